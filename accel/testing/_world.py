# SPDX-License-Identifier: Apache-2.0
"""One run of one function on all ranks, and its outcome."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import CoroutineType, GeneratorType
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist

from accel.testing._faults import AnyFault, Injector
from accel.testing._group import SimulatedGroup
from accel.testing._meetings import CallTraffic
from accel.testing._networks import Network
from accel.testing._process import Killed, enter_rank
from accel.testing._scheduler import Scheduler, Stopped
from accel.testing._sites import Deadlock, SimulationError, asked_for_default_group, stack_of
from accel.testing._threads import RankStreams, RankThread, interrupt

T = TypeVar("T")

_UNWIND_S = 5.0  # for the ranks of a run that failed to clean up, which takes no time unless they wait for something
_HALT_S = 0.25  # for the ranks of a run that took too long to reach their next call and end there
_INTERRUPT_S = 2.0  # for a rank that makes no calls to see the interrupt


Prepare: TypeAlias = Callable[[SimulatedGroup], Callable[[], T]]


class SimulationOptions(NamedTuple):
    """Options of a simulation, by the names of `simulate`."""

    seed: int | None
    timeout_s: float
    faults: Sequence[AnyFault]
    default_group: bool
    network: Network | None


class SimulatedRun(Generic[T]):
    """The ranks of one run.

    Args:
        prepare: makes a rank's function from its group; called for all ranks before the first one runs.
        size: number of ranks.
        options: options of the simulation.
        streams: each rank's random streams.
        around: scope of a rank's thread while it runs.
    """

    def __init__(
        self,
        prepare: Prepare[T],
        size: int,
        options: SimulationOptions,
        streams: RankStreams,
        around: Callable[[SimulatedGroup], AbstractContextManager[object]],
    ) -> None:
        self._prepare = prepare
        self._size = size
        self._around = around
        self._seed = options.seed
        self._scheduler = Scheduler(size, options.seed, streams)
        self._faults = Injector(options.faults, self._scheduler)
        self._traffic = CallTraffic(self._scheduler, self._faults, options.network)
        self._everyone = self._traffic.rendezvous("0", range(size))
        self._results: dict[int, T] = {}
        self._errors: dict[int, BaseException] = {}
        self._killed: dict[int, str] = {}

    def run(self, threads: list[RankThread], timeout_s: float) -> bool:
        """Run all ranks to their end, or stop them at the time-out; return whether the threads are free."""
        try:
            jobs = self._jobs()
            self._scheduler.start([partial(thread.submit, job) for thread, job in zip(threads, jobs, strict=True)])
            if self._scheduler.join(timeout_s, _UNWIND_S):
                return True
        except BaseException as error:  # such as KeyboardInterrupt: no rank may continue behind the caller's back
            self._halt(error)
            raise
        return self._halt(self._timeout_error(timeout_s))

    def outcome(self) -> list[T]:
        """Return the results by rank, or raise the first error, with notes on its rank and those left waiting."""
        __tracebackhide__ = True
        for rank, error in self._errors.items():
            error.add_note(f"raised on rank {rank} of {self._size}{self._replay()}{self._left_waiting()}")
            if asked_for_default_group(error) and not dist.is_initialized():
                error.add_note("simulated ranks have a default group only with default_group=True")
            raise error
        if (cause := self._scheduler.cause) is not None:
            if self._seed is not None:
                cause.add_note(f"seed={self._seed} gives the same schedule again")
            raise cause
        if unfinished := self._traffic.unfinished():
            raise Deadlock(
                "calls were made and never completed",
                got="".join(f"\n  {line}" for line in unfinished),
                fix="Wait for every call made with async_op=True, and let every rank make it.",
            )
        for rank, how in self._killed.items():
            raise SimulationError(f"rank {rank} {how}, as asked for; the other ranks did not need it")
        self._faults.check_reached()
        return [self._results[rank] for rank in range(self._size)]

    def close(self) -> None:
        """Drop the references of the ranks' groups."""
        self._traffic.close()

    def _jobs(self) -> list[Callable[[], None]]:
        """Make the ranks' jobs in one go: faster than on each rank's thread."""
        groups = [SimulatedGroup(self._everyone, rank) for rank in range(self._size)]
        calls = [self._prepare(group) for group in groups]
        return [
            partial(contextvars.copy_context().run, partial(self._body, rank, group, call))
            for rank, (group, call) in enumerate(zip(groups, calls, strict=True))
        ]

    def _body(self, rank: int, group: SimulatedGroup, call: Callable[[], T]) -> None:
        __tracebackhide__ = True
        scheduler = self._scheduler
        scheduler.enter(rank)
        how = "stopped"
        try:
            if scheduler.cause is None:
                self._faults.enter(rank)
                enter_rank()
                with self._around(group), torch.enable_grad():
                    self._results[rank] = _check_ran(call())
                how = "returned"
        except Stopped:
            pass
        except Killed as end:
            how = self._killed[rank] = str(end)
        except BaseException as error:
            how = f"raised {error!r}"
            if scheduler.cause is None:  # an error after the stop is no cause
                self._errors[rank] = error
        scheduler.leave(rank, how)

    def _halt(self, cause: BaseException) -> bool:
        scheduler = self._scheduler
        scheduler.stop(cause)
        rank = scheduler.running
        if scheduler.join(0, _HALT_S):
            return True
        thread = scheduler.thread_of(rank)
        if scheduler.running == rank and thread is not None:  # it makes no calls: a loop, or a wait outside of torch
            interrupt(thread, Stopped)
        return scheduler.join(0, _INTERRUPT_S)

    def _timeout_error(self, timeout_s: float) -> SimulationError:
        rank = self._scheduler.running
        thread = self._scheduler.thread_of(rank)
        stack = stack_of(thread) if thread is not None else ""
        return SimulationError(
            f"the simulation did not end within timeout_s={timeout_s:g}, rank {rank} is running",
            got=f"{self._scheduler.report()}\nrank {rank} is at\n{stack}",
            fix="Look for an endless loop or a wait for something outside of torch.distributed, or raise timeout_s: CPU"
            " seconds since ranks last met, and ten times as many for the whole run.",
        )

    def _replay(self) -> str:
        return "" if self._seed is None else f" with seed={self._seed}"

    def _left_waiting(self) -> str:
        cause = self._scheduler.cause
        return f"; no other rank could end without it:{cause.got}" if isinstance(cause, Deadlock) else ""


def _check_ran(result: T) -> T:
    """Return a result, unless it is a function that has yet to run."""
    if isinstance(result, CoroutineType | GeneratorType):
        unrun = cast(Any, result)
        unrun.close()  # else python warns of it
        raise SimulationError(
            "the function has not run",
            expected="a function that does its work when it is called",
            got=f"{type(unrun).__name__} {unrun.__name__}",
            fix="Leave out `async` and `yield`, or pass a function that runs this one to its end.",
        )
    return result
