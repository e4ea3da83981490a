# SPDX-License-Identifier: Apache-2.0
"""Opening of weights: the files at a path, their headers, and the names that the model has for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from accel.bigmodel.load._files import WeightFiles, find_files
from accel.bigmodel.load._headers import checkpoint_tensors, merged, pickled_in, safetensors_in
from accel.bigmodel.load._weights import FileWeights
from accel.checkpoint import Manifest, Recipe, Strided, apply_recipes, check_recipes, manifest_of
from accel.errors import ConfigError
from accel.storage import ByteRanges, LocalRanges, RemotePath, RemoteRanges

Rename = Callable[[str], str] | Sequence[Recipe]


def open_weights(
    path: str | os.PathLike[str] | RemotePath, *, rename: Rename = (), readers: int = 4, direct: bool = True
) -> FileWeights:
    """Open the weights at a path; reads headers alone.

    Args:
        path: a safetensors file, a file of torch.save, the index of several, a folder with either, a checkpoint of
            accel, or a run's folder; on a local disk or in a store.
        rename: maps a stored name to the model's; or recipes, for models that are stored otherwise than they run.
        readers: number of threads that read.
        direct: whether to read past the page cache what is not in it, where the file system can.

    Returns:
        The source; the caller closes it.

    Raises:
        CheckpointError: a file is missing or damaged, a recipe does not fit, or two tensors have the same name.
        ConfigError: nothing at the path is known as weights, `rename` is neither a function nor recipes, or no reader.
    """
    _check_readers(readers)
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


def _check_readers(readers: object) -> None:
    if type(readers) is not int or readers < 1:
        raise ConfigError("not a number of readers", expected="1 or more", got=repr(readers), where="readers=")


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
        return merged((safetensors_in(ranges, name, f"{where}/{name}") for name in names), where)
    if isinstance(files.folder.path, RemotePath):
        raise ConfigError(
            "files of torch.save are read from local disks alone",
            expected="safetensors",
            got=names[0],
            where=where,
            fix="Copy them to a local disk.",
        )
    return merged((pickled_in(Path(where) / name) for name in names), where)


def _renamed(found: Mapping[str, Strided], rename: Rename, where: str) -> dict[str, Strided]:
    if not callable(rename):
        check_recipes(rename, "a function of a stored name, or a sequence of accel.Recipe")
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
