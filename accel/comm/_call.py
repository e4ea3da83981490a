# SPDX-License-Identifier: Apache-2.0
"""What a call is, and where in the user's code it was made."""

from __future__ import annotations

import os.path
import sys
from collections.abc import Callable
from types import FrameType

import msgspec

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Call(msgspec.Struct, frozen=True):
    """A call that all ranks make together.

    Attributes:
        name: the public function's name.
        detail: what must agree between ranks, one fact a line.
        site: file, line and function of the caller; found when it is needed if left out.
        explain: makes the lines to report in place of `detail`, where that is made for comparing and not for reading.
    """

    name: str
    detail: str = ""
    site: str = ""
    explain: Callable[[], str] | None = None

    @property
    def label(self) -> str:
        """The call as errors name it: "gather at train.py:12 in train"."""
        return f"{self.name} at {self.site or call_site()}"


def call_site() -> str:
    """Return "file:line in function" of the nearest caller outside this package."""
    return _place(_border()[1])


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
