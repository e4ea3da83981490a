# SPDX-License-Identifier: Apache-2.0
"""Conversion between checkpoints of `torch.distributed.checkpoint` and accel's; by one process, offline."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from accel.checkpoint._encoding import decode, encode
from accel.checkpoint._live_tensors import check_tensor
from accel.checkpoint._manifest import RANKS, Item, ItemKind, is_object, tensors_in
from accel.checkpoint._read import Saved, open_checkpoint
from accel.checkpoint._save import save
from accel.checkpoint._snapshot import Content
from accel.context import single
from accel.errors import CheckpointError
from accel.errors._checks import disk_errors
from accel.items._optimizer import OptimizerValue, ParameterGroup, ParamFacts
from accel.items._rng import capture_row
from accel.items._source import facts
from accel.items.foreign._described import Described, describe_pickle
from accel.opening import read_regular
from accel.storage import (
    OpenDirectory,
    RemotePath,
    as_place,
    commit,
    local_target,
    open_directory,
    staged,
    storable_dtype,
)

METADATA = ".metadata"
_MOST_METADATA = 1_000_000_000  # bytes

_PLACE = "torch.distributed.checkpoint."


@dataclass(frozen=True, slots=True)
class _StoredBytes:
    """Position of a piece's bytes, as torch.save wrote them."""

    file: str
    start: int
    end: int


def read_dcp(path: Path) -> dict[str, Any]:
    """Return the state in a folder of `torch.distributed.checkpoint.save`, with whole tensors. Its description, a
    pickle, is read as data; the rest by torch's weights-only loader."""
    metadata = path / METADATA
    try:
        data = read_regular(metadata, _MOST_METADATA)
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
        raise CheckpointError(f"{name}: the pieces do not cover the tensor", where=str(folder.path))
    whole, filled = torch.empty(shape, dtype=dtype), 0
    for offsets, sizes in pieces.items():
        piece = _load(folder, files, name, stored[name, offsets])
        if not isinstance(piece, torch.Tensor) or tuple(piece.shape) != sizes or piece.dtype != dtype:
            raise CheckpointError(f"{name}: a piece does not match {METADATA}", where=str(folder.path))
        target = whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
        if target.shape != piece.shape:
            raise CheckpointError(f"{name}: a piece is outside of the tensor", where=str(folder.path))
        target.copy_(piece)
        filled += piece.numel()
    if filled != whole.numel():
        raise CheckpointError(f"{name}: the pieces do not cover the tensor", where=str(folder.path))
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
    described = cast(Any, fields["dtype"] if isinstance(fields, dict) else fields[0])  # a tuple, of torch's making
    dtype = storable_dtype(str(described.name).removeprefix("torch."))
    if dtype is None:
        raise TypeError(f"the dtype {described.name}")
    return dtype


