# SPDX-License-Identifier: Apache-2.0
"""`simulate`: run a function on N ranks as threads of this process, one at a time."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, cast, get_args

import torch.distributed as dist

from accel.context import DistContext, from_group
from accel.errors import ConfigError
from accel.errors._checks import check_choice, check_count, check_kind
from accel.testing._default_group import Enter, default_groups
from accel.testing._device import SimulatedDevice
from accel.testing._faults import AnyFault, check_faults
from accel.testing._networks import Network
from accel.testing._process import changed_process
from accel.testing._sites import SimulationError
from accel.testing._threads import GlobalStreams, RankStreams, RankThread, RankThreads
from accel.testing._world import Prepare, SimulatedRun, SimulationOptions

T = TypeVar("T")


class Simulator:
    """Runs simulations and keeps their threads in between; they end with its `with` block.

    Use it where many small simulations follow each other, as in a property test; `simulate` is for a single one. `run`
    takes the arguments of `simulate`.
    """

    def __init__(self) -> None:
        self._threads = RankThreads()
        self._streams = GlobalStreams()
        self._closed = False

    def __repr__(self) -> str:
        return f"Simulator({'closed' if self._closed else ''})"

    def __enter__(self) -> Simulator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and wait for them. Closing twice does nothing; later runs are refused."""
        self._closed = True
        self._threads.close()

    def run(
        self,
        fn: Callable[[DistContext], T],
        world_size: int,
        *,
        seed: int | None = None,
        timeout_s: float = 60.0,
        faults: Sequence[AnyFault] = (),
        default_group: bool = False,
        network: Network | None = None,
        streams: SimulatedDevice | None = None,
    ) -> list[T]:
        """Run `fn(ctx)` on every rank; see `simulate`."""
        __tracebackhide__ = True
        self._check_open()
        options = SimulationOptions(seed, timeout_s, faults, default_group, network)
        return _run(_on_contexts(fn, streams), world_size, options, self._streams, self._threads)

    def run_groups(
        self,
        fn: Callable[[dist.ProcessGroup], T],
        world_size: int,
        *,
        seed: int | None = None,
        timeout_s: float = 60.0,
        faults: Sequence[AnyFault] = (),
        default_group: bool = False,
        network: Network | None = None,
    ) -> list[T]:
        """Run `fn(group)` on every rank; see `simulate_groups`."""
        __tracebackhide__ = True
        self._check_open()
        options = SimulationOptions(seed, timeout_s, faults, default_group, network)
        return _run(_on_groups(fn), world_size, options, self._streams, self._threads)

    def _check_open(self) -> None:
        if self._closed:
            raise SimulationError("this simulator is closed", fix="Call it inside its `with` block.")


def simulate(
    fn: Callable[[DistContext], T],
    world_size: int,
    *,
    seed: int | None = None,
    timeout_s: float = 60.0,
    faults: Sequence[AnyFault] = (),
    default_group: bool = False,
    network: Network | None = None,
    streams: SimulatedDevice | None = None,
) -> list[T]:
    """Run `fn(ctx)` on every rank of a world that exists only in this process.

    Ranks are threads, exactly one running at a time; a collective is a point where they meet. So a run is the
    same every time, a deadlock is found at once, and the code under test (DDP included) is the real one. Each rank
    has its own copy of the caller's context variables and of python's, torch's and numpy's global random streams, and
    the signal handlers of a fresh process; the caller's are left as they were. Other global state, such as torch's
    default dtype, is shared. The first threshold of python's garbage collector is `world_size` times as large
    meanwhile.

    Args:
        fn: called with each rank's context, on CPU.
        world_size: number of ranks, 1 or more.
        seed: fixes a random schedule, one for each seed; None lets ranks go in turn, from rank 0.
        timeout_s: CPU seconds of the process since a rank last met others, began or ended; by the clock while the
            process uses no CPU. Only code that the simulation cannot see, such as an endless loop, takes them. A run
            that keeps meeting may take ten times as many in all.
        faults: `Fault`s of ranks and `WriteFault`s of their disks to inject; each must come to pass.
        default_group: whether each rank has a separate c10d world with the simulated group as its default group. Then
            code that asks torch.distributed for its default group runs too: `dist.get_rank()`, `new_group`, DeviceMesh,
            DTensor, FSDP2, tensor parallelism, pipelines, torch.distributed.checkpoint. Threads that a rank starts
            see the process's own default group, if it has one. It costs a few milliseconds a run.
        network: "gloo" or "nccl" to refuse dtypes, reduce ops, layouts and kinds of messages that the backend refuses
            or silently gets wrong; None for the laxest limits that make sense. Tensors are on the CPU all the same.
        streams: a device with streams that run next to the host; each rank gets one of its order as `ctx.streams`.
            Batches and prepared models go there. None for a host that does everything at once.

    Returns:
        Values of `fn`, by rank.

    Raises:
        Deadlock: ranks wait for each other, or a call was made that others never joined.
        CollectiveMismatch: ranks made calls that do not fit together.
        SimulationError: the run took longer than `timeout_s` allows, `fn` is a coroutine or generator and so has not
            run, a thread could not start, or torch lacks what `default_group` needs.
        FaultNotReached: the run ended before a fault was due.
        StreamRace: nothing orders two accesses to memory of `streams`.
        ConfigError: an argument is outside its range.
        BaseException: the first error of `fn` on a rank, with notes on that rank and those left waiting.

    Reference: ranks as threads over a passed group are torchft's way to test; running one at a time under a seed is
        the deterministic simulation testing of FoundationDB (Zhou et al. 2021, SIGMOD).

    >>> from accel.testing import simulate
    >>> simulate(lambda ctx: ctx.rank * 10, world_size=3)
    [0, 10, 20]
    """
    __tracebackhide__ = True  # pytest shows the test and the rank's function, and no frame between
    options = SimulationOptions(seed, timeout_s, faults, default_group, network)
    return _run(_on_contexts(fn, streams), world_size, options, GlobalStreams())


