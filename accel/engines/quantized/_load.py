# SPDX-License-Identifier: Apache-2.0
"""`load_quantized`: names first, then one weight at a time, and only then the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from accel.bigmodel import DeviceMap, WeightSource
from accel.bigmodel.load import (
    Destination,
    DeviceChoice,
    Match,
    Patterns,
    Rename,
    TensorFacts,
    find_destinations,
    match,
    open_weights,
    refusal,
    weight_dtype,
    weight_dtype_name,
)
from accel.comm import Call, agreed, call_site
from accel.context import DistContext, context_first
from accel.engines.quantized import _bitsandbytes
from accel.engines.quantized._config import Bitsandbytes, Quantization
from accel.engines.quantized._describe import (
    QuantizationPlan,
    QuantizedLayer,
    backend_of,
    plan_layers,
    replace_layer,
)
from accel.errors import ConfigError
from accel.parallel._modules import named_modules
from accel.storage import FLOATS, RemotePath
from accel.tensors import Packed


class Other(NamedTuple):
    """A tensor that is not quantized."""

    names: tuple[str, ...]  # its names in the model
    tensor: torch.Tensor
    dtype: torch.dtype  # dtype that it will have
    stored: str  # name in the source; "" where it may be missing


class Found(NamedTuple):
    """Weights of a source for a model."""

    matched: Match  # all differences
    stored: Mapping[str, TensorFacts]  # facts of the source's tensors by name
    others: list[Other]  # tensors that are not quantized
    templates: Mapping[str, Packed]  # the weight without values by name of a layer that is stored quantized
    known: Mapping[str, torch.Tensor]  # parts of those that the source has in another form, by full name


def find_weights(
    model: nn.Module, plan: QuantizationPlan, source: WeightSource, config: Quantization, allow_missing: Patterns
) -> Found:
    """Compare names, shapes and dtypes of a source with a model."""
    stored = {name: TensorFacts((name,), each.dtype, each.shape, each.where) for name, each in source.entries.items()}
    wanted: list[TensorFacts] = []
    templates: dict[str, Packed] = {}
    known: dict[str, torch.Tensor] = {}
    constants: set[str] = set()
    problems: list[str] = []
    for layer in plan.layers:
        if not _is_quantized(layer, source):
            dtype = weight_dtype_name(layer.dtype)
            wanted.append(TensorFacts((f"{layer.name}.weight",), dtype, tuple(layer.module.weight.shape)))
            continue
        template, constants_here, problem = _template(layer, source, config, constants)
        problems += [problem] if problem else []
        templates[layer.name] = template
        known |= {f"{layer.name}.{name}": tensor for name, tensor in constants_here.items()}
        for name, part in template.parts.items():
            if name not in constants_here:
                wanted.append(TensorFacts((f"{layer.name}.{name}",), weight_dtype_name(part.dtype), tuple(part.shape)))
    others = _others(model, plan)
    wanted += [TensorFacts(each.names, weight_dtype_name(each.dtype), tuple(each.tensor.shape)) for each in others]
    matched = match(wanted, stored, allow_missing)
    unused = [name for name in matched.unused if name not in constants | known.keys()]
    names = matched.found[len(matched.found) - len(others) :]
    others = [each._replace(stored=name[0] if name else "") for each, name in zip(others, names, strict=True)]
    matched = matched._replace(unused=unused, problems=problems + matched.problems)
    return Found(matched, stored, others, templates, known)


def _is_quantized(layer: QuantizedLayer, source: WeightSource) -> bool:
    """Return whether a source holds a layer's weight quantized."""
    plain = source.entries.get(f"{layer.name}.weight")
    if plain is not None:
        return plain.dtype not in FLOATS
    return f"{layer.name}.{layer.template.first}" in source.entries


def _template(
    layer: QuantizedLayer, source: WeightSource, config: Quantization, constants: set[str]
) -> tuple[Packed, dict[str, torch.Tensor], str]:
    """Return a stored weight without values, the parts that its format states, and how it differs from the record.

    `constants` receives the names of the tensors that state the format.
    """
    root = f"{layer.name}."
    given: dict[str, torch.Tensor] = {}
    for name, entry in source.entries.items():
        if name.startswith(root) and _is_format(name.removeprefix(root)):
            tensor = torch.empty(entry.shape, dtype=weight_dtype(entry.dtype))
            source.read([(name, tensor)])
            given[name.removeprefix(root)] = tensor
            constants.add(name)
    if not isinstance(config, Bitsandbytes):
        expected = layer.template.constants()
        same = all(torch.equal(expected[name], given.get(name, torch.empty(0))) for name in expected)
        return layer.template, {}, "" if same else f"{root}weight is not quantized by {config!r}"
    if config.bits == 8:
        by_rows = "weight_format" not in given or not given["weight_format"].any()
        return layer.template, {}, "" if by_rows else f"{root}weight is not stored by rows"
    facts = _bitsandbytes.stored_format(given, layer.name)
    if facts is None:
        return layer.template, {}, f"{root}weight has no format of 4 bits"
    if not facts.agrees(config):
        return layer.template, {}, f"{root}weight is not quantized by {config!r}: {facts}"
    shape = tuple(layer.module.weight.shape)
    if facts.shape != shape:  # a transposed matrix has as many packed elements
        return layer.template, {}, f"{root}weight: expected shape {list(shape)}, got {list(facts.shape)}"
    template, known = _bitsandbytes.with_facts(layer.template, facts)
    return template, known, ""


