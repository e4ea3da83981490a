# SPDX-License-Identifier: Apache-2.0
"""Tensors of files by their headers alone: safetensors, files of torch.save, and checkpoints of accel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch

from accel.bigmodel._dtypes import dtypes, name_of
from accel.checkpoint import Box, Manifest, Strided, StridedPart, all_tensors, in_file
from accel.errors import CheckpointError, ConfigError
from accel.storage import ByteRanges, Header, header_size, read_header


def safetensors_in(ranges: ByteRanges, name: str, where: str) -> dict[str, Strided]:
    """Return the tensors of a safetensors file, in the order of their bytes.

    Raises:
        CheckpointError: the header is damaged, or torch lacks a dtype.
    """
    header = _header(ranges, name, where)
    known = dtypes()
    found: dict[str, Strided] = {}
    for key, entry in header.tensors.items():
        if entry.dtype not in known:
            problem = f"{key!r} has the dtype {entry.dtype}"
            raise CheckpointError(problem, expected=", ".join(sorted(known)), where=where)
        start = header.end + entry.data_offsets[0]
        found[key] = in_file(entry.dtype, entry.shape, known[entry.dtype].itemsize, name, start)
    return found


def pickled_in(path: Path) -> dict[str, Strided]:
    """Return the tensors of a file of torch.save, which is read as weights alone: no code of it runs.

    Raises:
        CheckpointError: the file is damaged, of the format before torch 1.6, or holds other things than tensors.
    """
    fake = import_module("torch._subclasses.fake_tensor").FakeTensorMode()
    try:
        with fake:
            loaded = torch.load(path, weights_only=True)
    except Exception as error:  # whatever torch raises for a file that is none of its own
        fix = "Load it where you trust it, and save its tensors as safetensors."
        raise CheckpointError("cannot be read as weights", got=str(error), where=str(path), fix=fix) from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError("no weights by name", got=type(loaded).__name__, where=str(path))
    found: dict[str, Strided] = {}
    for name, tensor in cast("Mapping[Any, Any]", loaded).items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            got = f"{type(tensor).__name__} under {name!r}"
            fix = "Save the state dict in it alone: torch.save(torch.load(path, weights_only=True)[name], path)."
            fix = fix if isinstance(tensor, Mapping) else "Save its tensors alone, by name."
            raise CheckpointError("not weights by name", expected="a state dict", got=got, where=str(path), fix=fix)
        found[name] = _in_storage(name, tensor, path)
    return found


def checkpoint_tensors(ranges: ByteRanges, manifest: Manifest, where: str) -> dict[str, Strided]:
    """Return the tensors of a module in a checkpoint of accel, by their names in the module.

    The module is the item `model`, or the only module there.

    Raises:
        CheckpointError: a file does not hold what the manifest lists.
        ConfigError: no module, or several of which none is `model`.
    """
    headers = {name: _header(ranges, name, f"{where}/{name}") for name in manifest.files}
    prefix = f"{_module_of(manifest, where)}."
    found: dict[str, Strided] = {}
    for name, entry in all_tensors(manifest).items():
        if not name.startswith(prefix):
            continue
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"tensor {name!r} has the unknown dtype {entry.dtype!r}", where=where)
        stored = manifest.aliases.get(name, name)
        parts: list[StridedPart] = []
        for piece in entry.pieces:
            header = headers[piece.file]
            if stored not in header.tensors:
                raise CheckpointError(f"{piece.file}: tensor {stored!r} is missing", where=where)
            start, stop = header.tensors[stored].data_offsets
            part = in_file("", piece.shape, dtype.itemsize, piece.file, header.end + start).parts[0]
            if piece.box.size * dtype.itemsize != stop - start:
                raise CheckpointError(f"{piece.file}: tensor {stored!r} is not what the manifest lists", where=where)
            parts.append(StridedPart(part.file, part.start, Box(piece.offset, piece.shape), part.strides))
        found[name.removeprefix(prefix)] = Strided(name_of(dtype), entry.shape, tuple(parts))
    return found


def merged(files: Iterable[Mapping[str, Strided]], where: str) -> dict[str, Strided]:
    """Join the tensors of several files.

    Raises:
        CheckpointError: two files hold a tensor of the same name.
    """
    found: dict[str, Strided] = {}
    for tensors in files:
        for name, stored in tensors.items():
            if name in found:
                both = " and ".join(part.file for each in (found[name], stored) for part in each.parts[:1])
                fix = "Name one of the files, or their index."
                raise CheckpointError(f"two files hold {name!r}", got=both, where=where, fix=fix)
            found[name] = stored
    return found


def _header(ranges: ByteRanges, name: str, where: str) -> Header:
    size = ranges.sizes[name]
    end = header_size(ranges.read_bytes(name, 0, min(8, size)), size, where)
    return read_header(memoryview(ranges.read_bytes(name, 0, end)), where, size=size)


def _in_storage(name: str, tensor: torch.Tensor, path: Path) -> Strided:
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if start is None:
        raise CheckpointError(
            "a file of torch.save as before torch 1.6",
            where=str(path),
            fix="Write it anew: torch.save(torch.load(path, weights_only=True), path).",
        )
    itemsize = tensor.element_size()
    strides = tuple(stride * itemsize for stride in tensor.stride())
    box = Box((0,) * tensor.dim(), tuple(tensor.shape))
    part = StridedPart(path.name, start + tensor.storage_offset() * itemsize, box, strides)
    try:
        return Strided(name_of(tensor.dtype), tuple(tensor.shape), (part,) if tensor.numel() else ())
    except ConfigError as error:
        raise CheckpointError(f"{name!r}: {error.problem}", got=error.got, where=str(path)) from error


def _module_of(manifest: Manifest, where: str) -> str:
    modules: list[str] = [name for name, item in manifest.items.items() if item.kind == "module"]
    if "model" in modules:
        return "model"
    if len(modules) != 1:
        raise ConfigError(
            "which module of the checkpoint is meant",
            expected="an item `model`, or one module alone",
            got=", ".join(modules) or "no module",
            where=where,
            fix="Load the item by accel.load_state.",
        )
    return modules[0]
