# SPDX-License-Identifier: Apache-2.0
"""Reading: files by name from a folder held open, never through links, and compared with their digests."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from accel.errors import CheckpointError
from accel.opening import open_regular
from accel.storage._files import Span, disk_errors, is_file_name, try_flock, unlock
from accel.storage._objects import RemotePath

_HASHERS = 4
_HASH_BYTES = 1 << 18  # stays in a core's cache between being read and being hashed


class OpenDirectory:
    """A folder held open: its files stay those of one moment, even if it is renamed meanwhile."""

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
