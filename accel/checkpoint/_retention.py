# SPDX-License-Identifier: Apache-2.0
"""Retention: the rule of `keep=` and its deletions; and checkpoints listed, verified, compared and pruned."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Literal, get_args, overload

import msgspec

from accel.checkpoint._manifest import (
    MANIFEST,
    RANKS,
    Manifest,
    TensorEntry,
    candidates,
    check_bytes,
    committed,
    files_here,
    is_committed,
    is_exactly_ours,
    manifest_of,
    newest_in,
    read_manifest,
    step_of,
    warn_skipped,
)
from accel.errors import AccelError, CheckpointError, ConfigError
from accel.errors._checks import check_choice, check_count
from accel.storage import FileEntry, OpenDirectory, Place, RemotePath, as_place, remove_flat

BestMode = Literal["min", "max"]

_MARKED = re.compile(
    r"(tensors-[0-9]+-of-[0-9]+|share-[0-9]+)-(?P<mark>[0-9a-f]{16})\.(safetensors|json|beat)", re.ASCII
)


_STAYS = "%s stays: it holds what accel did not write, or is no valid checkpoint"


class Keep(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """A rule for the checkpoints to keep after a save: each field keeps some. The others are deleted.

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
    """Return the argument `keep=` as a record, None to keep all; raises `ConfigError` for a rule that cannot be."""
    if keep is None:
        return None
    asked = keep if isinstance(keep, Keep) else Keep(newest=keep)
    where = "save_state, keep="
    expected = f"{'newest' if asked is keep else 'keep'} of 1 or above, or keep=None to keep all"
    check_count(asked.newest, "no checkpoint would be kept", expected=expected, where=where)
    if asked.every is not None:
        check_count(asked.every, "the distance of steps is not valid", expected="every of 1 or above", where=where)
    check_count(asked.best, "the number of checkpoints is not valid", least=0, expected="best from 0", where=where)
    if (asked.best > 0) != (asked.by != ""):
        fix = "Write Keep(best=1, by='loss'), and save_state(..., metrics={'loss': loss})."
        raise ConfigError("best= and by= need each other", got=repr(asked), where=where, fix=fix)
    check_choice(asked.mode, get_args(BestMode), "unknown mode", where=where)
    return asked


def check_metrics(metrics: Mapping[str, float] | None, keep: Keep | None) -> dict[str, float]:
    """Return metrics as they are stored; raises `ConfigError` unless they are finite and the metric of `keep` is
    among them."""
    where = "save_state, metrics="
    for name, value in (metrics or {}).items():
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
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
    """Return the steps that stay, of checkpoints' metrics by step; `current`, just saved, always does."""
    others = sorted(saved.keys() - {current}, reverse=True)
    stay = {current, *others[: keep.newest - 1]}
    if keep.every is not None:
        stay |= {step for step in saved if step % keep.every == 0}
    return frozenset(stay.union(rank_by(saved, keep.by, keep.mode)[: keep.best]))


def rank_by(saved: Mapping[int, Mapping[str, float]], by: str, mode: BestMode) -> list[int]:
    """Return the steps with a metric, the best first, of equal ones the newer; `saved` has metrics by step."""
    sign = 1 if mode == "min" else -1
    rated = sorted((sign * metrics[by], -step) for step, metrics in saved.items() if by in metrics)
    return [-step for _, step in rated]


@overload
def best_checkpoint(out: os.PathLike[str], *, by: str, mode: BestMode = "min", verify: bool = False) -> Path | None: ...


@overload
def best_checkpoint(
    out: str | RemotePath, *, by: str, mode: BestMode = "min", verify: bool = False
) -> Path | RemotePath | None: ...


