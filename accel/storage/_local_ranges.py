# SPDX-License-Identifier: Apache-2.0
"""Byte ranges of local files, read by threads straight into memory: from the page cache, else past it.

What the page cache holds comes from there. The rest is read by O_DIRECT, which spares the processor a copy and the
page cache its contents; where a file system refuses that, through the page cache.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from accel.storage._files import disk_errors
from accel.storage._jobs import Passed, Wanted, carry_out, memory_at
from accel.storage._open_file import OpenFile
from accel.storage._ranges import CHUNK, PAGE, Piece, Request, is_tiled, pages_around, plan_requests

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
        """Open files; each stays the same file even if its path is replaced.

        Args:
            paths: path of each file, by name.
            readers: number of threads.
            direct: whether to read past the page cache what is not in it.

        Raises:
            CheckpointError: a file is missing, unreadable or no regular file.
        """
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

        Args:
            jobs: ranges in any order.
            advance: called in this thread with numbers of bytes that have come.

        Raises:
            CheckpointError: a file is too short or has changed, or the disk failed; memory is then partly filled.
        """
        used: set[str] = set()
        if self._process != os.getpid():  # a process that another one forks has none of its threads
            self._pool = self._make_pool()
            self._process = os.getpid()
        carry_out(self._pool, self._tasks(jobs, used), advance)
        for name in used:
            self._files[name].check()

    def read_bytes(self, name: str, start: int, nbytes: int) -> bytes:
        """Return a few bytes of a file, through the page cache.

        Raises:
            CheckpointError: the file is too short, or the disk failed.
        """
        file = self._files[name]
        memory = bytearray(nbytes)
        with disk_errors(file.path):
            file.read_buffered(start, [memoryview(memory)])
        return bytes(memory)

    def mapped(self, name: str) -> memoryview:
        """Return a file as memory; see `OpenFile.mapped`. The same memory each time.

        Raises:
            CheckpointError: the file has changed since it was opened, or cannot be mapped.
        """
        with self._mapping:
            if name not in self._mapped:
                self._files[name].check()
                self._mapped[name] = self._files[name].mapped()
            return self._mapped[name]

    def _tasks(self, jobs: Iterable[Wanted | Passed], used: set[str]) -> Iterator[tuple[int, Callable[[], object]]]:
        pieces: dict[tuple[str, bool], list[Piece]] = {}
        for job in jobs:
            used.add(job.file)
            if isinstance(job, Passed):
                yield job.nbytes, partial(self._pass, self._files[job.file], job)
            else:
                pieces.setdefault((job.file, job.is_shared), []).append(Piece(job.start, job.nbytes, job.address))
        for (name, is_shared), listed in pieces.items():
            for request in plan_requests(listed):
                nbytes = sum(piece.nbytes for piece in request.pieces)
                yield nbytes, partial(self._fill, self._files[name], request, is_shared)

    def _fill(self, file: OpenFile, request: Request, is_shared: bool) -> None:
        """Carry out a request: from the page cache what is there, the rest past it."""
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
        """Read a range into the thread's own memory; `cached` says whether the page cache may have it."""
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


def _after(pieces: Iterable[Piece], start: int) -> list[memoryview]:
    """Return the memory of what lies behind a byte of the file."""
    found: list[memoryview] = []
    for piece in pieces:
        skipped = min(max(start - piece.start, 0), piece.nbytes)
        if skipped < piece.nbytes:
            found.append(memory_at(piece.address + skipped, piece.nbytes - skipped))
    return found
