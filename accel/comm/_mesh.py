# SPDX-License-Identifier: Apache-2.0
"""Meshes of ranks: opened, adopted, merged or made of open groups; their groups, and this rank's position."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel.comm._call import Call, call_site
from accel.comm._exchange import barrier
from accel.comm._group import Comm
from accel.comm._rounds import peer_error
from accel.errors import ConfigError
from accel.topology import MeshPosition, mesh_position


def mesh_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of a mesh's ranks; `ConfigError` if torch has none, or this rank is not on the mesh."""
    _ = _coordinate(mesh)
    ranks = _ranks(mesh)
    world = dist.group.WORLD
    if world is not None and ranks == sorted(dist.get_process_group_ranks(world)):
        return world
    if mesh.ndim == 1:
        return mesh.get_group()
    raise ConfigError(
        "no process group has just the ranks of this mesh",
        expected="a mesh of all ranks, or of one dimension",
        got=f"{mesh.ndim} dimensions of {len(ranks)} ranks, {ranks}",
        where="from_mesh",
        fix="Make a group with torch.distributed.new_group, on all ranks, then replace(from_group(group), mesh=mesh).",
    )


def position_on_mesh(comm: Comm, mesh: DeviceMesh, data_dims: Sequence[str] | None) -> MeshPosition:
    """Return this rank's `MeshPosition` on a mesh; `ConfigError` unless it is a mesh of the handle's ranks."""
    coordinate = _coordinate(mesh)
    ranks = _ranks(mesh)
    own = _group_ranks(comm)
    if (own is None and len(ranks) > 1) or (own is not None and ranks != own):
        raise ConfigError(
            "the mesh has other ranks than the context",
            expected="one rank" if own is None else f"the {comm.size} ranks {own}",
            got=f"{len(ranks)}, {ranks}",
            where="mesh=",
            fix="Pass the full mesh, or make a context of its ranks with from_mesh.",
        )
    return mesh_position(mesh.mesh_dim_names, mesh.shape, coordinate, data_dims)


def open_mesh(comm: Comm, sizes: Mapping[str, int], device: torch.device, timeout_s: float) -> DeviceMesh:
    """Make a mesh of all ranks in their order, the slowest dimension first; the handle owns its groups. A collective.

    The handle's group must be torch's default one, or all ranks raise `ConfigError`.
    """
    world = comm.group
    if world is None or world is not dist.group.WORLD:
        raise ConfigError(
            "a mesh needs torch's default group",
            expected="a context of all ranks on it",
            got="a process without a group" if world is None else f"another group, of {comm.size} ranks",
            where="mesh=",
            fix="Open the mesh with accel.session(mesh=...).",
        )
    dimensions = "\n".join(f"{name}={size}" for name, size in sizes.items())
    # compared before anything opens: ranks that open different groups would wait for ever
    barrier(comm, Call("mesh", dimensions, call_site()))
    grid = torch.arange(comm.size).view(*sizes.values())
    groups: list[dist.ProcessGroup] = []
    for dim, (name, size) in enumerate(sizes.items()):
        if size == comm.size:  # no second group of the same ranks: its buffers would cost memory
            groups.append(world)
            continue
        rows = cast("list[list[int]]", cast(Any, grid.movedim(dim, -1).reshape(-1, size)).tolist())
        opened = _open_group(rows, f"mesh_{name}", timeout_s)
        assert opened is not None  # each rank has a place along every dimension
        groups.append(opened)
        comm.opened.append(opened)
    return DeviceMesh.from_group(groups, device.type, grid, mesh_dim_names=tuple(sizes))


def group_along(comm: Comm, mesh: DeviceMesh, axes: Sequence[str], timeout_s: float) -> dist.ProcessGroup | None:
    """Return the group of ranks that differ from this rank only along some axes; None if there are none.

    The first call for several axes opens the group, which the handle owns: a collective, as `group_of_rows`.
    """
    names = mesh.mesh_dim_names or ()
    dims = [at for at, name in enumerate(names) if name in axes and mesh.shape[at] > 1]
    size = math.prod([mesh.shape[at] for at in dims])
    if not dims:
        return None
    if size == comm.size:
        return comm.group
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    others = [at for at in range(mesh.ndim) if at not in dims]
    rows = cast(Any, mesh.mesh).permute(*others, *dims).reshape(-1, size)
    listed = tuple(tuple(row) for row in cast("list[list[int]]", rows.tolist()))
    return group_of_rows(comm, listed, "_".join(names[at] for at in dims), timeout_s)


def group_of_rows(comm: Comm, rows: Sequence[Sequence[int]], name: str, timeout_s: float) -> dist.ProcessGroup | None:
    """Return the group of this rank's row; None of a row of one. The first call opens it, a collective of all ranks.

    Rows have one length and no rank in common; a rank in no row gets None.
    """
    if len(rows[0]) == 1:
        return None
    if len(rows[0]) == comm.size:
        return comm.group
    # all rows, not only this rank's: torch opens the groups of all rows on every rank
    key = tuple(map(tuple, rows))
    if key not in comm.along:
        barrier(comm, Call("group_of", name, call_site()))
        opened = _open_group(rows, f"mesh_{name}", timeout_s)
        comm.along[key] = opened
        if opened is not None:
            comm.opened.append(opened)
    return comm.along[key]


def mesh_of_group(comm: Comm, device_type: str, name: str) -> DeviceMesh:
    """Return a 1-d mesh of all ranks of a handle; `ConfigError` if torch does not know the group. No communication."""
    try:
        return cast(Any, DeviceMesh).from_group(comm.group, device_type, mesh_dim_names=(name,))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "torch does not know the context's group, so no mesh can be made of it",
            expected="the default group, or one of torch.distributed.new_group",
            got=str(error),
            where="the context",
            fix="In a simulation, pass default_group=True.",
        ) from error