def best_checkpoint(
    out: str | os.PathLike[str] | RemotePath, *, by: str, mode: BestMode = "min", verify: bool = False
) -> Path | RemotePath | None:
    """Return the committed checkpoint with the best metric, as `Keep(best=1, by=)` keeps it. No communication.

    Of equal ones it is the newer. A checkpoint without the metric is never the best. A damaged one is skipped with a
    warning of the logger `accel.checkpoint`.

    Args:
        out: folder or URL as for `save_state`; it need not exist.
        by: name of the metric, one of `save_state(metrics=)`.
        mode: "min" or "max", the best value of the metric.
        verify: whether to read every file and skip a folder with changed bytes, as in `latest_checkpoint`.

    Returns:
        The checkpoint's folder; None if no checkpoint has the metric.

    Raises:
        CheckpointError: the folder cannot be read.
        ConfigError: no name of a metric, or another mode.

    Examples:
        >>> for step, loss in enumerate([0.5, 0.25, 0.75]):
        ...     path = accel.save_state(ctx, "runs/demo", items, step=step, metrics={"loss": loss})
        >>> accel.checkpoint.best_checkpoint("runs/demo", by="loss").name
        'step-00000001'
    """
    if not isinstance(by, str) or not by:  # pyright: ignore[reportUnnecessaryIsInstance]
        fix = 'Write best_checkpoint(out, by="loss").'
        raise ConfigError("the name of the metric is not valid", got=repr(by), where="best_checkpoint, by=", fix=fix)
    check_choice(mode, get_args(BestMode), "unknown mode", where="best_checkpoint, mode=")
    folder = as_place(out)
    best: Place | None = None
    seen = None
    look = folder.listed()
    while (found := candidates(look) if look.exists() else []) != seen:  # a writer may replace or delete some meanwhile
        best = _best_of([(step, path) for step, _, path, _ in found], by, mode, verify=verify)
        seen = found
        look = folder.listed()
    return None if best is None else best.path


def _best_of(found: Sequence[tuple[int, Place]], by: str, mode: BestMode, *, verify: bool) -> Place | None:
    """Return the folder with the best metric that can be read."""
    whole: dict[int, tuple[Place, Manifest]] = {}
    for step, path in found:
        if step in whole:
            continue
        try:
            whole[step] = path, manifest_of(path, step)
        except CheckpointError as error:
            warn_skipped(path, error)
    for step in rank_by({step: manifest.metrics for step, (_, manifest) in whole.items()}, by, mode):
        path, manifest = whole[step]
        try:
            if verify:
                check_bytes(path, manifest)
        except CheckpointError as error:
            warn_skipped(path, error)
        else:
            return path
    return None


def sweep(out: Place, spare: str = "") -> None:
    """Remove half-written stages but `spare`, and folders moved aside. Needs the lock, as their writers are gone."""
    try:
        # parts of an unfinished upload are in no listing, but cost storage
        out.abort_uploads()
    except CheckpointError as error:
        warn("unfinished uploads of dead writers stay in %s: %s", out, error)
    # a store has no rename: leftovers of a dead writer are among the objects of the step
    for folder in wasteful_steps(out):
        sweep_step(folder)
    for left in out.leftovers():
        step = step_of(left.target)
        # folders of others, and the stage of the save that sweeps
        if step is None or left.path.name == spare:
            continue
        target = out / left.target
        try:
            if left.kind == "tmp":
                remove_flat(left.path)
            elif is_committed(target, step):
                # its place is taken by a whole one, so nothing needs it
                discard(as_place(left.path))
            elif is_committed(as_place(left.path), step) and not target.exists():
                # its writer died between two renames: the former checkpoint gets its name back
                left.path.rename(left.path.with_name(left.target))
        except (AccelError, OSError) as error:
            # leftovers cost room, but no save fails by them
            warn("%s was left by a writer that is gone and could not be removed: %s", left.path, error)


def sweep_step(folder: Place) -> None:
    """Remove objects of a step's folder that are not part of its checkpoint."""
    try:
        sweep_objects(folder)
    except CheckpointError as error:
        warn("what no checkpoint needs could not be removed from %s: %s", folder, error)


def retain(newest: Place, keep: Keep, older: Set[str] | None = None) -> None:
    """Delete the committed checkpoints that the rule does not keep, after the commit of `newest`. `older` are names of
    the older checkpoints that the rule is for, where others go; None for all."""
    current = step_of(newest.name)
    assert current is not None, newest
    try:
        if listed := newest.parent.inside():
            _retain_in_store(listed, current, keep)
            return
        # damaged ones are neither counted nor deleted: their files may yet be of use
        paths = dict(committed(newest.parent))
        rated = {step: at for step, at in paths.items() if older is None or at.name in older or step == current}
        saved: dict[int, Mapping[str, float]] = {step: manifest_of(path, step).metrics for step, path in rated.items()}
    except CheckpointError as error:
        # the save has committed; an error now would call it failed
        warn("older checkpoints stay in %s: %s", newest.parent, error)
        return
    stay = plan_keep(saved, current, keep)
    for step, path in paths.items():
        if step not in stay:
            discard(path)


