# SPDX-License-Identifier: Apache-2.0
"""A model's description from its source: code, a configuration, headers of files, or the Hub's local cache."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from accel.errors import CheckpointError, ConfigError
from accel.errors._checks import did_you_mean
from accel.estimate._build import (
    DescribedModel,
    Input,
    from_config,
    function_of,
    measure,
    read_config,
    timm_maker,
)
from accel.estimate._model import Model, Parameter
from accel.opening import open_regular, read_regular
from accel.storage import (
    DTYPE_NAMES,
    INDEX,
    WEIGHT_FLOATS,
    WEIGHTS,
    Header,
    TensorHeader,
    decode_index,
    fetch_header,
)

_PICKLED = ("pytorch_model.bin.index.json", "pytorch_model.bin")
_FOUND = (INDEX, WEIGHTS, *_PICKLED)  # the first that is there counts
_TIMM = "timm/"
_LARGEST_INDEX = 100_000_000  # bytes
_LONGEST_REFERENCE = 1_000


class ModelSource(NamedTuple):
    """A named place that a model comes from.

    Attributes:
        kind: "function", "timm" or "config", which make a model, or "headers".
        text: the text.
        path: of a configuration or weights.
    """

    kind: Literal["function", "timm", "config", "headers"]
    text: str
    path: Path = Path()


def find_source(text: str, *, by_config: bool = True) -> ModelSource:
    """Return the source that a text names: module:function, timm/NAME, or a path.

    Args:
        text: the text.
        by_config: whether the configuration counts in a folder with weights, too.

    Raises:
        ConfigError: no such path.
    """
    path = Path(text)
    if text.startswith(_TIMM) and not path.exists():
        return ModelSource("timm", text)
    if ":" in text and not path.exists():
        return ModelSource("function", text)
    if path.is_dir() and (path / "config.json").is_file() and (by_config or not has_weights(path)):
        path /= "config.json"
    if path.is_file() and path.suffix == ".json" and not path.name.endswith(".index.json"):
        return ModelSource("config", text, path)
    if not path.exists():
        fix = "`accel estimate --help` lists what SOURCE may be."
        raise ConfigError("there is no such source", expected="a path or module:function", got=repr(text), fix=fix)
    return ModelSource("headers", text, path)


def describe_source(source: ModelSource) -> DescribedModel:
    """Return the model that a source other than headers makes, not yet built."""
    if source.kind == "timm":
        return DescribedModel(timm_maker(source.text.removeprefix(_TIMM)), source.text, False, None)
    if source.kind == "function":
        return DescribedModel(function_of(source.text), source.text, False, None)
    return read_config(source.path)


def read_source(source: ModelSource, inputs: Sequence[Input] = ()) -> Model:
    """Return the description of a source's model.

    Args:
        source: from `find_source`.
        inputs: inputs of one rank, to count activations; headers take none.

    Raises:
        ConfigError: a source that cannot be read, or headers with inputs.
    """
    if source.kind == "headers":
        if inputs:
            fix = "Name a config.json or module:function, or leave --input out."
            where = str(source.path)
            raise ConfigError("headers lack the activations of a forward", got="--input", where=where, fix=fix)
        return from_headers(source.path)
    if source.kind == "config":
        return from_config(source.path, inputs)
    found = describe_source(source)
    return measure(found.make, found.source, inputs)


def from_headers(path: Path) -> Model:
    """Return the model of a file of weights, of an index of several, or of a folder with either.

    Floating-point tensors count as trained in fp32, whatever their stored dtype; others keep it and are not trained.
    """
    headers = read_headers(path)
    parameters: list[Parameter] = []
    for name, entry in chain.from_iterable(header.tensors.items() for header in headers):
        trained = entry.dtype in WEIGHT_FLOATS
        dtype = "F32" if trained else entry.dtype
        parameters.append(Parameter(name=name, shape=entry.shape, dtype=dtype, file_dtype=entry.dtype, trained=trained))
    return Model(source=name_headers(path, headers), parameters=tuple(parameters))


def read_headers(path: Path) -> Sequence[Header]:
    """Return the headers of a file of weights, of an index of several, or of a folder with either.

    A damaged header, or an index that names tensors its files lack, is a `CheckpointError`.
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
    try:
        index = decode_index(read_regular(path, _LARGEST_INDEX))
    except OSError as error:
        raise CheckpointError("the index cannot be read", got=error.strerror or str(error), where=str(path)) from error
    if index is None:
        raise CheckpointError("the index cannot be read", expected="an index of files of weights", where=str(path))
    return [path.parent / name for name in index.files], index.weight_map


def _header(file: Path) -> Header:
    if file.suffix in (".bin", ".pt", ".pth"):
        return _pickled(file)
    try:
        with open(open_regular(file), "rb") as opened:
            number = opened.fileno()

            def read(start: int, nbytes: int) -> bytes:
                return os.pread(number, nbytes, start)

            return fetch_header(read, os.fstat(number).st_size, str(file))
    except OSError as error:
        raise CheckpointError("the file cannot be read", got=error.strerror or str(error), where=str(file)) from error


def _pickled(file: Path) -> Header:
    """Return a file of torch.save as a header. It is read as weights only: no code of it runs."""
    torch: Any = import_module("torch")
    fake: Any = import_module("accel.fakes").fake_mode()
    try:
        with open(open_regular(file), "rb") as opened, fake:  # tensors get no memory, and no bytes of them are read
            loaded: object = torch.load(opened, weights_only=True)
    except Exception as error:  # whatever torch raises for a file that torch.save has not written
        fix = "Load it where you trust it, and save its tensors as safetensors."
        raise CheckpointError("cannot be read as weights", got=str(error), where=str(file), fix=fix) from error
    found: dict[str, TensorHeader] = {}
    end = 0
    for name, tensor in cast("Mapping[Any, Any]", loaded).items() if isinstance(loaded, Mapping) else [("", loaded)]:
        dtype = DTYPE_NAMES.get(str(getattr(tensor, "dtype", "")).removeprefix("torch."))
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or dtype is None or not name:
            got = f"{type(tensor).__name__} under {name!r}"
            raise CheckpointError(
                "the value does not map names to weights", expected="a state dict", got=got, where=str(file)
            )
        shape = tuple(cast(Any, tensor).shape)
        size = prod(shape) * cast(Any, tensor).element_size()
        found[name] = TensorHeader(dtype=dtype, shape=shape, data_offsets=(end, end + size))
        end += size
    return Header(tensors=found, metadata={}, end=0)


_FILES = (".safetensors", ".json", ".bin", ".pt", ".pth")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(@[\w.-]+)?", re.ASCII)


def cached_model(name: str, environ: Mapping[str, str]) -> Path:
    """Return the folder of "organisation/model", or "organisation/model@revision", in Hugging Face's cache."""
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
    snapshot = (
        folder
        / "snapshots"
        / (read_regular(reference, _LONGEST_REFERENCE).decode().strip() if reference.is_file() else wanted)
    )
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
    """Return whether a text may be the name of a model on the Hub, and names no file."""
    return _NAME.fullmatch(source) is not None and not source.endswith(_FILES)


def _cache(environ: Mapping[str, str]) -> Path:
    if cache := environ.get("HF_HUB_CACHE"):
        return Path(cache)
    if home := environ.get("HF_HOME"):
        return Path(home) / "hub"
    general = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
    return Path(general) / "huggingface" / "hub"
