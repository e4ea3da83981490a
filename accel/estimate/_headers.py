# SPDX-License-Identifier: Apache-2.0
"""A model's shapes from the headers of its safetensors files; no weight is read."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from accel.errors import CheckpointError, ConfigError
from accel.estimate._plan import Model, Parameter
from accel.storage import INDEX, WEIGHTS, Header, decode_index, read_header

_TRAINED_BYTES = 4
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}


def from_headers(path: Path) -> Model:
    """Return the model of a safetensors file, of an index, or of a folder with either.

    Floating-point tensors count as trained parameters in fp32, whatever their stored format. Others keep their format
    and are not trained.

    Raises:
        ConfigError: the path holds no weights.
        CheckpointError: a header is damaged.
    """
    headers = read_headers(path)
    parameters: list[Parameter] = []
    for name, entry in chain.from_iterable(header.tensors.items() for header in headers):
        trained = entry.dtype in _FLOATS
        item_bytes = _TRAINED_BYTES if trained else _BYTES.get(entry.dtype, 1)
        parameters.append(Parameter(name=name, shape=entry.shape, item_bytes=item_bytes, trained=trained))
    return Model(source=name_headers(path, headers), parameters=tuple(parameters))


def read_headers(path: Path) -> Sequence[Header]:
    """Return the headers of a safetensors file, of an index, or of a folder with either.

    Raises:
        ConfigError: the path holds no weights.
        CheckpointError: a header is damaged.
    """
    return [_header(file) for file in _files(path)]


def name_headers(path: Path, headers: Sequence[Header]) -> str:
    """Return the words for headers as a source."""
    return f"{path}, headers of {len(headers)} file{'s' if len(headers) > 1 else ''}"


def has_weights(folder: Path) -> bool:
    """Return whether `from_headers` finds weights in a folder."""
    return (folder / INDEX).is_file() or (folder / WEIGHTS).is_file()


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        if not has_weights(path):
            raise ConfigError(
                "no weights in the folder",
                expected=f"{WEIGHTS} or {INDEX}",
                got=", ".join(sorted(each.name for each in path.iterdir())[:5]) or "an empty folder",
                where=str(path),
            )
        path = path / INDEX if (path / INDEX).is_file() else path / WEIGHTS
    if path.suffix != ".json":
        return [path]
    index = decode_index(path.read_bytes())
    if index is None:
        raise CheckpointError("the index cannot be read", expected="an index of safetensors files", where=str(path))
    return [path.parent / name for name in index.files]


def _header(file: Path) -> Header:
    try:
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            data = memoryview(mapped)
            try:
                return read_header(data, str(file))
            finally:
                data.release()
    except (OSError, ValueError) as error:
        raise CheckpointError("the file cannot be read", got=str(error), where=str(file)) from error
