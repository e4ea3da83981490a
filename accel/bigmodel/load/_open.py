# SPDX-License-Identifier: Apache-2.0
"""Weights at a path: its files, their headers, and the names that the model has for their tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

import torch

from accel.bigmodel._arguments import dtypes, name_of
from accel.bigmodel.load._read import FileWeights
from accel.checkpoint import Recipe
from accel.checkpoint._boxes import Box
from accel.checkpoint._manifest import Manifest, manifest_of
from accel.checkpoint._recipes import Strided, StridedPart, apply_recipes, check_recipes, in_file
from accel.checkpoint._retention import all_tensors, find_checkpoint
from accel.errors import CheckpointError, ConfigError
from accel.errors._checks import check_count
from accel.storage import (
    INDEX,
    WEIGHTS,
    ByteRanges,
    Header,
    LocalRanges,
    Place,
    RemotePath,
    RemoteRanges,
    as_place,
    decode_index,
    fetch_header,
)
from accel.tensors import fake_mode

Kind = Literal["safetensors", "pickled", "checkpoint"]

_MANIFEST = "manifest.json"
_SUFFIX = ".safetensors"
_PICKLED = (".bin", ".pt", ".pth")
_PICKLED_WEIGHTS = "pytorch_model.bin"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_LARGEST_INDEX = 64 << 20


class WeightFiles(NamedTuple):
    """Files that together hold weights."""

    kind: Kind  # their format
    folder: Place  # their place
    names: tuple[str, ...]  # names of the files; none for a checkpoint: its manifest lists them
    # The file of each tensor by name, from an index; empty without one.
    listed: Mapping[str, str] = MappingProxyType({})


def find_files(path: str | os.PathLike[str] | RemotePath) -> WeightFiles:
    """Find the weights at a path: a file, an index, a folder with either, a checkpoint, or a run's folder with some.

    Raises `ConfigError` where there are none, `CheckpointError` where an index lists a missing file.
    """
    place = as_place(path)
    name = place.name
    if name.endswith(".json") and name != _MANIFEST:
        return _indexed(place.parent, name)
    for kind, suffixes in _kinds():
        if name.endswith(suffixes):
            return WeightFiles(kind, place.parent, (name,))
    is_file = not isinstance(place.path, RemotePath) and place.path.is_file()
    found = set(place.names()) if place.exists() and not is_file else set[str]()
    for index, single in ((INDEX, WEIGHTS), (f"{_PICKLED_WEIGHTS}.index.json", _PICKLED_WEIGHTS)):
        if index in found:
            return _indexed(place, index)
        if single in found:
            return WeightFiles(_kind_of(single), place, (single,))
    if _MANIFEST in found or any(each.startswith("step-") for each in found):
        return WeightFiles("checkpoint", find_checkpoint(place), ())
    for kind, suffixes in _kinds():
        if names := sorted(each for each in found if each.endswith(suffixes)):
            return WeightFiles(kind, place, tuple(names))
    got = ", ".join(sorted(found)[:5]) or ("nothing of the kind" if place.exists() else "nothing")
    raise ConfigError(
        "no weights at the path",
        expected=f"a *{_SUFFIX} or *.bin file, an index of such files, a folder with either, or a checkpoint of accel",
        got=got,
        where=str(path),
        fix=_download(str(path)) if not place.exists() else "",
    )


def _download(path: str) -> str:
    """Return the way to the files of what may be a name on the Hugging Face hub, "" for other paths."""
    if not _HUB_NAME.fullmatch(path):
        return ""
    return f"If this is a name on the Hugging Face hub, pass huggingface_hub.snapshot_download({path!r})."


def _kinds() -> tuple[tuple[Kind, tuple[str, ...]], ...]:
    return ("safetensors", (_SUFFIX,)), ("pickled", _PICKLED)


def _kind_of(name: str) -> Kind:
    return "safetensors" if name.endswith(_SUFFIX) else "pickled"


def _indexed(folder: Place, name: str) -> WeightFiles:
    data = folder.get(name, _LARGEST_INDEX)
    where = f"{folder.path}/{name}"
    index = decode_index(data) if data is not None else None
    if index is None or not index.files:
        expected = 'JSON with "weight_map", the file of each tensor by name, in the same folder'
        raise CheckpointError("the index cannot be read", expected=expected, where=where)
    held = set(folder.names())
    if missing := [file for file in index.files if file not in held]:
        raise CheckpointError(
            f"{len(missing)} of {len(index.files)} files are missing",
            got=", ".join(missing[:5]),
            where=where,
            fix="Download or copy them again.",
        )
    return WeightFiles(_kind_of(index.files[0]), folder, tuple(index.files), index.weight_map)


def safetensors_in(ranges: ByteRanges, name: str, where: str) -> dict[str, Strided]:
    """Return the tensors of a safetensors file, in the order of their bytes."""
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
    """Return the tensors of a file of torch.save, which is read as weights only: no code of it runs.

    Raises `CheckpointError` for other content, and for the format before torch 1.6.
    """
    try:
        with fake_mode():
            loaded = torch.load(path, weights_only=True)
    except Exception as error:  # whatever torch raises for other files
        fix = "Load it where you trust it, and save its tensors as safetensors."
        raise CheckpointError("cannot be read as weights", got=str(error), where=str(path), fix=fix) from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError("no weights by name", got=type(loaded).__name__, where=str(path))
    found: dict[str, Strided] = {}
    for name, tensor in cast("Mapping[Any, Any]", loaded).items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            got = f"{type(tensor).__name__} under {name!r}"
            fix = "Save only its state dict: torch.save(torch.load(path, weights_only=True)[name], path)."
            fix = fix if isinstance(tensor, Mapping) else "Save only its tensors, by name."
            raise CheckpointError(
                "the value does not map names to weights", expected="a state dict", got=got, where=str(path), fix=fix
            )
        found[name] = _in_storage(name, tensor, path)
    return found


def checkpoint_tensors(ranges: ByteRanges, manifest: Manifest, where: str) -> dict[str, Strided]:
    """Return the tensors of a checkpoint's item `model`, or of its only module, by their names in the module."""
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
    """Join the tensors of several files; a name in two of them is a `CheckpointError`."""
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
    return fetch_header(partial(ranges.read_bytes, name), ranges.sizes[name], where)


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
            expected="an item `model`, or a single module",
            got=", ".join(modules) or "no module",
            where=where,
            fix="Load the item by accel.load_state.",
        )
    return modules[0]


