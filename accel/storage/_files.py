# SPDX-License-Identifier: Apache-2.0
"""Single files: written once, flushed to the disk and hashed, a digest of every 16 MiB; locks on open files; and files
read from a folder held open, never through links, and compared with their digests."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from accel.errors import CheckpointError
from accel.errors._checks import disk_errors
from accel.opening import open_regular

if TYPE_CHECKING:
    from accel.storage._objects import RemotePath

Bytes = bytes | memoryview
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]

SPAN_BYTES = 16 * 2**20

_HASHERS_BESIDE = 2  # as fast as one thread writes
_HASHERS = 4
_HASH_BYTES = 1 << 18  # stays in a core's cache between being read and being hashed
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_LONGEST_NAME = 255
_COALESCE_BYTES = 1 << 20
_FLUSH_BYTES = 16 << 20
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF)

# Called with the path of each written file; set where a test simulates a bad disk.
AFTER_WRITE: ContextVar[Callable[[Path], None] | None] = ContextVar("accel.storage.AFTER_WRITE", default=None)


class Span(msgspec.Struct, frozen=True):
    """Consecutive bytes of a file, from `start` to before `stop`, and their SHA-256 in hex."""

    start: int
    stop: int
    sha256: str


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and digests of a written file, checked when it is read."""

    size: Annotated[int, msgspec.Meta(ge=0)]  # bytes
    sha256: tuple[Digest, ...] | Digest  # digests in hex: of every 16 MiB, the last of the rest; or one of the whole

    @property
    def is_complete(self) -> bool:
        """Whether every byte is in exactly one digest."""
        return isinstance(self.sha256, str) or len(self.sha256) == -(-self.size // SPAN_BYTES)

    def spans(self) -> list[Span]:
        """Return the parts of the file with a digest each; the entry must be complete."""
        if isinstance(self.sha256, str):
            return [Span(0, self.size, self.sha256)]
        starts = range(0, self.size, SPAN_BYTES)
        return [
            Span(start, min(start + SPAN_BYTES, self.size), digest)
            for start, digest in zip(starts, self.sha256, strict=True)
        ]


def is_file_name(name: str) -> bool:
    """Return whether a name fits a file: letters, digits, "_", "." and "-", not starting with "." or "-"."""
    return len(name) <= _LONGEST_NAME and _NAME.fullmatch(name) is not None


def write_file(folder: Path, name: str, chunks: Sequence[Bytes]) -> FileEntry:
    """Write a new file to an existing folder, flushed to the disk on return; threads hash its chunks meanwhile."""
    assert is_file_name(name), name
    with disk_errors(folder / name), hashed_beside(chunks) as entry:
        file = os.open(folder / name, _WRITE_FLAGS, 0o666)
        try:
            _write_all(file, _coalesce(chunks))
            if (after_write := AFTER_WRITE.get()) is not None:
                after_write(folder / name)
            os.fsync(file)
        finally:
            os.close(file)
        return entry()


def try_flock(file: int, *, shared: bool = False) -> bool | None:
    """Lock an open file or folder without waiting: True if locked, False if another holder prevents it, None without
    locks in the file system."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def unlock(file: int) -> None:
    """Drop the lock. Closing is not enough: a forked process may hold the file open, too."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def hashed_beside(chunks: Sequence[Bytes]) -> Generator[Callable[[], FileEntry]]:
    """Hash chunks on threads while the block writes them; yields a function that waits and returns the file's entry."""
    waiting = deque(enumerate(cut(chunks)))
    found = dict[int, str]()
    count = len(waiting)

    def work() -> None:
        while True:
            try:
                at, parts = waiting.popleft()
            except IndexError:
                return
            digest = hashlib.sha256()
            for part in parts:
                digest.update(part)
            found[at] = digest.hexdigest()

    # not a pool's threads: a pool would not start any while the interpreter waits for the last save
    threads = [threading.Thread(target=work, name="accel-hash") for _ in range(min(_HASHERS_BESIDE, count))]

    def entry() -> FileEntry:
        for thread in threads:
            thread.join()
        return FileEntry(sum(map(len, chunks)), tuple(found[at] for at in range(count)))

    try:
        for thread in threads:
            thread.start()
        yield entry
    finally:
        waiting.clear()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def cut(chunks: Sequence[Bytes]) -> Iterator[list[memoryview]]:
    """Cut the concatenated chunks into the parts with a digest each."""
    parts, room = list[memoryview](), SPAN_BYTES
    for chunk in chunks:
        left = memoryview(chunk)
        while left:
            parts.append(left[:room])
            left, room = left[room:], room - len(parts[-1])
            if not room:
                yield parts
                parts, room = [], SPAN_BYTES
    if parts:
        yield parts


def _coalesce(chunks: Sequence[Bytes]) -> Iterator[Bytes]:
    """Join small chunks: a file of a thousand scalars takes few writes."""
    waiting = bytearray()
    for chunk in chunks:
        if len(chunk) >= _COALESCE_BYTES:
            if waiting:
                yield bytes(waiting)
                waiting.clear()
            yield chunk
            continue
        waiting += chunk
        if len(waiting) >= _COALESCE_BYTES:
            yield bytes(waiting)
            waiting.clear()
    if waiting:
        yield bytes(waiting)


def _write_all(file: int, chunks: Iterable[Bytes]) -> None:
    """Write chunks in order; the disk flushes each part while the next is written."""
    begun = written = 0
    for chunk in chunks:
        left = memoryview(chunk)
        while left:
            count = os.write(file, left[:_FLUSH_BYTES])
            left, written = left[count:], written + count
            if written - begun >= _FLUSH_BYTES:
                _begin_flush(file, begun, written - begun)
                begun = written


def _begin_flush(file: int, start: int, size: int) -> None:
    """Let the system flush a part of a file without waiting."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # it is advice
            os.posix_fadvise(file, start, size, os.POSIX_FADV_DONTNEED)


class OpenDirectory:
    """A folder held open: its files stay the files of one moment, even if it is renamed meanwhile."""

    __slots__ = ("_file", "path")

    def __init__(self, file: int, path: Path | RemotePath) -> None:
        self._file = file
        self.path = path

    def check_size(self, name: str, size: int) -> None:
        """Check that a file is a regular one, no link, of the expected size."""
        with self._opened(name) as file:
            self._compare_size(name, os.fstat(file).st_size, size)

    def read(self, name: str, *, size: int | None = None, limit: int | None = None) -> memoryview:
        """Return a file's bytes, as private memory backed by the file; check a known size or limit."""
        with self._opened(name) as file:
            found = os.fstat(file).st_size
            self._compare_size(name, found, size, limit)
            if not found:
                return memoryview(bytearray())
            return memoryview(mmap.mmap(file, found, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))

    def read_into(self, name: str, start: int, memory: memoryview) -> None:
        """Fill memory with a file's bytes from `start` on; in one pass, where mapping takes two."""
        with self._opened(name) as file:
            self._fill(file, name, start, memory)

    @contextlib.contextmanager
    def descriptor(self, name: str) -> Generator[str]:
        """Yield a path by which another library opens a file of this folder during the block; no link is followed."""
        with self._opened(name) as file:
            yield f"/proc/self/fd/{file}"

    def check(self, name: str, span: Span) -> None:
        """Compare a part of a file with its digest; raise if it is damaged."""
        digest = hashlib.sha256()
        memory = memoryview(bytearray(min(_HASH_BYTES, span.stop - span.start)))
        with self._opened(name) as file:
            for start in range(span.start, span.stop, _HASH_BYTES):
                chunk = memory[: span.stop - start]
                self._fill(file, name, start, chunk)
                digest.update(chunk)
        self._compare_digest(name, span, digest.hexdigest())

    def check_all(self, spans: Iterable[tuple[str, Span]], advance: Callable[[int], object] | None = None) -> None:
        """Compare parts of files with their digests, several at once; raise for the first bad part."""
        listed = list(spans)
        with ThreadPoolExecutor(_HASHERS) as pool:
            done = pool.map(self.check, [name for name, _ in listed], [span for _, span in listed])
            for (_, span), _ in zip(listed, done, strict=True):
                if advance is not None:
                    advance(span.stop - span.start)

    def names(self) -> list[str]:
        """List the names in the folder, sorted."""
        return sorted(os.listdir(self._file))

    @contextlib.contextmanager
    def kept(self) -> Generator[bool]:
        """Keep retention of this host from deleting the folder during the block; yields False if it did already."""
        with disk_errors(self.path):
            locked = try_flock(self._file, shared=True)
        try:
            yield locked is not False and self.is_in_place()
        finally:
            if locked:
                unlock(self._file)

    @contextlib.contextmanager
    def unread(self) -> Generator[bool]:
        """Keep readers out of the folder during the block; yields False if a reader holds it by `kept`."""
        with disk_errors(self.path):
            locked = try_flock(self._file)
        try:
            yield locked is not False
        finally:
            if locked:
                unlock(self._file)

    def is_in_place(self) -> bool:
        """Return whether the path still leads to this folder, which a writer may have deleted or replaced."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(str(self.path)))
        except OSError:
            return False

    def refusal(self, name: str, problem: str, *, expected: str = "", got: str = "") -> CheckpointError:
        """Make the error for one file."""
        fix = "Load an older checkpoint; `latest_checkpoint` skips folders with missing or cut files."
        return CheckpointError(f"{name}: {problem}", expected=expected, got=got, where=str(self.path / name), fix=fix)

    def _check_name(self, name: str) -> None:
        if not is_file_name(name):
            raise self.refusal("a file", "not a name of a file in this folder", got=repr(name))

    def _compare_size(self, name: str, found: int, size: int | None, limit: int | None = None) -> None:
        if size is not None and found != size:
            raise self.refusal(name, "wrong size", expected=f"{size} bytes", got=f"{found} bytes")
        if limit is not None and found > limit:
            raise self.refusal(name, "too large", expected=f"at most {limit} bytes", got=f"{found} bytes")

    def _compare_digest(self, name: str, span: Span, found: str) -> None:
        if found != span.sha256:
            where = f"other bytes from {span.start} to {span.stop}"
            raise self.refusal(name, "damaged: the digest does not fit the contents", got=where)

    def _fill(self, file: int, name: str, start: int, memory: memoryview) -> None:
        left = memory
        while left:
            count = os.preadv(file, [left], start)
            if not count:
                raise self.refusal(name, "wrong size", expected=f"{len(left)} bytes from {start} on", got="its end")
            left, start = left[count:], start + count

    @contextlib.contextmanager
    def _opened(self, name: str) -> Generator[int]:
        self._check_name(name)
        try:
            file = open_regular(name, dir_fd=self._file, follow=False)
        except OSError as error:
            reasons = {errno.ENOENT: "missing", errno.ELOOP: "a symbolic link, which is never followed"}
            raise self.refusal(name, reasons.get(error.errno or 0, str(error.strerror))) from error
        try:
            with disk_errors(self.path / name):
                yield file
        finally:
            os.close(file)


@contextlib.contextmanager
def open_directory(path: Path, *, follow: bool = True) -> Generator[OpenDirectory]:
    """Hold a folder open for the block; with `follow`, the last part of its path may be a symbolic link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    with disk_errors(path):
        file = os.open(path, flags)
    try:
        yield OpenDirectory(file, path)
    finally:
        os.close(file)
