# SPDX-License-Identifier: Apache-2.0
"""Experts as units of `fully_shard`: sharded, or replicated, over the ranks that hold the same ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from accel.context import DistContext
from accel.parallel.experts._mesh import gradient_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_experts(ctx: DistContext, module: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Call `fully_shard` on a module of experts. Mutates it.

    Fewer ranks average the gradients of experts than those of other parameters, and each of them has the tokens of
    several ranks, so the mean is brought to the number that other gradients are divided by.

    Args:
        ctx: the context.
        module: with parameters that are spread along `ep`.
        mesh: of the ranks that hold the same experts.
        options: of `fully_shard`, as other units have them.
    """
    from torch.distributed.fsdp import fully_shard  # its import takes most of a second
    from torch.distributed.tensor import Shard

    shards = mesh.size(mesh.ndim - 1)

    def placement(parameter: nn.Parameter) -> Shard | None:
        """Divide the experts where they can be, then the rows of each: no rank is left without a shard."""
        own = cast(Any, parameter).to_local().shape
        return None if own[0] % shards == 0 or len(own) < 2 or own[1] % shards else Shard(1)

    _ = fully_shard(module, mesh=mesh, shard_placement_fn=placement, **options)
    factor = mesh.size() / gradient_ranks(ctx)

    def rescale(shard: Tensor) -> None:
        _ = shard.mul_(factor)

    if factor != 1:  # set_gradient_divide_factor divides twice where a mesh has one rank along its shards
        cast(Any, module).set_all_reduce_hook(rescale)