def simulate_groups(
    fn: Callable[[dist.ProcessGroup], T],
    world_size: int,
    *,
    seed: int | None = None,
    timeout_s: float = 60.0,
    faults: Sequence[AnyFault] = (),
    default_group: bool = False,
    network: Network | None = None,
) -> list[T]:
    """Run `fn(group)` on every rank: `simulate` for code that takes torch's process group and not a context.

    The group is passed as `group=` to functions of `torch.distributed`, with `group_src=` and `group_dst=` for roots
    and peers, and to `DistributedDataParallel(process_group=...)`. With `default_group=True` it is
    `dist.group.WORLD` as well, and may be left out; without, what asks for a default group does not run: `DeviceMesh`
    and all above it, roots as `src=` and `dst=`, and `dist.recv`, which looks the sender up (`irecv` does not).

    Args, returns and errors as for `simulate`.
    """
    __tracebackhide__ = True
    options = SimulationOptions(seed, timeout_s, faults, default_group, network)
    return _run(_on_groups(fn), world_size, options, GlobalStreams())


def _on_groups(fn: Callable[[dist.ProcessGroup], T]) -> Prepare[T]:
    """Return the function that prepares a function of a group for a rank."""
    _check_callable(fn)
    return partial(partial, fn)


def _on_contexts(fn: Callable[[DistContext], T], streams: SimulatedDevice | None) -> Prepare[T]:
    """Return the function that makes a rank's context, before the rank runs."""
    _check_callable(fn)
    kinds = SimulatedDevice | None
    expected = "a SimulatedDevice or None"
    check_kind(streams, kinds, "the value is not a simulated device", expected=expected, where="streams=")

    def prepare(group: dist.ProcessGroup) -> Callable[[], T]:
        ctx = from_group(group, device="cpu")
        if streams is None:
            return partial(_call, fn, ctx, nullcontext)
        device = streams.for_rank(ctx.rank)
        cast(Any, group).device = device
        return partial(_call, fn, dataclasses.replace(ctx, streams=device), device.active)

    return prepare


def _call(fn: Callable[[DistContext], T], ctx: DistContext, scope: Callable[[], AbstractContextManager[object]]) -> T:
    __tracebackhide__ = True
    with scope():
        result = fn(ctx)
        ctx.comm.finish()
        return result


def _run(
    prepare: Prepare[T],
    world_size: int,
    options: SimulationOptions,
    streams: GlobalStreams,
    kept: RankThreads | None = None,
) -> list[T]:
    """Run a function on every rank, on `kept` threads or on threads that end with the run."""
    __tracebackhide__ = True
    _check(world_size, options)
    groups: AbstractContextManager[Enter] = default_groups() if options.default_group else nullcontext(nullcontext)
    # torch keeps caches of its meshes by thread, so no other rank may have the thread of a rank with a default group
    threads = RankThreads() if kept is None or options.default_group else kept
    with changed_process(world_size), groups as around:
        own_group = dist.group.WORLD
        ranks = RankStreams(streams, world_size)
        world = SimulatedRun(prepare, world_size, options, ranks, around)
        taken: list[RankThread] = []
        free = False
        try:
            taken = threads.take(world_size)
            free = world.run(taken, options.timeout_s)
        finally:
            ranks.close()
            threads.give_back(taken, free=free)
            if threads is not kept:
                threads.close()
    try:
        results = world.outcome()
    finally:
        world.close()
    if dist.group.WORLD is not own_group:
        raise SimulationError(
            "a rank opened or closed the default group of the process",
            fix="Pass default_group=True: each rank then has its own, and torch opens no other.",
        )
    return results


def _check_callable(fn: object) -> None:
    if not callable(fn):
        raise ConfigError("nothing to run", expected="a function of one argument", got=repr(fn), where="fn=")


def _check(world_size: int, options: SimulationOptions) -> None:
    if options.network is not None:
        check_choice(options.network, get_args(Network), "no network of that name", where="network=")
    check_count(world_size, "no world of that size", expected="1 rank or more", where="world_size=")
    seed, timeout_s = options.seed, options.timeout_s
    if seed is not None and type(seed) is not int:
        raise ConfigError(
            "the seed of a schedule is not valid", expected="an int or None", got=repr(seed), where="seed="
        )
    if type(timeout_s) not in (int, float) or not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise ConfigError(
            "the time-out is not valid", expected="seconds, above 0 and finite", got=repr(timeout_s), where="timeout_s="
        )
    check_faults(options.faults, world_size)
