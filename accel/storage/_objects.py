# SPDX-License-Identifier: Apache-2.0
"""Objects of a store that fsspec reaches: uploaded in parts, listed, fetched whole or by ranges, and deleted."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import msgspec

from accel.errors import AccelError, CheckpointError, ConfigError, MissingExtraError
from accel.storage._files import SPAN_BYTES, Bytes, FileEntry, cut
from accel.storage._ranges import Passed, Request, Wanted, WantedBytes, carry_out, memory_at, plan_requests
from accel.terminal import show_limit, show_names

_MOST_PARTS = 9_000  # of an object; S3 takes 10,000
_THREADS = 4
_SILENT_S = 20.0  # a slower request is logged: clients of stores try again for minutes
LAG = "Some stores list objects only some time after they are written: if that was just now, try again."
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
            raise ConfigError(
                "the URL does not name a place in a store", expected="a URL such as s3://bucket/run", got=repr(self.url)
            )
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
    """Turn any error of a store in the block into a `CheckpointError` with its text and the URL; warn of silence."""
    with _typed(place), warning_of_silence(place):
        yield


@contextlib.contextmanager
def warning_of_silence(place: RemotePath) -> Generator[Callable[[], None]]:
    """Warn if the store takes 20 s for a request of the block; yields a function to call between two requests."""
    log = logging.getLogger("accel.checkpoint")
    text = "%s: the store has not answered for %s; its client may try again for minutes"

    def start() -> threading.Timer:
        timer = threading.Timer(_SILENT_S, log.warning, (text, place, show_limit(_SILENT_S)))
        timer.daemon = True
        timer.start()
        return timer

    running = [start()]

    def answered() -> None:
        running.pop().cancel()
        running.append(start())

    try:
        yield answered
    finally:
        running.pop().cancel()


@contextlib.contextmanager
def _typed(place: RemotePath) -> Generator[None]:
    try:
        yield
    except AccelError:
        raise
    except Exception as error:  # each store has other errors
        raise CheckpointError(
            "missing" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}",
            where=str(place),
            fix="See whether the store can be reached, and whether its credentials allow this.",
        ) from error


def connect(place: RemotePath) -> tuple[Any, str]:
    """Return fsspec's file system for a place, and the place's name in it; `MissingExtraError` without its packages."""
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
    """List the objects in a folder of a store, sorted by name; nothing for no folder."""
    store, key = connect(folder)
    with remote_errors(folder):
        store.invalidate_cache()  # other processes write there, too
        try:
            listed = store.ls(key, detail=True)
        except FileNotFoundError:
            return []
    own = key.strip("/")
    found = [each for each in listed if each["name"].strip("/") != own]  # some stores list a folder in itself
    return sorted(_stored(each, each["name"].rstrip("/").rpartition("/")[2]) for each in found)


def list_inside(folder: RemotePath) -> dict[str, list[StoredObject]]:
    """List the objects in each folder of a folder, in one request for a thousand objects where the store can."""
    store, key = connect(folder)
    found: dict[str, list[StoredObject]] = {}
    with remote_errors(folder):
        store.invalidate_cache()  # other processes write there, too
        for name, each in store.find(key, detail=True).items():
            inside, _, last = name.strip("/").removeprefix(f"{key.strip('/')}/").partition("/")
            if last:
                found.setdefault(inside, []).append(_stored(each, last))
    return {inside: sorted(objects) for inside, objects in sorted(found.items())}


def upload(folder: RemotePath, name: str, chunks: Sequence[Bytes]) -> FileEntry:
    """Write a new object in parts, one in memory at a time; it appears after the last, or not at all."""
    store, key = connect(folder / name)
    digests, size = list[str](), 0
    with _typed(folder / name), warning_of_silence(folder / name) as answered:
        file = store.open(key, "wb", block_size=max(SPAN_BYTES, sum(map(len, chunks)) // _MOST_PARTS))
        try:
            for parts in cut(chunks):
                digest = hashlib.sha256()
                for part in parts:
                    digest.update(part)
                    file.write(part)
                    answered()
                    size += len(part)
                digests.append(digest.hexdigest())
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to raise
                file.discard()
                file.closed = True  # else it is uploaded when the object is collected
            raise
        file.close()
    return FileEntry(size, tuple(digests))


def put_object(place: RemotePath, data: bytes, *, new: bool = False) -> None:
    """Write a small object at once; if it is to be new and the store can compare, an existing one raises."""
    store, key = connect(place)
    with remote_errors(place):
        store.pipe_file(key, data, mode="create" if new else "overwrite")


def get_object(place: RemotePath, start: int, stop: int) -> bytes | None:
    """Return an object's bytes from `start` to before `stop`, or to its end; None if there is none."""
    store, key = connect(place)
    with remote_errors(place):
        try:
            return bytes(store.cat_file(key, start=start, end=stop))
        except FileNotFoundError:
            return None