def mesh_of_dims(mesh: DeviceMesh, dims: Sequence[int]) -> DeviceMesh:
    """Return the part of a mesh around this rank along some dimensions, in any order. No communication."""
    names = mesh.mesh_dim_names
    if names is None or list(dims) == list(range(mesh.ndim)):
        return mesh
    if list(dims) == sorted(dims):
        return cast(Any, mesh)[tuple(names[at] for at in dims)]
    # torch slices dimensions in their order only; another order is a mesh made of the same groups
    here = mesh.get_coordinate()
    assert here is not None  # this rank is on its context's mesh
    place = tuple(slice(None) if at in dims else here[at] for at in range(mesh.ndim))
    ordered = sorted(dims)
    ranks = cast(Any, mesh.mesh)[place].permute(*(ordered.index(at) for at in dims))
    groups = [mesh.get_group(at) for at in dims]
    kind = cast(Any, DeviceMesh)
    return kind.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=tuple(names[at] for at in dims))


def ranks_around(mesh: DeviceMesh, dims: Container[int]) -> frozenset[int]:
    """Return the ranks that differ from this one along these dimensions of a mesh alone, and this one, as the default
    group counts them; none if this rank is not on the mesh."""
    here = mesh.get_coordinate()
    if here is None:
        return frozenset()
    place = tuple(slice(None) if dim in dims else at for dim, at in enumerate(here))
    return frozenset(cast(Any, mesh.mesh)[place].flatten().tolist())


def ranks_of_group(group: dist.ProcessGroup | None) -> frozenset[int] | None:
    """Return a group's ranks in the default group (None: this rank alone); None for a group that is not torch's."""
    try:
        if group is None:
            return frozenset([dist.get_rank(dist.group.WORLD)])
        return frozenset(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):  # managed by somebody else; or there is no default group
        return None


def _open_group(rows: Sequence[Sequence[int]], name: str, timeout_s: float) -> dist.ProcessGroup | None:
    """Open a group for each row of ranks, and return this rank's; None for a rank in no row."""
    listed = [list(row) for row in rows]
    timeout = timedelta(seconds=timeout_s)
    try:
        return cast(Any, dist).new_subgroups_by_enumeration(listed, timeout=timeout, group_desc=name)[0]
    except RuntimeError as error:
        if (lost := peer_error(error, "opening a mesh")) is None:
            raise
        raise lost from error


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass shapes
        raise ConfigError(
            "the mesh is not valid",
            expected='a text such as "dp=2,tp=2", or a torch DeviceMesh',
            got=repr(mesh),
            where="mesh=",
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(
            "this rank is not on the mesh",
            expected=f"rank {dist.get_rank(dist.group.WORLD)} among its ranks",
            got=str(_ranks(mesh)),
            where="mesh=",
        )
    return tuple(coordinate)


def _ranks(mesh: DeviceMesh) -> list[int]:
    """The ranks of a mesh, as the default group counts them, in order."""
    return sorted(cast("list[int]", mesh.mesh.flatten().tolist()))  # pyright: ignore[reportUnknownMemberType]


def _group_ranks(comm: Comm) -> list[int] | None:
    """The ranks of a handle's group, as the default group counts them, in order; None without a group."""
    if comm.group is None:
        return None
    try:
        return sorted(dist.get_process_group_ranks(comm.group))
    except KeyError as error:
        raise ConfigError(
            "torch does not know the context's group, so no mesh can be compared with it",
            expected="the default group, or one of torch.distributed.new_group",
            where="mesh=",
        ) from error


MERGED = "+"  # between the names of merged dimensions


def merged_mesh(comm: Comm, mesh: DeviceMesh, parts: Sequence[Sequence[int]], timeout_s: float) -> DeviceMesh:
    """Return the mesh around this rank with each set of another mesh's dimensions as one, such as "dp_shard+cp".

    An empty set becomes a dimension of this rank alone. Merging is a collective at first: it opens the handle's groups.
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
    # a slice of a mesh of all ranks: FSDP2 combines its dimensions with dimensions of meshes on the same ranks
    return whole[tuple(titles[order.index(tuple(part))] for part in parts)]


def merged_order(ndim: int, parts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the sets of dimensions in the order of the mesh that has them merged; a dimension of no part is one alone.

    If the numbers ascend, ranks are laid out as before, and torch can combine dimensions of both meshes.
    """
    merged = {dim for part in parts for dim in part}
    first = min(merged, default=0)
    before = [(dim,) for dim in range(first)]
    after = [(dim,) for dim in range(first, ndim) if dim not in merged]
    return [*before, *map(tuple, parts), *after]


def lone_group(comm: Comm, timeout_s: float) -> dist.ProcessGroup:
    """Return a group of this rank alone, which the handle owns. No communication."""
    own = dist.get_rank(dist.group.WORLD)
    key = ((own,),)
    known = comm.along.get(key)
    if known is None:
        timeout = timedelta(seconds=timeout_s)
        # local synchronization: the other ranks need not call
        known = cast(Any, dist).new_group([own], timeout=timeout, use_local_synchronization=True, group_desc="alone")
        comm.along[key] = known
        comm.opened.append(known)
    return known


def grid_mesh(
    comm: Comm, grids: Sequence[Sequence[int]], sizes: Mapping[str, int], device_type: str, timeout_s: float
) -> DeviceMesh:
    """Return the mesh of this rank's grid. The first call opens its groups, which the handle owns: a collective.

    Each rank is in one grid. The ranks of a grid follow its dimensions, the last fastest.
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
