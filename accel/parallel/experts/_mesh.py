# SPDX-License-Identifier: Apache-2.0
"""The mesh of experts: ranks that hold other experts, and ranks that hold the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from accel.comm import grid_mesh
from accel.context import DistContext
from accel.parallel._paths import named_modules
from accel.tensors import is_dtensor
from accel.topology import rank_rows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

EP = "ep"
_ROWS = ("dp_replicate", "efsdp", EP)  # along the first two, ranks hold the same experts


def open_expert_mesh(ctx: DistContext) -> DeviceMesh:
    """Return the mesh of the ranks of this rank's pipeline stage for parameters of experts. A collective at first.

    Its last dimension is "ep"; before it one for shards, "efsdp", and where there are replicas one for them, first.
    Under the strategy `ddp` all ranks with the same experts are replicas.

    Args:
        ctx: a context with an `ep` of more than one rank.
    """
    sizes = expert_mesh_sizes(ctx)
    return grid_mesh(ctx.comm, rank_rows(ctx.axes, *_ROWS), sizes, ctx.device.type, ctx.timeout_s)


def expert_mesh_sizes(ctx: DistContext) -> Mapping[str, int]:
    """Return the sizes of the mesh of experts, by dimension."""
    axes = ctx.axes
    shards = axes.expert_ranks // axes.ep
    replicas = axes.dp_replicate
    if ctx.strategy == "ddp":
        replicas *= shards
        shards = 1
    names = {"dp_replicate": replicas, "efsdp": shards, EP: axes.ep}
    return {name: size for name, size in names.items() if size > 1 or name != "dp_replicate"}


def exchange_mesh(ctx: DistContext) -> DeviceMesh:
    """Return the part of the mesh of experts along which their gradients are exchanged. A collective at first."""
    mesh = open_expert_mesh(ctx)
    return cast(Any, mesh)[tuple(name for name in mesh.mesh_dim_names or () if name != EP)]


def gradient_ranks(ctx: DistContext) -> int:
    """Return the number of ranks whose losses are averaged: those with tokens of their own, of one pipeline stage."""
    axes = ctx.axes
    return axes.dp * axes.dp_replicate * axes.dp_shard * axes.cp


def is_expert_parameter(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is spread along `ep`. No communication."""
    return is_dtensor(parameter) and EP in (parameter.device_mesh.mesh_dim_names or ())


def expert_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules whose parameters are spread along `ep`, inner ones first. No communication."""
    named = named_modules(model)
    found = [name for name, module in named if any(map(is_expert_parameter, module.parameters(recurse=False)))]
    return tuple(reversed(found))
