# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tensors put together offline, and a model of it written for other libraries."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

import torch

from accel.checkpoint._manifest import RANKS, Manifest, is_object, manifest_of
from accel.checkpoint._read import Saved, open_checkpoint
from accel.checkpoint._retention import all_tensors
from accel.errors import CheckpointError
from accel.errors._checks import did_you_mean
from accel.storage import (
    Place,
    RemotePath,
    as_place,
    encode_index,
    file_names,
    local_target,
    parse_size,
    plan_shards,
    publish_weights,
    staged,
    write_tensors,
)

Advance = Callable[[int], object]


def merge(
    path: str | os.PathLike[str] | RemotePath,
    folder: str | os.PathLike[str],
    *,
    item: str = "model",
    max_shard_size: int | str = "5GB",
    advance: Advance | None = None,
) -> Path:
    """Write a model of a checkpoint as safetensors that `from_pretrained` of Hugging Face's libraries loads.

    Runs in one process, without a process group, in memory for one file. Every file that is read is checked. Tied
    tensors are written under each of their names, as readers may look for any of them.

    Args:
        path: the checkpoint's folder or URL.
        folder: output folder, as for `save_model`; made if it is missing.
        item: name of the model's item.
        max_shard_size: as for `save_model`.
        advance: called with numbers of bytes that have been read, for a progress bar.

    Returns:
        The folder.

    Raises:
        CheckpointError: no checkpoint, a damaged one, no such item, or one that is no module; or the disk failed.
        ConfigError: the folder is a URL, or `max_shard_size` is no size.
    """
    source = as_place(path)
    target = local_target(folder, "merge, folder")
    limit = parse_size(max_shard_size, "merge, max_shard_size=")
    names = _names(manifest_of(source), item, source)
    # bytes first: a damaged weight must not end in a file that looks whole
    with open_verified(source, names.values(), advance) as saved:
        sizes = {name: saved.stub(full).nbytes for name, full in names.items()}
        shards = plan_shards(sizes, limit)
        files = file_names(len(shards))
        # the files appear in the folder together, once all are flushed
        with staged(target / "model") as stage:
            for file, shard in zip(files, shards, strict=True):
                # the tensors of one file at a time bound the memory
                write_tensors(stage, file, {name: saved.read(names[name]) for name in shard}, {"format": "pt"})
            publish_weights(stage, files, encode_index(shards, sizes) if len(shards) > 1 else None)
    return target


@contextlib.contextmanager
def open_verified(path: Place, names: Iterable[str], advance: Advance | None = None) -> Generator[Saved]:
    """Hold a checkpoint open after checking every byte of the files that hold some of its tensors."""
    with open_checkpoint(path) as saved:
        files = {piece.file for name in names for piece in saved.entries[name].pieces}
        saved.verify(saved.spans(sorted(files)), advance)
        yield saved


def differing_values(one: Place, other: Place, *, advance: Advance | None = None) -> list[str]:
    """List tensors of the same shape and dtype in two checkpoints with different values, a line each."""
    lines: list[str] = []
    manifests = manifest_of(one), manifest_of(other)
    names = sorted(manifests[0].tensors.keys() & manifests[1].tensors.keys() - {RANKS})
    with open_verified(one, names, advance) as saved_one, open_verified(other, names, advance) as saved_other:
        for name in names:
            a = saved_one.read(name)
            b = saved_other.read(name)
            if (a.dtype, a.shape) == (b.dtype, b.shape) and not torch.equal(a, b):
                count, most = int((a != b).sum()), ""
                if a.is_floating_point() or a.is_complex():
                    wide = torch.complex128 if a.is_complex() else torch.float64
                    most = f", by at most {float((a.to(wide) - b.to(wide)).abs().max()):.3g}"
                lines.append(f"tensor {name}: {count} of {a.numel()} values differ{most}")
    return lines


def _names(manifest: Manifest, item: str, path: Place) -> dict[str, str]:
    """Return a model's tensors by name, each with its name in the checkpoint."""
    found = manifest.items.get(item)
    modules = sorted(name for name, each in manifest.items.items() if each.kind == "module")
    if found is None or found.kind != "module":
        raise CheckpointError(
            "the item is not a model in this checkpoint",
            expected=" or ".join(modules) or "a checkpoint that holds a model",
            got=repr(item) if found is None else f"{item!r}, of kind {found.kind}",
            where=str(path),
            fix=did_you_mean(item, modules) if modules else "Save the module as an item.",
        )
    extras = sorted(found.value) if is_object(found.value) else []
    if extras:
        logging.getLogger("accel.checkpoint").warning("left out, as extra state is no tensor: %s", ", ".join(extras))
    names = dict[str, str]()
    tensors = all_tensors(manifest)
    for full in sorted(tensors):
        name = full.removeprefix(f"{item}.")
        if name == full or any(name == extra or name.startswith((f"{extra}.", f"{extra}[")) for extra in extras):
            continue
        names[name] = full
    if not names:
        raise CheckpointError("the model has no tensors", where=f"{path}, item {item}")
    if wrong := next((full for full in names.values() if tensors[full].dtype == "complex128"), None):
        raise CheckpointError("safetensors holds no complex128", where=f"{path}, {wrong}")
    return names
