# SPDX-License-Identifier: Apache-2.0
"""A mesh of some of the ranks in a shape of their own, as experts have beside the context's mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel.comm._handle import Comm
from accel.comm._merged_mesh import lone_group
from accel.comm._mesh import group_of_rows


def grid_mesh(
    comm: Comm, grids: Sequence[Sequence[int]], sizes: Mapping[str, int], device_type: str, timeout_s: float
) -> DeviceMesh:
    """Return the mesh of this rank's grid. The first call opens its groups, which the handle owns: a collective.

    Args:
        comm: handle of all ranks, on torch's default group.
        grids: all ranks, each in one grid; the ranks of a grid in the order of its dimensions, the last fastest.
        sizes: of the dimensions by name; a grid has their product of ranks.
        device_type: of the mesh.
        timeout_s: time-out of collectives of the groups, in seconds.

    Raises:
        CollectiveMismatch: ranks make other meshes.
        PeerError: another rank was lost.
    """
    shape = tuple(sizes.values())
    assert all(len(grid) == math.prod(shape) for grid in grids)
    every = torch.tensor([list(grid) for grid in grids]).view(len(grids), *shape)
    groups: list[dist.ProcessGroup] = []
    for dim, (name, size) in enumerate(sizes.items()):
        rows = cast("list[list[int]]", cast(Any, every.movedim(dim + 1, -1).reshape(-1, size)).tolist())
        groups.append(group_of_rows(comm, rows, name, timeout_s) or lone_group(comm, timeout_s))
    own = next(grid for grid in grids if comm.rank in grid)
    ranks = torch.tensor(list(own)).view(shape)
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(sizes))
