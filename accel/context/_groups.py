# SPDX-License-Identifier: Apache-2.0
"""`group_of`: the process group along axes of the context's mesh."""

from __future__ import annotations

import torch.distributed as dist

from accel.comm import group_along, group_of_rows
from accel.context._first import context_first
from accel.context._record import DistContext
from accel.topology import STRATEGY_DIMENSION, rank_rows


@context_first
def group_of(ctx: DistContext, *axes: str) -> dist.ProcessGroup | None:
    """Return the process group of the ranks along axes of the mesh, for torch's own functions.

    It holds this rank and those whose coordinates differ from its own along these axes alone, in the mesh's order. The
    first call for several axes of more than one rank is a collective, which opens the group; the session closes it.
    Call it on all ranks.

    Args:
        ctx: the context.
        axes: names as for `ctx.axis`.

    Returns:
        The group; None where it would have this rank alone.

    Raises:
        ConfigError: no mesh has an axis of that name.
        CollectiveMismatch: ranks name other axes.
        PeerError: another rank was lost.
        ContextClosedError: the context is closed.

    Example:
        >>> accel.group_of(accel.single(), "dp_shard", "cp") is None
        True
    """
    ctx.comm.check_open()
    data = STRATEGY_DIMENSION.get(ctx.strategy, "data")
    own = list(dict.fromkeys(found for name in axes for found in ctx.position.find(name, data)))
    if ctx.mesh is None or ctx.mesh.mesh_dim_names is None:
        return ctx.comm.group if own and ctx.world_size > 1 else None
    if "ep" in own and "ep" not in ctx.mesh.mesh_dim_names:
        return group_of_rows(ctx.comm, rank_rows(ctx.axes, *own), "_".join(own), ctx.timeout_s)
    return group_along(ctx.comm, ctx.mesh, own, ctx.timeout_s)