def _is_format(name: str) -> bool:
    return name in ("weight.format", "weight_format") or name.startswith("weight.quant_state.")


def _others(model: nn.Module, plan: QuantizationPlan) -> list[Other]:
    """List parameters and persistent buffers that are not quantized, tied ones once."""
    quantized = {f"{layer.name}.weight" for layer in plan.layers}
    weights = {id(layer.module.weight) for layer in plan.layers}
    named: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and name not in quantized and id(value) not in weights:
            named.setdefault(id(value), []).append(name)
            tensors[id(value)] = value
    return [
        Other(tuple(names), tensors[key], plan.dtypes.get(key, tensors[key].dtype), "") for key, names in named.items()
    ]


class TensorDevices(NamedTuple):
    """Devices of a model's tensors."""

    home: Callable[[str], Destination]  # destination by name of a tensor or of a part
    runs: Callable[[str], torch.device]  # computing device by name of a tensor or of a part


def find_places(plan: QuantizationPlan, device_map: DeviceChoice, default: torch.device) -> TensorDevices:
    """Return the devices of a model's tensors, by one device or by a map of the model as it is when quantized."""
    home = find_destinations(device_map, default)
    if not isinstance(device_map, DeviceMap):
        device = home("").device or default

        def one(name: str) -> torch.device:
            return device

        return TensorDevices(home, one)
    names = {name for weight in device_map.skeleton.weights() for name in (weight.name, *weight.tied)}
    for layer in plan.layers:
        if any(f"{layer.name}.{part}" not in names for part in layer.template.parts):
            raise ConfigError(
                "the device map is of the model before it is quantized",
                got=f"no {layer.name}.{list(layer.template.parts)[-1]!s}",
                where="load_quantized(device_map=)",
                fix="Make it of accel.engines.quantized.describe_quantized(model, config).",
            )
    devices = {name: torch.empty(0, device=name).device for name in device_map.devices}
    runs: dict[str, torch.device] = {}
    for segment in device_map.skeleton.segments:
        for weight in segment.weights:
            runs |= dict.fromkeys((weight.name, *weight.tied), devices[device_map.runs[segment.name]])
    return TensorDevices(home, runs.__getitem__)


def made_layer(
    layer: QuantizedLayer, found: Found, source: WeightSource, config: Quantization, places: TensorDevices
) -> nn.Parameter:
    """Return a layer's quantized weight, in its home; a home in files takes stored quantized weights alone."""
    name = f"{layer.name}.weight"
    if layer.name in found.templates:
        return _read_quantized(layer, found, source, places)
    if name in source.entries:
        entry = source.entries[name]
        weight = torch.empty(entry.shape, dtype=weight_dtype(entry.dtype))
        source.read([(name, weight)])
    elif layer.module.weight.is_meta:  # it may be missing
        return layer.template.make(layer.template.parts)
    else:
        weight = layer.module.weight.detach()
    weight = weight.to(places.runs(f"{layer.name}.{layer.template.first}"), layer.dtype)
    packed: Packed = backend_of(config).quantize(weight, config)
    del weight
    parts: dict[str, torch.Tensor] = {}
    for part, tensor in packed.parts.items():
        device = places.home(f"{layer.name}.{part}").device
        if device is None:
            raise ConfigError(
                "a weight that is not quantized yet cannot be homed in files",
                got=f"{layer.name}.{part}",
                where="load_quantized(device_map=)",
                fix="Load it with the home 'cpu', write it by accel.save_model, and load that by this map.",
            )
        parts[part] = tensor.to(device)
    return packed.make(parts)


def _read_quantized(layer: QuantizedLayer, found: Found, source: WeightSource, places: TensorDevices) -> nn.Parameter:
    template = found.templates[layer.name]
    parts: dict[str, torch.Tensor] = {}
    for name, part in template.parts.items():
        full = f"{layer.name}.{name}"
        device = places.home(full).device
        if device is None:
            parts[name] = part
            continue
        tensor = found.known.get(full)
        if tensor is None:
            tensor = torch.empty(part.shape, dtype=part.dtype)
            source.read([(full, tensor)])
        parts[name] = tensor.to(device)
    return template.make(parts)


