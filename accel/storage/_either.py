# SPDX-License-Identifier: Apache-2.0
"""What checkpoints ask of a place, whichever kind it is of."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence
from typing import Protocol

from accel.storage import _files
from accel.storage._digests import Bytes, FileEntry
from accel.storage._files import OpenDirectory, disk_errors
from accel.storage._lock import take_lock
from accel.storage._place import Place, RemotePath
from accel.storage._remote import RemoteDirectory, list_objects, upload
from accel.storage._remote_lock import take_remote_lock


class Lock(Protocol):
    """Keeps other writers out of a folder until it is released."""

    def release(self) -> None:
        """Let the next writer in. Never raises."""
        ...


def lock_place(folder: Place) -> Lock:
    """Take a folder's lock; see `take_lock` and `take_remote_lock`.

    Raises:
        CheckpointError: another writer holds it, named by host and process; or the disk or store failed.
    """
    return take_remote_lock(folder) if isinstance(folder, RemotePath) else take_lock(folder)


def write_file(folder: Place, name: str, chunks: Sequence[Bytes]) -> FileEntry:
    """Write a new file, return once it is on the disk or in the store; see `write_file` of files, and `upload`.

    Raises:
        CheckpointError: the disk or store failed.
    """
    if isinstance(folder, RemotePath):
        return upload(folder, name, chunks)
    return _files.write_file(folder, name, chunks)


def open_directory(path: Place, *, follow: bool = True) -> contextlib.AbstractContextManager[OpenDirectory]:
    """Hold a folder open for the block; see `open_directory` of files, and `RemoteDirectory`.

    Raises:
        CheckpointError: it is missing, no folder, or cannot be read.
    """
    return _listed(path) if isinstance(path, RemotePath) else _files.open_directory(path, follow=follow)


def list_names(folder: Place) -> list[str]:
    """List what is in a folder; of a store that has nothing there, nothing.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    if isinstance(folder, RemotePath):
        return [each.name for each in list_objects(folder)]
    with disk_errors(folder):
        return os.listdir(folder)


@contextlib.contextmanager
def _listed(path: RemotePath) -> Generator[OpenDirectory]:
    yield RemoteDirectory(path)
