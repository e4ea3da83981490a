# SPDX-License-Identifier: Apache-2.0
"""Refusals of models whose weights are elsewhere, before anything moves."""

from __future__ import annotations

from torch import nn

from accel.context import DistContext
from accel.errors import PrepareError
from accel.tensors import is_absent, packed_weights
from accel.topology import dimension_of

_SHOWN = 3


def check_absent(ctx: DistContext, model: nn.Module) -> None:
    """Refuse a dispatched model that would train absent weights, or that ranks would replicate or shard.

    Raises:
        PrepareError: such a model; the first weights are named.
    """
    trains = {name: each.requires_grad for name, each in model.named_parameters() if is_absent(each)}
    trains |= {name: False for name, each in packed_weights(model).items() if any(map(is_absent, each.parts.values()))}
    trained = [name for name, is_trained in trains.items() if is_trained]
    if trained:
        raise PrepareError(
            "weights that are not in memory cannot be trained",
            got=f"{len(trained)}: {', '.join(trained[:_SHOWN])}",
            where="prepare_model",
            fix="Freeze them before dispatch_model, by model.requires_grad_(False); then add what trains.",
        )
    if trains and ctx.world_size > 1:
        raise PrepareError(
            "weights that are not in memory cannot be spread over ranks",
            got=f"{len(trains)} such weights and {ctx.world_size} ranks",
            where="prepare_model",
            fix="Train on one rank, or let fsdp shard a model that one device cannot hold. To run it divided, prepare "
            "it empty, by prepare_model(ctx, model, allocate=False), and dispatch it then.",
        )


def check_unallocated(ctx: DistContext) -> None:
    """Refuse to leave a model empty where ranks would exchange its gradients.

    Raises:
        PrepareError: an engine, or an axis of replicas or shards with several ranks.
    """
    data = ("data", "replicate", "shard")
    named = [f"{name}={axis.size}" for name, axis in ctx.position.axes if axis.size > 1 and dimension_of(name) in data]
    if ctx.settings.strategy not in ("ddp", "fsdp") or named:
        raise PrepareError(
            "a model without memory cannot be replicated, sharded, or given to an engine",
            expected="one rank, or a mesh of pp and tp",
            got=", ".join(named) or f"strategy {ctx.settings.strategy}",
            where="prepare_model(allocate=False)",
            fix="Leave it out to train; to run a model that memory cannot hold, let each replica be a run of its own.",
        )
