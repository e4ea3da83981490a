# SPDX-License-Identifier: Apache-2.0
"""A file of lines in the order of steps: appended to, flushed, and cut back to a step."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from accel.opening import open_regular
from accel.run_folder._files import MOST_LINE
from accel.trackers._tracker import Run

_BLOCK = 1 << 16

StepOf = Callable[[bytes], int | None]


class _StepRecord(msgspec.Struct):
    step: int


def step_of(line: bytes) -> int | None:
    """Return the step of a line; None if it has none."""
    try:
        return msgspec.json.decode(line, type=_StepRecord).step
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class LineFile:
    """A file of whole lines. Each line is one write, so that a kill leaves whole lines and at most one torn tail.

    Args:
        path: the file; made with its folder if it is missing.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._fd).st_size
        self._is_torn = False
        _flush_folder(path.parent)

    def first_line(self) -> bytes:
        """Return the first line with its newline; empty for none."""
        head = b""
        while b"\n" not in head and (more := os.pread(self._fd, _BLOCK, len(head))):
            head += more
        return head[: head.find(b"\n") + 1]

    def append(self, line: bytes) -> None:
        """Append a line, or raise `OSError`: the file holds no part of it, or none once the next is appended."""
        written = 0
        if self._is_torn:
            os.ftruncate(self._fd, self._size)
        self._is_torn = True
        try:
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
                self._is_torn = False
            raise
        self._is_torn = False
        self._size += len(line)

    def cut(self, size: int) -> None:
        """Keep the first bytes."""
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)
        self._size = size

    def cut_back(self, run: Run, step_of: StepOf, *, begin: int = 0) -> None:
        """Cut the lines behind a checkpoint's, and a torn tail; `begin` bytes of the head stay. A damaged line has no
        step."""
        end, found = kept_size(self._fd, run.step, run.lines, step_of, begin)
        if run.step is not None and found < run.lines:
            text = "%s lacks the lines of step %d that the checkpoint counts; earlier ones may be in another folder"
            logging.getLogger("accel.trackers").warning(text, self.path, run.step)
        self.cut(end)

    def replace(self, content: bytes) -> None:
        """Replace the whole file, by one rename."""
        partial = self.path.with_name(f"{self.path.name}.partial")
        fd = -1
        try:
            _ = partial.write_bytes(content)
            fd = os.open(partial, os.O_RDWR | os.O_APPEND)
            os.fsync(fd)
            os.replace(partial, self.path)
        except OSError:
            if fd >= 0:
                os.close(fd)
            partial.unlink(missing_ok=True)  # it may take the last of the space
            raise
        os.close(self._fd)
        self._fd = fd
        self._size = len(content)
        _flush_folder(self.path.parent)

    def flush(self) -> None:
        """Make all lines durable."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Flush and close."""
        os.fsync(self._fd)
        os.close(self._fd)


def kept_size(fd: int, step: int | None, lines: int, step_of: StepOf, begin: int = 0) -> tuple[int, int]:
    """Return where to cut a file of lines, and how many lines of the step stay. Reads from the end, no further than the
    cut."""
    end = os.fstat(fd).st_size
    if step is None:
        return min(begin, end), 0
    ends: list[int] = []  # of the lines at the step, the last one first
    while end > begin:
        start = _line_start(fd, end, begin)
        line = os.pread(fd, end - start, start)
        found = step_of(line[:-1]) if line.endswith(b"\n") else None
        if found is not None and found < step:
            break
        if found == step:
            ends.append(end)
        elif found is not None or not ends:
            ends.clear()
        end = start
    kept = min(lines, len(ends))
    return (ends[-kept] if kept else end), kept


def first_step(path: Path, step_of: StepOf, *, skip: int = 0) -> int | None:
    """Return the step of a file's first line after `skip` lines; None for none."""
    try:
        with open(open_regular(path), "rb") as file:
            for _ in range(skip):
                _ = file.readline(MOST_LINE)
            return step_of(file.readline(MOST_LINE).removesuffix(b"\n"))
    except OSError:
        return None


def open_lines(path: Path, run: Run) -> LineFile:
    """Open a run's file; the file of an earlier run is set aside by a new one."""
    if run.step is None:
        set_aside(path)
    return LineFile(path)


def set_aside(path: Path) -> None:
    """Rename the file or folder of an earlier run, so that nothing of it is lost."""
    if not path.exists() or not path.stat().st_size:
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
    text = "%s was of an earlier run, and its checkpoint was not loaded; it is now %s"
    logging.getLogger("accel.trackers").info(text, path, aside.name)


def _line_start(fd: int, end: int, begin: int) -> int:
    """Return where the line that ends at `end` starts."""
    low, chunk = end, b""
    while low > begin:
        size = min(_BLOCK, low - begin)
        low -= size
        chunk = os.pread(fd, size, low) + chunk
        at = chunk.rfind(b"\n", 0, len(chunk) - 1)
        if at >= 0:
            return low + at + 1
    return begin


def _flush_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