def _retain_in_store(listed: Mapping[str, Place], current: int, keep: Keep) -> None:
    """Delete as `retain` does, and read no more manifests than the rule needs: each takes a request."""
    paths = {step: path for name, path in listed.items() if (step := step_of(name)) is not None}
    paths = {step: path for step, path in paths.items() if MANIFEST in path.names()}
    # metrics are in the manifests, so the best take a request for each
    if keep.best:
        whole = {step: path for step, path in paths.items() if is_committed(path, step)}
        stay = plan_keep({step: manifest_of(path, step).metrics for step, path in whole.items()}, current, keep)
    else:
        others = sorted(paths.keys() - {current}, reverse=True)
        stay = {current, *(step for step in others if keep.every is not None and step % keep.every == 0)}
        whole = 1
        for step in others:
            if len(others) >= keep.newest and whole == keep.newest:
                break
            stay.add(step)  # a damaged one stays, too, and does not count
            whole += len(others) >= keep.newest and is_committed(paths[step], step)
    for step, path in sorted(paths.items()):
        if step not in stay:
            _discard_listed(path, step)


def _discard_listed(path: Place, step: int) -> None:
    """Delete a checkpoint of a store; what is damaged or another step's stays, as what holds files of others."""
    if is_exactly_ours(path, step):
        _delete(path)
    elif is_committed(path, step):
        warn(_STAYS, path)


def discard(path: Place) -> None:
    """Delete a checkpoint unless it is being read. It is renamed first, so no reader ever finds half of one."""
    if not is_exactly_ours(path):
        warn(_STAYS, path)
        return
    _delete(path)


def _delete(path: Place) -> None:
    try:
        # its name goes first, or its manifest in a store: nobody takes the rest for a checkpoint
        if not path.delete(MANIFEST):
            logging.getLogger("accel.checkpoint").info("%s is being read, and stays until the next save", path)
    except CheckpointError as error:
        warn("%s could not be deleted: %s", path, error)


def wasteful_steps(out: Place) -> list[Place]:
    """List the folders of steps with objects of several saves, or of an uncommitted one."""
    found: list[Place] = []
    for name, folder in sorted(out.inside().items()):
        inside = folder.names()
        marks = {match["mark"] for each in inside if (match := _MARKED.fullmatch(each)) is not None}
        if step_of(name) is not None and (len(marks) > 1 or (marks and MANIFEST not in inside)):
            found.append(folder)
    return found


def sweep_objects(folder: Place, mark: str = "") -> None:
    """Delete the marked objects of a step's folder that its manifest does not list. Needs the lock. Of one save, by its
    `mark`, or of any. With a damaged manifest nothing is deleted, and it raises."""
    names = folder.names()
    marked = {name for name in names if _MARKED.fullmatch(name) and mark in name}
    # without a manifest no object is of a checkpoint, and all go
    if marked and MANIFEST in names:
        with folder.open() as opened:
            marked -= read_manifest(opened)[0].files.keys()
    folder.remove(sorted(marked))


def warn(text: str, *values: object) -> None:
    """Log a warning of `accel.checkpoint`."""
    logging.getLogger("accel.checkpoint").warning(text, *values)


class FoundCheckpoint(msgspec.Struct, frozen=True):
    """A folder that has, or had, the name of a checkpoint."""

    path: Place  # the folder
    size: int  # bytes of its files
    changed: float  # time of the last write, in seconds since 1970
    manifest: Manifest | None  # manifest of a committed checkpoint; None otherwise
    problem: str  # reason why the folder is no checkpoint; "" for one
    is_busy: bool = False  # whether a process writes, moves or deletes it; on another host, it may have ended


def survey(out: Place) -> list[FoundCheckpoint]:
    """List the checkpoints of a run by step, with broken ones and remains of writers."""
    named = [(step, out / name) for name in out.names() if (step := step_of(name)) is not None]
    found: list[FoundCheckpoint] = []
    for step, path in sorted(named):
        try:
            found.append(_look(path, manifest_of(path, step), ""))
        except CheckpointError as error:
            found += _look_again(path, error.problem)
    for left in out.leftovers():
        if step_of(left.target) is not None:
            kind = "being written or deleted" if left.kind == "tmp" else "moved aside"
            problem = f"{kind}, by a process that is gone" if left.dead else kind
            found += _look_again(as_place(left.path), problem, is_busy=not left.dead)
    return found


