# SPDX-License-Identifier: Apache-2.0
"""Where in the user's code a call was made."""

from __future__ import annotations

import inspect
import sys
import traceback
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

_HERE = Path(__file__).resolve().parent
_MACHINERY = (f"{Path(torch.__file__).resolve().parent}/", f"{_HERE}/")
_LIBRARY = f"{_HERE.parent}/"
_LOOK_UPS = ("init_process_group", "_get_default_group", "get_group_rank", "get_global_rank")


class Line(NamedTuple):
    """A line of code; printed as "file:line in function"."""

    code: CodeType
    number: int

    def __str__(self) -> str:
        return f"{Path(self.code.co_filename).name}:{self.number} in {self.code.co_name}"


class Site(NamedTuple):
    """The line that made a call, and the line outside of accel that led to it when that is another one."""

    line: Line
    caller: Line | None

    def __str__(self) -> str:
        return str(self.line) if self.caller is None else f"{self.line} (from {self.caller})"


def call_site() -> Site | None:
    """Return the nearest line outside torch and this package; None if there is none."""
    frame = _outside(inspect.currentframe(), _MACHINERY)
    if frame is None:
        return None
    line = Line(frame.f_code, frame.f_lineno)
    if not frame.f_code.co_filename.startswith(_LIBRARY):
        return Site(line, None)
    caller = _outside(frame, (*_MACHINERY, _LIBRARY))
    return Site(line, caller and Line(caller.f_code, caller.f_lineno))


def stack_of(thread: int) -> str:
    """Return the innermost lines of a thread's stack, by its identifier."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    return "".join(traceback.format_stack(frame)[-4:]).rstrip() if frame is not None else "    (the thread has ended)"


def asked_for_default_group(error: BaseException) -> bool:
    """Whether an exception came from where c10d looks for its default group, or for a group that it made itself."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(code.co_name in _LOOK_UPS and code.co_filename.endswith("distributed_c10d.py") for code in frames)


def _outside(frame: FrameType | None, folders: tuple[str, ...]) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(folders):
        frame = frame.f_back
    return frame
