# SPDX-License-Identifier: Apache-2.0
"""Failures asked for by a test: which rank fails, at which of its calls or writes, and how.

The idea of faults injected at a rank and step is torchft's (`EventInjector` in its integration tests).
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NoReturn, TypeVar, get_args

import msgspec

from accel.errors import ConfigError
from accel.errors._checks import check_choice
from accel.storage import AFTER_WRITE
from accel.system import NOTICES, STOPPING
from accel.testing._process import CURRENT, Killed, RankSignals
from accel.testing._scheduler import Scheduler
from accel.testing._sites import FaultNotReached, InjectedFault

CallAction = Literal["raise", "vanish", "delay", "terminate"]
WriteAction = Literal["drop", "cut", "corrupt", "full"]

_STOP_REQUESTS = tuple(number.name for number in (*STOPPING, *NOTICES))


class Fault(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A fault of one rank at one of its calls.

    Attributes:
        rank: the rank that it happens to.
        call: number of the rank's collective, send or receive, from 0; the fault happens before it.
        action: "raise" raises `InjectedFault`. "vanish" ends the rank silently, except that its
            `finally` blocks still run. "delay" holds the rank until no other rank can continue. "terminate" delivers a
            signal: the rank's own handler is called on its thread; without one, the rank ends as by "vanish".
        signal: the one that "terminate" delivers: SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGXCPU, SIGUSR1 or SIGUSR2.
    """

    rank: int
    call: int
    action: CallAction = "raise"
    signal: int = signal.SIGTERM


class WriteFault(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A disk's fault in one file that a rank writes; except for "full" the disk reports success.

    Attributes:
        rank: the rank that writes.
        write: number of the file that the rank writes through accel (of a checkpoint, for example), from 0.
        action: "drop" leaves no file; "cut" leaves the first half; "corrupt" changes one byte; "full" leaves the first
            half and fails with `OSError(ENOSPC)`, no space left on device.
        byte: the one that "corrupt" changes, from the file's start, or from its end if negative; past the other end,
            counting continues at the start of the file.
    """

    rank: int
    write: int
    action: WriteAction = "drop"
    byte: int = -1


AnyFault = Fault | WriteFault
F = TypeVar("F", Fault, WriteFault)


def check_faults(faults: Sequence[object], world_size: int) -> None:
    """Raise `ConfigError` for a fault that can never happen: its rank, call, action or signal does not exist."""
    if isinstance(faults, AnyFault):
        raise ConfigError("faults come in a list", expected=f"[{faults!r}]", got=repr(faults), where="faults=")
    for number, fault in enumerate(faults):
        where = f"faults[{number}]"
        if not isinstance(fault, AnyFault):
            raise ConfigError(
                "the value is not a fault", expected="a Fault or WriteFault", got=repr(fault), where=where
            )
        if type(fault.rank) is not int or not 0 <= fault.rank < world_size:
            _refuse("a fault on a rank that is not there", f"0 to {world_size - 1}", fault.rank, f"{where}.rank")
        if isinstance(fault, Fault):
            _check_number(fault.call, f"{where}.call")
            check_choice(fault.action, get_args(CallAction), "unknown action", where=f"{where}.action")
            _check_signal(fault, where)
        else:
            _check_number(fault.write, f"{where}.write")
            check_choice(fault.action, get_args(WriteAction), "unknown action", where=f"{where}.action")


class Injector:
    """Counts the calls and writes of the ranks of one world, and makes the faults happen.

    Args:
        faults: as checked by `check_faults`.
        scheduler: of the world.
    """

    def __init__(self, faults: Sequence[AnyFault], scheduler: Scheduler) -> None:
        self._waiting = list(faults)
        self._scheduler = scheduler
        self._calls = [0] * scheduler.size
        self._writes = [0] * scheduler.size
        self._signals = [RankSignals() for _ in range(scheduler.size)]

    def enter(self, rank: int) -> None:
        """Give the calling thread the rank's own signals and disk."""
        CURRENT.set(self._signals[rank])
        AFTER_WRITE.set(lambda path: self._write(rank, path))

    def call(self, rank: int) -> None:
        """Count a call that the rank is about to make, and inject its faults; a signal handler's own error passes."""
        number = self._calls[rank]
        self._calls[rank] += 1
        for fault in self._due(Fault, rank, number):
            match fault.action:
                case "raise":
                    raise InjectedFault(f"rank {rank} fails at its call #{number}, as asked for", got=repr(fault))
                case "vanish":
                    raise Killed("vanished")
                case "delay":
                    self._scheduler.delay(rank)
                case "terminate":
                    self._signals[rank].raise_signal(fault.signal)

    def check_reached(self) -> None:
        """Raise `FaultNotReached` for the first fault after the end of its rank, with the rank's last call."""
        for fault in self._waiting:
            made = (self._calls if isinstance(fault, Fault) else self._writes)[fault.rank]
            noun = "call" if isinstance(fault, Fault) else "write"
            raise FaultNotReached(
                "a fault never happened",
                expected=f"rank {fault.rank} to come to {noun} #{_count_of(fault)}",
                got=f"{made} in all, counted from #0",
                where=repr(fault),
                fix="Choose an earlier one, or let the run continue for longer.",
            )

    def _write(self, rank: int, path: Path) -> None:
        number = self._writes[rank]
        self._writes[rank] += 1
        for fault in self._due(WriteFault, rank, number):
            _spoil(fault, path)

    def _due(self, kind: type[F], rank: int, number: int) -> Iterator[F]:
        for fault in [fault for fault in self._waiting if isinstance(fault, kind)]:
            if (fault.rank, _count_of(fault)) == (rank, number):
                self._waiting.remove(fault)
                yield fault


def _spoil(fault: WriteFault, path: Path) -> None:
    size = path.stat().st_size
    match fault.action:
        case "drop":
            path.unlink()
        case "cut":
            os.truncate(path, size // 2)
        case "corrupt" if size:
            with path.open("r+b") as file:
                file.seek(fault.byte % size)
                old = file.read(1)[0]
                file.seek(fault.byte % size)
                file.write(bytes([old ^ 1]))
        case "corrupt":
            raise FaultNotReached("an empty file has no byte to change", where=f"{fault!r} - {path.name}")
        case "full":
            os.truncate(path, size // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _count_of(fault: AnyFault) -> int:
    return fault.call if isinstance(fault, Fault) else fault.write


def _check_number(number: int, where: str) -> None:
    if type(number) is not int or number < 0:
        _refuse("a fault that cannot come", "a number from 0", number, where)


def _check_signal(fault: Fault, where: str) -> None:
    known = [signal.Signals[name] for name in _STOP_REQUESTS]
    if fault.signal not in known:
        _refuse("the stop request is not valid", ", ".join(_STOP_REQUESTS), fault.signal, f"{where}.signal")
    if fault.signal != signal.SIGTERM and fault.action != "terminate":
        raise ConfigError(
            "a signal that would not be delivered",
            expected="action 'terminate'",
            got=repr(fault.action),
            where=f"{where}.action",
            fix="Leave signal out, or choose 'terminate'.",
        )


def _refuse(problem: str, expected: str, got: object, where: str) -> NoReturn:
    raise ConfigError(problem, expected=expected, got=repr(got), where=where)
