# SPDX-License-Identifier: Apache-2.0
"""Byte ranges of objects in a store, fetched by threads in requests of at most a chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock

from accel.errors import CheckpointError
from accel.storage._jobs import Passed, Wanted, carry_out, memory_at
from accel.storage._objects import RemotePath, get_object, list_objects
from accel.storage._ranges import Piece, Request, plan_requests

_GAP = 1 << 20  # unwanted bytes that cost less than another request to a store


class RemoteRanges:
    """Objects of a store, as they were when they were listed. Its owner closes it.

    Attributes:
        sizes: bytes of each object.
        counts: bytes fetched so far, by "remote".
    """

    def __init__(self, folder: RemotePath, names: Sequence[str], *, readers: int = 4) -> None:
        """List objects.

        Args:
            folder: their folder.
            names: names of the objects.
            readers: number of threads.

        Raises:
            CheckpointError: an object is missing, or the store failed.
            MissingExtraError: fsspec, or its package for this store, is not installed.
        """
        self.counts = Counter[str]()
        self._folder = folder
        self._guard = Lock()
        self._listed = {each.name: each for each in list_objects(folder)}
        if missing := [name for name in names if name not in self._listed]:
            raise CheckpointError("objects are missing", got=", ".join(missing[:5]), where=str(folder))
        self.sizes = {name: self._listed[name].size for name in names}
        self._pool = ThreadPoolExecutor(readers, "accel-fetch")

    def close(self) -> None:
        """Wait for the readers."""
        self._pool.shutdown()

    def read(self, jobs: Iterable[Wanted | Passed], advance: Callable[[int], object] | None = None) -> None:
        """Fetch ranges, several at once; see `LocalRanges.read`.

        Raises:
            CheckpointError: an object is shorter than listed or has changed, or the store failed.
        """
        used: set[str] = set()
        carry_out(self._pool, self._tasks(jobs, used), advance)
        now = {each.name: each for each in list_objects(self._folder)} if used else {}
        if changed := [name for name in used if now.get(name) != self._listed[name]]:
            raise CheckpointError(
                "an object changed while it was read", where=str(self._folder / changed[0]), fix="Load again."
            )

    def read_bytes(self, name: str, start: int, nbytes: int) -> bytes:
        """Return a few bytes of an object.

        Raises:
            CheckpointError: it is too short, or the store failed.
        """
        data = get_object(self._folder / name, start, start + nbytes) if nbytes else b""
        if data is None or len(data) != nbytes:
            raise CheckpointError(
                "the object is too short",
                expected=f"{nbytes} bytes from {start} on",
                got="its end" if data is not None else "no object",
                where=str(self._folder / name),
            )
        with self._guard:
            self.counts["remote"] += nbytes
        return data

    def _tasks(self, jobs: Iterable[Wanted | Passed], used: set[str]) -> Iterator[tuple[int, Callable[[], object]]]:
        pieces: dict[str, list[Piece]] = {}
        for job in jobs:
            used.add(job.file)
            if isinstance(job, Passed):
                yield job.nbytes, partial(self._pass, job)
            else:
                pieces.setdefault(job.file, []).append(Piece(job.start, job.nbytes, job.address))
        for name, listed in pieces.items():
            for request in plan_requests(listed, gap=_GAP):
                nbytes = sum(piece.nbytes for piece in request.pieces)
                yield nbytes, partial(self._fill, name, request)

    def _pass(self, job: Passed) -> None:
        job.use(memoryview(bytearray(self.read_bytes(job.file, job.start, job.nbytes))))

    def _fill(self, name: str, request: Request) -> None:
        start = request.pieces[0].start
        data = memoryview(self.read_bytes(name, start, request.stop - start))
        for piece in request.pieces:
            begin = piece.start - start
            memory_at(piece.address, piece.nbytes)[:] = data[begin : begin + piece.nbytes]