Rename = Callable[[str], str] | Sequence[Recipe]


def open_weights(
    path: str | os.PathLike[str] | RemotePath, *, rename: Rename = (), readers: int = 4, direct: bool = True
) -> FileWeights:
    """Open the weights at a path; only reads headers.

    Args:
        path: a safetensors file, a file of torch.save, the index of several, a folder with either, a checkpoint of
            accel, or a run's folder; on a local disk or in a store.
        rename: maps a stored name to the model's; or recipes, for a checkpoint with another layout than the model's.
        readers: number of threads that read.
        direct: whether to read past the page cache what is not in it, where the file system can.

    Returns:
        The source; the caller closes it.

    Raises:
        CheckpointError: a file is missing or damaged, a recipe does not fit, or two tensors have the same name.
        ConfigError: nothing at the path is known as weights, `rename` is neither a function nor recipes, or no reader.
    """
    check_count(readers, "the number of readers is not valid", where="readers=")
    files = find_files(path)
    where = str(files.folder.path)
    manifest = manifest_of(files.folder) if files.kind == "checkpoint" else None
    names = tuple(manifest.files) if manifest is not None else files.names
    ranges = _open(files, names, readers, direct)
    try:
        named = _renamed(_tensors(files, manifest, names, ranges, where), rename, where)
        return FileWeights(named, ranges, where)
    except BaseException:
        ranges.close()
        raise


