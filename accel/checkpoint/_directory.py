# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders: which are committed, and which is the newest."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import overload

from accel.checkpoint._manifest import (
    MANIFEST,
    Manifest,
    candidates,
    check_sizes,
    check_step,
    files_here,
    read_manifest,
    step_of,
)
from accel.errors import CheckpointError
from accel.storage import Place, RemotePath, as_place


@overload
def latest_checkpoint(out: os.PathLike[str], *, verify: bool = False) -> Path | None: ...


@overload
def latest_checkpoint(out: str | RemotePath, *, verify: bool = False) -> Path | RemotePath | None: ...


def latest_checkpoint(out: str | os.PathLike[str] | RemotePath, *, verify: bool = False) -> Path | RemotePath | None:
    """Return the newest committed checkpoint by step, None if there is none. No communication.

    A folder with a damaged manifest, or with missing files or wrong sizes, is skipped with a warning of the logger
    `accel.checkpoint`.

    Args:
        out: folder or URL as for `save_state`; it need not exist.
        verify: whether to read every file and skip a folder with changed bytes. Without it, such a folder is returned,
            and `load_state` refuses it.

    Raises:
        CheckpointError: the folder cannot be read.

    Example:
        >>> accel.latest_checkpoint("runs/demo") is None
        True
        >>> path = accel.save_state(ctx, "runs/demo", items, step=3)
        >>> accel.latest_checkpoint("runs/demo") == path
        True
    """
    newest = newest_in(as_place(out), verify=verify)
    return newest.path if newest is not None else None


def newest_in(folder: Place, *, verify: bool = False) -> Place | None:
    """Return the newest committed checkpoint in a folder; see `latest_checkpoint`.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    if not folder.exists():
        return None
    seen = None
    while (found := candidates(folder)) != seen:  # a writer may replace all of them while they are looked at
        for step, _, path, _ in found:
            try:
                manifest = manifest_of(path, step)
                if verify:
                    check_bytes(path, manifest)
            except CheckpointError as error:
                logging.getLogger("accel.checkpoint").warning("%s is not a checkpoint and is skipped: %s", path, error)
            else:
                return path
        seen = found
    return None


def deleted(path: Place) -> CheckpointError:
    """Make the error for a step's folder that no longer exists."""
    try:
        left = [name for name in sorted(path.parent.names()) if step_of(name) is not None]
    except CheckpointError:
        left = []
    return CheckpointError(
        "this checkpoint has been deleted, or never was",
        expected="a committed checkpoint",
        got=f"{path.parent} holds {', '.join(left) or 'no checkpoint'}",
        where=str(path),
        fix="Pass the run's folder: load_state takes its newest checkpoint. save_state's keep= says how many stay.",
    )


def committed(out: Place) -> list[tuple[int, Place]]:
    """List committed steps with their folders, newest first."""
    steps = [(step, out / name) for name in out.names() if (step := step_of(name)) is not None]
    return [(step, path) for step, path in sorted(steps, reverse=True) if is_committed(path, step)]


def is_committed(path: Place, step: int | None = None) -> bool:
    """Return whether a folder is a checkpoint (of that step), with a valid manifest and files of the right size."""
    try:
        manifest_of(path, step)
    except CheckpointError:
        return False
    return True


def is_exactly_ours(path: Place) -> bool:
    """Return whether a folder is a checkpoint without files that its manifest does not list."""
    try:
        with path.open(follow=False) as folder:
            manifest, _ = read_manifest(folder)
            return folder.names() == sorted([MANIFEST, *files_here(folder, manifest)])
    except CheckpointError:
        return False


def manifest_of(path: Place, step: int | None = None) -> Manifest:
    """Return a checkpoint's manifest, checked against the sizes of its files; not through a symbolic link.

    Args:
        path: the checkpoint's folder or place.
        step: expected step; None for any.

    Raises:
        CheckpointError: it is no committed checkpoint, or of another step.
    """
    with path.open(follow=False) as folder:
        manifest, _ = read_manifest(folder)
        if step is not None:
            check_step(folder, manifest, step)
        check_sizes(folder, files_here(folder, manifest))
    return manifest


def check_bytes(path: Place, manifest: Manifest) -> None:
    """Compare every byte of a checkpoint's files with its manifest.

    Raises:
        CheckpointError: a file is missing or damaged; it is named.
    """
    with path.open() as folder:
        files = sorted(files_here(folder, manifest).items())
        folder.check_all((name, span) for name, entry in files for span in entry.spans())
