# SPDX-License-Identifier: Apache-2.0
"""Files of weights at a path: safetensors, files of torch.save, or a checkpoint of accel; alone or by an index."""

from __future__ import annotations

import os
import re
from typing import Literal, NamedTuple

from accel.checkpoint import find_checkpoint
from accel.errors import CheckpointError, ConfigError
from accel.storage import INDEX, WEIGHTS, Place, RemotePath, as_place, decode_index

Kind = Literal["safetensors", "pickled", "checkpoint"]

_MANIFEST = "manifest.json"
_SUFFIX = ".safetensors"
_PICKLED = (".bin", ".pt", ".pth")
_PICKLED_WEIGHTS = "pytorch_model.bin"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_LARGEST_INDEX = 64 << 20


class WeightFiles(NamedTuple):
    """Files that together hold weights.

    Attributes:
        kind: their format.
        folder: the place that they lie in.
        names: names of the files; none of a checkpoint, whose manifest lists them.
    """

    kind: Kind
    folder: Place
    names: tuple[str, ...]


def find_files(path: str | os.PathLike[str] | RemotePath) -> WeightFiles:
    """Find the weights at a path.

    Args:
        path: a file, an index, a folder with either, a checkpoint of accel, or a run's folder with some, of which the
            newest counts; on a local disk or in a store.

    Raises:
        CheckpointError: an index cannot be read, or a file that it lists is missing.
        ConfigError: there are none.
    """
    place = as_place(path)
    name = place.name
    if name.endswith(".json") and name != _MANIFEST:
        return _indexed(place.parent, name)
    for kind, suffixes in _kinds():
        if name.endswith(suffixes):
            return WeightFiles(kind, place.parent, (name,))
    found = set(place.names()) if place.exists() and not _is_file(place) else set[str]()
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


def _is_file(place: Place) -> bool:
    return not isinstance(place.path, RemotePath) and place.path.is_file()


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
    return WeightFiles(_kind_of(index.files[0]), folder, tuple(index.files))
