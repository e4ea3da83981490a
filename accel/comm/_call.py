# SPDX-License-Identifier: Apache-2.0
"""Calls that all ranks make together, their places in the user's code, and the optimizer steps taken between them."""

from __future__ import annotations

import os.path
import struct
import sys
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from types import CodeType, FrameType
from typing import NamedTuple

import msgspec

from accel.errors import ConfigError

_PLACE = struct.Struct("<II")
# Bytes of a function's table of lines and columns: enough to distinguish lambdas of one line.
_DISTINCT = 64

Trace = Sequence[tuple[CodeType, int]]
_CodePoint = tuple[int, int]  # a function and an instruction in it


class Met(NamedTuple):
    """A call that ranks made from different places."""

    fingerprint: bytes  # hash of kind, structure and shapes
    places: list[bytes]  # from `place_of`, by rank; of this rank alone in a large group
    trace: Trace  # functions and instructions on this rank's stack, outermost first


class TraceLevel(msgspec.Struct, frozen=True, array_like=True):
    """One level of a trace: its function, the instruction in it, and both as text; comparable between ranks."""

    function: int
    instruction: int
    text: str


def place_of(code: CodeType, instruction: int) -> bytes:
    """Return 8 bytes that identify an instruction on all ranks, wherever the program is installed."""
    # the path of a file is no part of it, since hosts install a program in different folders
    return _PLACE.pack(_function(code), instruction)


def steps(trace: Trace) -> list[TraceLevel]:
    """Describe a trace for other ranks."""
    return [TraceLevel(_function(code), _call_begin(code, at), _text(code, at)) for code, at in trace]


def crossed(earlier: Met | None, now: Met) -> tuple[int, int] | None:
    """Find the lowest ranks that made this call and the one before from the same two places, in opposite orders."""
    if earlier is None or earlier.fingerprint != now.fingerprint:
        return None
    first: dict[tuple[bytes, bytes], int] = {}
    for rank, (before, after) in enumerate(zip(earlier.places, now.places, strict=True)):
        # one pair of places met in both orders is the proof; a third place is only another branch
        if before != after and (after, before) in first:
            return first[after, before], rank
        _ = first.setdefault((before, after), rank)
    return None


def are_branches(
    left: tuple[Sequence[TraceLevel], Sequence[TraceLevel]], right: tuple[Sequence[TraceLevel], Sequence[TraceLevel]]
) -> bool:
    """Return whether two crossed calls are branches that ranks may take in any order; each pair has one rank's traces.

    They are if they are in one function, or if both ranks reached one of the calls by the same path.
    """
    before, after = _parting(*left)
    other_before, other_after = _parting(*right)
    if before == other_before or after == other_after:
        return True
    # ranks may enter the arms of an `if` in turn, as in a pipeline of two stages
    one_function = before is not None and after is not None and before[0] == after[0]
    return one_function and (before, after) == (other_after, other_before)


def _parting(before: Sequence[TraceLevel], after: Sequence[TraceLevel]) -> tuple[_CodePoint | None, _CodePoint | None]:
    """Return the points at the outermost level where two traces differ; None for a trace that has ended."""
    points = [[(step.function, step.instruction) for step in trace] for trace in (before, after)]
    return next(((a, b) for a, b in zip_longest(*points) if a != b), (None, None))


def _function(code: CodeType) -> int:
    return zlib.crc32(code.co_linetable[:_DISTINCT], code.co_firstlineno)


def _call_begin(code: CodeType, instruction: int) -> int:
    """Return the first instruction of an expression's call; the interpreter may show another after many calls.

    The end of a `with` and a `finally` have two copies in the code, the second for an exception.
    """
    spans = list(code.co_positions())
    # a code unit has two bytes
    at = instruction // 2
    if at >= len(spans) or None in spans[at]:
        return instruction
    return 2 * spans.index(spans[at])


def _text(code: CodeType, instruction: int) -> str:
    line = next((line for begin, end, line in code.co_lines() if begin <= instruction < end), None)
    return f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}"


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Call(msgspec.Struct, frozen=True):
    """A call that all ranks make together.

    Attributes:
        name: the public function's name.
        detail: facts that ranks compare, one a line.
        site: file, line and function of the caller; looked up when needed by default.
        explain: returns readable lines to report in place of `detail`.
        hint: maps two differing lines, of rank 0 and of another rank, to the fix; "" for the general one.
        ordered: whether two such calls swapped on one rank would swap their results.
    """

    name: str
    detail: str = ""
    site: str = ""
    explain: Callable[[], str] | None = None
    ordered: bool = True
    hint: Callable[[str, str], str] | None = None

    @property
    def label(self) -> str:
        """Name and site, as in errors: "gather at train.py:12 in train"."""
        return f"{self.name} at {self.site or call_site()}"


def check_tag(tag: str | None, name: str) -> None:
    """Raise `ConfigError` unless the user's name for a call is text or None."""
    if tag is not None and type(tag) is not str:
        raise ConfigError("the tag is not text", expected="str or None", got=repr(tag), where=f"{name}, tag=")


