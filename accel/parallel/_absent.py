# SPDX-License-Identifier: Apache-2.0
"""Refusals of models whose weights are elsewhere, before anything moves."""

from __future__ import annotations

from torch import nn

from accel.context import DistContext
from accel.errors import PrepareError
from accel.tensors import is_absent, packed_weights

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
            fix="Train on one rank, or let fsdp shard a model that one device cannot hold.",
        )