def _open(files: WeightFiles, names: Sequence[str], readers: int, direct: bool) -> ByteRanges:
    folder = files.folder.path
    if isinstance(folder, RemotePath):
        return RemoteRanges(folder, names, readers=readers)
    return LocalRanges({name: folder / name for name in names}, readers=readers, direct=direct)


def _tensors(
    files: WeightFiles, manifest: Manifest | None, names: Sequence[str], ranges: ByteRanges, where: str
) -> dict[str, Strided]:
    if manifest is not None:
        return checkpoint_tensors(ranges, manifest, where)
    if files.kind == "safetensors":
        return _joined(files, {name: safetensors_in(ranges, name, f"{where}/{name}") for name in names}, where)
    if isinstance(files.folder.path, RemotePath):
        raise ConfigError(
            "files of torch.save are read only from local disks",
            expected="safetensors",
            got=names[0],
            where=where,
            fix="Copy them to a local disk.",
        )
    return _joined(files, {name: pickled_in(Path(where) / name) for name in names}, where)


def _joined(files: WeightFiles, found: Mapping[str, Mapping[str, Strided]], where: str) -> dict[str, Strided]:
    """Join the tensors of files, which must match their index."""
    lost = [(name, file) for name, file in files.listed.items() if name not in found[file]]
    if lost:
        name, file = lost[0]
        raise CheckpointError(
            "the index names tensors that its files lack",
            expected=f"{name!r} in {file}",
            got=f"{len(lost)} of {len(files.listed)} such names",
            where=where,
            fix="Download or copy the files again, the index with them.",
        )
    return merged(found.values(), where)


def _renamed(found: Mapping[str, Strided], rename: Rename, where: str) -> dict[str, Strided]:
    if not callable(rename):
        check_recipes(rename, "a function of a stored name, or a sequence of accel.checkpoint.Recipe")
        return apply_recipes(found, rename, where)
    named: dict[str, Strided] = {}
    former: dict[str, str] = {}
    for name, stored in found.items():
        new = rename(name)
        if new in named:
            got = f"{former[new]!r} and {name!r}"
            raise ConfigError(f"rename gives two tensors the name {new!r}", got=got, where=where)
        named[new] = stored
        former[new] = name
    return named


def expert_recipes(
    *, block: str = "mlp", stored_block: str = "", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Recipe, ...]:
    """Return the recipes of a mixture of experts of transformers 5, for `rename=` of loads and of `save_model`.

    The defaults fit Qwen, DeepSeek, OLMoE, GLM and others; for Mixtral pass `stored_block="block_sparse_moe"`,
    `gate="w1"`, `up="w3"` and `down="w2"`.

    Args:
        block: name of the module of the experts in the model.
        stored_block: its name in the checkpoint; "" for the same.
        gate, up, down: names of an expert's projections in the checkpoint.

    Returns:
        Recipes that stack the experts as `experts.gate_up_proj` and `experts.down_proj`.

    Reference: `MergeModulelist` and `Concatenate` of transformers.core_model_loading.
    """
    into = f"{{before...}}.{block}.experts"
    renamed = Recipe("rename", f"{{before...}}.{stored_block}.{{after...}}", f"{{before...}}.{block}.{{after...}}")
    return (
        *((renamed,) if stored_block else ()),
        Recipe("stack", f"{into}.{{expert}}.{gate}.weight", f"{into}.gate"),
        Recipe("stack", f"{into}.{{expert}}.{up}.weight", f"{into}.up"),
        Recipe("concat", (f"{into}.gate", f"{into}.up"), f"{into}.gate_up_proj", dim=1),
        Recipe("stack", f"{into}.{{expert}}.{down}.weight", f"{into}.down_proj"),
    )
