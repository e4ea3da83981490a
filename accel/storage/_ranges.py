# SPDX-License-Identifier: Apache-2.0
"""Plans of reading without files: byte ranges and addresses in, the requests to make out; and the jobs they serve."""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed, wait
from typing import NamedTuple, Protocol

PAGE = 4096  # what reads past the page cache align to: offset in the file, address, and length
CHUNK = 8 << 20  # largest request, and the staging memory of a reader

_LEAST_STRAIGHT = 64 << 10  # below, one request for a page's neighbours costs less than three aligned ones
_GAP = 32 << 10  # unwanted bytes between two ranges that cost less than another request


class WantedBytes(NamedTuple):
    """Wanted bytes of a file."""

    start: int  # first byte in the file
    nbytes: int  # number of bytes
    address: int  # first byte in memory

    @property
    def stop(self) -> int:
        """The end in the file."""
        return self.start + self.nbytes


class Request(NamedTuple):
    """One read of at most `CHUNK` bytes of a file, from a page's start."""

    start: int  # first byte in the file, a multiple of `PAGE`
    stop: int  # end of the wanted bytes in the file
    pieces: tuple[WantedBytes, ...]  # the wanted bytes inside, in order of `start`
    is_straight: bool  # whether the request is one piece of whole pages, at an address that is a multiple of `PAGE`


def plan_requests(
    wanted: Iterable[WantedBytes], *, chunk: int = CHUNK, gap: int = _GAP, least: int = _LEAST_STRAIGHT
) -> list[Request]:
    """Plan the requests that fill memory with pieces of one file, each wanted byte once, in order of the file.

    Pieces may overlap in the file, not in memory. Small and unaligned ones are staged, `gap` unwanted bytes apart.
    """
    straight: list[Request] = []
    staged: list[WantedBytes] = []
    for piece in _merged(sorted(each for each in wanted if each.nbytes)):
        first, last = _whole_pages(piece)
        # whole pages go straight to memory, past the page cache, where addresses have the file's alignment
        if (piece.address - piece.start) % PAGE or last - first < least:
            staged.append(piece)
            continue
        staged += [_cut(piece, piece.start, first), _cut(piece, last, piece.stop)]
        for start in range(first, last, chunk):
            inside = _cut(piece, start, min(start + chunk, last))
            straight.append(Request(start, inside.stop, (inside,), True))
    requests = straight + _staged([each for each in staged if each.nbytes], chunk, gap)
    return sorted(requests, key=lambda request: request.start)


def is_tiled(pieces: Sequence[WantedBytes]) -> bool:
    """Return whether ordered pieces follow each other in the file without gaps."""
    return all(piece.stop == following.start for piece, following in itertools.pairwise(pieces))


def pages_around(start: int, stop: int) -> tuple[int, int]:
    """Return the start and the end of the whole pages that hold a range."""
    return start - start % PAGE, -(-stop // PAGE) * PAGE


def _merged(ordered: Sequence[WantedBytes]) -> list[WantedBytes]:
    """Join pieces that follow each other both in the file and in memory."""
    found: list[WantedBytes] = []
    for piece in ordered:
        last = found[-1] if found else None
        if last is not None and last.stop == piece.start and last.address + last.nbytes == piece.address:
            found[-1] = last._replace(nbytes=last.nbytes + piece.nbytes)
        else:
            found.append(piece)
    return found


def _whole_pages(piece: WantedBytes) -> tuple[int, int]:
    """Return the start and the end of the whole pages inside a piece."""
    return -(-piece.start // PAGE) * PAGE, piece.stop - piece.stop % PAGE


def _cut(piece: WantedBytes, start: int, stop: int) -> WantedBytes:
    return WantedBytes(start, stop - start, piece.address + start - piece.start)


def _staged(pieces: Iterable[WantedBytes], chunk: int, gap: int) -> list[Request]:
    """Join pieces into requests, and cut them where a request is full."""
    found: list[Request] = []
    start, stop, inside = 0, -1, list[WantedBytes]()

    def finish() -> None:
        if inside:
            found.append(Request(start, stop, tuple(inside), False))

    waiting = sorted(pieces, reverse=True)
    while waiting:
        piece = waiting.pop()
        if not inside or piece.start > stop + gap or piece.start >= start + chunk:
            finish()
            start, stop, inside = pages_around(piece.start, piece.stop)[0], piece.start, []
        end = min(piece.stop, start + chunk)
        inside.append(_cut(piece, piece.start, end))
        stop = max(stop, end)
        if end < piece.stop:
            rest = _cut(piece, end, piece.stop)
            at = len(waiting)
            while at and waiting[at - 1] < rest:
                at -= 1
            waiting.insert(at, rest)
    finish()
    return found


class Wanted(NamedTuple):
    """Bytes of a file, and the memory to fill with them."""

    file: str  # name of the file
    start: int  # first byte in the file
    nbytes: int  # number of bytes
    address: int  # first byte in memory, which stays alive while it is read
    # Whether other processes of the host read the same bytes, so that the page cache should have them.
    is_shared: bool = False


class Passed(NamedTuple):
    """Bytes of a file that a function takes over, in the reader's thread and memory."""

    file: str  # name of the file
    start: int  # first byte in the file
    nbytes: int  # number of bytes, at most `CHUNK`
    use: Callable[[memoryview], object]  # called with the bytes, which are valid during the call
    is_shared: bool = False  # whether other processes of the host read the same bytes


class ByteRanges(Protocol):
    """Files with ranges that threads read. The owner closes it."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each file."""
        ...

    @property
    def counts(self) -> Counter[str]:
        """Bytes read so far, by way."""
        ...

    def read(self, jobs: Iterable[Wanted | Passed], advance: Callable[[int], object] | None = None) -> None:
        """Read ranges, several at once; return once all are there. Callable from several threads; see
        `LocalRanges.read`."""
        ...

    def read_bytes(self, name: str, start: int, nbytes: int) -> bytes:
        """Return a few bytes of a file."""
        ...

    def close(self) -> None:
        """Wait for the readers and close the files."""
        ...


def carry_out(
    pool: Executor,
    tasks: Iterable[tuple[int, Callable[[], object]]],
    advance: Callable[[int], object] | None,
) -> None:
    """Run tasks in a pool, each with its number of bytes; return once all have ended, or none runs after an error."""
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
