# SPDX-License-Identifier: Apache-2.0
"""Meshes of ranks that somebody else made: which group is theirs, and which place this rank takes on one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel.comm._handle import Comm
from accel.errors import ConfigError
from accel.topology import data_place


def mesh_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a process group of exactly the ranks of a mesh: the default group, or that of its only dimension.

    Raises:
        ConfigError: torch has no such group, or this rank is not on the mesh.
    """
    _ = _coordinate(mesh)
    ranks, world = _ranks(mesh), dist.group.WORLD
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


def place_on_mesh(comm: Comm, mesh: DeviceMesh, data_dims: Sequence[str] | None) -> tuple[int, int]:
    """Return this rank's place among the data-parallel ones of a mesh; see `accel.topology.data_place`.

    Args:
        comm: whose ranks the mesh has.
        mesh: with the meaning of its dimensions in their names.
        data_dims: as for `data_place`.

    Raises:
        ConfigError: not a mesh, or one of other ranks; or as `data_place`.
    """
    coordinate, ranks = _coordinate(mesh), _ranks(mesh)
    own = _group_ranks(comm)
    if (own is None and len(ranks) > 1) or (own is not None and ranks != own):
        raise ConfigError(
            "the mesh has other ranks than the context",
            expected="one rank" if own is None else f"the {comm.size} ranks {own}",
            got=f"{len(ranks)}, {ranks}",
            where="mesh=",
            fix="Pass the whole mesh, or make a context of its own ranks with from_mesh.",
        )
    return data_place(mesh.mesh_dim_names, mesh.shape, coordinate, data_dims)


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass shapes
        raise ConfigError("not a mesh", expected="a torch DeviceMesh", got=repr(mesh), where="mesh=")
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
