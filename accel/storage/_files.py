# SPDX-License-Identifier: Apache-2.0
"""Single files: written once, flushed to the disk and hashed, a digest of every 16 MiB; and locks on open files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import msgspec

from accel.errors import CheckpointError

Bytes = bytes | memoryview
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]

SPAN_BYTES = 16 * 2**20

_HASHERS_BESIDE = 2  # as fast as one thread writes
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_LONGEST_NAME = 255
_COALESCE_BYTES = 1 << 20
_FLUSH_BYTES = 16 << 20
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF)

# Called with the path of each file whose bytes have been written; set where a test simulates a bad disk.
AFTER_WRITE: ContextVar[Callable[[Path], None] | None] = ContextVar("accel.storage.AFTER_WRITE", default=None)


class Span(msgspec.Struct, frozen=True):
    """Consecutive bytes of a file, from `start` to before `stop`, and their SHA-256 in hex."""

    start: int
    stop: int
    sha256: str


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and digests of a written file, checked when it is read.

    Attributes:
        size: bytes.
        sha256: digests in hex: of every 16 MiB, the last of the rest; or one of the whole.
    """

    size: Annotated[int, msgspec.Meta(ge=0)]
    sha256: tuple[Digest, ...] | Digest

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


@contextlib.contextmanager
def disk_errors(path: object) -> Generator[None]:
    """Turn an operating system's error in the block into a `CheckpointError` with its text and the path."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'OSError')})",
            where=str(path),
            fix=_advice(error.errno),
        ) from error


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


def _advice(number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "Free space or choose another `out`; older checkpoints are untouched."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Choose an `out` that this process may write to."
    if number in (errno.ENOENT, errno.ENOTDIR):
        return "Check the path: it must be on a file system that every node shares."
    return "See the system's log; older checkpoints are untouched."
