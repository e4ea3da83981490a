# SPDX-License-Identifier: Apache-2.0
"""`load_quantized`: names first, then one weight at a time, and only then the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch import nn

from accel.bigmodel import WeightSource
from accel.bigmodel.load import DeviceChoice, Patterns, Rename, open_weights, refusal
from accel.comm import Call, agreed, call_site
from accel.context import DistContext, context_first
from accel.engines.quantized._config import Bitsandbytes, Quantization
from accel.engines.quantized._describe import Layer, plan_layers, replace_layer
from accel.engines.quantized._formats import empty_layer
from accel.engines.quantized._match import Found, find_weights
from accel.engines.quantized._read import Places, commit_others, find_places, made_layer, read_others
from accel.storage import RemotePath

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
    as it was. Weights that are quantized already, as `save_model` writes them, are read as they are. Layers whose
    weight another module uses, such as a head tied to an embedding, stay as they are.

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
        places = find_places(model, plan, device_map, ctx.device)
        made = _read_layers(plan.layers, found, source, config, places)
        others = read_others(found, source, places)

        # the model changes from here on
        for layer, weight in zip(plan.layers, made, strict=True):
            _ = replace_layer(model, layer.module, empty_layer(layer.module, config), weight)
        commit_others(model, others, places)
        _tell_peft(model, config)
    return model


def _read_layers(
    layers: list[Layer], found: Found, source: WeightSource, config: Quantization, places: Places
) -> list[nn.Parameter]:
    return [made_layer(layer, found, source, config, places) for layer in layers]


def _tell_peft(model: nn.Module, config: Quantization) -> None:
    """Set the attributes by which peft knows a model of bitsandbytes."""
    if isinstance(config, Bitsandbytes):
        told: Mapping[str, bool] = {"is_loaded_in_4bit": config.bits == 4, "is_loaded_in_8bit": config.bits == 8}
        for name, value in told.items():
            setattr(model, name, value)
