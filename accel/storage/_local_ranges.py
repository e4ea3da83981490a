# SPDX-License-Identifier: Apache-2.0
"""Byte ranges of local files, read by threads straight into memory: from the page cache, else past it."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from accel.errors import CheckpointError
from accel.errors._checks import disk_errors
from accel.opening import open_regular
from accel.storage._ranges import (
    CHUNK,
    PAGE,
    Passed,
    Request,
    Wanted,
    WantedBytes,
    carry_out,
    is_tiled,
    memory_at,
    pages_around,
    plan_requests,
)

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
        """Open a regular file."""
        self.path = path
        self.counts = Counter[str]()
        self._guard = threading.Lock()
        with disk_errors(path):
            self._buffered = open_regular(path)
        self._direct: int | None = None
        found = os.fstat(self._buffered)
        self.size = found.st_size
        self._written = found.st_mtime_ns, found.st_size
        self._touched = found.st_ctime_ns
        self._sample: dict[tuple[int, int], int] = {}  # checksums by range
        if direct and _DIRECT:
            try:  # the same file, even if the path has another one by now
                self._direct = os.open(f"/proc/self/fd/{self._buffered}", os.O_RDONLY | os.O_CLOEXEC | _DIRECT)
            except OSError:  # the file system has no such reads
                self._direct = None
        self.is_direct = self._direct is not None

    def watch(self, start: int, memory: memoryview) -> None:
        """Note a range as it is now, for `check` to compare it with."""
        self._sample[start, len(memory)] = zlib.crc32(memory)

    def check(self) -> None:
        """Raise if the file has been written to since it was opened."""
        with disk_errors(self.path):
            found = os.fstat(self._buffered)
            if (found.st_mtime_ns, found.st_size) == self._written:
                # A writer can set the time of its change back, and a rename, a link or chmod changes the inode's: then
                # the watched ranges decide.
                if found.st_ctime_ns == self._touched:
                    return
                if self._is_as_watched():
                    self._touched = found.st_ctime_ns
                    return
        raise CheckpointError(
            "the file changed while it was read",
            expected=f"{self.size} bytes, as when it was opened",
            got=f"{found.st_size} bytes, written to since",
            where=str(self.path),
            fix="Load again once the file is complete; replace weights by renaming a new file.",
        )

    def _is_as_watched(self) -> bool:
        for (start, nbytes), before in list(self._sample.items()):
            memory = memoryview(bytearray(nbytes))
            self.read_buffered(start, [memory])
            if zlib.crc32(memory) != before:
                return False
        return True

    def read_cached(self, start: int, memory: Sequence[memoryview]) -> int:
        """Fill memory from the page cache, as far as that holds the range; return the bytes. Never waits for a disk."""
        if not _NOWAIT or self._direct is None:
            return 0
        # A read that misses makes the system read ahead, which costs more than reading past the cache. So both ends are
        # probed first.
        last = start + sum(map(len, memory)) - 1
        probe = [memoryview(bytearray(1))]
        if not self._at_once(last, probe) or not self._at_once(start, probe):
            return 0
        got = self._at_once(start, memory)
        self._count("cached", got)
        return got

    def read_direct(self, start: int, memory: memoryview) -> int:
        """Fill whole pages of memory past the page cache; return the bytes, fewer at the file's end or where
        refused."""
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
        """Fill memory through the page cache; raise if the file is too short."""
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
        """Return the file as memory: its pages are read when they are touched, and writes to it stay in memory.

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


_MOST_BUFFERS = 512  # of one system call; Linux takes 1024


