# SPDX-License-Identifier: Apache-2.0
"""Call sites in the user's code, and errors that only a simulation can raise."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Literal, NamedTuple

import torch

from accel.comm import UnitLog, parting, unit_of, way_out
from accel.errors import AccelError

_HERE = Path(__file__).resolve().parent
_LIBRARY = f"{_HERE.parent}/"
_STARTS = (f"{_HERE}/", threading.__file__)  # what every rank's stack begins with
_NOT_THE_USER_S = (*_STARTS, _LIBRARY, f"{Path(torch.__file__).resolve().parent}/", contextlib.__file__)
_LOOK_UPS = ("init_process_group", "_get_default_group", "get_group_rank", "get_global_rank")
_INNERMOST = 4  # frames of a stack that are shown


class CodeLine(NamedTuple):
    """A line of code; printed as "file:line in function"."""

    code: CodeType
    number: int

    def __str__(self) -> str:
        return f"{Path(self.code.co_filename).name}:{self.number} in {self.code.co_name}"


class Site(NamedTuple):
    """The line that made a call."""

    line: CodeLine  # of the user's code
    function: str | None  # accel's function that the line called, if that made the call on its behalf
    unit: str | None = None  # call of an FSDP unit, as in "the gather of blocks.0"
    units: UnitLog | None = None  # units that the rank has run, if `unit` is one of them

    def __str__(self) -> str:
        inside = self.unit or self.function
        return str(self.line) if inside is None else f"{self.line}, in {inside}"

    def calls(self, call: object) -> str:
        """Say that the line made a call: what the user called comes first."""
        if self.unit is not None:
            return f"{call} at {self}"
        return f"{call} at {self.line}" if self.function is None else f"{self.function} at {self.line} ({call})"


def call_site() -> Site:
    """Return the nearest line outside of torch and accel; the outermost of theirs if there is none outside."""
    frame = outermost = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    called: CodeType | None = None
    unit: tuple[str, UnitLog] | None = None
    while frame is not None and (owner := _owner(frame.f_code.co_filename)) != "user":
        if owner != "simulator":
            outermost = frame
            if owner == "accel":
                called = frame.f_code
                unit = unit or unit_of(frame)
        frame = frame.f_back
    found = frame or outermost
    function = f"accel.{called.co_name}" if called is not None else None
    name, units = unit or (None, None)
    return Site(CodeLine(found.f_code, found.f_lineno), function, name, units)


def units_differ(sites: Mapping[int, Site]) -> str:
    """Return where ranks began to run different FSDP units, and the fix; empty if units explain nothing."""
    places = {rank: site.units.at(site.unit or "") for rank, site in sites.items() if site.units is not None}
    parted = parting(places)
    fix = way_out(places)
    return fix if parted is None else f"R{str(parted)[1:]}. {fix}"


@functools.lru_cache(maxsize=1024)
def _owner(file: str) -> Literal["user", "simulator", "accel", "torch"]:
    """Return the owner of the code in a file; contextlib counts as torch's."""
    if not file.startswith(_NOT_THE_USER_S):
        return "user"
    if file.startswith(_STARTS):
        return "simulator"
    return "accel" if file.startswith(_LIBRARY) else "torch"


def stack_of(thread: int) -> str:
    """Return the innermost lines of a rank's stack, by its thread's identifier."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return "    (the thread has ended)"
    stack = itertools.dropwhile(lambda each: each.filename.startswith(_STARTS), traceback.extract_stack(frame))
    return "".join(traceback.format_list(list(stack)[-_INNERMOST:])).rstrip()


def asked_for_default_group(error: BaseException) -> bool:
    """Whether an exception came from where c10d looks for its default group, or for a group that it made itself."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(code.co_name in _LOOK_UPS and code.co_filename.endswith("distributed_c10d.py") for code in frames)


class SimulationError(AccelError):
    """A simulated run could not continue, or used the simulator in a way that it does not support."""

    def __str__(self) -> str:
        if "\n" not in self.got:
            return super().__str__()
        return "\n".join(line for line in (f"{self.problem}:", self.got.lstrip("\n"), self.fix) if line)


class Deadlock(SimulationError):  # noqa: N818 - what everybody calls it
    """No rank can continue: each has ended or waits for ranks that will never come; `got` has a line for each."""


class InjectedFault(SimulationError):  # noqa: N818 - it is the fault itself, asked for by the test
    """The failure that a `Fault` asked for."""


class FaultNotReached(SimulationError):  # noqa: N818 - its name is the fact
    """A run ended well before a fault could happen, so it has tested nothing."""
