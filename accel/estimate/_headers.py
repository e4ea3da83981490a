# SPDX-License-Identifier: Apache-2.0
"""A model's shapes from the headers of its files, at a path or in the Hub's local cache; no weight is read."""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, cast

from accel.errors import CheckpointError, ConfigError, did_you_mean
from accel.estimate._plan import Model, Parameter
from accel.storage import INDEX, WEIGHTS, Header, TensorHeader, decode_index, read_header

_TRAINED_BYTES = 4
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_PICKLED = ("pytorch_model.bin.index.json", "pytorch_model.bin")
_FOUND = (INDEX, WEIGHTS, *_PICKLED)  # the first that is there counts
_DTYPES = {  # names of torch, and of safetensors
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "complex64": "C64", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}


def from_headers(path: Path) -> Model:
    """Return the model of a file of weights, of an index of several, or of a folder with either.

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
    """Return the headers of a file of weights, of an index of several, or of a folder with either.

    Raises:
        ConfigError: the path holds no weights.
        CheckpointError: a header is damaged, or an index names tensors that its files lack.
    """
    files, listed = _files(path)
    headers = {file.name: _header(file) for file in files}
    lost = [name for name, file in listed.items() if name not in headers[file].tensors]
    if lost:
        got = f"{len(lost)} names, such as {lost[0]!r} in {listed[lost[0]]}"
        raise CheckpointError("the index names tensors that its files lack", got=got, where=str(path))
    return list(headers.values())


def name_headers(path: Path, headers: Sequence[Header]) -> str:
    """Return the words for headers as a source."""
    return f"{path}, headers of {len(headers)} file{'s' if len(headers) > 1 else ''}"


def has_weights(folder: Path) -> bool:
    """Return whether `from_headers` finds weights in a folder."""
    return any((folder / name).is_file() for name in _FOUND)


def _files(path: Path) -> tuple[list[Path], Mapping[str, str]]:
    """Return the files at a path, and the file of each tensor if there is an index."""
    if path.is_dir():
        if not has_weights(path):
            raise ConfigError(
                "no weights in the folder",
                expected=" or ".join(_FOUND),
                got=", ".join(sorted(each.name for each in path.iterdir())[:5]) or "an empty folder",
                where=str(path),
            )
        path = next(path / name for name in _FOUND if (path / name).is_file())
    if path.suffix != ".json":
        return [path], {}
    index = decode_index(path.read_bytes())
    if index is None:
        raise CheckpointError("the index cannot be read", expected="an index of files of weights", where=str(path))
    return [path.parent / name for name in index.files], index.weight_map


def _header(file: Path) -> Header:
    if file.suffix in (".bin", ".pt", ".pth"):
        return _pickled(file)
    try:
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            data = memoryview(mapped)
            try:
                return read_header(data, str(file))
            finally:
                data.release()
    except (OSError, ValueError) as error:
        raise CheckpointError("the file cannot be read", got=str(error), where=str(file)) from error


def _pickled(file: Path) -> Header:
    """Return what a header would say of a file of torch.save. It is read as weights alone: no code of it runs."""
    torch: Any = import_module("torch")
    fake: Any = import_module("torch._subclasses.fake_tensor").FakeTensorMode()
    try:
        with fake:  # tensors get no memory, and no bytes of them are read
            loaded: object = torch.load(file, weights_only=True)
    except Exception as error:  # whatever torch raises for a file that is none of its own
        fix = "Load it where you trust it, and save its tensors as safetensors."
        raise CheckpointError("cannot be read as weights", got=str(error), where=str(file), fix=fix) from error
    found: dict[str, TensorHeader] = {}
    end = 0
    for name, tensor in cast("Mapping[Any, Any]", loaded).items() if isinstance(loaded, Mapping) else [("", loaded)]:
        dtype = _DTYPES.get(str(getattr(tensor, "dtype", "")).removeprefix("torch."))
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or dtype is None or not name:
            got = f"{type(tensor).__name__} under {name!r}"
            raise CheckpointError("not weights by name", expected="a state dict", got=got, where=str(file))
        shape = tuple(cast(Any, tensor).shape)
        size = prod(shape) * cast(Any, tensor).element_size()
        found[name] = TensorHeader(dtype=dtype, shape=shape, data_offsets=(end, end + size))
        end += size
    return Header(tensors=found, metadata={}, end=0)


_FILES = (".safetensors", ".json", ".bin", ".pt", ".pth")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(@[\w.-]+)?", re.ASCII)


def cached_model(name: str, environ: Mapping[str, str]) -> Path:
    """Return the folder of a model's files in the cache.

    Args:
        name: "organisation/model", or with a revision "organisation/model@v1"; else that of `main`.
        environ: variables that say where the cache is: HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME or HOME.

    Raises:
        ConfigError: the model, or that revision of it, is not there.
    """
    repository, _, revision = name.partition("@")
    cache = _cache(environ)
    folder = cache / f"models--{repository.replace('/', '--')}"
    if not folder.is_dir():
        known = [each.name.removeprefix("models--").replace("--", "/") for each in cache.glob("models--*")]
        hint = did_you_mean(repository, known) if known else ""
        raise ConfigError(
            "there is no such source, nor such a model in the cache of the Hub",
            expected=f"a path, module:function, timm/NAME, or a model in {cache}",
            got=repr(name),
            fix=hint if hint.startswith("Did") else f"Fetch it first: hf download {repository} config.json",
        )
    wanted = revision or "main"
    reference = folder / "refs" / wanted
    snapshot = folder / "snapshots" / (reference.read_text().strip() if reference.is_file() else wanted)
    if not snapshot.is_dir():
        there = sorted(each.name for each in folder.glob("refs/*"))
        raise ConfigError(
            "the cache of the Hub has no such revision of the model",
            expected=" or ".join(there) or "a revision",
            got=repr(wanted),
            where=str(folder),
        )
    return snapshot


def is_model_name(source: str) -> bool:
    """Return whether a text may be the name of a model on the Hub, and is not that of a file."""
    return _NAME.fullmatch(source) is not None and not source.endswith(_FILES)


def _cache(environ: Mapping[str, str]) -> Path:
    if cache := environ.get("HF_HUB_CACHE"):
        return Path(cache)
    if home := environ.get("HF_HOME"):
        return Path(home) / "hub"
    general = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
    return Path(general) / "huggingface" / "hub"
