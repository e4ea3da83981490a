# SPDX-License-Identifier: Apache-2.0
"""Objects of a store that fsspec reaches: uploaded in parts, listed with their sizes, read block by block.

A store has neither renames nor folders nor flushes. What it promises, and all that is asked of it here: an object
appears whole or not at all, and whoever asks after that finds it.
Reference: https://filesystem-spec.readthedocs.io, "API Reference".
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib
import mmap
import os
import tempfile
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from typing_extensions import override

from accel.errors import AccelError, CheckpointError, MissingExtraError
from accel.storage._digests import SPAN_BYTES, Bytes, FileEntry, Span, cut
from accel.storage._files import OpenDirectory
from accel.storage._place import RemotePath

_PART = SPAN_BYTES  # what is in memory of each object that is read
_MOST_PARTS = 9_000  # of an object; S3 takes 10,000
_THREADS = 4
_CHANGED = ("mtime", "LastModified", "last_modified", "updated", "created")  # each store has its own word


class Found(NamedTuple):
    """Something in a folder: its last name, bytes, whether it is an object, and when it changed, in s since 1970."""

    name: str
    size: int
    is_file: bool
    changed: float


class RemoteDirectory(OpenDirectory):
    """A folder of a store as it was when it was listed; objects are fetched once, to memory or a temporary file."""

    __slots__ = ("_fetched", "_found")

    def __init__(self, path: RemotePath) -> None:
        super().__init__(-1, path)
        self._found = {each.name: each for each in list_objects(path)}
        self._fetched: dict[str, memoryview] = {}
        if not self._found:
            raise CheckpointError("nothing is there", where=str(path), fix="See whether the URL is right.")

    @override
    def check_size(self, name: str, size: int) -> None:
        """Look whether an object is there and has as many bytes as it should.

        Raises:
            CheckpointError: it is missing, no object, or of another size.
        """
        self._compare_size(name, self._size(name), size)

    @override
    def read(self, name: str, *, size: int | None = None, limit: int | None = None) -> memoryview:
        """Return an object's bytes: of a small one in memory, of a larger one mapped from an unnamed temporary file.

        Args:
            name: an object of this folder.
            size: bytes that it must have; None for any.
            limit: bytes that it may have at most; None for any.

        Raises:
            CheckpointError: it is missing, of another size, or the store or the temporary file failed.
        """
        found = self._size(name)
        self._compare_size(name, found, size, limit)
        if name not in self._fetched:
            self._fetched[name] = _fetch(self._at(name), found)
        return self._fetched[name]

    @override
    def read_into(self, name: str, start: int, memory: memoryview) -> None:
        """Fill memory with an object's bytes from `start` on.

        Raises:
            CheckpointError: it is missing or too short, or the store failed.
        """
        if name in self._fetched:
            data: Bytes = self._fetched[name][start : start + len(memory)]
        else:
            data = get_object(self._at(name), start, start + len(memory)) or b""
        if len(data) != len(memory):
            raise self.refusal(name, "wrong size", expected=f"{len(memory)} bytes from {start} on", got="its end")
        memory[:] = data

    @override
    def check(self, name: str, span: Span) -> None:
        """Compare a part of an object with its digest; of one that was read, the bytes that were.

        Raises:
            CheckpointError: it is damaged; or as for `read_into`.
        """
        digest, step = hashlib.sha256(), min(_PART, span.stop - span.start)
        memory = memoryview(bytearray(step))
        for start in range(span.start, span.stop, step or 1):
            chunk = memory[: span.stop - start]
            self.read_into(name, start, chunk)
            digest.update(chunk)
        self._compare_digest(name, span, digest.hexdigest())

    @override
    def names(self) -> list[str]:
        """List what is in the folder, sorted."""
        return sorted(self._found)

    @override
    @contextlib.contextmanager
    def kept(self) -> Generator[bool]:
        """Give True: a store has no locks, and readers notice what is deleted meanwhile."""
        yield True

    @override
    def is_in_place(self) -> bool:
        """Return whether the objects that were listed are still there, as large and as old; False if nobody knows."""
        assert isinstance(self.path, RemotePath)
        try:
            return list_objects(self.path) == list(self._found.values())
        except CheckpointError:
            return False

    def _at(self, name: str) -> RemotePath:
        assert isinstance(self.path, RemotePath)
        return self.path / name

    def _size(self, name: str) -> int:
        self._check_name(name)
        found = self._found.get(name)
        if found is None or not found.is_file:
            raise self.refusal(name, "missing" if found is None else "not a regular file")
        return found.size


@contextlib.contextmanager
def remote_errors(place: RemotePath) -> Generator[None]:
    """Turn whatever a store raises in the block into a `CheckpointError` with its text and the URL."""
    try:
        yield
    except AccelError:
        raise
    except Exception as error:  # each store has errors of its own
        raise CheckpointError(
            "missing" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}",
            where=str(place),
            fix="See whether the store can be reached and written to; older checkpoints are untouched.",
        ) from error


def connect(place: RemotePath) -> tuple[Any, str]:
    """Return fsspec's file system for a place, and the place's name in it.

    Raises:
        MissingExtraError: fsspec, or what it needs for this store, is not installed.
        CheckpointError: there is no such kind of store, or it refuses the options.
    """
    scheme = place.url.partition("://")[0]
    extra = "s3" if scheme in ("s3", "s3a") else "remote"
    try:
        fsspec = importlib.import_module("fsspec.core")
    except ImportError as error:
        raise _missing(place, extra, error) from error
    try:
        with remote_errors(place):
            return fsspec.url_to_fs(place.url, **place.options)
    except CheckpointError as error:
        if isinstance(error.__cause__, ImportError):
            raise _missing(place, extra, error.__cause__) from error
        raise


def list_objects(folder: RemotePath) -> list[Found]:
    """List what is in a folder of a store, sorted by name; nothing if there is none.

    Raises:
        CheckpointError: the store failed.
    """
    store, key = connect(folder)
    with remote_errors(folder):
        store.invalidate_cache()  # other processes write there, too
        try:
            listed = store.ls(key, detail=True)
        except FileNotFoundError:
            return []
    own = key.strip("/")
    found = [each for each in listed if each["name"].strip("/") != own]  # some stores list a folder in itself
    return sorted(
        Found(each["name"].rstrip("/").rpartition("/")[2], each["size"] or 0, each["type"] == "file", _changed(each))
        for each in found
    )


def list_tree(folder: RemotePath) -> dict[str, list[str]]:
    """List the objects in the folders of a folder, by folder, at once; those deeper inside by their whole rest of name.

    Raises:
        CheckpointError: the store failed.
    """
    store, key = connect(folder)
    found: dict[str, list[str]] = {}
    with remote_errors(folder):
        store.invalidate_cache()
        for name in store.find(key):
            inside, _, last = name.strip("/").removeprefix(f"{key.strip('/')}/").partition("/")
            if last:
                found.setdefault(inside, []).append(last)
    return found


def upload(folder: RemotePath, name: str, chunks: Sequence[Bytes]) -> FileEntry:
    """Write a new object in parts, each in memory for itself; it appears when all are there.

    Args:
        folder: where.
        name: the object's.
        chunks: its bytes, in order.

    Raises:
        CheckpointError: the store failed; nothing has appeared.
    """
    store, key = connect(folder / name)
    digests, size = list[str](), 0
    with remote_errors(folder / name):
        file = store.open(key, "wb", block_size=max(SPAN_BYTES, sum(map(len, chunks)) // _MOST_PARTS))
        try:
            for parts in cut(chunks):
                digest = hashlib.sha256()
                for part in parts:
                    digest.update(part)
                    file.write(part)
                    size += len(part)
                digests.append(digest.hexdigest())
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                file.discard()
                file.closed = True  # else it is uploaded when the object is collected
            raise
        file.close()
    return FileEntry(size, tuple(digests))


def put_object(place: RemotePath, data: bytes, *, new: bool = False) -> None:
    """Write a small object at once.

    Raises:
        CheckpointError: the store failed; or, if it is to be new and the store can tell, it exists.
    """
    store, key = connect(place)
    with remote_errors(place):
        store.pipe_file(key, data, mode="create" if new else "overwrite")


def get_object(place: RemotePath, start: int, stop: int) -> bytes | None:
    """Return an object's bytes from `start` to before `stop`, or to its end; None if there is none.

    Raises:
        CheckpointError: the store failed.
    """
    store, key = connect(place)
    with remote_errors(place):
        try:
            return bytes(store.cat_file(key, start=start, end=stop))
        except FileNotFoundError:
            return None


def remove_objects(folder: RemotePath, names: Iterable[str]) -> None:
    """Delete objects of a folder; those that are gone already do not count.

    Raises:
        CheckpointError: the store failed.
    """
    store, _ = connect(folder)

    def remove(name: str) -> None:
        with remote_errors(folder / name), contextlib.suppress(FileNotFoundError):
            store.rm_file(connect(folder / name)[1])

    with ThreadPoolExecutor(_THREADS) as pool:
        _ = list(pool.map(remove, names))


def _fetch(place: RemotePath, size: int) -> memoryview:
    def block(start: int) -> bytes:
        end = min(start + _PART, size)
        data = get_object(place, start, end)
        if data is None or len(data) != end - start:
            raise CheckpointError("changed while it was read", where=str(place), fix="Load it again.")
        return data

    if size <= _PART:
        return memoryview(bytearray(block(0) if size else b""))
    with remote_errors(place), tempfile.TemporaryFile() as file, ThreadPoolExecutor(_THREADS) as pool:
        os.truncate(file.fileno(), size)

        def copy(start: int) -> None:
            _ = os.pwrite(file.fileno(), block(start), start)

        _ = list(pool.map(copy, range(0, size, _PART)))
        mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return memoryview(mapped)


def _changed(entry: dict[str, Any]) -> float:
    value = next((entry[word] for word in _CHANGED if entry.get(word) is not None), 0.0)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = datetime.datetime.fromisoformat(value)
    if isinstance(value, datetime.datetime):
        return value.timestamp()
    return float(value) if isinstance(value, int | float) else 0.0


def _missing(place: RemotePath, extra: str, error: ImportError) -> MissingExtraError:
    return MissingExtraError(
        "checkpoints at URLs need a package that is not installed",
        expected="fsspec, and its package for this kind of store",
        got=str(error),
        where=str(place),
        fix=f"Run `pip install 'accel[{extra}]'`" + ("." if extra == "s3" else ", and install what fsspec asks for."),
    )
