# SPDX-License-Identifier: Apache-2.0
"""Jobs of reading: a range of a file, and the memory or the function that it is for."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future, as_completed, wait
from typing import NamedTuple, Protocol


class Wanted(NamedTuple):
    """Bytes of a file, and the memory to fill with them.

    Attributes:
        file: name of the file.
        start: first byte in the file.
        nbytes: number of bytes.
        address: first byte in memory, which stays alive while it is read.
        is_shared: whether other processes of the host read the same bytes, so that the page cache should have them.
    """

    file: str
    start: int
    nbytes: int
    address: int
    is_shared: bool = False


class Passed(NamedTuple):
    """Bytes of a file that a function takes over, in the reader's thread and memory.

    Attributes:
        file: name of the file.
        start: first byte in the file.
        nbytes: number of bytes, at most `CHUNK`.
        use: called with the bytes, which are valid during the call.
        is_shared: whether other processes of the host read the same bytes.
    """

    file: str
    start: int
    nbytes: int
    use: Callable[[memoryview], object]
    is_shared: bool = False


class ByteRanges(Protocol):
    """Files whose ranges are read by threads. Its owner closes it."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each file."""
        ...

    @property
    def counts(self) -> Counter[str]:
        """Bytes read so far, by way."""
        ...

    def read(self, jobs: Iterable[Wanted | Passed], advance: Callable[[int], object] | None = None) -> None:
        """Read ranges, several at once; return once all of them are there. Callable from several threads.

        Args:
            jobs: ranges in any order.
            advance: called in this thread with numbers of bytes that have come.

        Raises:
            CheckpointError: a file is too short or has changed, or the disk or store failed; memory is then partly
                filled.
        """
        ...

    def read_bytes(self, name: str, start: int, nbytes: int) -> bytes:
        """Return a few bytes of a file.

        Raises:
            CheckpointError: the file is too short, or the disk or store failed.
        """
        ...

    def close(self) -> None:
        """Wait for the readers and close the files."""
        ...


def carry_out(
    pool: Executor,
    tasks: Iterable[tuple[int, Callable[[], object]]],
    advance: Callable[[int], object] | None,
) -> None:
    """Run tasks in a pool; return once all have ended, or none runs after the first error.

    Args:
        pool: threads.
        tasks: functions, each with the bytes that it reads.
        advance: called with the bytes of each task that has ended; None for nothing.
    """
    reading: dict[Future[object], int] = {}
    try:
        for nbytes, task in tasks:
            reading[pool.submit(task)] = nbytes
        for each in as_completed(reading):
            each.result()
            if advance is not None:
                advance(reading[each])
    finally:
        for each in reading:
            _ = each.cancel()
        _ = wait(reading)  # none may write to memory that has another use by then


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return the bytes at an address, writable. The caller keeps the memory alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
