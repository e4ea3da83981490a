# SPDX-License-Identifier: Apache-2.0
"""The program of each process of a launch: runs the user's script or module as `__main__`, and records its failure.

Run by path, as `python _worker.py RECORD PARENT KIND NAME ARGS...`: with `-m`, files of the current folder could take
the place of modules imported here, and interpreter flags against that would reach the script's own children.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from importlib.abc import InspectLoader
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec
from types import ModuleType, TracebackType

from accel.errors._checks import is_users
from accel.launching.reports._failure import STACK_SIGNAL, FailureRecord, file_beside, frames_below
from accel.run_folder import RUN_EVENT, bounded, write_json
from accel.system import current_folder

_PR_SET_PDEATHSIG = 1
_MOST_TEXT = 100_000  # characters of a message, and of a traceback, that the launcher reads


def main(record: str, parent: int, kind: str, name: str, args: list[str]) -> None:
    """Run a script as `python script.py args...` would, and record its failure; or become another program.

    The script's exception is raised anew, so that the interpreter ends as without a launcher."""
    die_with(parent)
    if kind == "program":
        os.execvp(name, [name, *args])
    if not faulthandler.is_enabled():
        faulthandler.enable(open(file_beside(record, "crash"), "wb"), all_threads=False)  # noqa: SIM115 - open until the end
    show_stacks(record)
    announce_runs(record, parent)
    if os.path.exists(ask := file_beside(record, "ask")):
        from accel.launching.reports._failure import (
            answer_calls,  # a thread, and imports, for those alone who ask for them
        )

        answer_calls(record, ask)
    rank = int(os.environ["RANK"])
    sys.argv = [name, *args]
    if not sys.flags.safe_path:
        sys.path[0] = current_folder() if kind == "module" else os.path.dirname(os.path.realpath(name))

    started = os.getpid()  # what the script forks comes through here as well, but is no rank

    def show_unrecorded(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != started or not os.path.exists(record):
            traceback.print_exception(kind, error, frames_below(trace, __file__))

    sys.excepthook = show_unrecorded  # the parent shows what is on record, once and last
    try:
        run_module(name) if kind == "module" else run_script(name)
    except BaseException as error:
        harmless = isinstance(error, SystemExit) and error.code in (None, 0)
        if os.getpid() == started and not harmless:
            with contextlib.suppress(OSError):  # without a record, the hook above shows the error
                write_json(record, describe_failure(rank, error))
        raise


def show_stacks(record: str) -> None:
    """Let a signal of the launcher write this process's stack; the file exists once the signal may be sent."""
    path = file_beside(record, "stack")
    partial = f"{path}.partial"
    # The fault handler gives a signal back as it was when the interpreter ends; by default this one would kill.
    _ = signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    _ = signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACK_SIGNAL])  # whatever mask the launcher began with
    with contextlib.suppress(OSError):
        faulthandler.register(STACK_SIGNAL, open(partial, "ab"), all_threads=False)  # noqa: SIM115 - open until the end
        os.replace(partial, path)


def announce_runs(record: str, parent: int) -> None:
    """Write the newest checkpoint and the folders of runs for the launcher, from the library's audit events."""
    started = os.getpid()
    known: set[str] = set()

    def announce(folder: str) -> None:
        folder = folder if "://" in folder else os.path.abspath(folder)
        if folder not in known and "\n" not in folder:
            known.add(folder)
            with open(file_beside(record, "run"), "ab") as file:
                _ = file.write(os.fsencode(f"{folder}\n"))
            if os.getpid() == started and os.getppid() == parent:
                os.kill(parent, signal.SIGCHLD)  # wakes the launcher, which waits for the ends of its children

    def note(event: str, args: tuple[object, ...]) -> None:
        with contextlib.suppress(OSError):
            if event == "accel.checkpoint":
                write_json(file_beside(record, "checkpoint"), args[0])
                announce(os.path.dirname(str(args[0])))
            elif event == RUN_EVENT:
                announce(str(args[0]))

    # Audit events, https://docs.python.org/3/library/audit_events.html: the library need not know of its launcher.
    sys.addaudithook(note)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process as soon as its parent dies, however it dies."""
    if sys.platform == "linux":
        _ = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def run_script(script: str) -> None:
    """Execute a script as the module `__main__`, which stays in place until the interpreter ends."""
    # Not by `runpy.run_path`, which puts the old `__main__` and `sys.argv` back while exit handlers and threads still
    # need theirs. Without a `__spec__`, multiprocessing finds the script by its `__file__`.
    path = os.path.abspath(script)
    loader = SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins, __loader__=loader, __spec__=None, __cached__=None)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def run_module(name: str) -> None:
    """Execute a module, or a package's `__main__`, as `python -m` does, in place like a script."""
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if spec is not None and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        raise ImportError(f"no module named {name} that can be run", name=name)
    module = module_from_spec(spec)
    module.__name__ = "__main__"
    sys.argv[0] = module.__file__ or name
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def describe_failure(rank: int, error: BaseException) -> FailureRecord:
    """Turn an exception of the script into a record; its traceback begins at the script's first frame."""
    trace = frames_below(error.__traceback__, __file__)
    kind = type(error)
    name = kind.__qualname__
    raised = traceback.TracebackException(kind, error, trace, compact=True)
    return FailureRecord(
        rank=rank,
        host=os.uname().nodename,
        exception=name if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{name}",
        message=_encodable(bounded(str(raised), _MOST_TEXT)),
        location=_encodable(_location(error, trace)),
        traceback=_encodable(bounded("".join(raised.format()), _MOST_TEXT)),
        time_s=time.time(),
    )


def _location(error: BaseException, trace: TracebackType | None) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    own = [(file, line) for file, line in frames if is_users(file)]
    return "{}:{}".format(*(own or frames)[-1]) if frames else ""


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()  # file names may hold any byte, JSON may not


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
