# SPDX-License-Identifier: Apache-2.0
"""Folders that appear by one rename: a stage is filled beside its target, then takes the target's name.

Names tell what a folder is, so that a crash at any moment leaves something that the next writer understands:
`<target>.tmp-<host>-<pid>-<hex>` is being written or deleted, `<target>.old-<host>-<pid>-<hex>` was moved aside by a
writer that was about to take its name.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Literal

import msgspec

from accel.errors import CheckpointError
from accel.storage._files import disk_errors, sync_folder

_LEFTOVER = re.compile(
    r"(?P<target>[A-Za-z0-9_-]+)\.(?P<kind>tmp|old)-(?P<host>[A-Za-z0-9_.-]+)-(?P<pid>[0-9]{1,10})-[0-9a-f]{8}",
    re.ASCII,
)


class Leftover(msgspec.Struct, frozen=True):
    """A folder that a writer used beside its target.

    Attributes:
        path: where it is.
        target: the name that it had or was to get.
        kind: "tmp" for one being written or deleted, "old" for one moved aside.
        dead: whether its writer ran on this host and is gone.
    """

    path: Path
    target: str
    kind: Literal["tmp", "old"]
    dead: bool


def make_stage(target: Path) -> Path:
    """Make an empty folder beside the target, named after this process.

    Raises:
        CheckpointError: the disk failed, or forbids it.
    """
    stage = _beside(target, "tmp")
    with disk_errors(stage):
        os.mkdir(stage)
    return stage


def commit(stage: Path, target: Path) -> Path | None:
    """Give a filled stage its target's name, durably; whatever had that name is moved aside first.

    Args:
        stage: a folder of which every file is on the disk.
        target: its final path, in the same folder.

    Returns:
        Where the former holder of the name is now, None if there was none.

    Raises:
        CheckpointError: the disk failed; a former holder has its name back.
    """
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
    sync_folder(target.parent)
    return aside


def set_aside(path: Path) -> Path:
    """Rename a folder to what the next writer deletes should this process end before it has.

    Raises:
        CheckpointError: the disk failed, or forbids it.
    """
    gone = _beside(path, "tmp")
    with disk_errors(path):
        os.rename(path, gone)
    return gone


def remove_flat(folder: Path) -> None:
    """Delete a folder of files; one that holds folders is not ours and stays.

    Raises:
        CheckpointError: the disk failed, forbids it, or there is a folder inside.
    """
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
    """List the folders in `parent` that writers used beside their targets, in order of name.

    Raises:
        CheckpointError: the folder cannot be read.
    """
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


def host_name() -> str:
    """Return this host's name, as names of files hold it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", os.uname().nodename)[:100] or "host"


def is_alive(pid: int) -> bool:
    """Whether this host has a process of that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
