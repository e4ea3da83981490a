# SPDX-License-Identifier: Apache-2.0
"""One file held open, and three ways to read it: from the page cache alone, past it, and through it.

Reference: preadv2(2), RWF_NOWAIT; open(2), O_DIRECT.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from accel.errors import CheckpointError
from accel.storage._files import disk_errors
from accel.storage._ranges import PAGE

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in place of a file must not hang
_DIRECT = getattr(os, "O_DIRECT", 0)
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_NOT_CACHED = (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL)


class OpenFile:
    """An open file, as it was when it was opened; the same one even if its path is replaced.

    Attributes:
        path: its path when it was opened.
        size: bytes.
        is_direct: whether reads go past the page cache.
        counts: bytes read so far, by "cached", "direct" and "buffered".
    """

    def __init__(self, path: Path, *, direct: bool) -> None:
        """Open a file.

        Raises:
            CheckpointError: it is missing, unreadable or no regular file.
        """
        self.path = path
        self.counts = Counter[str]()
        self._guard = threading.Lock()
        with disk_errors(path):
            self._buffered = os.open(path, _READ_FLAGS)
        self._direct: int | None = None
        found = os.fstat(self._buffered)
        self.size = found.st_size
        self._changed = found.st_mtime_ns, found.st_size
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise CheckpointError("not a regular file", where=str(path))
        if direct and _DIRECT:
            try:  # the same file, even if the path has another one by now
                self._direct = os.open(f"/proc/self/fd/{self._buffered}", _READ_FLAGS | _DIRECT)
            except OSError:  # the file system has no such reads
                self._direct = None
        self.is_direct = self._direct is not None

    def check(self) -> None:
        """Raise if the file has been written to since it was opened.

        Raises:
            CheckpointError: it has.
        """
        with disk_errors(self.path):
            found = os.fstat(self._buffered)
        if (found.st_mtime_ns, found.st_size) != self._changed:
            raise CheckpointError(
                "the file changed while it was read",
                expected=f"{self.size} bytes, as when it was opened",
                got=f"{found.st_size} bytes, written to since",
                where=str(self.path),
                fix="Load again once the file is complete; replace weights by renaming a new file.",
            )

    def read_cached(self, start: int, memory: Sequence[memoryview]) -> int:
        """Fill memory from the page cache, as far as that holds the range; return the bytes. Never waits for a disk.

        Nothing is read unless the cache holds both ends: a read that misses makes the system read ahead, and what it
        fetches that way costs more than reading past the cache.
        """
        if not _NOWAIT or self._direct is None:
            return 0
        last = start + sum(map(len, memory)) - 1
        probe = [memoryview(bytearray(1))]
        if not self._at_once(last, probe) or not self._at_once(start, probe):
            return 0
        got = self._at_once(start, memory)
        self._count("cached", got)
        return got

    def read_direct(self, start: int, memory: memoryview) -> int:
        """Fill whole pages past the page cache.

        Args:
            start: first byte in the file, a multiple of `PAGE`.
            memory: whole pages of memory.

        Returns:
            The bytes; fewer at the file's end, or where the file system refuses.
        """
        done = 0
        while done < len(memory) and self._direct is not None:
            try:
                got = os.preadv(self._direct, [memory[done:]], start + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break
            done += got
            if not got or done % PAGE:
                break
        self._count("direct", done)
        return done

    def read_buffered(self, start: int, memory: Sequence[memoryview]) -> None:
        """Fill memory through the page cache.

        Raises:
            CheckpointError: the file is too short.
        """
        for left in memory:
            while left:
                got = os.preadv(self._buffered, [left], start)
                if not got:
                    raise CheckpointError(
                        "the file is too short",
                        expected=f"{len(left)} bytes from {start} on",
                        got="its end",
                        where=str(self.path),
                        fix="Copy or download the file again.",
                    )
                self._count("buffered", got)
                left, start = left[got:], start + got

    def mapped(self) -> memoryview:
        """Return the file as memory of which pages are read when they are touched; writes to it stay in memory.

        It outlives `close`. A file that is cut short meanwhile ends the process where a lost page is touched.
        """
        with disk_errors(self.path):
            return memoryview(mmap.mmap(self._buffered, 0, access=mmap.ACCESS_COPY))

    def close(self) -> None:
        """Close its descriptors. Never raises."""
        for file in (self._buffered, self._direct):
            if file is not None:
                os.close(file)
        self._buffered, self._direct = -1, None

    def _at_once(self, start: int, memory: Sequence[memoryview]) -> int:
        """Read what needs no waiting; return the bytes."""
        try:
            return os.preadv(self._buffered, memory, start, _NOWAIT)
        except OSError as error:
            if error.errno not in _NOT_CACHED:
                raise
            return 0

    def _count(self, kind: str, nbytes: int) -> None:
        with self._guard:
            self.counts[kind] += nbytes
