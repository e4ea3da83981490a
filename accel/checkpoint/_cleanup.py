# SPDX-License-Identifier: Apache-2.0
"""What a writer deletes: what dead writers left, and checkpoints that are not to stay. Only while it holds the lock."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from accel.checkpoint._directory import committed, is_committed, is_exactly_ours, manifest_of, step_of
from accel.checkpoint._keep import Keep, plan_keep
from accel.checkpoint._manifest import MANIFEST
from accel.checkpoint._objects import sweep_objects, wasteful_steps
from accel.errors import AccelError, CheckpointError
from accel.storage import Place, as_place, remove_flat


def sweep(out: Place) -> None:
    """Remove half-written stages, and what was moved aside; who holds the lock knows that their writers are gone."""
    for folder in wasteful_steps(out):
        sweep_step(folder)
    for left in out.leftovers():
        step = step_of(left.target)
        if step is None:
            continue
        target = out / left.target
        try:
            if left.kind == "tmp":
                remove_flat(left.path)
            elif is_committed(target, step):
                discard(as_place(left.path))
            elif is_committed(as_place(left.path), step) and not target.exists():
                left.path.rename(left.path.with_name(left.target))
        except (AccelError, OSError) as error:
            warn("%s was left by a writer that is gone and could not be removed: %s", left.path, error)


def sweep_step(folder: Place) -> None:
    """Remove the objects of a step that its checkpoint does not consist of."""
    try:
        sweep_objects(folder)
    except CheckpointError as error:
        warn("what no checkpoint needs could not be removed from %s: %s", folder, error)


def retain(newest: Place, keep: Keep) -> None:
    """Delete the committed checkpoints that are not to stay beside the one just written."""
    current = step_of(newest.name)
    assert current is not None, newest
    try:
        paths = dict(committed(newest.parent))
        saved: dict[int, Mapping[str, float]] = {step: manifest_of(path, step).metrics for step, path in paths.items()}
    except CheckpointError as error:
        warn("older checkpoints stay in %s: %s", newest.parent, error)
        return
    stay = plan_keep(saved, current, keep)
    for step, path in paths.items():
        if step not in stay:
            discard(path)


def discard(path: Place) -> None:
    """Delete a checkpoint unless it is being read; it loses its name first, so no reader ever finds half of one."""
    if not is_exactly_ours(path):
        warn("%s stays: it holds what accel did not write, or is no valid checkpoint", path)
        return
    try:
        if not path.delete(MANIFEST):
            logging.getLogger("accel.checkpoint").info("%s is being read, and stays until the next save", path)
    except CheckpointError as error:
        warn("%s could not be deleted: %s", path, error)


def warn(text: str, *values: object) -> None:
    """Tell the logger of checkpoints."""
    logging.getLogger("accel.checkpoint").warning(text, *values)
