# SPDX-License-Identifier: Apache-2.0
"""Checkpoints from outside of a run: listed, verified, compared and pruned."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from accel.checkpoint._directory import committed, manifest_of, newest_in
from accel.checkpoint._manifest import MANIFEST, RANKS, Manifest, TensorEntry, files_here, read_manifest, step_of
from accel.checkpoint._retention import Keep, discard, plan_keep
from accel.errors import CheckpointError
from accel.storage import FileEntry, OpenDirectory, Place, as_place


class FoundCheckpoint(msgspec.Struct, frozen=True):
    """A folder that has, or had, the name of a checkpoint.

    Attributes:
        path: the folder.
        size: bytes of its files.
        changed: time of the last write, in seconds since 1970.
        manifest: manifest of a committed checkpoint; None otherwise.
        problem: reason why the folder is no checkpoint; "" for one.
    """

    path: Place
    size: int
    changed: float
    manifest: Manifest | None
    problem: str


def survey(out: Place) -> list[FoundCheckpoint]:
    """List the checkpoints of a run by step, with broken ones and remains of writers.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    named = [(step, out / name) for name in out.names() if (step := step_of(name)) is not None]
    found: list[FoundCheckpoint] = []
    for step, path in sorted(named):
        try:
            found.append(_look(path, manifest_of(path, step), ""))
        except CheckpointError as error:
            found.append(_look(path, None, error.problem))
    for left in out.leftovers():
        if step_of(left.target) is not None:
            kind = "being written or deleted" if left.kind == "tmp" else "moved aside"
            found.append(_look(as_place(left.path), None, f"{kind}, by a process that is gone" if left.dead else kind))
    return found


def find_checkpoint(path: Place) -> Place:
    """Return the checkpoint at a path: a checkpoint's folder itself, or the newest of a run's.

    Raises:
        CheckpointError: the path is neither.
    """
    with path.open() as folder:
        if MANIFEST in folder.names():
            return path
    if (newest := newest_in(path)) is None:
        raise CheckpointError(
            "no checkpoint, and no folder of any",
            expected=f"a folder with {MANIFEST}, or one that was given to save_state",
            where=str(path),
            fix="See `accel checkpoint ls`.",
        )
    return newest


def verify(path: Place, advance: Callable[[int], object]) -> list[str]:
    """Read every byte of a checkpoint and compare it with the manifest's digests.

    Args:
        path: the checkpoint.
        advance: called with the number of bytes read since the last call.

    Returns:
        Problems, by file; none for a whole checkpoint.
    """
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
    """List differences of two checkpoints, a line each, without reading tensors.

    Lists files with different contents, but not the tensors in them: a digest covers several tensors.
    """
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
    """Delete the committed checkpoints that a rule does not keep; never files of others.

    Args:
        out: the folder of a run's checkpoints.
        keep: rule for the checkpoints to keep, the newest among them.
        dry_run: whether to list only.

    Returns:
        The folders that were deleted, or would be, oldest first.

    Raises:
        CheckpointError: another process is saving into the folder, or the folder cannot be read.
    """
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
        left = set[str]() if dry_run else set(out.names())
        return [path for path in gone if path.name not in left]
    finally:
        if lock is not None:
            lock.release()


def check_file(folder: OpenDirectory, name: str, entry: FileEntry, advance: Callable[[int], object] | None) -> None:
    """Compare all of a file's bytes with its digests.

    Raises:
        CheckpointError: it is missing, of another size, or damaged.
    """
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
