# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a store without renames: objects under names that no save has twice, and the manifest last, as commit.

A save never writes over an object but the manifest, which appears at once. So a folder holds the former checkpoint of
its step until it holds the new one, and objects with a mark that no manifest lists are what dead writers left.
"""

from __future__ import annotations

import re

from accel.checkpoint._directory import read_manifest, step_of
from accel.checkpoint._manifest import MANIFEST
from accel.storage import Place

_MARKED = re.compile(
    r"(tensors-[0-9]+-of-[0-9]+|share-[0-9]+)-(?P<mark>[0-9a-f]{16})\.(safetensors|json|beat)", re.ASCII
)


def wasteful_steps(out: Place) -> list[Place]:
    """List the folders of steps that hold objects of more than one save, or of one that has not committed."""
    found: list[Place] = []
    for name, inside in sorted(out.tree().items()):
        marks = {match["mark"] for each in inside if (match := _MARKED.fullmatch(each)) is not None}
        if step_of(name) is not None and (len(marks) > 1 or (marks and MANIFEST not in inside)):
            found.append(out / name)
    return found


def sweep_objects(folder: Place, mark: str = "") -> None:
    """Delete the marked objects of a folder that its manifest does not list; who holds the lock knows them to be waste.

    Args:
        folder: of a step.
        mark: of the save whose objects these are; "" for any.

    Raises:
        CheckpointError: the manifest is damaged, and so nothing is deleted; or the store failed.
    """
    names = folder.names()
    marked = {name for name in names if _MARKED.fullmatch(name) and mark in name}
    if marked and MANIFEST in names:
        with folder.open() as opened:
            marked -= read_manifest(opened)[0].files.keys()
    folder.remove(sorted(marked))