def read_others(found: Found, source: WeightSource, places: TensorDevices) -> list[tuple[Other, torch.Tensor]]:
    """Read the tensors that are not quantized, one at a time where one is cast or goes to another device."""
    made: list[tuple[Other, torch.Tensor]] = []
    together: list[tuple[str, torch.Tensor]] = []
    for other in found.others:
        device = places.home(other.names[0]).device
        if not other.stored or device is None:
            continue
        tensor = torch.empty(other.tensor.shape, dtype=weight_dtype(source.entries[other.stored].dtype))
        if tensor.dtype == other.dtype and device.type == "cpu":
            together.append((other.stored, tensor))
        else:
            source.read([(other.stored, tensor)])
            tensor = tensor.to(device, other.dtype)
        made.append((other, tensor))
    source.read(together)
    return made


def commit_others(model: nn.Module, made: list[tuple[Other, torch.Tensor]], places: TensorDevices) -> None:
    """Put tensors into a model, and what no checkpoint holds on the device of its module. Mutates the model."""
    known = {id(other.tensor): tensor for other, tensor in made}
    kept: dict[int, torch.Tensor] = {}
    for path, module in named_modules(model):
        registries: list[dict[str, Any]] = [module._parameters, module._buffers]  # pyright: ignore[reportPrivateUsage]
        for registry in registries:
            for key, old in list(registry.items()):
                if old is None:
                    continue
                if id(old) in known:
                    registry[key] = kept.setdefault(id(old), _put(old, known[id(old)]))
                elif key in module._non_persistent_buffers_set and not old.is_meta:  # pyright: ignore[reportPrivateUsage]
                    registry[key] = old.to(places.runs(f"{path}.{key}" if path else key))


def _put(old: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the values of a load: the same object where it had memory."""
    if not old.is_meta:
        old.data = tensor
        return old
    return nn.Parameter(tensor, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else tensor


M = TypeVar("M", bound=nn.Module)


@context_first
def load_quantized(
    ctx: DistContext,
    model: M,
    weights: str | os.PathLike[str] | RemotePath | WeightSource,
    *,
    config: Quantization,
    device_map: DeviceChoice = None,
    rename: Rename = (),
    allow_missing: Patterns = (),
    allow_unexpected: Patterns = (),
) -> M:
    """Load weights into a model, and quantize its linear layers on the way. A collective. Mutates the model.

    Weights are read, quantized on their computing device and put away one at a time, so that memory holds one of them
    as it was. Weights that are quantized already, as `save_model` writes them, are read as they are. Layers with
    a weight that another module uses, such as a head tied to an embedding, stay as they are.

    Args:
        ctx: the context. Each rank loads the whole model.
        model: built by `init_empty_weights`, or with values, which are replaced.
        weights: a path, as `open_weights` takes it, or a source, as it gives.
        config: the way to quantize.
        device_map: home of each segment, made of `describe_quantized(model, config)`; or one device. None for the
            context's. Segments with a home in files stay empty, for `dispatch_model(model, device_map, source=...)`.
        rename: maps a stored name to the model's; or recipes. Of a path alone.
        allow_missing: names of the model that may be missing, or patterns of such names. They stay as they are.
        allow_unexpected: stored names that the model may lack, or patterns of such names.

    Returns:
        The same model, with quantized layers.

    Raises:
        CheckpointError: weights that are missing, unexpected, of other shapes, or quantized otherwise, all in one
            error; or a file cannot be read. The model is unchanged. The same on every rank.
        ConfigError: a pattern that matches nothing, a model that is quantized already, or a home in files for weights
            that are still to be quantized.
        DeviceError: the device is not there, or cannot quantize so.
        MissingExtraError: the package of the record does not import.
    """
    site = call_site()
    with agreed(ctx.comm, Call("load_quantized", site=site)), ExitStack() as opened, torch.no_grad():
        plan = plan_layers(model, config)
        if isinstance(weights, str | os.PathLike | RemotePath):
            where = os.fspath(weights) if not isinstance(weights, RemotePath) else str(weights)
            source: WeightSource = opened.enter_context(open_weights(weights, rename=rename))
        else:
            where, source = type(weights).__name__, weights
        found = find_weights(model, plan, source, config, allow_missing)
        if error := refusal(found.matched, found.matched.unused, found.stored, allow_unexpected, where):
            raise error
        places = find_places(plan, device_map, ctx.device)
        made = [made_layer(layer, found, source, config, places) for layer in plan.layers]
        others = read_others(found, source, places)

        # the model changes from here on
        for layer, weight in zip(plan.layers, made, strict=True):
            _ = replace_layer(model, layer.module, weight, config)
        commit_others(model, others, places)
        _set_peft_flags(model, config)
    return model


def _set_peft_flags(model: nn.Module, config: Quantization) -> None:
    """Set the attributes by which peft knows a model of bitsandbytes."""
    if isinstance(config, Bitsandbytes):
        flags: Mapping[str, bool] = {"is_loaded_in_4bit": config.bits == 4, "is_loaded_in_8bit": config.bits == 8}
        for name, value in flags.items():
            setattr(model, name, value)
