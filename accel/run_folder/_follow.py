# SPDX-License-Identifier: Apache-2.0
"""New lines of a file that another process writes: its last line may be torn, and the file may be cut back."""

from __future__ import annotations

import os
from typing import NamedTuple

_CHUNK = 2**24
_TAIL = 256  # bytes before the position that must still be the same


class Position(NamedTuple):
    """A position in a file behind the lines that have been read.

    Attributes:
        offset: bytes before it.
        tail: the last of these bytes, by which another content of the same length is noticed.
    """

    offset: int = 0
    tail: bytes = b""


class NewLines(NamedTuple):
    """Lines behind a position.

    Attributes:
        lines: whole lines, without their newlines.
        position: position behind them.
        restarted: whether the file was cut back or replaced: lines of earlier reads no longer count, and these begin
            with the file's first.
    """

    lines: list[bytes]
    position: Position
    restarted: bool


def read_new(path: str | os.PathLike[str], position: Position = Position()) -> NewLines:  # noqa: B008 - a frozen value
    """Return whole lines behind a position, some 16 MiB at most; no lines once all have been read.

    A torn last line stays for the next read. A file that does not exist has no lines.

    Args:
        path: the file.
        position: result of the last read.

    Raises:
        OSError: the file exists, but cannot be read.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        return NewLines([], Position(), position.offset > 0)
    with file:
        _ = file.seek(max(0, position.offset - len(position.tail)))
        restarted = file.read(len(position.tail)) != position.tail
        if restarted:
            position = Position()
            _ = file.seek(0)
        data = file.read(_CHUNK)
        while b"\n" not in data and (more := file.read(_CHUNK)):
            data += more
    data = data[: data.rfind(b"\n") + 1]
    moved = Position(position.offset + len(data), (position.tail + data)[-_TAIL:])
    return NewLines(data.splitlines() if b"\r" not in data else data.split(b"\n")[:-1], moved, restarted)
