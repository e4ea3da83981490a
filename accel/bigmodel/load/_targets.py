# SPDX-License-Identifier: Apache-2.0
"""A model's tensors as targets of a load: names without wrappers, ties, this rank's part, and their devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from accel.bigmodel._dtypes import check_dtype
from accel.bigmodel._model import check_model
from accel.bigmodel.load._destinations import Destination, DeviceChoice, find_destinations
from accel.checkpoint import Box, held_box, whole
from accel.errors import ConfigError, StreamError
from accel.items import clean_name, reshard
from accel.parallel import is_pipelined, is_unknown, unwrap_model
from accel.parallel.pipeline import pipeline_of
from accel.tensors import become, is_absent, is_dtensor, local_part, packed_weights, split_dims


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of a model that a checkpoint holds.

    Attributes:
        names: its names, several of a tied one.
        live: the tensor.
        dtype: dtype after the load.
        device: device after the load; None for a tensor that stays in files.
        box: this rank's part; None if it has none.
    """

    names: tuple[str, ...]
    live: torch.Tensor
    dtype: torch.dtype
    device: torch.device | None
    box: Box | None

    @property
    def is_empty(self) -> bool:
        """Whether it lies on the meta device."""
        return self.live.is_meta

    @property
    def is_unknown(self) -> bool:
        """Whether it has memory but no values yet, as `prepare` leaves a model that was built empty."""
        part = local_part(self.live)
        if self.is_empty or not part.numel() or not part.is_floating_point():
            return False
        return bool(part[(0,) * part.dim()].isnan()) and is_unknown(self.live)  # most are known by one element

    @property
    def is_copied(self) -> bool:
        """Whether other ranks hold the same elements."""
        return not is_dtensor(self.live) or len(split_dims(self.live)) < sum(n > 1 for n in self.live.device_mesh.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of this rank's part."""
        return tuple(local_part(self.live).shape)


def find_targets(
    model: nn.Module, device_map: DeviceChoice, dtype: torch.dtype | None, default: torch.device
) -> list[Target]:
    """List what a load fills: parameters and persistent buffers, tied ones once.

    Args:
        model: the model.
        device_map: home of each segment, or one device; None for `default` where tensors are empty.
        dtype: of floating-point tensors; None for that of each tensor.
        default: the context's device.

    Raises:
        ConfigError: no model, a dtype that a tensor with values does not have, or a map of another model.
        DeviceError: the device is not there.
        StreamError: the model is dispatched.
    """
    check_model(model, where="load_checkpoint_in_model")
    check_dtype(dtype, where="dtype=")
    destination_of = find_destinations(device_map, default)
    reshard(model)
    for name in packed_weights(model):
        raise ConfigError(
            "a load into quantized weights",
            expected="a model without them",
            got=f"{name!r}, a quantizer's",
            where="load_checkpoint_in_model",
            fix="Build the model anew, and call accel.load_quantized(ctx, model, weights, config=...).",
        )
    named: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for raw, value in model.state_dict(keep_vars=True).items():
        if is_absent(value):
            raise StreamError(
                "a load into a model whose weights are elsewhere, by dispatch_model",
                where=f"load_checkpoint_in_model, {raw!r}",
                fix="Build it anew by accel.init_empty_weights; or close it, and dispatch it again with source=path.",
            )
        if isinstance(value, torch.Tensor):
            named.setdefault(id(value), []).append(clean_name(model, raw))
            tensors[id(value)] = value
    inner = unwrap_model(model)
    pipeline = pipeline_of(inner) if is_pipelined(inner) else None
    for tied in pipeline.names if pipeline is not None else ():  # across stages
        for names in named.values():
            if not set(tied).isdisjoint(names):
                names += [name for name in tied if name not in names]
    return [
        _target(tuple(names), tensors[key], destination_of(names[0]), dtype, default) for key, names in named.items()
    ]


def place_others(model: nn.Module, device_map: DeviceChoice, filled: bool, default: torch.device) -> None:
    """Move tensors with values that no load fills, such as rotary frequencies, to the device of their module.

    Args:
        model: the model. Mutates it.
        device_map: as for `find_targets`.
        filled: whether the load gave memory to empty tensors.
        default: the context's device.
    """
    if device_map is None and not filled:
        return
    destination_of = find_destinations(device_map, default)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta or is_dtensor(tensor):
            continue
        device = destination_of(clean_name(model, name)).device
        if device is not None and tensor.device != device:
            tensor.data = tensor.data.to(device)


def fill(target: Target, made: torch.Tensor) -> None:
    """Give a live tensor its values. Mutates it, or swaps it in place for one on another device or of another dtype."""
    live = target.live
    if not target.is_empty:
        with torch.no_grad():
            _ = local_part(live).copy_(made)
        return
    there = made
    if is_dtensor(live):
        there = cast(Any, type(live)).from_local(
            made, live.device_mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride()
        )
    if isinstance(live, nn.Parameter):
        there = nn.Parameter(there, live.requires_grad)
    become(live, there)


def _target(
    names: tuple[str, ...],
    live: torch.Tensor,
    destination: Destination,
    dtype: torch.dtype | None,
    default: torch.device,
) -> Target:
    wanted = dtype if dtype is not None and live.is_floating_point() else live.dtype
    if live.is_meta and destination.dtype is not None:
        wanted = destination.dtype
    if wanted != live.dtype and not live.is_meta:
        raise ConfigError(
            "another dtype than that of a tensor with values",
            expected=str(live.dtype),
            got=str(wanted),
            where=f"dtype=, {names[0]}",
            fix="Build the model by accel.init_empty_weights, or convert it first: model.to(dtype).",
        )
    device = destination.device if live.is_meta and not is_dtensor(live) else live.device
    if live.is_meta and is_dtensor(live):
        kind = live.device_mesh.device_type
        device = default if kind == default.type else torch.device(kind)
        place = destination.device.type if destination.device is not None else None
        if destination.is_planned and (place != kind or destination.dtype is not None):
            device = None  # `dispatch_model` reads what lies elsewhere than its mesh computes, or in another dtype
    box = held_box(live, names[0]) if is_dtensor(live) else whole(live.shape)
    return Target(names, live, wanted, device, box)
