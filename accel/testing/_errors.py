# SPDX-License-Identifier: Apache-2.0
"""Errors that only a simulation can raise."""

from __future__ import annotations

from accel.errors import AccelError


class SimulationError(AccelError):
    """A simulated run could not go on, or used the simulator in a way that it does not support."""

    def __str__(self) -> str:
        if "\n" not in self.got:
            return super().__str__()
        return "\n".join(line for line in (f"{self.problem}:", self.got.lstrip("\n"), self.fix) if line)


class Deadlock(SimulationError):  # noqa: N818 - what everybody calls it
    """No rank can go on: each has ended or waits for ranks that will never come; `got` has a line for each."""


class InjectedFault(SimulationError):  # noqa: N818 - it is the fault itself, asked for by the test
    """The failure that a `Fault` asked for."""


class FaultNotReached(SimulationError):  # noqa: N818 - what it says
    """A run ended well before a fault could happen, so it has tested nothing."""