def tagged(detail: str, tag: str | None) -> str:
    """Append the user's name for a call to a detail."""
    if tag is None:
        return detail
    return f"{detail}, tag={tag!r}" if detail else f"tag={tag!r}"


def call_site() -> str:
    """Return "file:line in function" of the nearest caller outside this package."""
    return _place(_border()[1])


def call_place() -> bytes:
    """Return 8 bytes that identify the instruction of the nearest caller outside this package on every rank."""
    frame = _border()[1]
    return place_of(frame.f_code, frame.f_lasti)


def call_trace() -> Trace:
    """Return functions and instructions from the outermost to the nearest caller outside this package."""
    frame: FrameType | None = _border()[1]
    trace: list[tuple[CodeType, int]] = []
    while frame is not None:
        trace.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    trace.reverse()
    return trace


def public_call() -> str:
    """Return the public function that the user called and its site: "gather at train.py:12 in train"."""
    inside, outside = _border()
    return f"{inside.f_code.co_name} at {_place(outside)}"


def _border() -> tuple[FrameType, FrameType]:
    """The outermost frame of this package above the caller, and the frame that called it."""
    # two levels up: neither this function nor the one that asks is the user's
    inside = frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            inside = frame
        # a context manager of this package runs below a frame of contextlib, which is not the user
        elif not frame.f_code.co_filename.endswith("contextlib.py"):
            break
        frame = frame.f_back
    return inside, frame


def _place(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


_DECISION = struct.Struct("<Q??d")
# Decisions to quote in an error; the digest covers the older ones.
_MOST_KEPT = 64


class TakenStep(msgspec.Struct, frozen=True, array_like=True):
    """One decision about an optimizer step."""

    number: int  # place among the decisions of the handle
    digest: int  # of this decision and all before
    step: int  # the run's steps before it
    stepped: bool  # whether parameters were changed
    finite: bool  # whether the gradients were finite
    scale: float  # loss scale for the next step
    first_of: str = ""  # an optimizer's first replicated parameter, where its values were noted and nothing decided

    def __str__(self) -> str:
        if self.first_of:
            return f"the values of {self.first_of} before a first step"
        done = "taken" if self.stepped else "left out as empty" if self.finite else "skipped"
        return f"step {self.step} {done}, loss scale {self.scale} after it"


class FirstValue(NamedTuple):
    """A parameter before its first step."""

    holders: str  # the ranks that hold the same elements: equal texts for equal ranks
    name: str  # its name in the prepared model
    bits: int  # sum of the bits that this rank holds


class StepLog:
    """Decisions about optimizer steps since the ranks of a group were last known to be alike.

    Attributes:
        digest: of all decisions, an integer of 32 bits; 0 before any.
    """

    __slots__ = ("_kept", "_number", "_values", "digest")

    def __init__(self) -> None:
        self.digest = 0
        self._number = 0
        self._kept: deque[TakenStep] = deque(maxlen=_MOST_KEPT)
        self._values: list[FirstValue] | None = None  # that no message has compared

    def add(self, *, updates: int, stepped: bool, finite: bool, scale: float) -> None:
        """Add a decision; `updates` is the run's steps before it. No communication."""
        # chained, so that one word in a header compares the whole history
        self.digest = zlib.crc32(_DECISION.pack(self._number, stepped, finite, scale), self.digest)
        self._kept.append(TakenStep(self._number, self.digest, updates, stepped, finite, scale))
        self._number += 1

    def add_values(self, values: Sequence[FirstValue]) -> None:
        """Add parameters before their first step, for the next message to compare. No communication; ranks that hold
        none of a model's replicated parameters add an empty list."""
        self.digest = zlib.crc32(b"values", self.digest)
        name = values[0].name if values else "no parameter"
        self._kept.append(TakenStep(self._number, self.digest, 0, True, True, 1.0, name))
        self._number += 1
        self._values = [*(self._values or ()), *values]

    def take_values(self) -> list[FirstValue] | None:
        """Return the parameters since the last call; None if nothing was added, on all ranks with this digest."""
        found, self._values = self._values, None
        return found

    def clear(self) -> None:
        """Begin anew, where all ranks of the group do."""
        self.digest = self._number = 0
        self._kept.clear()
        _ = self.take_values()

    def latest(self) -> list[TakenStep]:
        """Return the latest decisions in order."""
        return list(self._kept)


def first_difference(
    left: Sequence[TakenStep], right: Sequence[TakenStep]
) -> tuple[TakenStep | None, TakenStep | None]:
    """Return the first decisions that differ among the latest of two ranks; None for a rank without that one."""
    one, other = ({each.number: each for each in steps} for steps in (left, right))
    # a log drops its oldest decisions, so that it begins later than the other may
    begin = max(min(steps, default=0) for steps in (one, other))
    for number in sorted(one.keys() | other.keys()):
        first = one.get(number)
        second = other.get(number)
        if number >= begin and (first is None or second is None or first.digest != second.digest):
            return first, second
    return None, None
