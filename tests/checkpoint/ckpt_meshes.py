# SPDX-License-Identifier: Apache-2.0
"""A model spread over meshes in every way that checkpoints meet, and steps on data that no world size changes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

Layout = tuple[str, tuple[int, ...]]  # how, and over which mesh

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def plain(seed: int = 1) -> nn.Sequential:
    """Sizes that meshes divide unevenly where torch computes with that; double, as sums go in other orders."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 18), nn.Tanh(), nn.Linear(18, 7), nn.LayerNorm(7)).double()


def build(layout: Layout, seed: int = 1) -> tuple[nn.Module, torch.optim.AdamW]:
    kind, shape = layout
    model = plain(seed)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", shape)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
    elif kind == "tensor":
        parallelize_module(model, init_device_mesh("cpu", shape), PLAN)
    elif kind == "both":
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], PLAN)
        fully_shard(model, mesh=mesh["data"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def world_size(layout: Layout) -> int:
    return math.prod(layout[1])


def shares(layout: Layout) -> int:
    """Over how many ranks a batch is divided."""
    kind, shape = layout
    return {"plain": 1, "tensor": 1, "both": shape[0]}.get(kind, math.prod(shape))


def step(layout: Layout, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One step on twelve samples that all ranks share."""
    inputs = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    parts = shares(layout)
    mine = rank * parts // world_size(layout)
    model(inputs.chunk(parts)[mine]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All tensors whole, a collective; parameters are in the order of the plain model."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[name] = _full(parameter)
        found |= {f"{name}.{key}": _full(value) for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def _full(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    assert not any(each.is_partial() for each in tensor.placements)
    return tensor.detach().redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local().clone()
