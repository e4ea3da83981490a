# SPDX-License-Identifier: Apache-2.0
"""Single files: written once, flushed to the disk and hashed; read by name from an open folder, never through links."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import re
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path

from accel.errors import CheckpointError
from accel.storage._digests import HASHERS, Bytes, FileEntry, Span, hashed_beside
from accel.storage._flock import try_flock, unlock
from accel.storage._place import Place

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_LONGEST_NAME = 255
_COALESCE_BYTES = 1 << 20
_FLUSH_BYTES = 16 << 20
_HASH_BYTES = 1 << 18  # stays in a core's cache between being read and being hashed
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in place of a file must not hang
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

# Called with the path of each file whose bytes have been written; set where a test simulates a bad disk.
AFTER_WRITE: ContextVar[Callable[[Path], None] | None] = ContextVar("accel.storage.AFTER_WRITE", default=None)


@contextlib.contextmanager
def disk_errors(path: Place) -> Generator[None]:
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
    """Whether a name can be a file of a checkpoint: letters, digits, "_", "." and "-", not starting with "." or "-"."""
    return len(name) <= _LONGEST_NAME and _NAME.fullmatch(name) is not None


def write_file(folder: Path, name: str, chunks: Sequence[Bytes]) -> FileEntry:
    """Write a new file, return once it is on the disk.

    Args:
        folder: an existing folder.
        name: must not exist there.
        chunks: its bytes, in order; hashed by threads while they are written.

    Raises:
        CheckpointError: the disk failed, is full or forbids it.
    """
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


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk.

    Raises:
        CheckpointError: the disk failed.
    """
    with disk_errors(folder):
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, each on the disk before the next.

    Raises:
        CheckpointError: the disk failed, or forbids it.
    """
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_folder(folder.parent)
    with disk_errors(folder), contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    if not folder.is_dir():
        raise CheckpointError("a file stands where a folder should be", where=str(folder), fix="Choose another `out`.")
    sync_folder(folder.parent)


class OpenDirectory:
    """A folder held open, so that all its files are of one moment even if it is renamed meanwhile."""

    __slots__ = ("_file", "path")

    def __init__(self, file: int, path: Place) -> None:
        self._file = file
        self.path = path

    def check_size(self, name: str, size: int) -> None:
        """Look whether a file is there and has as many bytes as it should.

        Raises:
            CheckpointError: it is missing, a link, no regular file, or of another size.
        """
        with self._opened(name) as file:
            self._compare_size(name, os.fstat(file).st_size, size)

    def read(self, name: str, *, size: int | None = None, limit: int | None = None) -> memoryview:
        """Return a file's bytes, as private memory backed by the file.

        Args:
            name: a file of this folder.
            size: bytes that it must have; None for any.
            limit: bytes that it may have at most; None for any.

        Raises:
            CheckpointError: it is missing, a link, no regular file, or of another size.
        """
        with self._opened(name) as file:
            found = os.fstat(file).st_size
            self._compare_size(name, found, size, limit)
            if not found:
                return memoryview(bytearray())
            return memoryview(mmap.mmap(file, found, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))

    def read_into(self, name: str, start: int, memory: memoryview) -> None:
        """Fill memory with a file's bytes from `start` on; in one pass, where mapping takes two.

        Raises:
            CheckpointError: it is missing, a link, no regular file, or too short; or the disk failed.
        """
        with self._opened(name) as file:
            self._fill(file, name, start, memory)

    @contextlib.contextmanager
    def descriptor(self, name: str) -> Generator[str]:
        """Give a path by which another library opens a file of this folder during the block; no link is followed.

        Raises:
            CheckpointError: it is missing, a link, or no regular file.
        """
        with self._opened(name) as file:
            yield f"/proc/self/fd/{file}"

    def check(self, name: str, span: Span) -> None:
        """Compare a part of a file with its digest.

        Raises:
            CheckpointError: it is damaged; or as for `read_into`.
        """
        digest, memory = hashlib.sha256(), memoryview(bytearray(min(_HASH_BYTES, span.stop - span.start)))
        with self._opened(name) as file:
            for start in range(span.start, span.stop, _HASH_BYTES):
                chunk = memory[: span.stop - start]
                self._fill(file, name, start, chunk)
                digest.update(chunk)
        self._compare_digest(name, span, digest.hexdigest())

    def check_all(self, spans: Iterable[tuple[str, Span]], advance: Callable[[int], object] | None = None) -> None:
        """Compare parts of files with their digests, several at once.

        Args:
            spans: names of files, and which part of each.
            advance: called with numbers of bytes that have been read.

        Raises:
            CheckpointError: as for `check`, of the first that is not as it should be.
        """
        listed = list(spans)
        with ThreadPoolExecutor(HASHERS) as pool:
            done = pool.map(self.check, [name for name, _ in listed], [span for _, span in listed])
            for (_, span), _ in zip(listed, done, strict=True):
                if advance is not None:
                    advance(span.stop - span.start)

    def names(self) -> list[str]:
        """List what is in the folder, sorted."""
        return sorted(os.listdir(self._file))

    @contextlib.contextmanager
    def kept(self) -> Generator[bool]:
        """Keep retention from deleting the folder during the block, among the processes of one host.

        Gives False if the folder has been deleted or has lost its name already.

        Raises:
            CheckpointError: the disk failed.
        """
        with disk_errors(self.path):
            locked = try_flock(self._file, shared=True)
        try:
            yield locked is not False and self.is_in_place()
        finally:
            if locked:
                unlock(self._file)

    @contextlib.contextmanager
    def unread(self) -> Generator[bool]:
        """Keep readers out of the folder during the block; gives False if one holds it by `kept`.

        Raises:
            CheckpointError: the disk failed.
        """
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
        """Make the error that blames one file."""
        fix = "Load an older checkpoint; `latest_checkpoint` skips folders whose files are missing or cut."
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
            file = os.open(name, _READ_FLAGS, dir_fd=self._file)
        except OSError as error:
            reasons = {errno.ENOENT: "missing", errno.ELOOP: "a symbolic link, which is never followed"}
            raise self.refusal(name, reasons.get(error.errno or 0, str(error.strerror))) from error
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise self.refusal(name, "not a regular file")
            with disk_errors(self.path / name):
                yield file
        finally:
            os.close(file)


@contextlib.contextmanager
def open_directory(path: Path, *, follow: bool = True) -> Generator[OpenDirectory]:
    """Hold a folder open for the block.

    Args:
        path: the folder.
        follow: whether the last part of the path may be a symbolic link.

    Raises:
        CheckpointError: it is missing, no folder, or cannot be read.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    with disk_errors(path):
        file = os.open(path, flags)
    try:
        yield OpenDirectory(file, path)
    finally:
        os.close(file)


def _coalesce(chunks: Sequence[Bytes]) -> Iterator[Bytes]:
    """Join small chunks, so that a file of a thousand scalars is not a thousand writes."""
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
    """Write chunks in order, and let the disk begin with each part while the next is written."""
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
    """Have the system write out a part of a file without waiting; what it has not yet written stays in memory."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # it is advice
            os.posix_fadvise(file, start, size, os.POSIX_FADV_DONTNEED)


def _advice(number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "Free space or choose another `out`; older checkpoints are untouched."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Choose an `out` that this process may write to."
    if number in (errno.ENOENT, errno.ENOTDIR):
        return "See whether the path is right, and on a file system that every node shares."
    return "See the system's log; older checkpoints are untouched."