def _look_again(path: Place, problem: str, *, is_busy: bool = False) -> list[FoundCheckpoint]:
    """Return a folder that is no checkpoint; none if it went since it was listed, as a run deletes its old ones."""
    try:
        return [msgspec.structs.replace(_look(path, None, problem), is_busy=is_busy)] if path.exists() else []
    except CheckpointError:
        if path.exists():
            raise
        return []


def find_checkpoint(path: Place) -> Place:
    """Return the checkpoint at a path: a checkpoint's folder itself, or the newest of a run's."""
    with path.open() as folder:
        if MANIFEST in folder.names():
            return path
    if (newest := newest_in(path)) is None:
        raise CheckpointError(
            "the folder is neither a checkpoint nor a run",
            expected=f"a folder with {MANIFEST}, or one that was given to save_state",
            where=str(path),
            fix="See `accel checkpoint ls`.",
        )
    return newest


def verify(path: Place, advance: Callable[[int], object]) -> list[str]:
    """Compare every byte of a checkpoint with the manifest's digests; return problems by file. `advance` gets the
    number of bytes read since the last call."""
    problems: list[str] = []
    try:
        with path.open() as folder:
            manifest, _ = read_manifest(folder)
            for name, entry in sorted(files_here(folder, manifest).items()):
                try:
                    check_file(folder, name, entry, advance)
                except CheckpointError as error:
                    problems.append(error.problem)
    except CheckpointError as error:
        problems.append(error.problem)
    return problems


def compare(one: Manifest, other: Manifest) -> list[str]:
    """List differences of two checkpoints, a line each, without reading tensors."""
    lines = [f"{name}: {a} | {b}" for name, a, b in _facts(one, other) if a != b]
    lines += _names("item", one.items, other.items)
    for name in sorted(one.items.keys() & other.items.keys()):
        if one.items[name] != other.items[name]:
            lines.append(f"item {name}: {_item(one, name)} | {_item(other, name)}, of another value")
    tensors = all_tensors(one), all_tensors(other)
    lines += _names("tensor", *tensors)
    for name in sorted(tensors[0].keys() & tensors[1].keys() - {RANKS}):
        a = describe(tensors[0][name])
        b = describe(tensors[1][name])
        if a != b:
            lines.append(f"tensor {name}: {a} | {b}")
    return lines


def all_tensors(manifest: Manifest) -> dict[str, TensorEntry]:
    """Return every tensor by name, tied ones under each of theirs."""
    return manifest.tensors | {name: manifest.tensors[target] for name, target in manifest.aliases.items()}


def describe(entry: TensorEntry) -> str:
    """Return a tensor's dtype and shape."""
    return f"{entry.dtype} {list(entry.shape)}"


def prune(out: Place, keep: Keep, *, dry_run: bool = False) -> list[Place]:
    """Delete the committed checkpoints that a rule does not keep, never files of others; return those, oldest first."""
    lock = None if dry_run else out.lock()
    try:
        paths = dict(committed(out))
        if not paths:
            return []
        saved: dict[int, Mapping[str, float]] = {step: manifest_of(path, step).metrics for step, path in paths.items()}
        stay = plan_keep(saved, max(paths), keep)
        gone = [path for step, path in sorted(paths.items()) if step not in stay]
        if not dry_run:
            for path in gone:
                discard(path)
        # a reader that holds one open keeps it
        left = set[str]() if dry_run else set(out.names())
        return [path for path in gone if path.name not in left]
    finally:
        if lock is not None:
            lock.release()


def check_file(folder: OpenDirectory, name: str, entry: FileEntry, advance: Callable[[int], object] | None) -> None:
    """Compare all of a file's bytes with its digests."""
    folder.check_size(name, entry.size)
    folder.check_all([(name, span) for span in entry.spans()], advance)


def _look(path: Place, manifest: Manifest | None, problem: str) -> FoundCheckpoint:
    size, changed = path.usage()
    return FoundCheckpoint(path, size, changed, manifest, problem)


def _facts(one: Manifest, other: Manifest) -> list[tuple[str, object, object]]:
    names = ("format", "accel", "torch", "step", "world_size", "metrics")
    return [(name, getattr(one, name), getattr(other, name)) for name in names]


def _names(what: str, one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    only = [f"{what} {name}: only in the first" for name in sorted(one.keys() - other.keys())]
    return only + [f"{what} {name}: only in the second" for name in sorted(other.keys() - one.keys())]


def _item(manifest: Manifest, name: str) -> str:
    return f"{manifest.items[name].kind} {manifest.items[name].type}"
