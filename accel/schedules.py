# SPDX-License-Identifier: Apache-2.0
"""Learning rates as functions of the step: frozen records that map a step to a factor.

Step 0 is the first optimizer step. A schedule of `steps` begins at `start`, reaches `end` at that step exactly, and
stays there. Pass one to torch's `LambdaLR`, which multiplies it with each group's learning rate, or call it:

>>> from accel.schedules import Cosine, Joined, warmup
>>> schedule = Joined((warmup(3), Cosine(4)))
>>> [round(schedule(step), 2) for step in range(8)]
[0.25, 0.5, 0.75, 1.0, 0.85, 0.5, 0.15, 0.0]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from accel.errors import ConfigError
from accel.errors._checks import check_choice, check_count
from accel.lazy import declared, exports

if TYPE_CHECKING:
    from accel.training._find_lr import find_lr
    from accel.training._lr_range import LrRange

__all__ = [
    "Constant",
    "Cosine",
    "Curve",
    "InverseSqrt",
    "Joined",
    "Linear",
    "LrRange",
    "Piece",
    "Polynomial",
    "find_lr",
    "warmup",
    "wsd",
]

Schedule = Callable[[int], float]

# Schedules are free of torch; the test of learning rates takes steps, and loads it on first use.
__getattr__ = exports(__name__, declared())
__dir__ = __all__.copy


class Piece(msgspec.Struct, frozen=True, dict=True, tag=True):  # LambdaLR saves the __dict__ of callables
    """Base of schedules.

    Attributes:
        steps: length of the piece; None for no end.
    """

    steps: int | None = None

    def __call__(self, step: int) -> float:
        """Return the factor at a step, 0 or above.

        Raises:
            ConfigError: a negative step.
        """
        return self.at(_check_step(step, type(self).__name__))

    def at(self, step: int) -> float:
        """Return the factor at a step, 0 or above, without a check."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        if self.steps is not None:
            check_count(self.steps, "the number of steps is not valid", where=f"{type(self).__name__}.steps")


class Constant(Piece, frozen=True, kw_only=True):
    """The same factor at every step.

    Attributes:
        value: the factor.
    """

    value: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_factor(self.value, "Constant.value")

    def at(self, step: int) -> float:
        """Return the value."""
        return self.value


class InverseSqrt(Piece, frozen=True, kw_only=True):
    """The inverse square root of time: 1 / sqrt(1 + step / timescale).

    After `warmup(n)`, `InverseSqrt(timescale=n)` is the schedule of Vaswani et al. 2017, arXiv:1706.03762.

    Attributes:
        timescale: steps after which the factor is 1 / sqrt(2).
    """

    timescale: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.timescale, "the number of steps is not valid", where="InverseSqrt.timescale")

    def at(self, step: int) -> float:
        """Return the point on the curve."""
        return 1 / math.sqrt(1 + step / self.timescale)


class Curve(Piece, frozen=True, kw_only=True):
    """Base of curves from `start` to `end`, which is kept after `steps`.

    Attributes:
        start, end: factors at step 0 and from step `steps` on.
    """

    start: float = 1.0
    end: float = 0.0

    def __post_init__(self) -> None:
        check_count(self.steps, "the number of steps is not valid", where=f"{type(self).__name__}.steps")
        _check_factor(self.start, f"{type(self).__name__}.start")
        _check_factor(self.end, f"{type(self).__name__}.end")

    def at(self, step: int) -> float:
        """Return the point on the curve."""
        gone = self.gone(min(step / (self.steps or 1), 1.0))
        return self.start * (1 - gone) + self.end * gone  # exact at both ends

    def gone(self, time: float) -> float:
        """Return the fraction of the way done at a fraction of the time, both 0 to 1."""
        raise NotImplementedError


class Linear(Curve, frozen=True, kw_only=True):
    """A straight line."""

    def gone(self, time: float) -> float:
        """Return the time."""
        return time


class Cosine(Curve, frozen=True, kw_only=True):
    """Half a cosine. Loshchilov and Hutter 2017, arXiv:1608.03983."""

    def gone(self, time: float) -> float:
        """Return the fall of a cosine."""
        return (1 - math.cos(math.pi * time)) / 2


