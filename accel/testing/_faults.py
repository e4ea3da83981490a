# SPDX-License-Identifier: Apache-2.0
"""Failures asked for by a test: which rank fails, at which of its calls, and how.

The idea of faults injected at a rank and step is torchft's (`EventInjector` in its integration tests).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from accel.errors import ConfigError
from accel.testing._errors import InjectedFault


class Fault(msgspec.Struct, frozen=True):
    """A failure of one rank at one of its calls.

    Attributes:
        rank: the rank that fails.
        call: which of the rank's collectives, sends and receives, counted from 0; it fails instead of making it.
        action: "raise" raises `InjectedFault` in the rank; "vanish" ends the rank there without a word to the others,
            save that its `finally` blocks still run.
    """

    rank: int
    call: int
    action: Literal["raise", "vanish"] = "raise"


class Vanished(BaseException):
    """Unwinds a rank that a fault makes vanish."""


def check_faults(faults: Sequence[Fault], world_size: int) -> None:
    """Refuse faults that can never happen.

    Raises:
        ConfigError: a rank outside of the world, a negative call, an unknown action.
    """
    for fault in faults:
        if not 0 <= fault.rank < world_size or fault.call < 0 or fault.action not in ("raise", "vanish"):
            raise ConfigError(
                "a fault that cannot happen",
                expected=f"rank 0 to {world_size - 1}, call 0 or more, action 'raise' or 'vanish'",
                got=repr(fault),
                where="faults=",
            )


def act(faults: Sequence[Fault], rank: int, call: int) -> None:
    """Fail if a fault is asked for at this call of this rank.

    Raises:
        InjectedFault: a fault that raises.
        Vanished: a fault that vanishes.
    """
    for fault in faults:
        if (fault.rank, fault.call) == (rank, call):
            if fault.action == "vanish":
                raise Vanished
            raise InjectedFault(f"rank {rank} fails at its call #{call}, as asked for", got=repr(fault))
