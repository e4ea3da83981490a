# SPDX-License-Identifier: Apache-2.0
"""Launch a function instead of a script: from a notebook, on Colab and Kaggle too, from a test, or any program."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from itertools import takewhile
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar, cast

import msgspec

from accel.brought import answered
from accel.config import LaunchConfig, resolve
from accel.config._resolve import TORCHRUN_VARIABLES, Resolved, Source
from accel.config._schema import to_text
from accel.errors import ConfigError, LaunchError
from accel.errors._base import escaped
from accel.formats import PrecisionName
from accel.launching._launch import CALLED, make_log_dir, plan_here, record_dir
from accel.launching._target import LaunchTarget
from accel.launching.local._children import Children
from accel.launching.local._function_rank import (
    drop_results,
    pack,
    read_call,
    receive_error,
    receive_value,
    send_call,
    unpack,
)
from accel.launching.local._launch_plan import HostPosition, LaunchPlan, ProcessPlan, check_mesh
from accel.launching.local._machine import read_machine
from accel.launching.local._signals import listening
from accel.launching.local._supervisor import LaunchEnd, Peers, run_attempts, run_to_end
from accel.launching.reports._journal import first_record, open_journal
from accel.launching.reports._report import notify, warn_of_surroundings
from accel.terminal import is_notebook_stream
from accel.xla import has_begun, not_installed

_KAGGLE = "KAGGLE_KERNEL_RUN_TYPE"
_COLAB = ("COLAB_RELEASE_TAG", "COLAB_GPU", "COLAB_TPU_1VM")
_REMOTE = ("COLAB_TPU_ADDR", "XRT_TPU_CONFIG")  # a TPU behind the network, which torch_xla left with its release 2.1
# Kaggle sets the first to "local": with it, processes of XLA look for each other there (pytorch/xla issue 8215). With
# the second, a process counts as one that torch_xla has started.
_MISLEADING = ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID")


class HostedNotebook(NamedTuple):
    """The host of a notebook."""

    name: Literal["Colab", "Kaggle"]
    tpu: str = ""  # type of its TPU, such as v5e-8; "a TPU" if unknown, empty without one
    is_remote: bool = False  # whether the TPU is behind the network


def read_hosted(environ: Mapping[str, str]) -> HostedNotebook | None:
    """Return the host of this notebook from its variables; None elsewhere."""
    if _KAGGLE in environ:
        name = "Kaggle"
    elif any(variable in environ for variable in _COLAB):
        name = "Colab"
    else:
        return None
    has_tpu = environ.get("COLAB_TPU_1VM") == "1" or environ.get("PJRT_DEVICE", "").upper() == "TPU"
    tpu = environ.get("TPU_ACCELERATOR_TYPE") or ("a TPU" if has_tpu else "")
    is_remote = not tpu and any(environ.get(variable) for variable in _REMOTE)
    return HostedNotebook(name, "a TPU" if is_remote else tpu, is_remote)


def choose_device(
    config: LaunchConfig, hosted: HostedNotebook | None, modules: Mapping[str, ModuleType]
) -> LaunchConfig:
    """Return the settings of a launch for a hosted notebook's TPU, if it has one and nobody chose a device."""
    on_xla = config.device.partition(":")[0] == "xla"
    if hosted is None or not hosted.tpu or not (on_xla or config.device == "auto"):
        return config
    where = f"{hosted.name}, {hosted.tpu}"
    on_cpu = 'config=LaunchConfig(device="cpu")'
    if hosted.is_remote:
        raise LaunchError(
            "the TPU of this notebook is behind the network, where torch_xla no longer reaches it",
            where=where,
            fix=f"Choose a runtime with a TPU VM, or compute on the CPU with {on_cpu}.",
        )
    if find_spec("torch_xla") is None:
        raise not_installed(
            "only torch_xla drives the TPU of this notebook, and it is not installed", where, f"or pass {on_cpu}"
        )
    if has_begun(modules):
        raise LaunchError(
            "this process holds the TPU, which one process at a time can use",
            got="XLA devices in use before the launch",
            where=where,
            fix="Restart the kernel, and use XLA devices in the launched function only.",
        )
    if config.nproc_per_node not in ("auto", 1) and not read_machine().tpu_chips:
        raise LaunchError(
            "the chips of this TPU are two devices of XLA's each, or cannot be seen, and allow one process",
            expected="nproc=1",
            got=f"nproc={config.nproc_per_node}",
            where=where,
        )
    return config if on_xla else msgspec.structs.replace(config, device="xla")