class Polynomial(Curve, frozen=True, kw_only=True):
    """A power of the remaining or the elapsed time.

    Attributes:
        power: 1 is `Linear`.
        of: "remaining" is flat at the end if the power is above 1. "elapsed" with power 0.5 is the cool-down
            1 - sqrt(t) of Hägele et al. 2024, arXiv:2405.18392.
    """

    power: float = 2.0
    of: Literal["remaining", "elapsed"] = "remaining"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.power < math.inf:
            raise ConfigError(
                "the power is not valid", expected="above 0", got=repr(self.power), where="Polynomial.power"
            )
        check_choice(self.of, ("remaining", "elapsed"), "the part of the time is unknown", where="Polynomial.of")

    def gone(self, time: float) -> float:
        """Return the power of the elapsed time, or the complement of the power of the remaining time."""
        return time**self.power if self.of == "elapsed" else 1 - (1 - time) ** self.power


class Joined(msgspec.Struct, frozen=True, dict=True, tag=True):
    """A sequence of pieces, each with steps counted from 0.

    Attributes:
        pieces: all but the last with `steps`.
        jumps: whether the factor may jump between pieces, as in warm restarts.
    """

    pieces: tuple[Constant | Linear | Cosine | Polynomial | InverseSqrt, ...]
    jumps: bool = False

    def __post_init__(self) -> None:
        pieces = self.pieces
        if not isinstance(pieces, tuple) or not pieces or not all(isinstance(each, Piece) for each in self.pieces):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
            raise ConfigError(
                "nothing to join",
                expected="a tuple of Linear, Cosine and their like",
                got=repr(pieces),
                where="Joined.pieces",
                fix="Write Joined((first, second)).",
            )
        for at, (piece, after) in enumerate(zip(self.pieces[:-1], self.pieces[1:], strict=True)):
            if piece.steps is None:
                raise ConfigError(
                    "a piece without an end is followed by another",
                    expected="steps",
                    got=repr(piece),
                    where=f"Joined.pieces[{at}]",
                )
            end = piece.at(piece.steps)
            start = after.at(0)
            if not self.jumps and not math.isclose(end, start, rel_tol=1e-9, abs_tol=1e-12):
                raise ConfigError(
                    "the factor jumps between two pieces",
                    expected=f"a piece that begins at {end:g}, where the one before it ends",
                    got=f"{after!r}, which begins at {start:g}",
                    where=f"Joined.pieces[{at + 1}]",
                    fix="Set start= and end= so that they meet, or pass jumps=True.",
                )

    def __call__(self, step: int) -> float:
        """Return the factor of the piece at a step.

        Raises:
            ConfigError: a negative step.
        """
        _check_step(step, "Joined")
        for piece in self.pieces[:-1]:
            if piece.steps is None or step < piece.steps:
                return piece.at(step)
            step -= piece.steps
        return self.pieces[-1].at(step)


def warmup(steps: int) -> Linear:
    """Return a line that reaches 1 at `steps`; it begins at 1 / (steps + 1), so that the first step counts."""
    check_count(steps, "the number of steps is not valid", where="warmup(steps=)")
    return Linear(steps, start=1 / (steps + 1), end=1.0)


def wsd(warmup_steps: int, stable_steps: int, decay: Linear | Cosine | Polynomial) -> Joined:
    """Return a warm-up to 1, a stable phase at 1, then a decay. Hu et al. 2024, arXiv:2404.06395.

    Args:
        warmup_steps, stable_steps: lengths of the first two phases, 1 or above.
        decay: the last phase, from 1, such as `Linear(1000)` or `Polynomial(1000, power=0.5, of="elapsed")`.

    Raises:
        ConfigError: steps below 1, or a decay that does not begin at 1.
    """
    return Joined((warmup(warmup_steps), Constant(stable_steps), decay))


def _check_step(step: int, where: str) -> int:
    if not step >= 0:
        raise ConfigError("the step is not valid", expected="0 or above", got=repr(step), where=where)
    return step


def _check_factor(value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError("the factor is not valid", expected="a number from 0", got=repr(value), where=where)
