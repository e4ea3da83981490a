# SPDX-License-Identifier: Apache-2.0
"""Reading weights one at a time, to the device that quantizes them and from there to their home."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from accel.bigmodel import DeviceMap, WeightSource
from accel.bigmodel.load import Destination, DeviceChoice, find_destinations, weight_dtype
from accel.engines.quantized._config import Quantization
from accel.engines.quantized._describe import Layer, Plan
from accel.engines.quantized._formats import quantize
from accel.engines.quantized._match import Found, Other
from accel.errors import ConfigError
from accel.parallel import named_modules


class Places(NamedTuple):
    """Devices of a model's tensors.

    Attributes:
        home: destination by name of a tensor or of a part.
        runs: computing device by name of a tensor or of a part.
    """

    home: Callable[[str], Destination]
    runs: Callable[[str], torch.device]


def find_places(model: nn.Module, plan: Plan, device_map: DeviceChoice, default: torch.device) -> Places:
    """Return the devices that a map, or one device, gives the tensors of a model.

    Raises:
        ConfigError: neither a map nor a device, or a map that counts a layer as it was.
        DeviceError: the device is not there.
    """
    home = find_destinations(device_map, default)
    if not isinstance(device_map, DeviceMap):
        device = home("").device or default

        def one(name: str) -> torch.device:
            return device

        return Places(home, one)
    names = {name for weight in device_map.skeleton.weights() for name in (weight.name, *weight.tied)}
    for layer in plan.layers:
        if any(f"{layer.name}.{part}" not in names for part in layer.template.parts):
            raise ConfigError(
                "the device map is of the model before it is quantized",
                got=f"no {layer.name}.{list(layer.template.parts)[-1]!s}",
                where="load_quantized(device_map=)",
                fix="Make it of accel.describe_quantized(model, config).",
            )
    devices = {name: torch.empty(0, device=name).device for name in device_map.devices}
    runs: dict[str, torch.device] = {}
    for segment in device_map.skeleton.segments:
        for weight in segment.weights:
            runs |= dict.fromkeys((weight.name, *weight.tied), devices[device_map.runs[segment.name]])
    return Places(home, runs.__getitem__)


def made_layer(layer: Layer, found: Found, source: WeightSource, config: Quantization, places: Places) -> nn.Parameter:
    """Return a layer's quantized weight, in its home.

    Raises:
        CheckpointError: a file cannot be read.
        ConfigError: a home in files for a weight that is still to be quantized.
    """
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
    packed = quantize(weight, config)
    del weight
    parts: dict[str, torch.Tensor] = {}
    for part, tensor in packed.parts.items():
        device = places.home(f"{layer.name}.{part}").device
        if device is None:
            raise ConfigError(
                "a home in files for a weight that is still to be quantized",
                got=f"{layer.name}.{part}",
                where="load_quantized(device_map=)",
                fix="Load it with the home 'cpu', write it by accel.save_model, and load that by this map.",
            )
        parts[part] = tensor.to(device)
    return packed.make(parts)


def _read_quantized(layer: Layer, found: Found, source: WeightSource, places: Places) -> nn.Parameter:
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


def read_others(found: Found, source: WeightSource, places: Places) -> list[tuple[Other, torch.Tensor]]:
    """Read the tensors that are not quantized, one at a time where one is cast or goes to another device.

    Raises:
        CheckpointError: a file cannot be read.
    """
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


def commit_others(model: nn.Module, made: list[tuple[Other, torch.Tensor]], places: Places) -> None:
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
