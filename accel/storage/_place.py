# SPDX-License-Identifier: Apache-2.0
"""Places: folders of files, in a file system, on each host, or in an object store, behind one set of operations."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from accel.errors import ConfigError
from accel.storage._files import Bytes, FileEntry
from accel.storage._folders import Leftover, LocalPlace
from accel.storage._objects import LAG, RemotePath
from accel.storage._reading import OpenDirectory
from accel.storage._store import RemotePlace


@dataclass(frozen=True, slots=True)
class HostFolder:
    """A run's folder at the same path on each host, each on a disk of its own: for hosts that share no file system.

    `save_state`, `load_state` and `resume` take it in place of a path. Each host's folder gets what its ranks need to
    load again at the same layout: its shards, and a copy of all that is not sharded. A checkpoint counts once every
    host has committed it. Hosts are the nodes of the context.

    Attributes:
        path: the folder.

    Raises:
        ConfigError: no path, an empty one, or a URL.

    Example:
        >>> path = accel.save_state(ctx, accel.HostFolder("runs/local"), {"model": model}, step=3)
        >>> accel.load_state(ctx, accel.HostFolder("runs/local"), {"model": model}).path == path
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


_LOCAL = ("file://", "local://")


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

    def leftovers(self) -> list[Leftover]:
        """List the folders inside that writers used beside their targets; none in a store."""
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
        """Return a part of file names that no other save has; "" where each save has a stage of its own."""
        ...

    def make_stage(self) -> Place:
        """Return the folder to write a new version in: a new one beside it; in a store, this one."""
        ...

    def commit(self, name: str, last: str, data: bytes, files: Mapping[str, FileEntry]) -> Place | None:
        """Write a stage's last file, without which the folder counts for nothing, and give the stage its name.

        Returns the former holder of the name, moved aside; None without one. In a store, that is this place itself if
        it holds other objects than these.
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


def lag_of(where: str | os.PathLike[str] | RemotePath) -> str:
    """Return what to add to an error about a place without objects: lists of stores may lag. Nothing for a path."""
    return f" {LAG}" if isinstance(as_place(where).path, RemotePath) else ""


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
