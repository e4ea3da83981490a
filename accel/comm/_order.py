# SPDX-License-Identifier: Apache-2.0
"""Calls of one kind in opposite orders on two ranks, found from the code places of the calls.

Ranks may make one call from different places, as a branch for rank 0 does. If one rank calls from X and then from Y
while another calls from Y and then from X, each gets the other's data. Branches of one function are the exception: a
loop with one call per iteration, from either branch, looks the same and is right. So does a function of two branches
that is called twice: ranks that reach it from the same line are in step.
"""

from __future__ import annotations

import os.path
import struct
import zlib
from collections.abc import Sequence
from itertools import zip_longest
from types import CodeType
from typing import NamedTuple

import msgspec

_PLACE = struct.Struct("<II")
_TOLD_APART = 64  # bytes of a function's table of lines and columns; they distinguish lambdas of one line

Trace = Sequence[tuple[CodeType, int]]
_CodePoint = tuple[int, int]  # a function and an instruction in it


class Met(NamedTuple):
    """A call that ranks made from different places.

    Attributes:
        fingerprint: hash of kind, structure and shapes.
        places: from `place_of`, by rank; of this rank alone in a large group.
        trace: functions and instructions on this rank's stack, outermost first.
    """

    fingerprint: bytes
    places: list[bytes]
    trace: Trace


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One level of a trace: its function, the instruction in it, and both as text; comparable between ranks."""

    function: int
    instruction: int
    text: str


def place_of(code: CodeType, instruction: int) -> bytes:
    """Return 8 bytes that identify an instruction on all ranks, wherever the program is installed."""
    return _PLACE.pack(_function(code), instruction)


def steps(trace: Trace) -> list[Step]:
    """Describe a trace for other ranks."""
    return [Step(_function(code), _call_begin(code, at), _text(code, at)) for code, at in trace]


def crossed(earlier: Met | None, now: Met) -> tuple[int, int] | None:
    """Find the lowest ranks that made this call and the one before from the same two places, in opposite orders."""
    if earlier is None or earlier.fingerprint != now.fingerprint:
        return None
    first: dict[tuple[bytes, bytes], int] = {}
    for rank, (before, after) in enumerate(zip(earlier.places, now.places, strict=True)):
        if before != after and (after, before) in first:
            return first[after, before], rank
        _ = first.setdefault((before, after), rank)
    return None


def are_branches(left: tuple[Sequence[Step], Sequence[Step]], right: tuple[Sequence[Step], Sequence[Step]]) -> bool:
    """Return whether two crossed calls are branches that ranks may take in any order.

    They are if they lie in one function, or if both ranks reached one of the calls by the same way.

    Args:
        left: the traces of both calls on one rank.
        right: those on the other.
    """
    before, after = _parting(*left)
    other_before, other_after = _parting(*right)
    if before == other_before or after == other_after:
        return True
    one_function = before is not None and after is not None and before[0] == after[0]
    return one_function and (before, after) == (other_after, other_before)


def _parting(before: Sequence[Step], after: Sequence[Step]) -> tuple[_CodePoint | None, _CodePoint | None]:
    """Return the points at the outermost level where two traces differ; None for a trace that has ended."""
    points = [[(step.function, step.instruction) for step in trace] for trace in (before, after)]
    return next(((a, b) for a, b in zip_longest(*points) if a != b), (None, None))


def _function(code: CodeType) -> int:
    return zlib.crc32(code.co_linetable[:_TOLD_APART], code.co_firstlineno)


def _call_begin(code: CodeType, instruction: int) -> int:
    """Return the first instruction of an expression's call; the interpreter may show another after many calls."""
    spans = list(code.co_positions())
    at = begin = instruction // 2
    if at >= len(spans) or None in spans[at]:
        return instruction
    while begin and spans[begin - 1] == spans[at]:
        begin -= 1
    return 2 * begin


def _text(code: CodeType, instruction: int) -> str:
    line = next((line for begin, end, line in code.co_lines() if begin <= instruction < end), None)
    return f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}"
