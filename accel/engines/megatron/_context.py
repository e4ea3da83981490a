# SPDX-License-Identifier: Apache-2.0
"""Contexts on Megatron's parallel state: its groups as one mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel.config._settings import GroupKeywords
from accel.context import DistContext, from_mesh
from accel.errors import ConfigError
from accel.errors._checks import import_extra


class RankMesh(msgspec.Struct, frozen=True):
    """A mesh of ranks 0 to n - 1 in their order.

    Attributes:
        names: of the dimensions, the slowest first; dimensions of one rank are left out, unless all are.
        sizes: of the dimensions.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def row(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from a rank along a dimension at most, itself included, in ascending order."""
        if name not in self.names:
            return (rank,)
        at = self.names.index(name)
        stride = math.prod(self.sizes[at + 1 :])
        first = rank - rank // stride % self.sizes[at] * stride
        return tuple(first + each * stride for each in range(self.sizes[at]))


def mesh_of_groups(groups: Mapping[str, Sequence[int]], rank: int, world_size: int) -> RankMesh:
    """Return the mesh that a rank's groups form, whatever order of parallelism made them.

    A group's stride, the distance of its ranks, gives its dimension's place: the fastest dimension has stride 1. So
    every rank finds the same mesh. Groups "ep" and "edp" take the place of "dp" where they divide it.
    """
    dense = {name: tuple(groups[name]) for name in ("pp", "dp", "cp", "tp")}
    experts = tuple(groups.get("ep", (rank,)))
    if len(experts) > 1:
        divided = _mesh({**dense, "dp": tuple(groups["edp"]), "ep": experts}, rank, world_size)
        if divided is not None and _joint(divided, rank) == dense["dp"]:
            return divided
    found = _mesh(dense, rank, world_size)
    if found is None:
        listed = ", ".join(f"{name}={len(ranks)} {list(ranks)}" for name, ranks in dense.items())
        raise ConfigError(
            "Megatron's groups do not form one mesh of all ranks",
            expected=f"sizes of pp, dp, cp and tp with the product {world_size}, each of evenly spaced ranks",
            got=listed,
            where="from_megatron",
            fix="Initialize Megatron's parallel state on torch's default group, with all of its ranks.",
        )
    return found


def _mesh(groups: Mapping[str, tuple[int, ...]], rank: int, world_size: int) -> RankMesh | None:
    """Return the mesh of groups ordered by their strides; None unless each group is its row of the mesh."""
    several = {name: ranks for name, ranks in groups.items() if len(ranks) > 1}
    names = sorted(several, key=lambda name: several[name][1] - several[name][0], reverse=True)
    sizes = tuple(len(several[name]) for name in names)
    if math.prod(sizes) != world_size:
        return None
    found = RankMesh(tuple(names), sizes)
    if any(found.row(name, rank) != several[name] for name in names):
        return None
    return found if names else RankMesh(("dp",), (1,))


def _joint(mesh: RankMesh, rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from a rank along "dp" and "ep" alone."""
    return tuple(sorted(each for other in mesh.row("ep", rank) for each in mesh.row("dp", other)))


def megatron_core(module: str) -> Any:
    """Import a module below `megatron.core`."""
    where = "accel.engines.megatron"
    return import_extra(f"megatron.core.{module}", where, extra="megatron", where=where)


def initialized_state() -> Any:
    """Return Megatron's module of the parallel state, which must be initialized."""
    state = megatron_core("parallel_state")
    if not dist.is_initialized() or not state.model_parallel_is_initialized():
        raise ConfigError(
            "Megatron's parallel state is not initialized",
            expected="its groups, on torch's default group",
            got="no groups" if dist.is_initialized() else "no default group",
            where="from_megatron",
            fix="Call megatron.core.parallel_state.initialize_model_parallel(...) on every rank before.",
        )
    return state


def megatron_mesh(device_type: str) -> DeviceMesh:
    """Return Megatron's groups as one mesh of all ranks, for `accel.replace(ctx, mesh=)`. No communication.

    Its dimensions are the ones of "pp", "dp", "cp" and "tp" with several ranks, in Megatron's order. With experts,
    "ep" and "dp" divide the data ranks; where experts divide other ranks too, as with context parallelism, the mesh has
    no "ep". The groups stay Megatron's.

    Args:
        device_type: such as "cuda" or "cpu".

    Raises:
        MissingExtraError: Megatron-core does not import.
        ConfigError: its parallel state is not initialized, or does not form one mesh.
    """
    state = initialized_state()
    groups: dict[str, dist.ProcessGroup] = {
        "pp": state.get_pipeline_model_parallel_group(),
        "dp": state.get_data_parallel_group(),
        "cp": state.get_context_parallel_group(),
        "tp": state.get_tensor_model_parallel_group(),
        "ep": state.get_expert_model_parallel_group(),
        "edp": state.get_expert_data_parallel_group(),
    }
    ranks = {name: sorted(dist.get_process_group_ranks(group)) for name, group in groups.items()}
    world = dist.group.WORLD
    assert world is not None
    found = mesh_of_groups(ranks, world.rank(), world.size())
    if "ep" in found.names:
        groups["dp"] = groups["edp"]
    along = [groups[name] for name in found.names]
    if len(along) == 1:
        return DeviceMesh.from_group(along[0], device_type, mesh_dim_names=found.names)
    grid = torch.arange(world.size()).view(found.sizes)
    return DeviceMesh.from_group(along, device_type, grid, mesh_dim_names=found.names)


def from_megatron(
    *,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    **settings: Unpack[GroupKeywords],
) -> DistContext:
    """Make a context on Megatron's parallel state; nothing of Megatron's is destroyed with it. No communication.

    Ranks along "dp", and "ep", have different samples. Ranks along "tp", "cp" and "pp" share them: loaders give them
    the same batches.

    Args:
        local_rank, local_world_size: as for `accel.from_group`.
        settings: as for `accel.from_group`; the device is by default CUDA's where there is one, else the CPU.

    Raises:
        MissingExtraError: Megatron-core does not import.
        ConfigError: its parallel state is not initialized, or a setting is outside its range.
        DeviceError: the device is not there.
    """
    device = settings.get("device")
    kind = torch.device(device).type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    mesh = megatron_mesh(kind)
    return from_mesh(mesh, local_rank=local_rank, local_world_size=local_world_size, **settings)
