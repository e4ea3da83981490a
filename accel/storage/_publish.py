# SPDX-License-Identifier: Apache-2.0
"""New weights in place of old ones, in a folder with other files: at any moment either set is whole."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path

import msgspec

from accel.errors import CheckpointError
from accel.storage._files import disk_errors, write_file
from accel.storage._folders import leftovers, make_stage, remove_flat, sync_folder
from accel.storage._reading import open_directory
from accel.storage._weight_files import INDEX, WEIGHTS, Index, aside_name, decode_index, replaceable

_LARGEST_INDEX = 256 * 2**20


def stage_files(target: Path) -> Path:
    """Make a folder beside a target to write its files in; remove those of dead writers.

    Raises:
        CheckpointError: the disk failed, or forbids it.
    """
    for left in leftovers(target.parent):
        if left.dead and left.kind == "tmp" and left.target == target.name.split(".", 1)[0]:
            remove_flat(left.path)
    return make_stage(target)


def publish_file(stage: Path, name: str, target: Path) -> None:
    """Move the only file of a stage to its final path, over a former file.

    Raises:
        CheckpointError: the disk failed.
    """
    with disk_errors(target):
        os.rename(stage / name, target)
        os.rmdir(stage)
    sync_folder(target.parent)


def publish_weights(stage: Path, files: Sequence[str], index: bytes | None) -> None:
    """Move new weights out of their stage and delete those that they replace.

    Readers follow either `model.safetensors` or the index; each appears by one rename, after the files it refers to.
    Older files are deleted only where their names are of this format and the old index lists them.

    Args:
        stage: from `stage_files`, inside of the folder, with the files in it, all on the disk.
        files: their names.
        index: the index of several files; None for one.

    Raises:
        CheckpointError: the disk failed; the folder holds the old weights or the new ones.
    """
    folder = stage.parent
    names, listed = _read_index(folder)
    old = replaceable(names, listed)
    if index is not None:
        write_file(stage, INDEX, [index])
    sync_folder(stage)
    old |= _make_way(stage, listed, old & set(files))
    with disk_errors(folder):
        for name in [*files, INDEX] if index is not None else files:
            if name == INDEX:
                sync_folder(folder)
            os.rename(stage / name, folder / name)
        sync_folder(folder)
        stale = [WEIGHTS] if index is not None else [INDEX]
        for name in [*stale, *sorted(old - set(files))]:
            with suppress(FileNotFoundError):
                os.unlink(folder / name)
        os.rmdir(stage)


def _read_index(folder: Path) -> tuple[list[str], Index | None]:
    """Return the names in a folder, and its index if it has a valid one."""
    with open_directory(folder) as opened:
        names = opened.names()
        return names, decode_index(opened.read(INDEX, limit=_LARGEST_INDEX)) if INDEX in names else None


def _make_way(stage: Path, index: Index | None, names: Set[str]) -> set[str]:
    """Give old files in the way a second name, point the old index there, and return those names."""
    if index is None or not names:
        return set()
    folder, mark = stage.parent, secrets.token_hex(4)
    moved = {name: aside_name(name, mark) for name in sorted(names)}
    led = Index({key: moved.get(file, file) for key, file in index.weight_map.items()}, index.metadata or {})
    write_file(stage, "old.json", [msgspec.json.encode(led)])
    for name, other in moved.items():
        try:
            os.link(folder / name, folder / other, follow_symlinks=False)
        except OSError as error:
            raise CheckpointError(
                f"weights cannot be replaced without hard links: {error.strerror}",
                where=str(folder / name),
                fix="Save into another folder, or delete the old weights first.",
            ) from error
    with disk_errors(folder):
        sync_folder(folder)
        os.rename(stage / "old.json", folder / INDEX)
        sync_folder(folder)
    return set(moved.values())
