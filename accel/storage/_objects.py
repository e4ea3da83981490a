# SPDX-License-Identifier: Apache-2.0
"""Objects of a store that fsspec reaches: uploaded in parts, listed with their sizes, fetched, and deleted.

A store has neither renames nor folders nor flushes. All that is needed here: an object appears whole or not at all, and
every later request finds it.
Reference: https://filesystem-spec.readthedocs.io, "API Reference".
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from accel.errors import AccelError, CheckpointError, ConfigError, MissingExtraError
from accel.storage._files import SPAN_BYTES, Bytes, FileEntry, cut

_MOST_PARTS = 9_000  # of an object; S3 takes 10,000
_THREADS = 4
_CHANGED = ("mtime", "LastModified", "last_modified", "updated", "created")  # each store has its own word


class RemotePath(msgspec.Struct, frozen=True):
    """A place in a store that fsspec reaches, such as `s3://bucket/run`; used like a path, but it is no path.

    Attributes:
        url: scheme of the store and place in it, without "/" at the end.
        options: arguments of the store in fsspec, such as `{"endpoint_url": ...}`; never shown.

    Raises:
        ConfigError: the URL names no place.
    """

    url: str
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        scheme, mark, inside = self.url.partition("://")
        if not scheme or not mark or not inside.strip("/"):
            raise ConfigError("not a place in a store", expected="a URL such as s3://bucket/run", got=repr(self.url))
        msgspec.structs.force_setattr(self, "url", self.url.rstrip("/"))

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The place above this one; itself for the first in its store."""
        return RemotePath(self.url.rpartition("/")[0], self.options)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}", self.options)

    def __hash__(self) -> int:
        return hash(self.url)

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"RemotePath({self.url!r})"


class StoredObject(NamedTuple):
    """Something in a folder: its last name, bytes, whether it is an object, and when it changed, in s since 1970."""

    name: str
    size: int
    is_file: bool
    changed: float


@contextlib.contextmanager
def remote_errors(place: RemotePath) -> Generator[None]:
    """Turn any error of a store in the block into a `CheckpointError` with its text and the URL."""
    try:
        yield
    except AccelError:
        raise
    except Exception as error:  # each store has errors of its own
        raise CheckpointError(
            "missing" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}",
            where=str(place),
            fix="See whether the store can be reached, and whether its credentials allow this.",
        ) from error


def connect(place: RemotePath) -> tuple[Any, str]:
    """Return fsspec's file system for a place, and the place's name in it.

    Raises:
        MissingExtraError: fsspec, or its package for this store, is not installed.
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


def list_objects(folder: RemotePath) -> list[StoredObject]:
    """List the objects in a folder of a store, sorted by name; nothing for no folder.

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
        StoredObject(
            each["name"].rstrip("/").rpartition("/")[2], each["size"] or 0, each["type"] == "file", _changed(each)
        )
        for each in found
    )


def upload(folder: RemotePath, name: str, chunks: Sequence[Bytes]) -> FileEntry:
    """Write a new object in parts, one in memory at a time; it appears after the last.

    Args:
        folder: the folder.
        name: the new object's name.
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
    """Delete objects of a folder; missing ones are ignored.

    Raises:
        CheckpointError: the store failed.
    """
    store, _ = connect(folder)

    def remove(name: str) -> None:
        with remote_errors(folder / name), contextlib.suppress(FileNotFoundError):
            store.rm_file(connect(folder / name)[1])

    with ThreadPoolExecutor(_THREADS) as pool:
        _ = list(pool.map(remove, names))


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
