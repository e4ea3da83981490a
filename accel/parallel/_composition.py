# SPDX-License-Identifier: Apache-2.0
"""The answers for all dimensions of a context's mesh, in the order in which a model is spread along them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from accel.context import DistContext
from accel.errors import PrepareError
from accel.parallel._ddp import REPLICATE
from accel.parallel._spread import Spread
from accel.parallel.context import CONTEXT
from accel.parallel.experts import EXPERT
from accel.parallel.pipeline import PIPELINE
from accel.parallel.shard import SHARD
from accel.parallel.tensor import TENSOR
from accel.topology import STRATEGY_DIMENSION, Dimension, dimension_of

# Stages are cut first, since every other dimension divides what one stage holds. Data parallelism comes last: it takes
# the parameters as the others have left them. `fully_shard` exchanges along replicas too, so a mesh of both is SHARD's.
_ORDER: tuple[Dimension, ...] = ("pipeline", "expert", "tensor", "context", "sequence", "shard", "replicate")
_BUILT = (PIPELINE, EXPERT, TENSOR, CONTEXT, SHARD, REPLICATE)
_SPREADS: Mapping[Dimension, Spread] = {each.dimension: each for each in _BUILT}


def composition(ctx: DistContext) -> Sequence[Spread]:
    """Return what spreads a model over the ranks of a context, in the order to apply it.

    Dimensions that nothing here spreads a model along are left out: their ranks hold replicas, or what the user spread.
    """
    asked = {dimension_of(name) for name, axis in ctx.position.axes if axis.size > 1}
    # DDP takes whole models of plain parameters alone; `fully_shard` has replicas of parts of models too.
    apart = asked & {"pipeline", "tensor", "expert"}
    wanted = {*asked - {"data", "replicate", "shard"}, "shard" if apart else STRATEGY_DIMENSION[ctx.strategy]}
    if asked == {"pipeline"}:  # every rank has a stage of its own, and no peer with the same one
        wanted = {"pipeline"}
    return [_SPREADS[dimension] for dimension in _ORDER if dimension in wanted and dimension in _SPREADS]


def unspread(ctx: DistContext, model: nn.Module) -> Sequence[Spread]:
    """Return what `prepare_model` would apply to a model; nothing on one rank. No communication."""
    return [each for each in composition(ctx) if ctx.world_size > 1 and not each.is_done(ctx, model)]


def check_axes(ctx: DistContext, *, spreads: bool = True) -> None:
    """Raise for a mesh along which ranks hold layers or experts of their own, and nothing here gives them those.

    Stages and experts often have equal names and shapes, so every one of them would begin with rank 0's values and
    would be averaged with the others.

    Args:
        ctx: the context.
        spreads: whether the model is about to be spread along the axes that something here knows.

    Raises:
        PrepareError: a pipeline or expert axis of more than one rank.
    """
    for name, axis in ctx.position.axes:
        dimension = dimension_of(name)
        known = spreads and dimension in _SPREADS
        if axis.size == 1 or dimension not in ("pipeline", "expert") or known:
            continue
        held = "stage" if dimension == "pipeline" else "experts"
        raise PrepareError(
            f"every rank would begin with rank 0's {held}, and average gradients with all others",
            expected="a mesh without pipeline and expert dimensions of more than one rank",
            got=f"{name}={axis.size}",
            where="prepare_model, ctx.mesh",
            fix=f"Leave {name} out of the mesh, or keep the model out of prepare and exchange its gradients.",
        )
