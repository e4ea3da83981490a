# SPDX-License-Identifier: Apache-2.0
"""Places: folders of files in a file system or in an object store, behind one set of operations.

Folders on a disk appear by one rename: a stage is filled next to its target, then takes its name. Names state the
purpose of a folder, so the next writer understands what a crash has left: `<target>.tmp-<host>-<pid>-<hex>` is being
written or deleted, `<target>.old-<host>-<pid>-<hex>` was moved aside by a writer that was about to take its name.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, cast

import msgspec

from accel.errors import CheckpointError, ConfigError
from accel.errors._checks import disk_errors
from accel.storage._files import Bytes, FileEntry, OpenDirectory, open_directory, write_file
from accel.storage._lock import FolderLock, host_name, is_alive, take_lock
from accel.storage._objects import LAG, RemotePath
from accel.storage._store import RemotePlace

_LOCAL = ("file://", "local://")
_LEFTOVER = re.compile(
    r"(?P<target>[A-Za-z0-9_-]+)\.(?P<kind>tmp|old)-(?P<host>[A-Za-z0-9_.-]+)-(?P<pid>[0-9]{1,10})-[0-9a-f]{8}",
    re.ASCII,
)


class Leftover(msgspec.Struct, frozen=True):
    """A folder that a writer used next to its target."""

    path: Path  # the folder
    target: str  # the name that it had or was to get
    kind: Literal["tmp", "old"]  # "tmp" for one being written or deleted, "old" for one moved aside
    dead: bool  # whether its writer ran on this host and is gone


class Lock(Protocol):
    """Keeps other writers out of a place until it is released."""

    def check(self) -> None:
        """Raise unless the lock is still held: another writer may have taken it as abandoned."""
        ...

    def release(self) -> None:
        """Release the lock. Never raises."""
        ...


class Place(Protocol):
    """A folder of files. Every operation raises `CheckpointError` if the disk or store fails.

    Attributes:
        path: the user's name for it.
        pause_s: time between two looks for files of other writers, in seconds.
    """

    pause_s: ClassVar[float]

    @property
    def path(self) -> Path | RemotePath: ...

    @property
    def name(self) -> str: ...

    @property
    def parent(self) -> Place: ...

    def __truediv__(self, name: str) -> Place: ...

    def exists(self) -> bool:
        """Whether anything is there."""
        ...

    def identity(self) -> tuple[int, int]:
        """Return numbers that differ for another folder of the same name; zeros where a store has none."""
        ...

    def names(self) -> list[str]:
        """List the names in the folder; nothing where a store has no such folder."""
        ...

    def listed(self) -> Place:
        """Return this place as it is now: in a store, reading it lists it no more; elsewhere, the place itself."""
        ...

    def inside(self) -> Mapping[str, Place]:
        """Return the folders inside by name, listed all at once, in a store; nothing elsewhere."""
        ...

    def leftovers(self) -> Sequence[Leftover]:
        """List the folders inside that writers used next to their targets; none in a store."""
        ...

    def abort_uploads(self) -> None:
        """Abort the uploads to this place that dead writers left unfinished, in a store that shows them."""
        ...

    def usage(self) -> tuple[int, float]:
        """Return the bytes of the files, and the time of the last change in seconds since 1970."""
        ...

    def make(self) -> bool:
        """Make the folder and its missing parents; return whether it is new. A store has nothing to make."""
        ...

    def unmake(self) -> None:
        """Delete the folder if nothing is in it. Never raises."""
        ...

    def lock(self) -> Lock:
        """Take the lock of the folder; the error names the writer that holds it, by host and process."""
        ...

    def open(self, *, follow: bool = True) -> AbstractContextManager[OpenDirectory]:
        """Hold the folder open for reading during the block; with `follow` it may be a symbolic link."""
        ...

    def write(self, name: str, chunks: Sequence[Bytes]) -> FileEntry:
        """Write a new file, and return once it is on the disk or in the store."""
        ...

    def get(self, name: str, limit: int) -> Bytes | None:
        """Return the bytes of a small file, None if there is none."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, which appears whole."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Delete files; missing ones are ignored."""
        ...

    def beating(self, name: str) -> AbstractContextManager[object]:
        """Renew a file during the block, where an upload is invisible to others."""
        ...

    def new_mark(self) -> str:
        """Return a part of file names that no other save has; "" where each save has a separate stage."""
        ...

    def make_stage(self) -> Place:
        """Return the folder to write a new version in: a new one next to it; in a store, this one."""
        ...

    def commit(self, name: str, last: str, data: bytes, files: Mapping[str, FileEntry]) -> Place | None:
        """Write a stage's last file, without which the folder counts for nothing, and give the stage its name.

        Returns the name's former holder, moved aside, or None; in a store this place itself if it holds other objects.
        """
        ...

    def take_back(self, aside: Any) -> None:
        """Delete a folder just committed, and give its name back to `aside` from `commit`; nothing in a store."""
        ...

    def remove_stage(self) -> None:
        """Delete a stage with its files, unless the stage is the target."""
        ...

    def delete(self, last: str) -> bool:
        """Delete the folder, its `last` file first, so that no reader ever finds half of it; return False if a reader
        holds it open."""
        ...


@dataclass(frozen=True, slots=True)
class HostFolder:
    """A run's folder at the same path on each host, each on a local disk: for hosts that share no file system.

    `save_state`, `load_state` and `resume` take it in place of a path. Each host's folder gets what its ranks need to
    load again at the same layout: its shards, and a copy of all that is not sharded. A checkpoint counts once every
    host has committed it. Hosts are the nodes of the context.

    Attributes:
        path: the folder.

    Raises:
        ConfigError: no path, an empty one, or a URL.

    Examples:
        >>> path = accel.save_state(ctx, accel.checkpoint.HostFolder("runs/local"), {"model": model}, step=3)
        >>> accel.load_state(ctx, accel.checkpoint.HostFolder("runs/local"), {"model": model}).path == path
        True
    """

    path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        if not _is_path(self.path):
            raise ConfigError("no path", expected="the path of a folder", got=repr(self.path), where="HostFolder")
        if "://" in (path := os.fspath(self.path)):
            expected = "a path; all hosts share a store"
            raise ConfigError("a URL as a folder of each host", expected=expected, got=path, where="HostFolder")

    def __fspath__(self) -> str:
        return os.fspath(self.path)


def _is_path(given: object) -> bool:
    return isinstance(given, os.PathLike) or (isinstance(given, str) and given != "")


def lag_of(where: str | os.PathLike[str] | RemotePath) -> str:
    """Return what to add to an error about a place without objects: lists of stores may lag. Nothing for a path."""
    return f" {LAG}" if isinstance(as_place(where).path, RemotePath) else ""


def folder_of(where: str | os.PathLike[str] | RemotePath) -> tuple[Place, bool]:
    """Return the place of a run's folder, and whether each host has such a folder. Raises as `as_place`."""
    return as_place(where), isinstance(where, HostFolder)


def as_place(where: str | os.PathLike[str] | RemotePath) -> Place:
    """Return the place of a path or URL; `file://` is a path. Raises `ConfigError` if no file system takes it."""
    if isinstance(where, RemotePath):
        return RemotePlace(where)
    if not isinstance(cast(object, where), str | os.PathLike):
        raise ConfigError("no path", expected="a path or URL", got=repr(where))
    text = os.fspath(where)
    if "\0" in text:
        raise ConfigError("a path with a zero byte", expected="a path or URL", got=repr(text))
    if text.startswith(_LOCAL):
        return LocalPlace(Path(text.partition("://")[2]))
    if isinstance(where, str) and "://" in text:
        return RemotePlace(RemotePath(text))
    return LocalPlace(Path(text))


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
        raise CheckpointError("there is a file instead of a folder", where=str(folder), fix="Choose another `out`.")
    sync_folder(folder.parent)


def make_stage(target: Path) -> Path:
    """Make an empty folder next to the target, named after this process."""
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
    """List the folders in `parent` that writers used next to their targets, in order of name."""
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
