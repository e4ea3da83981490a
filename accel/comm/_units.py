# SPDX-License-Identifier: Apache-2.0
"""FSDP units that a rank runs, and its line: what errors of ranks that no longer meet report of each other."""

from __future__ import annotations

import base64
import itertools
import os
import re
import sys
import traceback
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import NamedTuple

import msgspec

from accel.errors._checks import is_users

SUM_OF = "the sum of gradients of"  # a unit: the name of that call
_MOST_KEPT = 1024


class UnitLog:
    """Units of sharded models that this rank has run forward.

    Attributes:
        count: number of them since the group was opened.
        latest: the last 1024 of them, in their order.
    """

    __slots__ = ("count", "latest")

    def __init__(self) -> None:
        self.count = 0
        self.latest: deque[str] = deque(maxlen=_MOST_KEPT)

    def add(self, unit: str) -> None:
        """Note that the forward of a unit begins."""
        self.count += 1
        self.latest.append(unit)

    def at(self, place: str) -> RankPlace:
        """Return the place of this rank, with its units."""
        return RankPlace(place, self.count, list(self.latest))


class RankPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of a rank, as other ranks read it after a failed call."""

    place: str  # its task and the user's line, as in "in the gather of see.0 at train.py:17 in forward"
    count: int = 0  # number of units that it has run forward
    units: Sequence[str] = ()  # the latest of them

    def word(self) -> str:
        """Encode it as one word for a store."""
        return base64.urlsafe_b64encode(zlib.compress(msgspec.json.encode(self))).decode()


def read_place(word: str) -> RankPlace:
    """Decode the word of a `RankPlace`."""
    return msgspec.json.decode(zlib.decompress(base64.urlsafe_b64decode(word)), type=RankPlace)


class Parting(NamedTuple):
    """The first unit that two ranks did not run alike."""

    ranks: tuple[int, int]  # the two, in ascending order
    units: tuple[str, str]  # the unit that each ran in its place
    patterns: Sequence[str]  # patterns for the units that one of them ran alone from there on

    def __str__(self) -> str:
        one, other = (f"rank {rank} ran the unit {unit}" for rank, unit in zip(self.ranks, self.units, strict=True))
        return f"{one} where {other}"


def parting(places: Mapping[int, RankPlace]) -> Parting | None:
    """Return where the lowest rank and another one parted; None if the units that they noted are alike."""
    for rank, other in zip(itertools.repeat(min(places, default=0)), sorted(places)[1:], strict=False):
        pair = places[rank], places[other]
        begin = max(each.count - len(each.units) for each in pair)
        one, two = (each.units[begin - (each.count - len(each.units)) :] for each in pair)
        for at, units in enumerate(zip(one, two, strict=False)):
            if units[0] != units[1]:
                return Parting((rank, other), units, _patterns(one[at:], two[at:]))
    return None


def _patterns(one: Sequence[str], two: Sequence[str]) -> Sequence[str]:
    """Return patterns, with numbers as `*`, of the units that one rank ran and the other passed over."""
    tails = [[re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", each) for each in tail] for tail in (one, two)]
    found: list[str] = []
    for tail, others in (tails, tails[::-1]):
        # units behind the last one of both are still to come on the other rank
        end = max((at for at, each in enumerate(tail) if each in others), default=len(tail))
        found += [each for each in tail[:end] if each not in others]
    return tuple(dict.fromkeys(found)) or (one[0], two[0])


def described(places: Mapping[int, RankPlace]) -> str:
    """Describe the places of ranks, and where they parted."""
    shown = [f"rank {rank} {each.place}" for rank, each in sorted(places.items())]
    parted = parting(places)
    return "; ".join([*shown, str(parted)] if parted is not None else shown)


def way_out(places: Mapping[int, RankPlace]) -> str:
    """Return the fix for ranks that run different units, or sum different parameters' gradients; empty for neither."""
    if (parted := parting(places)) is not None:
        listed = ", ".join(f'"{each}"' for each in parted.patterns)
        return (
            "Keep parts that only some ranks run in a unit that always runs: model = accel.prepare_model(ctx, model, "
            f"plan=accel.parallel.Plan(together=({listed},)), find_unused_parameters=True), before prepare."
        )
    if any(SUM_OF in each.place for each in places.values()):
        return (
            "If a rank leaves out some parameters of the unit, as experts that it never calls: "
            "model = accel.prepare_model(ctx, model, find_unused_parameters=True), before prepare."
        )
    return ""


def users_line(error: BaseException | None = None) -> str:
    """Return " at file:line in function" of the user's innermost frame, in an error or on the stack; or nothing."""
    raised = [] if error is None else list(traceback.walk_tb(error.__traceback__))
    for frame, line in itertools.chain(reversed(raised), _stack()):
        if is_users(frame.f_code.co_filename):
            return f" at {os.path.basename(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
    return ""


def _stack() -> Iterator[tuple[FrameType, int]]:
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back
