# SPDX-License-Identifier: Apache-2.0
"""The layers that a record quantizes, and the skeleton of a model with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import nn

from accel.bigmodel import Skeleton, Weight, describe
from accel.bigmodel.load import weight_dtype_name
from accel.engines.quantized import _bitsandbytes, _torchao
from accel.engines.quantized._config import Bitsandbytes, Quantization, Torchao, dtype_named, package, patterns
from accel.errors import ConfigError
from accel.errors._checks import did_you_mean
from accel.parallel._blocks import Select
from accel.parallel._modules import named_modules
from accel.tensors import FORMATS, Packed, is_absent, is_dtensor
from accel.terminal import show_names


def check_installed(config: Quantization) -> None:
    """Raise `MissingExtraError` unless the package of a record imports."""
    _ = package("bitsandbytes" if isinstance(config, Bitsandbytes) else "torchao.quantization")


def take_apart(module: nn.Module, key: str, tensor: Any) -> Packed | None:
    """Return a parameter of a module as plain tensors; None for one that is no quantized weight."""
    if type(tensor).__module__.partition(".")[0] == "bitsandbytes":
        return _bitsandbytes.take_apart(module, tensor)
    return _torchao.take_apart(key, tensor) if hasattr(tensor, "__tensor_flatten__") else None


def backend_of(config: Quantization) -> Any:
    """Return the module that quantizes as a record says: its `quantize`, `empty` and `empty_layer` take the record."""
    return _bitsandbytes if isinstance(config, Bitsandbytes) else _torchao


_SHOWN = 5


class QuantizedLayer(NamedTuple):
    """A linear layer that is quantized."""

    name: str  # its path, the first of several
    module: nn.Linear  # the layer
    dtype: torch.dtype  # dtype of its weight before
    template: Packed  # the quantized weight without values


class QuantizationPlan(NamedTuple):
    """The changes that a record makes to a model."""

    layers: list[QuantizedLayer]  # layers that are quantized
    dtypes: dict[int, torch.dtype]  # dtype of each other floating-point tensor, by `id`


def describe_quantized(model: nn.Module, config: Quantization, *, blocks: Select | None = None) -> Skeleton:
    """Return the skeleton that a model will have once it is quantized, for a device map. No communication.

    Args:
        model: the model, best an empty one. It stays as it is.
        config: the way to quantize.
        blocks: modules that move together, as for `describe`.

    Raises:
        ConfigError: a pattern that matches nothing, a model that is quantized already, or no layer to quantize.
        MissingExtraError: the package of the record does not import.
    """
    plan = plan_layers(model, config)
    with ExitStack() as undo:
        for layer in plan.layers:
            weight = layer.template.make(layer.template.parts)
            _ = undo.callback(replace_layer(model, layer.module, weight, config))
        skeleton = describe(model, blocks=blocks)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    dtypes = {name: plan.dtypes[id(tensor)] for name, tensor in named if id(tensor) in plan.dtypes}
    segments = tuple(
        replace(segment, weights=tuple(_cast(weight, dtypes) for weight in segment.weights))
        for segment in skeleton.segments
    )
    return Skeleton(segments=segments)


def plan_layers(model: nn.Module, config: Quantization) -> QuantizationPlan:
    """Return the layers that a record quantizes: each `nn.Linear` with an untied weight, except those to skip.

    A model that is quantized, sharded or dispatched already is refused, as is a pattern without a match.
    """
    if not isinstance(config, Bitsandbytes | Torchao):  # pyright: ignore[reportUnnecessaryIsInstance] - a caller's
        fix = "Pass accel.engines.quantized.Bitsandbytes(bits=4) or accel.engines.quantized.Torchao(kind='int8')."
        raise ConfigError("the way to quantize is unknown", got=repr(config), where="config=", fix=fix)
    check_installed(config)
    _check_model(model)
    where = type(config).__name__
    spared = _matched(model, patterns(config.skip), f"{where}.skip")
    wide = _matched(model, patterns(config.keep_float32), f"{where}.keep_float32")
    users: dict[int, int] = {}
    for module in _modules(model):
        for tensor in module.parameters(recurse=False):
            users[id(tensor)] = users.get(id(tensor), 0) + 1
    wanted = None if config.dtype is None else dtype_named(config.dtype)
    chosen: list[tuple[str, nn.Linear]] = []
    dtypes: dict[int, torch.dtype] = {}
    for name, module in named_modules(model):
        kept = id(module) in wide
        made: set[str] = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        buffers = [tensor for key, tensor in module.named_buffers(recurse=False) if key not in made]
        for tensor in [*module.parameters(recurse=False), *buffers]:
            if tensor.is_floating_point() and (dtype := torch.float32 if kept else wanted) is not None:
                dtypes.setdefault(id(tensor), dtype)
        if type(module) is nn.Linear and not kept and id(module) not in spared and users[id(module.weight)] == 1:
            chosen.append((name, module))
    _check_layers(chosen, config)
    layers: list[QuantizedLayer] = []
    for name, module in chosen:
        dtype = dtypes.pop(id(module.weight), module.weight.dtype)
        shape = (module.out_features, module.in_features)
        layers.append(QuantizedLayer(name, module, dtype, backend_of(config).empty(shape, dtype, config)))
    return QuantizationPlan(layers, dtypes)


def replace_layer(model: nn.Module, old: nn.Linear, weight: nn.Parameter, config: Quantization) -> Callable[[], None]:
    """Put a layer with a quantized weight in the place of another one; return the way back. Mutates the model."""
    new: nn.Linear = backend_of(config).empty_layer(old, config)
    new.weight = weight
    registries: list[tuple[dict[str, Any], str]] = []
    for parent in _modules(model):
        children: dict[str, Any] = parent._modules  # pyright: ignore[reportPrivateUsage]
        registries += [(children, key) for key, child in children.items() if child is old]

    def put(module: nn.Module) -> None:
        for registry, key in registries:
            registry[key] = module

    put(new)
    return lambda: put(old)


def _cast(weight: Weight, dtypes: Mapping[str, torch.dtype]) -> Weight:
    dtype = dtypes.get(weight.name)
    return weight if dtype is None else replace(weight, dtype=weight_dtype_name(dtype))


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    return (module for _, module in named_modules(model))


def _check_model(model: nn.Module) -> None:
    quantized = [name for name, each in model.named_parameters() if type(each).__module__.partition(".")[0] in FORMATS]
    if quantized:
        raise ConfigError(
            "the model is quantized already",
            got=show_names([*map(repr, quantized)], _SHOWN),
            where="load_quantized",
            fix="Build it anew, as by accel.init_empty_weights.",
        )
    for name, tensor in model.named_parameters():
        if is_dtensor(tensor) or is_absent(tensor):
            what = "sharded" if is_dtensor(tensor) else "dispatched"
            fix = "Quantize first, then prepare or dispatch it."
            raise ConfigError(f"the model is {what} already", where=f"load_quantized, {name!r}", fix=fix)


def _check_layers(chosen: list[tuple[str, nn.Linear]], config: Quantization) -> None:
    if not chosen:
        raise ConfigError(
            "no layer of the model would be quantized",
            expected="linear layers inside the model, with weights that no other module uses",
            where=f"load_quantized, {type(config).__name__}",
            fix="Skip fewer modules.",
        )
    if not isinstance(config, Torchao):
        return
    if narrow := [name for name, module in chosen if module.in_features == 1]:
        got = show_names([*map(repr, narrow)], _SHOWN)
        fix = f"Pass skip={tuple(narrow[:_SHOWN])!r}."
        raise ConfigError("torchao quantizes no layers with one input", got=got, where="Torchao.skip", fix=fix)
    group = (config.group_size or 32) if config.kind.startswith("int4") else 1
    odd = [name for name, module in chosen if module.in_features % group]
    if odd:
        raise ConfigError(
            f"rows of {len(odd)} layers do not divide into groups of {group}",
            got=show_names([*map(repr, odd)], _SHOWN),
            where="Torchao.group_size",
            fix=f"Pass a smaller group_size=, or skip={tuple(odd[:_SHOWN])!r}.",
        )


def _matched(model: nn.Module, wanted: Collection[str], where: str) -> set[int]:
    """Return the `id` of each module with a path, or a parent's path, that matches a pattern; each must match."""
    paths = [(path, module) for path, module in named_modules(model, every_path=True) if path]
    found: set[int] = set()
    for pattern in wanted:
        hits = [path for path, _ in paths if fnmatchcase(path, pattern)]
        if not hits:
            fix = did_you_mean(pattern, [path for path, _ in paths]) if paths else "Leave it out."
            raise ConfigError("no module of the model matches", got=repr(pattern), where=where, fix=fix)
        roots = tuple(f"{hit}." for hit in hits)
        found |= {id(module) for path, module in paths if f"{path}.".startswith(roots)}
    return found
