# SPDX-License-Identifier: Apache-2.0
"""Folders of `torch.distributed.checkpoint`, read without running their pickles."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from accel.errors import CheckpointError
from accel.items.foreign._described import Described, describe_pickle
from accel.storage import OpenDirectory, open_directory, stored_dtype

METADATA = ".metadata"

_PLACE = "torch.distributed.checkpoint."


@dataclass(frozen=True, slots=True)
class _StoredBytes:
    """Position of a piece's bytes, as torch.save wrote them."""

    file: str
    start: int
    end: int


def read_dcp(path: Path) -> dict[str, Any]:
    """Return the state in a folder of `torch.distributed.checkpoint.save`, with whole tensors.

    The folder's own description, a pickle, is read as data; tensors and values by torch's weights-only loader.

    Raises:
        CheckpointError: not such a folder, a damaged one, or one with more than weights and plain values.
    """
    metadata = path / METADATA
    try:
        data = metadata.read_bytes()
    except OSError as error:
        raise CheckpointError(
            "no folder of torch.distributed.checkpoint", expected=f"a folder with {METADATA}", where=str(path)
        ) from error
    try:
        fields = _state(describe_pickle(data, str(metadata)), "metadata.Metadata")
        stored = {_key(index): _stored(info) for index, info in fields["storage_data"].items()}
        paths: Mapping[str, tuple[Any, ...]] = fields.get("planner_data") or {}
        state: dict[Any, Any] = {}
        with open_directory(path) as folder:
            files: dict[str, memoryview] = {}
            for name, described in fields["state_dict_metadata"].items():
                value = _value(folder, files, name, described, stored)
                _put(state, paths.get(name, (name,)), value)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        problem = f"{METADATA}: not what torch.distributed.checkpoint writes: {type(error).__name__}: {error}"
        raise CheckpointError(problem, where=str(path)) from error
    return _with_lists(state)


def _value(
    folder: OpenDirectory,
    files: dict[str, memoryview],
    name: str,
    described: object,
    stored: Mapping[tuple[str, tuple[int, ...] | None], _StoredBytes],
) -> Any:
    """Read a tensor from all its pieces, or another value."""
    if not isinstance(described, Described) or not described.name.endswith("metadata.TensorStorageMetadata"):
        return _load(folder, files, name, stored[name, None])
    fields = _state(described, "metadata.TensorStorageMetadata")
    shape = _size(fields["size"])
    dtype = _dtype(fields["properties"])
    boxes = [_state(chunk, "metadata.ChunkStorageMetadata") for chunk in fields["chunks"]]
    pieces = {_size(box["offsets"]): _size(box["sizes"]) for box in boxes}
    if math.prod(shape) * dtype.itemsize > sum(stored[name, start].end - stored[name, start].start for start in pieces):
        raise CheckpointError(f"{name}: the pieces do not make the tensor whole", where=str(folder.path))
    whole, filled = torch.empty(shape, dtype=dtype), 0
    for offsets, sizes in pieces.items():
        piece = _load(folder, files, name, stored[name, offsets])
        if not isinstance(piece, torch.Tensor) or tuple(piece.shape) != sizes or piece.dtype != dtype:
            raise CheckpointError(f"{name}: a piece is not what {METADATA} says", where=str(folder.path))
        target = whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
        if target.shape != piece.shape:
            raise CheckpointError(f"{name}: a piece lies outside of the tensor", where=str(folder.path))
        target.copy_(piece)
        filled += piece.numel()
    if filled != whole.numel():
        raise CheckpointError(f"{name}: the pieces do not make the tensor whole", where=str(folder.path))
    return whole


def _load(folder: OpenDirectory, files: dict[str, memoryview], name: str, stored: _StoredBytes) -> Any:
    if stored.file not in files:
        files[stored.file] = folder.read(stored.file)
    data = files[stored.file][stored.start : stored.end]
    if len(data) != stored.end - stored.start:
        raise folder.refusal(stored.file, "cut", expected=f"at least {stored.end} bytes")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # damaged or hostile bytes can raise anything
        problem = f"{name} cannot be read without running code from it: {str(error).splitlines()[0]}"
        raise CheckpointError(f"{stored.file}: {problem}", where=str(folder.path)) from error


def _state(described: object, name: str) -> dict[str, Any]:
    if not isinstance(described, Described) or described.name != _PLACE + name:
        raise TypeError(f"{name} is missing")
    return described.state


def _key(index: object) -> tuple[str, tuple[int, ...] | None]:
    fields = _state(index, "metadata.MetadataIndex")
    offset = fields.get("offset")
    return fields["fqn"], None if offset is None else _size(offset)


def _stored(info: object) -> _StoredBytes:
    fields = _state(info, "filesystem._StorageInfo")
    if fields.get("transform_descriptors"):
        raise CheckpointError("compressed or otherwise transformed files are not read", where=fields["relative_path"])
    start, length = fields["offset"], fields["length"]
    if type(start) is not int or type(length) is not int or start < 0 or length < 0:
        raise ValueError("not a range of bytes")
    return _StoredBytes(fields["relative_path"], start, start + length)


def _size(described: object) -> tuple[int, ...]:
    if not isinstance(described, Described) or described.name != "torch.Size" or not described.args:
        raise TypeError("torch.Size is missing")
    sizes: tuple[Any, ...] = described.args[0]
    if any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError("not a size")
    return sizes


def _dtype(properties: object) -> torch.dtype:
    fields: Any = _state(properties, "metadata.TensorProperties")
    described = cast(Any, fields["dtype"] if isinstance(fields, dict) else fields[0])  # a tuple, of its own making
    dtype = getattr(torch, str(described.name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or stored_dtype(dtype) is None:
        raise TypeError(f"the dtype {described.name}")
    return dtype


def _put(state: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        state = state.setdefault(part, {})
    state[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """Turn dicts with keys from 0 into lists, which torch takes apart by position."""
    if not isinstance(value, dict):
        return value
    fields = {key: _with_lists(held) for key, held in cast("dict[Any, Any]", value).items()}
    counted = fields and all(type(key) is int for key in fields) and sorted(fields) == list(range(len(fields)))
    return [fields[at] for at in range(len(fields))] if counted else fields