def rank_environ(environ: Mapping[str, str], hosted: HostedNotebook | None) -> Mapping[str, str]:
    """Return the variables for ranks, without the ones that mislead XLA in a hosted notebook."""
    if hosted is None or not hosted.tpu:
        return environ
    return {name: text for name, text in environ.items() if name not in _MISLEADING}


T = TypeVar("T")
_REDRAW_S = 0.5  # in a notebook, which keeps and sends all that is ever printed


def launch(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    *,
    nproc: int | Literal["auto"] | None = None,
    config: LaunchConfig | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[T]:
    """Run `fn(ctx, *args)` on several processes of this machine, and return their values.

    Each rank is a fresh interpreter with a context from `session()`, closed when the function has returned. Functions
    and classes of modules are sent by name, others by value, which takes the extra `notebook`.
    This process may have used CUDA, and stays as it is. Output of the ranks appears here, with their rank in front.
    Ctrl-C reaches all ranks. When one fails, the others are ended; all start again, `config.max_restarts` times.

    Args:
        fn: called on every rank with its context first.
        args: further arguments, a copy for each rank.
        nproc: number of processes, "auto" for one per visible GPU or TPU chip; None for the number in `config`.
        config: settings of the launch; None for the settings of the `ACCEL_*` variables.
        environ: base environment of each process; `os.environ` if None.

    Returns:
        A copy of each rank's value, in rank order; tensors should be on the CPU.

    Raises:
        Exception: the exception of the rank that failed first, with a note of its rank and traceback.
        LaunchError: that rank was killed, ended without a value, or its exception cannot be sent; the machine has too
            few GPUs, this process holds its TPU, or this is not the main thread.
        ConfigError: no function, no tuple of arguments, or one that cannot be pickled.
        MissingExtraError: the extra `notebook` is needed, or a notebook's TPU needs torch_xla.
        EnvError: the environment holds a setting that the processes would refuse.
        KeyboardInterrupt: Ctrl-C; the ranks have had their time to leave.
    """
    __tracebackhide__ = True  # a notebook shows its cell and the error, without the frames between
    environ = os.environ if environ is None else environ
    resolved = _resolve({}, environ) if config is None else Resolved(config, {})
    config = resolved.config
    config = config if nproc is None else msgspec.structs.replace(config, nproc_per_node=nproc)
    _refuse_without_effect(config, "nnodes")
    hosted = read_hosted(environ)
    config = choose_device(config, hosted, sys.modules)
    warn_of_surroundings()
    # Before a process starts: a function that cannot be pickled is an error of this call, not of N ranks.
    call = _packed(fn, args)
    with record_dir() as folder:
        send_call(folder, call)
        ending, count = _run(_name(fn), folder, config, resolved.sources, rank_environ(environ, hosted))
        return _outcome(ending, folder, count)


def _run(
    name: str, folder: str, config: LaunchConfig, sources: Mapping[str, Source], environ: Mapping[str, str]
) -> tuple[LaunchEnd, int]:
    """Run the packed function in a folder on ranks of this machine; return their end and their number."""
    target = LaunchTarget(kind="module", name=CALLED, args=(folder,))
    redraw_s = _REDRAW_S if is_notebook_stream(sys.stderr) else 0.0
    # Planned for its number of ranks, and so that wrong settings fail before anything is set up.
    count = len(plan_here(target, config, environ, record_dir=folder).processes)
    make_log_dir(config.log_dir)

    def start(failed: int, _last: LaunchEnd) -> tuple[LaunchPlan, Peers]:
        plan = plan_here(target, config, environ, record_dir=folder, position=HostPosition(restarts=failed))
        if failed:
            notify(f"accel: all ranks start again, restart {failed} of {config.max_restarts}\n")
            # A value that a rank left before the failure would pass for one of this attempt.
            drop_results(folder)
        return msgspec.structs.replace(plan, redraw_s=redraw_s), Peers()

    # The log names the function; what the ranks execute is a module of this package and a temporary folder.
    shown = LaunchTarget(kind="program", name=name)
    with listening() as signals, open_journal(shown, first_record(shown, config, sources), config) as journal:
        ending = run_attempts(start, signals, max_restarts=config.max_restarts, shows_last=False, journal=journal)
    return ending, count


def launch_placed(
    fn: Callable[..., T],
    args: Sequence[Any],
    *,
    nproc: int,
    config: LaunchConfig | None,
    place: Callable[[LaunchConfig, bytes], AbstractContextManager[Children]],
) -> list[T]:
    """Run `fn(ctx, *args)` as `launch` does, on processes of `place`, which ends them with its block."""
    config = _resolve({}, os.environ).config if config is None else config
    config = msgspec.structs.replace(config, nproc_per_node=nproc)
    _refuse_without_effect(config, "nnodes", "max_restarts")
    check_mesh(config, nproc)
    call = _packed(fn, args)
    with record_dir() as folder:
        send_call(folder, call)
        # Neither commands nor environments: `place` starts the ranks, and only the supervisor reads this plan.
        planned = tuple(
            ProcessPlan(rank=rank, program=(), command=(), environ={}, record=f"{folder}/rank-{rank}-0.json")
            for rank in range(nproc)
        )
        plan = LaunchPlan(
            processes=planned,
            log_dir=config.log_dir,
            prefix=config.prefix,
            quiet=config.quiet,
            stop_grace_s=config.stop_grace_s,
        )
        make_log_dir(config.log_dir)
        with place(config, read_call(folder)) as children:
            return _outcome(run_to_end(plan, children), folder, nproc)


@answered
def notebook_launcher(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    *,
    nproc: int | Literal["auto"] = "auto",
    precision: PrecisionName | Literal["no"] | None = None,
    max_restarts: int | None = None,
) -> list[T]:
    """Run `fn(ctx, *args)` on every GPU or TPU chip of this machine, from a notebook; `accel.launch` otherwise.

    Args:
        fn: called on every rank with its context first; it may be defined in a cell.
        args: further arguments, a copy for each rank.
        nproc: number of processes; "auto" for one per visible GPU or TPU chip, one without them.
        precision: precision of the run; None for the one that `ACCEL_PRECISION` or the function sets.
        max_restarts: number of failures after which all ranks start again; None for `ACCEL_MAX_RESTARTS`.

    Returns:
        The value of each rank, in rank order.

    Raises:
        Exception: as `accel.launch` does.
    """
    __tracebackhide__ = True
    flags = {"nproc_per_node": to_text(nproc)} | ({"precision": precision} if precision else {})
    flags |= {} if max_restarts is None else {"max_restarts": to_text(max_restarts)}
    return launch(fn, args, config=_resolve(flags, os.environ).config)


@answered
def debug_launcher(fn: Callable[..., T], args: Sequence[Any] = (), *, nproc: int = 2) -> list[T]:
    """Run `fn(ctx, *args)` on processes that compute on the CPU; like `accel.launch` with other defaults.

    `accel.testing.simulate` takes the same function and is much quicker; this shows what only real processes show.

    Args:
        fn: called on every rank with its context first.
        args: further arguments, a copy for each rank.
        nproc: number of processes.

    Returns:
        The value of each rank, in rank order.

    Raises:
        Exception: as `accel.launch` does.
    """
    __tracebackhide__ = True
    return launch(fn, args, config=LaunchConfig(nproc_per_node=nproc, device="cpu"))


def _name(fn: Callable[..., object]) -> str:
    """Return what the record of a launch has in place of a script."""
    return f"{getattr(fn, '__module__', None) or '__main__'}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"


def _resolve(flags: Mapping[str, str], environ: Mapping[str, str]) -> Resolved:
    """Return the settings of flags and `ACCEL_*` variables. torchrun's are ignored: it launches scripts only."""
    own = {name: text for name, text in environ.items() if name not in TORCHRUN_VARIABLES}
    return resolve(flags, own)


def _packed(fn: object, args: object) -> bytes:
    if not callable(fn):
        fix = "Start a script with `accel launch`, or by accel.launching.run_launch."
        raise ConfigError(
            "there is no function to launch", expected="a function", got=repr(fn), where="launch, fn", fix=fix
        )
    if not isinstance(args, list | tuple):
        fix = f"Write ({args!r},) for one argument."
        raise ConfigError(
            "the arguments are not a tuple", expected="a tuple or list", got=repr(args), where="launch, args", fix=fix
        )
    return pack((fn, tuple(cast("Sequence[object]", args))), "the function to launch, or its arguments")


def _refuse_without_effect(config: LaunchConfig, *names: str) -> None:
    problems = {
        "nnodes": ("a function is launched on this machine", 1),
        "max_restarts": ("ranks that another program places start once", 0),
    }
    for name in names:
        problem, only = problems[name]
        if getattr(config, name) != only:
            raise ConfigError(
                problem,
                expected=f"{name}={only}",
                got=f"{name}={getattr(config, name)}",
                fix="Put the call into a script and start that with `accel launch`.",
            )


def _outcome(ending: LaunchEnd, folder: str, world_size: int) -> list[Any]:
    """Return the values of all ranks, or raise what ended the launch."""
    __tracebackhide__ = True
    if ending.stopped:
        raise _stopped(ending)
    if ending.first is not None:
        raise _failure(ending, folder, world_size)
    return [_value(folder, rank) for rank in range(world_size)]


def _value(folder: str, rank: int) -> Any:
    packed = receive_value(folder, rank)
    if packed is None:  # `sys.exit(0)` in the function ends a rank well, but without a value
        raise LaunchError(
            f"rank {rank} ended before it returned a value",
            got="exit status 0",
            fix="Return from the function instead of leaving the process.",
        )
    return unpack(packed, f"the value of rank {rank}")


def _stopped(ending: LaunchEnd) -> BaseException:
    """Raise the signal here, as without a launch; return the exception to raise if a handler returns."""
    notify(ending.report)
    signal.raise_signal(ending.stopped)
    return LaunchError(f"the launch was stopped by {signal.Signals(ending.stopped).name}")


def _failure(ending: LaunchEnd, folder: str, world_size: int) -> BaseException:
    """Return the exception of the first failing rank, with a note of its rank, the other failures and the place."""
    assert ending.first is not None
    rank, lines = ending.first.rank, ending.report.splitlines()
    reported = [line.removeprefix("accel: ") for line in takewhile(lambda line: line.startswith("accel: "), lines)]
    raised = receive_error(folder, rank)
    # A rank's SystemExit or KeyboardInterrupt, raised here, would end the caller's program or notebook cell.
    if raised is not None and isinstance(raised.error, Exception):
        error, about = raised.error, f"rank {rank} of {world_size} raised this"
    else:
        error, about = LaunchError(reported[0]), ""
    rest = raised.traceback if raised is not None else "\n".join(lines[len(reported) :])
    note = "\n".join(line for line in (about, *reported[1:], rest) if line)
    if note:
        error.add_note(escaped(note.expandtabs(4)))
    return error