def _put(state: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        state = state.setdefault(part, {})
    state[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """Turn dicts with keys from 0 into lists, which torch flattens by position."""
    if not isinstance(value, dict):
        return value
    fields = {key: _with_lists(held) for key, held in cast("dict[Any, Any]", value).items()}
    counted = fields and all(type(key) is int for key in fields) and sorted(fields) == list(range(len(fields)))
    return [fields[at] for at in range(len(fields))] if counted else fields


def import_dcp(
    folder: str | os.PathLike[str], out: str | os.PathLike[str] | RemotePath, *, step: int
) -> Path | RemotePath:
    """Convert a folder of `torch.distributed.checkpoint.save` to a checkpoint. No communication.

    Each name at the top becomes an item: a dict of tensors a module; the state dict of an optimizer that names its
    parameters (as torch's `get_state_dict` gives) an optimizer; other dicts the state of an object with
    `load_state_dict`; the rest plain values. A folder that holds a single state dict becomes the item "model". Random
    streams begin anew. Everything is in memory at once.

    Args:
        folder: folder with a `.metadata` file, which is read as data: nothing in its pickle is imported or called.
        out: folder or URL of the run's checkpoints.
        step: step of the checkpoint.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the folder is damaged, holds more than weights and plain values, or the disk failed.
    """
    state = read_dcp(Path(folder))
    if all(isinstance(value, torch.Tensor) for value in state.values()):
        state = {"model": state}
    modules = {name: value for name, value in state.items() if _kind(value) == "module"}
    tensors: dict[str, torch.Tensor] = {}
    items: dict[str, Item] = {}
    for name, value in state.items():
        if not name.isidentifier():
            raise CheckpointError(
                "the name of an item is not valid", expected="an identifier", got=repr(name), where=str(folder)
            )
        kind = _kind(value)
        encoded: Any = {}
        if kind == "module":
            for key, tensor in value.items():
                check_tensor(tensor, f"{name}.{key}")
                tensors[f"{name}.{key}"] = tensor
        elif (names := _parameters(value, modules)) is not None:
            kind, encoded = "optimizer", msgspec.to_builtins(_optimizer(name, value, names, modules, tensors))
        else:
            encoded = encode(value, name, tensors)
        items[name] = Item(kind=kind, type=type(value).__name__ if kind == "value" else "", value=encoded)
    ctx = single()
    content = Content(shared={}, main=tensors, own={}, loose={}, items=items, row=capture_row(ctx, {}))
    return save(ctx, as_place(out), content, step=step, keep=None, metrics={})


def export_dcp(
    path: str | os.PathLike[str] | RemotePath,
    folder: str | os.PathLike[str],
    *,
    advance: Callable[[int], object] | None = None,
) -> Path:
    """Write a checkpoint in the format of `torch.distributed.checkpoint`. No communication.

    Every item is a name at the top: a module its tensors by name, an optimizer its state by the names of its
    parameters, as torch's `set_state_dict` takes them, other items their state. Random streams are left out.
    Everything is in memory at once, and every byte of it is checked.

    Args:
        path: the checkpoint's folder or URL.
        folder: folder to make; must not exist.
        advance: called with numbers of bytes read, for a progress bar.

    Returns:
        The folder.

    Raises:
        CheckpointError: no checkpoint, a damaged one, the folder exists, or the disk failed.
        ConfigError: the folder is a URL.
    """
    import torch.distributed.checkpoint

    target = local_target(folder, "export, folder")
    if os.path.lexists(target):
        raise CheckpointError("exists already", where=str(target), fix="Name a folder that is to be made.")
    with open_checkpoint(as_place(path)) as saved:
        saved.verify(saved.spans(saved.manifest.files), advance)
        state = {name: _exported(saved, name, item) for name, item in saved.manifest.items.items()}
    with staged(target, locks=False) as stage:
        with disk_errors(stage), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group, which is the point
            dcp = cast(Any, torch.distributed.checkpoint)
            dcp.save(state, storage_writer=dcp.FileSystemWriter(stage), no_dist=True)
        _ = commit(stage, target)
    return target


def _kind(value: object) -> ItemKind:
    if not isinstance(value, dict):
        return "value"
    values = cast("dict[object, object]", value)
    plain = all(isinstance(key, str) and isinstance(held, torch.Tensor) for key, held in values.items())
    return "module" if plain and values else "stateful"


def _parameters(value: Any, modules: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, str] | None:
    """Return the full names of an optimizer's parameters, by their names in a state dict; None for another dict."""
    if not is_object(value) or {"state", "param_groups"} - value.keys():
        return None
    names: dict[str, str] = {}
    for group in cast("list[dict[str, list[str]]]", value["param_groups"]):
        for name in group["params"]:
            owners = [module for module, tensors in modules.items() if name in tensors]
            if len(owners) != 1:
                return None
            names[name] = f"{owners[0]}.{name}"
    return names


def _optimizer(
    item: str,
    value: dict[str, Any],
    names: Mapping[str, str],
    modules: Mapping[str, Mapping[str, torch.Tensor]],
    tensors: dict[str, torch.Tensor],
) -> OptimizerValue:
    groups = tuple(
        ParameterGroup(
            params=tuple(names[name] for name in group["params"]),
            options={
                key: encode(option, f"{item}.param_groups[{at}].{key}", tensors)
                for key, option in group.items()
                if key not in ("params", "param_names")
            },
        )
        for at, group in enumerate(value["param_groups"])
    )
    params = {full: ParamFacts(*facts(modules[full.partition(".")[0]][name])) for name, full in names.items()}
    state = {
        names[name]: encode(entries, f"{item}.state.{names[name]}", tensors) for name, entries in value["state"].items()
    }
    return OptimizerValue(groups, params, state, {})


def _exported(saved: Saved, name: str, item: Item) -> Any:
    """Return an item's state in torch's own form."""

    def plain(value: Any) -> Any:
        return decode(value, f"item {name}", {key: saved.read(key) for key in tensors_in(value)})

    if item.kind == "optimizer":
        stored = msgspec.convert(item.value, OptimizerValue)
        groups = [
            {key: plain(option) for key, option in group.options.items()} | {"params": [_bare(p) for p in group.params]}
            for group in stored.groups
        ]
        state = {_bare(full): plain(entries) for full, entries in stored.state.items()}
        return {key: plain(value) for key, value in stored.rest.items()} | {"state": state, "param_groups": groups}
    if item.kind == "module":
        inside = tensors_in(item.value)
        own = [key for key in saved.entries if key.startswith(f"{name}.") and key not in inside and key != RANKS]
        extras = {key: plain(value) for key, value in item.value.items()}
        return {key.removeprefix(f"{name}."): saved.read(key) for key in own} | extras
    return plain(item.value)


def _bare(full: str) -> str:
    """Return a parameter's name without its module's item."""
    return full.partition(".")[2] or full
