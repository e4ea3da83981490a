# SPDX-License-Identifier: Apache-2.0
"""The cause of a failed read in one line, and the user's line that raised it, in this process or in a worker."""

from __future__ import annotations

import os
import re
import traceback
from typing import NamedTuple

_FRAME = re.compile(r'  File "(.+)", line (\d+), in (.+)')
_IN_WORKER = re.compile(r"Caught \w+ in (?:DataLoader )?(worker process \d+)\.\nOriginal Traceback ")
_LIBRARIES = tuple(
    folder + os.sep for folder in (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(__file__)))
)


class ReadError(NamedTuple):
    """Cause and place of a failed read.

    Attributes:
        cause: class and message.
        place: "data.py:7 in __getitem__, worker process 0"; empty where no line is the user's.
    """

    cause: str
    place: str


def read_error(error: BaseException) -> ReadError:
    """Return cause and place of an error; torch's error for a worker holds the worker's traceback as text."""
    text = str(error)
    in_worker = _IN_WORKER.match(text)
    if in_worker is None:
        frames = [(each.filename, str(each.lineno), each.name) for each in traceback.extract_tb(error.__traceback__)]
        return ReadError(f"{type(error).__name__}: {error}", _users(frames))
    lines = text.splitlines()
    at = max((i for i, line in enumerate(lines) if _FRAME.fullmatch(line)), default=0)
    said = [line for line in lines[at + 1 :] if not line.startswith("    ")]
    begins = max((i for i, line in enumerate(lines) if line.endswith("(most recent call last):")), default=0)
    found = [match.groups() for line in lines[begins:] if (match := _FRAME.fullmatch(line))]
    frames = [(file, number, name) for file, number, name in found]
    place = ", ".join(filter(None, (_users(frames), in_worker[1])))
    return ReadError("\n".join(said).strip() or type(error).__name__, place)


def _users(frames: list[tuple[str, str, str]]) -> str:
    """Return the innermost frame of the user's own code."""
    for file, number, name in reversed(frames):
        installed = {"site-packages", "dist-packages"} & set(file.split(os.sep))
        if not installed and not file.startswith(("<", *_LIBRARIES)):
            return f"{os.path.basename(file)}:{number} in {name}"
    return ""
