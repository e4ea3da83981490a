# SPDX-License-Identifier: Apache-2.0
"""Stop requests: a signal on any rank ends the run at one step on all ranks, with everything saved.

Schedulers announce the end of a job by a signal and kill its processes some seconds later. A handler runs between any
two instructions, where nothing can be saved. So it only records the signal, and the loop asks at the end of a step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from types import FrameType
from typing import Any

from accel.comm import Call, agreed, call_site, reduce_ints
from accel.context import DistContext, context_first
from accel.errors import ConfigError
from accel.system import REPEATED, SAME_REQUEST_S, STOPPING, not_ignored

__all__ = ["Stop", "StopRequests", "stop_agreed", "stop_requests"]

_NUMBERS = 1 << 16  # more than there are signals
_NONE = 1 << 62

_Handler = Callable[[int, FrameType | None], Any] | int | None
__dir__ = __all__.copy


class Stop(SystemExit):
    """Exits the script with the status that schedulers expect; returned by `stop_agreed`, for the loop to raise.

    Args:
        number: of the signal.
        rank: the lowest rank that received it.

    Attributes:
        signal: the signal.
        rank: the lowest rank that received it.
        code: exit status, 128 plus the signal's number: 143 for SIGTERM.
    """

    def __init__(self, number: int, rank: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)
        self.rank = rank

    def __str__(self) -> str:
        return f"stopped by {self.signal.name}, which reached rank {self.rank}"


class StopRequests:
    """The stop request of this rank, if any; from `stop_requests`.

    Attributes:
        received: number of the signal received; 0 before.
    """

    def __init__(self) -> None:
        self.received = 0
        self._at_s = 0.0
        self._process = os.getpid()
        self._former: dict[int, _Handler] = {}
        self._mask: set[int] = set()

    def take_over(self, signals: Sequence[int]) -> None:
        """Handle these signals from now on.

        Raises:
            ConfigError: this is not the main thread.
        """
        try:
            for number in set(signals):
                self._former[number] = signal.signal(number, self._handle)
            # Once they are handled, as one may be pending; a scheduler may start its jobs with a mask.
            self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._former)
        except ValueError as error:
            raise ConfigError(
                "only the main thread can change what signals do",
                got=str(error),
                where="stop_requests",
                fix="Open it on the main thread, and pass its result to the thread that trains.",
            ) from error

    def give_back(self) -> None:
        """Restore the former handlers and mask."""
        _ = signal.pthread_sigmask(signal.SIG_BLOCK, self._mask & self._former.keys())
        for number, former in self._former.items():
            _ = signal.signal(number, signal.SIG_DFL if former is None else former)  # None: not set from python

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._end(number)
        elif not self.received:
            self.received = number
            self._at_s = time.monotonic()
        elif number not in REPEATED and time.monotonic() - self._at_s > SAME_REQUEST_S:
            self._end(number)

    def _end(self, number: int) -> None:
        """Run the former handler: for a second request, and in processes forked from this one."""
        former = self._former[number]
        _ = signal.signal(number, former if callable(former) else signal.SIG_DFL)
        signal.raise_signal(number)


@context_first
@contextlib.contextmanager
def stop_requests(ctx: DistContext, signals: Sequence[int] | None = None) -> Generator[StopRequests]:
    """Record signals in this block as a stop request for `stop_agreed`. A collective at the start.

    The first signal is only recorded. A second one, more than 0.3 s later, runs the former handler, which ends the
    process; SIGHUP and SIGXCPU, which the system repeats, do not. Signals that were blocked arrive in the block. The
    block restores handlers and mask at its end, without communication.

    Args:
        ctx: the context.
        signals: signals that request a stop; None for SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGXCPU and SIGUSR1, without
            those that this process ignores, such as SIGHUP under `nohup`.

    Returns:
        A context manager that gives the requests.

    Raises:
        ConfigError: not the main thread, no signals, or one that cannot be handled; on every rank.
    """
    requests = StopRequests()
    try:
        with agreed(ctx.comm, Call("stop_requests", site=call_site())):
            requests.take_over(not_ignored((*STOPPING, signal.SIGUSR1)) if signals is None else _checked(signals))
        yield requests
    finally:
        requests.give_back()


@context_first
def stop_agreed(ctx: DistContext, requests: StopRequests) -> Stop | None:
    """Return the stop request of any rank, the same on every rank. A collective of one small message.

    Call it where a checkpoint can be saved, such as after each optimizer step: `save_state`, then raise the result.

    Args:
        ctx: the context.
        requests: from `stop_requests`.

    Returns:
        None, or the exception to raise, which ends the script with the status that schedulers expect.

    Raises:
        CollectiveMismatch: another rank called something else; on every rank.
    """
    mine = ctx.rank * _NUMBERS + requests.received if requests.received else _NONE
    (lowest,) = reduce_ints(ctx.comm, Call("stop_agreed", site=call_site()), [mine], "min")
    if lowest == _NONE:
        return None
    rank, number = divmod(lowest, _NUMBERS)
    return Stop(number, rank)


def _checked(signals: Sequence[int]) -> Sequence[int]:
    known = {int(number) for number in signal.Signals} - {signal.SIGKILL, signal.SIGSTOP}
    listed = isinstance(signals, Sequence)  # pyright: ignore[reportUnnecessaryIsInstance] - users pass a single one
    if not listed or not signals or not known.issuperset(signals):
        raise ConfigError(
            "the signals cannot request a stop",
            expected="a list of at least one, such as [signal.SIGTERM], and neither SIGKILL nor SIGSTOP",
            got=repr(signals),
            where="stop_requests, signals=",
        )
    return signals
