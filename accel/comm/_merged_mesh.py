# SPDX-License-Identifier: Apache-2.0
"""A mesh with one dimension for several of another mesh, as for parameters that are sharded along two axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel.comm._handle import Comm
from accel.comm._mesh import group_along, mesh_of_dims

MERGED = "+"  # between the names of merged dimensions


def merged_mesh(comm: Comm, mesh: DeviceMesh, parts: Sequence[Sequence[int]], timeout_s: float) -> DeviceMesh:
    """Return the mesh around this rank with one dimension for each set of another mesh's dimensions.

    The first call opens the groups, which the handle owns: a collective. Where no dimensions are merged the mesh is a
    slice of the other, and nothing is opened.

    Args:
        comm: handle of the mesh's ranks.
        mesh: with named dimensions.
        parts: sets of dimensions by number, each for one dimension of the new mesh, named "dp_shard+cp"; an empty set
            for a dimension of this rank alone.
        timeout_s: time-out of collectives of the new groups, in seconds.

    Raises:
        CollectiveMismatch: ranks merge other dimensions.
        PeerError: another rank was lost.
    """
    if all(len(part) == 1 for part in parts):
        return mesh_of_dims(mesh, [part[0] for part in parts])
    names = mesh.mesh_dim_names
    assert names is not None
    order = merged_order(mesh.ndim, parts)
    grid = cast(Any, mesh.mesh).permute(*(dim for part in order for dim in part))
    sizes = [math.prod(mesh.shape[dim] for dim in part) for part in order]
    groups: list[dist.ProcessGroup] = []
    for part in order:
        along = group_along(comm, mesh, [names[dim] for dim in part], timeout_s) if len(part) != 1 else None
        groups.append(mesh.get_group(part[0]) if len(part) == 1 else along or lone_group(comm, timeout_s))
    titles = [MERGED.join(names[dim] for dim in part) or "whole" for part in order]
    kind = cast(Any, DeviceMesh)
    whole = kind.from_group(groups, mesh.device_type, grid.reshape(sizes), mesh_dim_names=tuple(titles))
    return whole[tuple(titles[order.index(tuple(part))] for part in parts)]


def merged_order(ndim: int, parts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the sets of dimensions in the order of the mesh that has them merged; a dimension of no part is one alone.

    If the numbers ascend, ranks lie as before, and torch can combine dimensions of both meshes.

    Args:
        ndim: number of the mesh's dimensions.
        parts: as of `merged_mesh`.
    """
    merged = {dim for part in parts for dim in part}
    first = min(merged, default=0)
    before = [(dim,) for dim in range(first)]
    after = [(dim,) for dim in range(first, ndim) if dim not in merged]
    return [*before, *map(tuple, parts), *after]


def lone_group(comm: Comm, timeout_s: float) -> dist.ProcessGroup:
    """Return a group of this rank alone, which the handle owns. No communication.

    Args:
        comm: handle on torch's default group.
        timeout_s: time-out of collectives of the group, in seconds.
    """
    own = dist.get_rank(dist.group.WORLD)
    key = ((own,),)
    known = comm.along.get(key)
    if known is None:
        timeout = timedelta(seconds=timeout_s)
        known = cast(Any, dist).new_group([own], timeout=timeout, use_local_synchronization=True, group_desc="alone")
        comm.along[key] = known
        comm.opened.append(known)
    return known
