# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tensors put together offline, and a model of it written for other libraries."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path
from typing import cast

import torch

from accel.checkpoint._manifest import RANKS, Manifest
from accel.checkpoint._survey import all_tensors, check_file, manifest_of
from accel.errors import CheckpointError, did_you_mean
from accel.storage import (
    encode_index,
    file_names,
    make_folder,
    open_directory,
    parse_size,
    plan_shards,
    publish_weights,
    read_tensors,
    remove_flat,
    stage_files,
    take_lock,
    write_tensors,
)

Advance = Callable[[int], object]


def merge(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    item: str = "model",
    max_shard_size: int | str = "5GB",
    advance: Advance | None = None,
) -> Path:
    """Write a model of a checkpoint as safetensors that `from_pretrained` of Hugging Face's libraries loads.

    One process does it, without a process group, in memory for one file. Every file that is read is checked. Tied
    tensors are written under each of their names, since nothing in a checkpoint tells which of them readers look for.

    Args:
        path: the checkpoint's folder.
        folder: gets what `save_model` writes; made if it is missing.
        item: the name that the model was saved by.
        max_shard_size: as for `save_model`.
        advance: called with numbers of bytes that have been read, for a progress bar.

    Returns:
        The folder.

    Raises:
        CheckpointError: no checkpoint, a damaged one, no such item, or one that is no module; or the disk failed.
        ConfigError: `max_shard_size` is no size.
    """
    source, target, limit = Path(path), Path(folder), parse_size(max_shard_size, "merge, max_shard_size=")
    manifest = manifest_of(source)
    names = _names(manifest, item, source)
    entries = manifest.tensors
    sizes = {name: math.prod(entries[key].shape) * _dtype(entries[key].dtype).itemsize for name, key in names.items()}
    shards = plan_shards(sizes, limit)
    files = file_names(len(shards))
    make_folder(target)
    with contextlib.ExitStack() as held:
        held.callback(take_lock(target).release)
        read = held.enter_context(opened_tensors(source, manifest, set(names.values()), advance))
        stage = stage_files(target / "model")
        try:
            for file, shard in zip(files, shards, strict=True):
                write_tensors(stage, file, {name: read(names[name]) for name in shard}, {"format": "pt"})
            publish_weights(stage, files, encode_index(shards, sizes) if len(shards) > 1 else None)
        except BaseException:
            with contextlib.suppress(CheckpointError):  # a disk that fails: the first error is the one to tell
                remove_flat(stage)
            raise
    return target


@contextlib.contextmanager
def opened_tensors(
    path: Path, manifest: Manifest, names: Collection[str], advance: Advance | None = None
) -> Generator[Callable[[str], torch.Tensor]]:
    """Check the files of a checkpoint that hold some tensors, and give what reads these one at a time.

    What is read is a view on a file where the tensor is in one piece, and a new tensor where it is in several.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    needed = {piece.file for name in names for piece in manifest.tensors[name].pieces}
    with open_directory(path) as folder:
        files: dict[str, dict[str, torch.Tensor]] = {}
        for file in sorted(needed):
            data = check_file(folder, file, manifest.files[file], advance or (lambda _: None))
            files[file] = read_tensors(data, str(path / file))
        yield lambda name: _assemble(manifest, name, files, path)


def differing_values(one: Path, other: Path, *, advance: Advance | None = None) -> list[str]:
    """Tell which tensors that two checkpoints both hold, in one shape and dtype, have other values; a line each.

    Raises:
        CheckpointError: one of them is no checkpoint, or damaged.
    """
    lines: list[str] = []
    manifests = manifest_of(one), manifest_of(other)
    names = sorted(manifests[0].tensors.keys() & manifests[1].tensors.keys() - {RANKS})
    with (
        opened_tensors(one, manifests[0], names, advance) as read_one,
        opened_tensors(other, manifests[1], names, advance) as read_other,
    ):
        for name in names:
            a, b = read_one(name), read_other(name)
            if (a.dtype, a.shape) == (b.dtype, b.shape) and not torch.equal(a, b):
                count, most = int((a != b).sum()), ""
                if a.is_floating_point() or a.is_complex():
                    wide = torch.complex128 if a.is_complex() else torch.float64
                    most = f", by at most {float((a.to(wide) - b.to(wide)).abs().max()):.3g}"
                lines.append(f"tensor {name}: {count} of {a.numel()} values differ{most}")
    return lines


def _assemble(
    manifest: Manifest, name: str, files: Mapping[str, Mapping[str, torch.Tensor]], path: Path
) -> torch.Tensor:
    entry = manifest.tensors[name]
    dtype = _dtype(entry.dtype)
    if sum(math.prod(piece.shape) for piece in entry.pieces) != math.prod(entry.shape):
        raise CheckpointError(f"the pieces of tensor {name!r} do not make it whole", where=str(path))
    whole = None
    for piece in entry.pieces:
        stored = files[piece.file].get(name)
        if stored is not None and dtype == torch.complex128 and stored.dtype == torch.float64:
            stored = torch.view_as_complex(stored)
        if stored is None or (stored.dtype, tuple(stored.shape)) != (dtype, piece.shape):
            raise CheckpointError(f"{piece.file}: tensor {name!r} is not what the manifest lists", where=str(path))
        if piece.shape == entry.shape:
            return stored
        whole = torch.empty(entry.shape, dtype=dtype) if whole is None else whole
        box = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.shape, strict=True))
        whole[box].copy_(stored)
    return whole if whole is not None else torch.empty(entry.shape, dtype=dtype)


def _names(manifest: Manifest, item: str, path: Path) -> dict[str, str]:
    """A model's tensors by name, each with its name in the checkpoint."""
    found = manifest.items.get(item)
    modules = sorted(name for name, each in manifest.items.items() if each.kind == "module")
    if found is None or found.kind != "module":
        raise CheckpointError(
            "not a model in this checkpoint",
            expected=" or ".join(modules) or "a checkpoint that holds a model",
            got=repr(item) if found is None else f"{item!r}, of kind {found.kind}",
            where=str(path),
            fix=did_you_mean(item, modules) if modules else "Save the module as an item.",
        )
    value: object = found.value
    extras = sorted(cast("dict[str, object]", value)) if isinstance(value, dict) else []
    if extras:
        logging.getLogger("accel.checkpoint").warning("left out, as extra state is no tensor: %s", ", ".join(extras))
    names: dict[str, str] = {}
    for full in sorted(all_tensors(manifest)):
        name = full.removeprefix(f"{item}.")
        if name == full or any(name == extra or name.startswith((f"{extra}.", f"{extra}[")) for extra in extras):
            continue
        names[name] = manifest.aliases.get(full, full)
    if not names:
        raise CheckpointError("a model without tensors", where=f"{path}, item {item}")
    if wrong := next((name for name, key in names.items() if manifest.tensors[key].dtype == "complex128"), None):
        raise CheckpointError("safetensors holds no complex128", where=f"{path}, {item}.{wrong}")
    return names


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError("a dtype that torch does not have", got=repr(name))
    return dtype
