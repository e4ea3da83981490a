# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a store without renames: objects under names that no save has twice, and the manifest last, as commit.

A save never writes over an object but the manifest, which appears at once. So a folder holds the former checkpoint of
its step until it holds the new one, and objects with a mark that no manifest lists are what dead writers left.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from accel.checkpoint._directory import check_sizes, read_manifest, step_of
from accel.checkpoint._manifest import MANIFEST
from accel.storage import (
    FileEntry,
    Place,
    RemotePath,
    list_names,
    list_tree,
    open_directory,
    put_object,
    remove_objects,
)

_MARKED = re.compile(
    r"(tensors-[0-9]+-of-[0-9]+|share-[0-9]+)-(?P<mark>[0-9a-f]{16})\.(safetensors|json|beat)", re.ASCII
)


def new_mark(target: Place) -> str:
    """Return what tells the files of a save from those of any other; nothing where each save has a stage of its own."""
    return f"-{secrets.token_hex(8)}" if isinstance(target, RemotePath) else ""


def commit_objects(target: RemotePath, manifest: bytes, files: Mapping[str, FileEntry]) -> None:
    """Look whether all objects are there, and commit by the manifest.

    Raises:
        CheckpointError: an object is missing or cut, or the store failed; the former checkpoint is untouched.
    """
    with open_directory(target) as folder:
        check_sizes(folder, files)
    put_object(target / MANIFEST, manifest)


def wasteful_steps(out: RemotePath) -> list[RemotePath]:
    """List the folders of steps that hold objects of more than one save, or of one that has not committed."""
    found: list[RemotePath] = []
    for name, inside in sorted(list_tree(out).items()):
        marks = {match["mark"] for each in inside if (match := _MARKED.fullmatch(each)) is not None}
        if step_of(name) is not None and (len(marks) > 1 or (marks and MANIFEST not in inside)):
            found.append(out / name)
    return found


def sweep_objects(folder: RemotePath, mark: str = "") -> None:
    """Delete the marked objects of a folder that its manifest does not list; who holds the lock knows them to be waste.

    Args:
        folder: of a step.
        mark: of the save whose objects these are; "" for any.

    Raises:
        CheckpointError: the manifest is damaged, and so nothing is deleted; or the store failed.
    """
    names = list_names(folder)
    listed: set[str] = set()
    if MANIFEST in names:
        with open_directory(folder) as opened:
            listed = set(read_manifest(opened)[0].files)
    waste = [name for name in names if _MARKED.fullmatch(name) and mark in name and name not in listed]
    remove_objects(folder, waste)


def discard_objects(path: RemotePath) -> None:
    """Delete a checkpoint of which every object is listed; the manifest first, so that nobody finds half of one.

    Raises:
        CheckpointError: the store failed.
    """
    names = list_names(path)
    remove_objects(path, [MANIFEST])
    remove_objects(path, [name for name in names if name != MANIFEST])