def abort_uploads(folder: RemotePath) -> None:
    """Abort unfinished uploads to a folder of S3, which no list of objects shows. Nothing in other stores."""
    store, key = connect(folder)
    if (call := getattr(store, "call_s3", None)) is None:
        return
    bucket, _, prefix = key.strip("/").partition("/")
    with remote_errors(folder):
        found = call("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/" if prefix else "")
        for each in found.get("Uploads", []):
            call("abort_multipart_upload", Bucket=bucket, Key=each["Key"], UploadId=each["UploadId"])


def remove_objects(folder: RemotePath, names: Iterable[str]) -> None:
    """Delete objects of a folder; missing ones are ignored."""
    store, _ = connect(folder)

    def remove(name: str) -> None:
        with remote_errors(folder / name), contextlib.suppress(FileNotFoundError):
            store.rm_file(connect(folder / name)[1])

    with ThreadPoolExecutor(_THREADS) as pool:
        _ = list(pool.map(remove, names))


def _stored(entry: dict[str, Any], name: str) -> StoredObject:
    return StoredObject(name, entry["size"] or 0, entry["type"] == "file", _changed(entry))


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
        fix=f"Run `pip install 'accel-torch[{extra}]'`"
        + ("." if extra == "s3" else ", and install what fsspec asks for."),
    )


_GAP = 1 << 20  # unwanted bytes that cost less than another request to a store


class RemoteRanges:
    """Objects of a store, as they were when they were listed. Its owner closes it.

    Attributes:
        sizes: bytes of each object.
        counts: bytes fetched so far, by "remote".
    """

    def __init__(self, folder: RemotePath, names: Sequence[str], *, readers: int = 4) -> None:
        """List objects of a folder, to be read by some threads; a missing one raises."""
        self.counts = Counter[str]()
        self._folder = folder
        self._guard = Lock()
        self._listed = {each.name: each for each in list_objects(folder)}
        if missing := [name for name in names if name not in self._listed]:
            raise CheckpointError("objects are missing", got=show_names(missing, 5), where=str(folder))
        self.sizes = {name: self._listed[name].size for name in names}
        self._pool = ThreadPoolExecutor(readers, "accel-fetch")

    def close(self) -> None:
        """Wait for the readers."""
        self._pool.shutdown()

    def read(self, jobs: Iterable[Wanted | Passed], advance: Callable[[int], object] | None = None) -> None:
        """Fetch ranges, several at once; see `LocalRanges.read`."""
        used: set[str] = set()
        carry_out(self._pool, self._tasks(jobs, used), advance)
        now = {each.name: each for each in list_objects(self._folder)} if used else {}
        if changed := [name for name in used if now.get(name) != self._listed[name]]:
            raise CheckpointError(
                "an object changed while it was read", where=str(self._folder / changed[0]), fix="Load again."
            )

    def read_bytes(self, name: str, start: int, nbytes: int) -> bytes:
        """Return a few bytes of an object."""
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
        pieces: dict[str, list[WantedBytes]] = {}
        for job in jobs:
            used.add(job.file)
            if isinstance(job, Passed):
                yield job.nbytes, partial(self._pass, job)
            else:
                pieces.setdefault(job.file, []).append(WantedBytes(job.start, job.nbytes, job.address))
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
