# SPDX-License-Identifier: Apache-2.0
"""Frames of the user: not those of the standard library, of an installed package, or of accel."""

from __future__ import annotations

import os
from types import TracebackType

WORKER = "/launching/_worker.py"  # end of the path of what each process executes
DECORATOR = "wrapper"  # c10d's name for the function around each of its own
_LIBRARIES = tuple(
    f"{folder}{os.sep}" for folder in (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(__file__)))
)


def is_users(file: str) -> bool:
    """Return whether a source file is the user's."""
    installed = not {"site-packages", "dist-packages"}.isdisjoint(file.split(os.sep))
    return not (installed or file.startswith(("<", *_LIBRARIES)))


def frames_below(trace: TracebackType | None, file: str) -> TracebackType | None:
    """Return a traceback without the frames at its start of a file and of Python's import system."""
    while trace and trace.tb_frame.f_code.co_filename.startswith((file, "<frozen importlib")):
        trace = trace.tb_next
    return trace
