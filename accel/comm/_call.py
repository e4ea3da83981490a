# SPDX-License-Identifier: Apache-2.0
"""What a call is, and where in the user's code it was made."""

from __future__ import annotations

import os.path
import sys
from collections.abc import Callable
from types import CodeType, FrameType

import msgspec

from accel.comm._order import Trace, place_of
from accel.errors import ConfigError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Call(msgspec.Struct, frozen=True):
    """A call that all ranks make together.

    Attributes:
        name: the public function's name.
        detail: what must agree between ranks, one fact a line.
        site: file, line and function of the caller; found when it is needed if left out.
        explain: makes the lines to report in place of `detail`, where that is made for comparing and not for reading.
        hint: the way out for two lines that differ, of rank 0 and of another; "" where there is no better one than the
            same calls everywhere.
        ordered: whether its result is another's if two calls of its kind are swapped on one rank.
    """

    name: str
    detail: str = ""
    site: str = ""
    explain: Callable[[], str] | None = None
    ordered: bool = True
    hint: Callable[[str, str], str] | None = None

    @property
    def label(self) -> str:
        """The call as errors name it: "gather at train.py:12 in train"."""
        return f"{self.name} at {self.site or call_site()}"


def check_tag(tag: str | None, name: str) -> None:
    """Raise `ConfigError` unless the user's name for a call is text or None."""
    if tag is not None and type(tag) is not str:
        raise ConfigError("a tag that is no text", expected="str or None", got=repr(tag), where=f"{name}, tag=")


def tagged(detail: str, tag: str | None) -> str:
    """Add the user's name for a call to what must agree between ranks."""
    if tag is None:
        return detail
    return f"{detail}, tag={tag!r}" if detail else f"tag={tag!r}"


def call_site() -> str:
    """Return "file:line in function" of the nearest caller outside this package."""
    return _place(_border()[1])


def call_place() -> bytes:
    """Return 8 bytes for the instruction of the nearest caller outside this package, alike on all ranks."""
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
    """Name the function of this package that was called from outside, and where: "gather at train.py:12 in train"."""
    inside, outside = _border()
    return f"{inside.f_code.co_name} at {_place(outside)}"


def _border() -> tuple[FrameType, FrameType]:
    """The outermost frame of this package above the caller, and the frame that called it."""
    inside = frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            inside = frame
        elif not frame.f_code.co_filename.endswith("contextlib.py"):
            break
        frame = frame.f_back
    return inside, frame


def _place(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
