# SPDX-License-Identifier: Apache-2.0
"""Weights of torchao as plain tensors, by the protocol that tensor subclasses have, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from accel.engines.quantized._config import Torchao, package
from accel.errors import ConfigError, DeviceError, MissingExtraError
from accel.tensors import Packed

_GROUP = 32
_INT4: Any = vars(torch)["int4"]  # a dtype without a stub


class DynamicLinear(nn.Linear):
    """A linear layer that quantizes its inputs as they come, for which torchao has no backward pass."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply; a gradient of the input, which would be lost, is a `ConfigError`."""
        if input.requires_grad and torch.is_grad_enabled():
            raise ConfigError(
                "layers that quantize their inputs have no backward pass",
                expected="inputs without gradients",
                where="Torchao.kind",
                fix="Pass kind='int8' or kind='float8' to train adapters, or call the model in torch.no_grad().",
            )
        return super().forward(input)


def empty_layer(old: nn.Linear, config: Torchao) -> nn.Linear:
    """Return a layer with another one's bias, and still without a weight."""
    kind = DynamicLinear if config.kind.endswith("_dynamic") else nn.Linear
    new = kind(old.in_features, old.out_features, bias=False, device="meta")
    new.bias = old.bias
    return new.train(old.training)


def quantize(weight: torch.Tensor, config: Torchao) -> Packed:
    """Quantize a matrix on its device; `DeviceError` where the device has no kernels for the kind."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    try:
        package("torchao.quantization").quantize_(layer, _recipe(config))
    except ImportError as error:
        fix = "Install it, or pass kind='int4_grouped'." if config.kind == "int4" else "Install it."
        problem = f"torchao's {config.kind!r} needs a further package"
        raise MissingExtraError(problem, got=str(error), where="Torchao.kind", fix=fix) from error
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise DeviceError(
            f"torchao does not quantize to {config.kind!r} on this device",
            got=f"{weight.device}: {error}".partition("\n")[0],
            where="Torchao.kind",
            fix="Pass kind='int8', or kind='float8' for weights alone.",
        ) from error
    return take_apart("weight", layer.weight)


def empty(shape: tuple[int, int], dtype: torch.dtype, config: Torchao) -> Packed:
    """Return a weight without values: its parts on the meta device."""
    try:
        return quantize(torch.empty(shape, dtype=dtype, device="meta"), config)
    except DeviceError:  # a kernel that knows no shapes without values
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        found = quantize(torch.zeros(shape, dtype=dtype, device=device), config)
        made = found.make({name: part.to("meta") for name, part in found.parts.items()})
        return take_apart("weight", made)


def take_apart(key: str, tensor: Any) -> Packed:
    """Return a weight of torchao as plain tensors."""
    names, facts = tensor.__tensor_flatten__()
    parts = {f"{key}.{name}": getattr(tensor, name) for name in names}
    make = partial(_make, type(tensor), key, facts, tensor.shape, tensor.stride())
    return Packed(parts, make, partial(_constants, type(tensor), key, facts))


def _make(
    kind: Any, key: str, facts: Any, shape: torch.Size, stride: tuple[int, ...], parts: Mapping[str, torch.Tensor]
) -> nn.Parameter:
    inner = {name.removeprefix(f"{key}."): part for name, part in parts.items()}
    return nn.Parameter(kind.__tensor_unflatten__(inner, facts, shape, stride), requires_grad=False)


def _constants(kind: type, key: str, facts: Any, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    text = json.dumps({"class": kind.__name__, **facts}, default=str, sort_keys=True).encode()
    return {f"{key}.format": torch.tensor(list(text), dtype=torch.uint8)}


def _recipe(config: Torchao) -> Any:
    torchao = package("torchao.quantization")
    group = config.group_size or _GROUP
    if config.kind == "int4":
        return torchao.Int4WeightOnlyConfig(group_size=group)
    if config.kind == "int4_grouped":
        return torchao.IntxWeightOnlyConfig(weight_dtype=_INT4, granularity=torchao.PerGroup(group))
    kinds = {
        "int8": torchao.Int8WeightOnlyConfig,
        "int8_dynamic": torchao.Int8DynamicActivationInt8WeightConfig,
        "float8": torchao.Float8WeightOnlyConfig,
        "float8_dynamic": torchao.Float8DynamicActivationFloat8WeightConfig,
    }
    return kinds[config.kind]()
