# SPDX-License-Identifier: Apache-2.0
"""Retention of checkpoints: the rule of `keep=`, and deletions by a writer with the lock.

In a store without renames, a save overwrites no object but the manifest, which appears atomically. So a folder holds
the former checkpoint of its step until it holds the new one. Marked objects that no manifest lists are left by dead
writers.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Set
from typing import Literal, cast, get_args

import msgspec

from accel.checkpoint._directory import committed, is_committed, is_exactly_ours, manifest_of
from accel.checkpoint._manifest import MANIFEST, read_manifest, step_of
from accel.errors import AccelError, CheckpointError, ConfigError, check_choice
from accel.storage import Place, as_place, remove_flat

BestMode = Literal["min", "max"]

_MARKED = re.compile(
    r"(tensors-[0-9]+-of-[0-9]+|share-[0-9]+)-(?P<mark>[0-9a-f]{16})\.(safetensors|json|beat)", re.ASCII
)


class Keep(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """A rule for the checkpoints to keep after a save: those of any field. The others are deleted.

    Attributes:
        newest: number of newest checkpoints, the one just saved included; 1 or above.
        every: keep all steps that are multiples of this number; None for none.
        best: number of checkpoints with the best metric, the newer of equal ones; 0 for none.
        by: name of the metric, one of `save_state(metrics=)`.
        mode: "min" or "max", the best value of the metric.
    """

    newest: int = 1
    every: int | None = None
    best: int = 0
    by: str = ""
    mode: BestMode = "min"


def check_keep(keep: int | Keep | None) -> Keep | None:
    """Return the argument `keep=` as a record; None to keep all.

    Raises:
        ConfigError: a number is out of range, or `best` and `by` do not go together.
    """
    if keep is None:
        return None
    asked = keep if isinstance(keep, Keep) else Keep(newest=keep)
    where = "save_state, keep="
    if type(asked.newest) is not int or asked.newest < 1:
        expected = f"{'newest' if asked is keep else 'keep'} of 1 or above, or keep=None to keep all"
        raise ConfigError("no checkpoint would stay", expected=expected, got=repr(asked.newest), where=where)
    if asked.every is not None and (type(asked.every) is not int or asked.every < 1):
        raise ConfigError("not a distance of steps", expected="every of 1 or above", got=repr(asked.every), where=where)
    if type(asked.best) is not int or asked.best < 0:
        raise ConfigError("not a number of checkpoints", expected="best from 0", got=repr(asked.best), where=where)
    if (asked.best > 0) != (asked.by != ""):
        fix = "Write Keep(best=1, by='loss'), and save_state(..., metrics={'loss': loss})."
        raise ConfigError("best= and by= need each other", got=repr(asked), where=where, fix=fix)
    check_choice(asked.mode, get_args(BestMode), "unknown mode", where=where)
    return asked


def check_metrics(metrics: Mapping[str, float] | None, keep: Keep | None) -> dict[str, float]:
    """Return metrics as they are stored.

    Raises:
        ConfigError: a metric is no finite number, or that of `keep` is missing.
    """
    where = "save_state, metrics="
    for name, value in (metrics or {}).items():
        if not _is_comparable(value):
            raise ConfigError(
                f"the metric {name!r} cannot be compared",
                expected="a finite number",
                got=repr(value),
                where=where,
                fix="Leave it out: a checkpoint without it is never among the best. Of a tensor, pass `.item()`.",
            )
    if metrics is not None and keep is not None and keep.best and keep.by not in metrics:
        raise ConfigError("the metric to keep by is missing", expected=keep.by, got=", ".join(metrics), where=where)
    return {name: float(value) for name, value in (metrics or {}).items()}


def plan_keep(saved: Mapping[int, Mapping[str, float]], current: int, keep: Keep) -> frozenset[int]:
    """Return the steps that stay.

    Args:
        saved: metrics of all checkpoints, by step.
        current: the step just saved, which always stays.
        keep: the rule for the others.
    """
    others = sorted(saved.keys() - {current}, reverse=True)
    stay = {current, *others[: keep.newest - 1]}
    if keep.every is not None:
        stay |= {step for step in saved if step % keep.every == 0}
    sign = 1 if keep.mode == "min" else -1
    rated = sorted((sign * metrics[keep.by], -step) for step, metrics in saved.items() if keep.by in metrics)
    stay |= {-step for _, step in rated[: keep.best]}
    return frozenset(stay)


def sweep(out: Place, spare: str = "") -> None:
    """Remove half-written stages but `spare`, and folders moved aside. Needs the lock, as their writers are gone."""
    for folder in wasteful_steps(out):
        sweep_step(folder)
    for left in out.leftovers():
        step = step_of(left.target)
        if step is None or left.path.name == spare:
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
    """Remove objects of a step's folder that are not part of its checkpoint."""
    try:
        sweep_objects(folder)
    except CheckpointError as error:
        warn("what no checkpoint needs could not be removed from %s: %s", folder, error)


def retain(newest: Place, keep: Keep, common: Set[str] | None = None) -> None:
    """Delete the committed checkpoints that the rule does not keep.

    Args:
        newest: the checkpoint just saved.
        keep: the rule.
        common: names of the older checkpoints that all hosts have, where each has a folder of its own: the rule is for
            them, and others go. None for all.
    """
    current = step_of(newest.name)
    assert current is not None, newest
    try:
        paths = dict(committed(newest.parent))
        rated = {step: at for step, at in paths.items() if common is None or at.name in common or step == current}
        saved: dict[int, Mapping[str, float]] = {step: manifest_of(path, step).metrics for step, path in rated.items()}
    except CheckpointError as error:
        warn("older checkpoints stay in %s: %s", newest.parent, error)
        return
    stay = plan_keep(saved, current, keep)
    for step, path in paths.items():
        if step not in stay:
            discard(path)


def discard(path: Place) -> None:
    """Delete a checkpoint unless it is being read. It is renamed first, so no reader ever finds half of one."""
    if not is_exactly_ours(path):
        warn("%s stays: it holds what accel did not write, or is no valid checkpoint", path)
        return
    try:
        if not path.delete(MANIFEST):
            logging.getLogger("accel.checkpoint").info("%s is being read, and stays until the next save", path)
    except CheckpointError as error:
        warn("%s could not be deleted: %s", path, error)


def wasteful_steps(out: Place) -> list[Place]:
    """List the folders of steps with objects of several saves, or of an uncommitted one."""
    found: list[Place] = []
    for name, inside in sorted(out.tree().items()):
        marks = {match["mark"] for each in inside if (match := _MARKED.fullmatch(each)) is not None}
        if step_of(name) is not None and (len(marks) > 1 or (marks and MANIFEST not in inside)):
            found.append(out / name)
    return found


def sweep_objects(folder: Place, mark: str = "") -> None:
    """Delete the marked objects of a folder that its manifest does not list. Needs the lock.

    Args:
        folder: folder of a step.
        mark: mark of the save; "" for any.

    Raises:
        CheckpointError: the manifest is damaged, and nothing was deleted; or the store failed.
    """
    names = folder.names()
    marked = {name for name in names if _MARKED.fullmatch(name) and mark in name}
    if marked and MANIFEST in names:
        with folder.open() as opened:
            marked -= read_manifest(opened)[0].files.keys()
    folder.remove(sorted(marked))


def warn(text: str, *values: object) -> None:
    """Log a warning of `accel.checkpoint`."""
    logging.getLogger("accel.checkpoint").warning(text, *values)


def _is_comparable(value: object) -> bool:
    return type(value) in (int, float) and abs(cast(float, value)) <= sys.float_info.max