class LocalRanges:
    """Files held open, and threads that read them. Its owner closes it.

    Attributes:
        sizes: bytes of each file.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        *,
        readers: int = 4,
        direct: bool = True,
    ) -> None:
        """Open files by name, read by some threads; each stays the same file even if its path is replaced."""
        self._files: dict[str, OpenFile] = {}
        self._mapped: dict[str, memoryview] = {}
        self._mapping = threading.Lock()
        self._memory = threading.local()
        self._make_pool = partial(ThreadPoolExecutor, readers, "accel-read")
        self._pool = self._make_pool()
        self._process = os.getpid()
        try:
            for name, path in paths.items():
                self._files[name] = OpenFile(path, direct=direct)
        except BaseException:
            self.close()
            raise
        self.sizes = {name: file.size for name, file in self._files.items()}

    @property
    def counts(self) -> Counter[str]:
        """Bytes read so far, by "cached", "direct" and "buffered"."""
        return sum((file.counts for file in self._files.values()), Counter[str]())

    def close(self) -> None:
        """Wait for the readers and close the files."""
        self._pool.shutdown()
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._mapped.clear()

    def read(self, jobs: Iterable[Wanted | Passed], advance: Callable[[int], object] | None = None) -> None:
        """Read ranges, several at once; return once all of them are there. Callable from several threads.

        `advance` is called in this thread with numbers of bytes. After an error, memory is partly filled.
        """
        used: set[str] = set()
        if self._process != os.getpid():  # a process that another one forks has none of its threads
            self._pool = self._make_pool()
            self._process = os.getpid()
        carry_out(self._pool, self._tasks(jobs, used), advance)
        self.check(used)

    def watch(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """Note pages at both ends and in the middle of each span, which `check` compares in a rewritten file."""
        self.read(
            Passed(name, start, nbytes, partial(self._files[name].watch, start))
            for name, first, stop in spans
            for start, nbytes in _sample(first, stop)
        )

    def check(self, names: Iterable[str]) -> None:
        """Raise if files have been written to since they were opened, as `read` does for those that it reads."""
        for name in names:
            self._files[name].check()

    def read_bytes(self, name: str, start: int, nbytes: int) -> bytes:
        """Return a few bytes of a file, through the page cache."""
        file = self._files[name]
        memory = bytearray(nbytes)
        with disk_errors(file.path):
            file.read_buffered(start, [memoryview(memory)])
        return bytes(memory)

    def mapped(self, name: str) -> memoryview:
        """Return a file as memory; see `OpenFile.mapped`. The same memory each time."""
        with self._mapping:
            if name not in self._mapped:
                self._files[name].check()
                self._mapped[name] = self._files[name].mapped()
            return self._mapped[name]

    def _tasks(self, jobs: Iterable[Wanted | Passed], used: set[str]) -> Iterator[tuple[int, Callable[[], object]]]:
        pieces: dict[tuple[str, bool], list[WantedBytes]] = {}
        for job in jobs:
            used.add(job.file)
            if isinstance(job, Passed):
                yield job.nbytes, partial(self._pass, self._files[job.file], job)
            else:
                pieces.setdefault((job.file, job.is_shared), []).append(WantedBytes(job.start, job.nbytes, job.address))
        for (name, is_shared), listed in pieces.items():
            for request in plan_requests(listed):
                nbytes = sum(piece.nbytes for piece in request.pieces)
                yield nbytes, partial(self._fill, self._files[name], request, is_shared)

    def _fill(self, file: OpenFile, request: Request, is_shared: bool) -> None:
        """Carry out a request: cached pages from the page cache, the rest past it."""
        pieces = request.pieces
        with disk_errors(file.path):
            if not is_tiled(pieces) or len(pieces) > _MOST_BUFFERS:
                staged = self._stage(file, pieces[0].start, request.stop, is_shared)
                for piece in pieces:
                    begin = piece.start - pieces[0].start
                    memory_at(piece.address, piece.nbytes)[:] = staged[begin : begin + piece.nbytes]
                return
            start = pieces[0].start
            if is_shared or not file.is_direct:
                file.read_buffered(start, _after(pieces, start))
                return
            done = file.read_cached(start, [memory_at(each.address, each.nbytes) for each in pieces])
            if start + done == request.stop:
                return
            if request.is_straight:
                done -= done % PAGE
                memory = memory_at(pieces[0].address, pieces[0].nbytes)[done:]
                if file.read_direct(start + done, memory) == len(memory):
                    return
            staged = self._stage(file, start + done, request.stop, False, cached=False)
            for memory in _after(pieces, start + done):
                memory[:] = staged[: len(memory)]
                staged = staged[len(memory) :]

    def _pass(self, file: OpenFile, job: Passed) -> None:
        with disk_errors(file.path):
            staged = self._stage(file, job.start, job.start + job.nbytes, job.is_shared)
        job.use(staged)

    def _stage(self, file: OpenFile, start: int, stop: int, is_shared: bool, *, cached: bool = True) -> memoryview:
        """Read a range into the thread's own memory; with `cached` the page cache may have it."""
        memory = self._own_memory()
        first, last = pages_around(start, stop)
        inside = memory[start - first : stop - first]
        done = file.read_cached(start, [inside]) if cached and not is_shared else 0
        if done == len(inside):
            return inside
        if file.is_direct and not is_shared:
            skipped = (start + done) // PAGE * PAGE - first
            got = file.read_direct(first + skipped, memory[skipped : last - first])
            if first + skipped + got >= stop:
                return inside
        file.read_buffered(start + done, [inside[done:]])
        return inside

    def _own_memory(self) -> memoryview:
        if not hasattr(self._memory, "staging"):
            self._memory.staging = memoryview(
                mmap.mmap(-1, CHUNK + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            )
        return self._memory.staging


def _sample(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges that represent a span of a file: start and number of bytes."""
    if stop - start <= 3 * PAGE:
        yield start, stop - start
        return
    for at in (start, (start + stop - PAGE) // 2, stop - PAGE):
        yield at, PAGE


def _after(pieces: Iterable[WantedBytes], start: int) -> list[memoryview]:
    """Return the memory of the file from a byte on."""
    found: list[memoryview] = []
    for piece in pieces:
        skipped = min(max(start - piece.start, 0), piece.nbytes)
        if skipped < piece.nbytes:
            found.append(memory_at(piece.address + skipped, piece.nbytes - skipped))
    return found
