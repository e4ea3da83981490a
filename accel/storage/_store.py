# SPDX-License-Identifier: Apache-2.0
"""A folder of an object store: listed once and read block by block, and written by a commit of its last object."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import secrets
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from accel.errors import CheckpointError
from accel.storage._files import SPAN_BYTES, Bytes, FileEntry, OpenDirectory, Span
from accel.storage._lock import Beat, RemoteLock, take_remote_lock
from accel.storage._objects import (
    LAG,
    RemotePath,
    StoredObject,
    abort_uploads,
    get_object,
    list_inside,
    list_objects,
    put_object,
    remote_errors,
    remove_objects,
    upload,
)

_BLOCK = SPAN_BYTES  # in memory, of each object that is read
_THREADS = 4


class RemoteDirectory(OpenDirectory):
    """A folder of a store at the time of its listing; objects are fetched once, to memory or a temporary file."""

    __slots__ = ("_fetched", "_found", "_url")

    def __init__(self, path: RemotePath, found: Iterable[StoredObject] | None = None) -> None:
        super().__init__(-1, path)
        self._url = path
        self._found = {each.name: each for each in (list_objects(path) if found is None else found)}
        self._fetched: dict[str, memoryview] = {}
        if not self._found:
            fix = f"See whether the URL is right. {LAG}"
            raise CheckpointError("the store lists nothing there", where=str(path), fix=fix)

    @override
    def check_size(self, name: str, size: int) -> None:
        """Check that an object exists with the expected size."""
        self._compare_size(name, self._size(name), size)

    @override
    def read(self, name: str, *, size: int | None = None, limit: int | None = None) -> memoryview:
        """Return an object's bytes, in memory or mapped from an unnamed temporary file; check its size."""
        found = self._size(name)
        self._compare_size(name, found, size, limit)
        if name not in self._fetched:
            self._fetched[name] = _fetch(self._url / name, found)
        return self._fetched[name]

    @override
    def read_into(self, name: str, start: int, memory: memoryview) -> None:
        """Fill memory with an object's bytes from `start` on."""
        if name in self._fetched:
            data: Bytes = self._fetched[name][start : start + len(memory)]
        else:
            data = get_object(self._url / name, start, start + len(memory)) or b""
        if len(data) != len(memory):
            raise self.refusal(name, "wrong size", expected=f"{len(memory)} bytes from {start} on", got="its end")
        memory[:] = data

    @override
    def check(self, name: str, span: Span) -> None:
        """Compare a part of an object with its digest; of a fetched object, its fetched bytes."""
        digest = hashlib.sha256()
        step = min(_BLOCK, span.stop - span.start)
        memory = memoryview(bytearray(step))
        for start in range(span.start, span.stop, step or 1):
            chunk = memory[: span.stop - start]
            self.read_into(name, start, chunk)
            digest.update(chunk)
        self._compare_digest(name, span, digest.hexdigest())

    @override
    def names(self) -> list[str]:
        """List the names in the folder, sorted."""
        return sorted(self._found)

    @override
    @contextlib.contextmanager
    def kept(self) -> Generator[bool]:
        """Yield True: a store has no locks, and readers notice deleted objects."""
        yield True

    @override
    def is_in_place(self) -> bool:
        """Return whether the listed objects still exist, with the same size and time; False if unknown."""
        try:
            return list_objects(self._url) == list(self._found.values())
        except CheckpointError:
            return False

    def _size(self, name: str) -> int:
        self._check_name(name)
        found = self._found.get(name)
        if found is None or not found.is_file:
            raise self.refusal(name, "missing" if found is None else "not a regular file")
        return found.size


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """A folder of a store, as a `Place`.

    Attributes:
        found: its objects, where it was listed already; None to list it whenever they are asked for.
    """

    path: RemotePath
    found: tuple[StoredObject, ...] | None = None
    pause_s: ClassVar[float] = 0.2

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> RemotePlace:
        return RemotePlace(self.path / name)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> RemotePlace:
        return RemotePlace(self.path.parent)

    def exists(self) -> bool:
        return bool(self._objects())

    def identity(self) -> tuple[int, int]:
        return 0, 0

    def names(self) -> list[str]:
        return [each.name for each in self._objects()]

    def listed(self) -> RemotePlace:
        return RemotePlace(self.path, tuple(list_objects(self.path)))

    def inside(self) -> dict[str, RemotePlace]:
        return {name: RemotePlace(self.path / name, tuple(found)) for name, found in list_inside(self.path).items()}

    def abort_uploads(self) -> None:
        abort_uploads(self.path)

    def leftovers(self) -> tuple[()]:
        return ()

    def usage(self) -> tuple[int, float]:
        found = self._objects()
        return sum(each.size for each in found), max((each.changed for each in found), default=0.0)

    def make(self) -> bool:
        """Do nothing: a store has no folders without objects."""
        return False

    def unmake(self) -> None:
        """Do nothing, as `make`."""

    def lock(self) -> RemoteLock:
        return take_remote_lock(self.path)

    @contextlib.contextmanager
    def open(self, *, follow: bool = True) -> Generator[OpenDirectory]:
        del follow  # a store has no links
        yield RemoteDirectory(self.path, self.found)

    def write(self, name: str, chunks: Sequence[Bytes]) -> FileEntry:
        return upload(self.path, name, chunks)

    def get(self, name: str, limit: int) -> bytes | None:
        return get_object(self.path / name, 0, limit)

    def put(self, name: str, data: bytes) -> None:
        put_object(self.path / name, data)

    def remove(self, names: Iterable[str]) -> None:
        remove_objects(self.path, names)

    @contextlib.contextmanager
    def beating(self, name: str) -> Generator[None]:
        beat = Beat(lambda: put_object(self.path / name, b"."))
        try:
            yield
        finally:
            beat.stop()

    def new_mark(self) -> str:
        return f"-{secrets.token_hex(8)}"

    def make_stage(self) -> RemotePlace:
        return self

    def commit(self, name: str, last: str, data: bytes, files: Mapping[str, FileEntry]) -> RemotePlace | None:
        assert name == self.name, name
        folder = RemoteDirectory(self.path)
        for file, entry in files.items():
            folder.check_size(file, entry.size)
        put_object(self.path / last, data)
        return RemotePlace(self.path) if set(folder.names()) - {last, *files} else None

    def take_back(self, aside: object) -> None:
        """Do nothing: hosts share a store, so its commit is one for all."""

    def remove_stage(self) -> None:
        """Do nothing: the stage is also the folder of the former checkpoint."""

    def delete(self, last: str) -> bool:
        names = self.names()
        remove_objects(self.path, [last])
        remove_objects(self.path, [name for name in names if name != last])
        return True

    def _objects(self) -> Sequence[StoredObject]:
        return list_objects(self.path) if self.found is None else self.found


def _fetch(place: RemotePath, size: int) -> memoryview:
    def block(start: int) -> bytes:
        end = min(start + _BLOCK, size)
        data = get_object(place, start, end)
        if data is None or len(data) != end - start:
            raise CheckpointError("changed while it was read", where=str(place), fix="Load it again.")
        return data

    if size <= _BLOCK:
        return memoryview(bytearray(block(0) if size else b""))
    with remote_errors(place), tempfile.TemporaryFile() as file, ThreadPoolExecutor(_THREADS) as pool:
        os.truncate(file.fileno(), size)

        def copy(start: int) -> None:
            _ = os.pwrite(file.fileno(), block(start), start)

        _ = list(pool.map(copy, range(0, size, _BLOCK)))
        mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return memoryview(mapped)
