# SPDX-License-Identifier: Apache-2.0
"""Folders of a file system, which appear by one rename: a stage is filled beside its target, then takes its name.

Names state the purpose of a folder, so the next writer understands what a crash has left:
`<target>.tmp-<host>-<pid>-<hex>` is being written or deleted, `<target>.old-<host>-<pid>-<hex>` was moved aside by a
writer that was about to take its name.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import msgspec

from accel.errors import CheckpointError
from accel.storage._files import Bytes, FileEntry, disk_errors, write_file
from accel.storage._lock import FolderLock, host_name, is_alive, take_lock
from accel.storage._reading import OpenDirectory, open_directory

_LEFTOVER = re.compile(
    r"(?P<target>[A-Za-z0-9_-]+)\.(?P<kind>tmp|old)-(?P<host>[A-Za-z0-9_.-]+)-(?P<pid>[0-9]{1,10})-[0-9a-f]{8}",
    re.ASCII,
)


class Leftover(msgspec.Struct, frozen=True):
    """A folder that a writer used beside its target.

    Attributes:
        path: the folder.
        target: the name that it had or was to get.
        kind: "tmp" for one being written or deleted, "old" for one moved aside.
        dead: whether its writer ran on this host and is gone.
    """

    path: Path
    target: str
    kind: Literal["tmp", "old"]
    dead: bool


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk."""
    with disk_errors(folder):
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, each on the disk before the next."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_folder(folder.parent)
    with disk_errors(folder), contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    if not folder.is_dir():
        raise CheckpointError("a file is in the place of a folder", where=str(folder), fix="Choose another `out`.")
    sync_folder(folder.parent)


def make_stage(target: Path) -> Path:
    """Make an empty folder beside the target, named after this process."""
    stage = _beside(target, "tmp")
    with disk_errors(stage):
        os.mkdir(stage)
    return stage


def commit(stage: Path, target: Path) -> Path | None:
    """Give a filled stage its target's name, durably; return the new path of a former holder of the name, who has it
    back if the disk fails."""
    sync_folder(stage)
    aside = _beside(target, "old") if os.path.lexists(target) else None
    with disk_errors(target):
        if aside is not None:
            os.rename(target, aside)
        try:
            os.rename(stage, target)
        except OSError:
            if aside is not None:
                os.rename(aside, target)
            raise
    sync_folder(target.parent)  # a rename is durable only once the parent's list of names is
    return aside


def set_aside(path: Path) -> Path:
    """Rename a folder for deletion; if this process ends before, the next writer deletes it."""
    gone = _beside(path, "tmp")
    with disk_errors(path):
        os.rename(path, gone)
    return gone


def remove_flat(folder: Path) -> None:
    """Delete a folder of files; one with folders inside is not ours: it stays, and raises."""
    with disk_errors(folder):
        with os.scandir(folder) as entries:
            found = list(entries)
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                raise CheckpointError("holds a folder, which accel did not write", got=entry.name, where=str(folder))
        for entry in found:
            os.unlink(entry.path)
        os.rmdir(folder)


def leftovers(parent: Path) -> list[Leftover]:
    """List the folders in `parent` that writers used beside their targets, in order of name."""
    with disk_errors(parent), os.scandir(parent) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    found: list[Leftover] = []
    for name in names:
        if (match := _LEFTOVER.fullmatch(name)) is not None:
            dead = match["host"] == host_name() and not is_alive(int(match["pid"]))
            kind = "tmp" if match["kind"] == "tmp" else "old"
            found.append(Leftover(parent / name, match["target"], kind, dead))
    return found


def _beside(target: Path, kind: Literal["tmp", "old"]) -> Path:
    base = target.name.split(".", 1)[0]  # of a folder moved aside: the name that it had
    return target.with_name(f"{base}.{kind}-{host_name()}-{os.getpid()}-{secrets.token_hex(4)}")


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """A folder of a file system, as a `Place`."""

    path: Path
    pause_s: ClassVar[float] = 0.02

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> LocalPlace:
        return LocalPlace(self.path / name)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> LocalPlace:
        return LocalPlace(self.path.parent)

    def exists(self) -> bool:
        return os.path.lexists(self.path)

    def identity(self) -> tuple[int, int]:
        try:
            status = os.lstat(self.path)
        except OSError:
            return 0, 0
        return status.st_ino, status.st_ctime_ns

    def names(self) -> list[str]:
        with disk_errors(self.path):
            return os.listdir(self.path)

    def listed(self) -> LocalPlace:
        return self

    def inside(self) -> dict[str, LocalPlace]:
        return {}

    def abort_uploads(self) -> None:
        """Do nothing: a disk has no uploads."""

    def leftovers(self) -> list[Leftover]:
        return leftovers(self.path)

    def usage(self) -> tuple[int, float]:
        with disk_errors(self.path):
            status = os.lstat(self.path)
            size = 0
            if stat.S_ISDIR(status.st_mode):
                with os.scandir(self.path) as entries:
                    for entry in entries:
                        with contextlib.suppress(FileNotFoundError):  # a file that gets its name just now
                            size += entry.stat(follow_symlinks=False).st_size
            return size, status.st_mtime

    def make(self) -> bool:
        is_new = not self.exists()
        make_folder(self.path)
        return is_new

    def unmake(self) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def lock(self) -> FolderLock:
        return take_lock(self.path)

    def open(self, *, follow: bool = True) -> contextlib.AbstractContextManager[OpenDirectory]:
        return open_directory(self.path, follow=follow)

    def write(self, name: str, chunks: Sequence[Bytes]) -> FileEntry:
        return write_file(self.path, name, chunks)

    def get(self, name: str, limit: int) -> memoryview | None:
        if not os.path.lexists(self.path / name):
            return None
        with open_directory(self.path, follow=False) as folder:
            return folder.read(name, limit=limit)

    def put(self, name: str, data: bytes) -> None:
        _ = write_file(self.path, f"{name}.part", [data])
        with disk_errors(self.path / name):
            os.rename(self.path / f"{name}.part", self.path / name)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with disk_errors(self.path / name), contextlib.suppress(FileNotFoundError):
                os.unlink(self.path / name)

    def beating(self, name: str) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext(name)

    def new_mark(self) -> str:
        return ""

    def make_stage(self) -> LocalPlace:
        return LocalPlace(make_stage(self.path))

    def commit(self, name: str, last: str, data: bytes, files: Mapping[str, FileEntry]) -> LocalPlace | None:
        del files  # each was flushed by its writer
        _ = write_file(self.path, last, [data])
        aside = commit(self.path, self.path.with_name(name))
        return LocalPlace(aside) if aside is not None else None

    def take_back(self, aside: LocalPlace | None) -> None:
        """Delete a committed folder, and give its name back to the one that had it before."""
        remove_flat(set_aside(self.path))
        if aside is not None:
            with disk_errors(aside.path):
                os.rename(aside.path, self.path)

    def remove_stage(self) -> None:
        remove_flat(self.path)

    def delete(self, last: str) -> bool:
        del last  # the folder loses its name first
        with open_directory(self.path, follow=False) as folder, folder.unread() as unread:
            if unread:
                remove_flat(set_aside(self.path))
            return unread
