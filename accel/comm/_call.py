# SPDX-License-Identifier: Apache-2.0
"""Calls that all ranks make together, and their places in the user's code."""

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
        detail: facts to compare between ranks, one a line.
        site: file, line and function of the caller; looked up when needed by default.
        explain: returns readable lines to report in place of `detail`.
        hint: maps two differing lines, of rank 0 and of another rank, to the way out; "" for the general one.
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
        raise ConfigError("a tag that is no text", expected="str or None", got=repr(tag), where=f"{name}, tag=")


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
