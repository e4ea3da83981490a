# SPDX-License-Identifier: Apache-2.0
"""What a rank knows about itself and its peers."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.device_mesh import DeviceMesh

from accel.comm import Comm
from accel.env import LaunchEnv
from accel.formats import Precision, StrategyName
from accel.topology import Axis, MeshPosition, without_mesh
from accel.tree import Container


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DistContext:
    """This rank's place in the job, its device and its precision; a value that never changes.

    Attributes:
        rank, world_size: position among all ranks.
        local_rank, local_world_size: position among the ranks of this node.
        node_rank, num_nodes: position of this node.
        device: where this rank computes.
        backend: c10d backend for that device; "none" for a single process without a group.
        precision: what is computed in which format; `autocast`, `loss_scale` and `prepare` follow it.
        accumulation: how many micro-batches were asked for in each optimizer step; for `Accumulation(steps=)`.
        strategy: how `prepare` spreads a model over the ranks.
        timeout_s: seconds after which a collective that misses a rank fails.
        containers: kinds of containers besides those that `accel.tree` knows; set by `replace`.
        position: coordinate on the mesh, or on the one axis "dp" that all ranks form without a mesh.
        mesh: the mesh of all ranks, if `replace` or `from_mesh` was given one.
        launched: which of `accumulation`, `precision` and `mesh` a variable has set, as `accel launch` sets those of
            its flags and files; a step refuses them if they have no effect. Not part of equality either.
        comm: the handle on the process group; like the mesh not part of equality, nor of what is printed.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    backend: str
    precision: Precision
    timeout_s: float
    position: MeshPosition
    accumulation: int = 1
    strategy: StrategyName = "ddp"
    containers: tuple[Container, ...] = ()
    mesh: DeviceMesh | None = dataclasses.field(default=None, compare=False, repr=False)
    launched: frozenset[str] = dataclasses.field(default=frozenset(), compare=False, repr=False)
    comm: Comm = dataclasses.field(compare=False, repr=False)

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self.rank == self.world_size - 1

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(index, count) of this rank among those with samples of their own; (rank, world_size) without a mesh.

        Ranks of one tensor, context or pipeline group have the same index.
        """
        return self.position.data

    def axis(self, name: str) -> Axis:
        """Return this rank's index along an axis of the mesh, and the axis's size.

        (0, 1) for an axis that the mesh does not have, so that one script serves all meshes. Without a mesh the ranks
        form one axis, "dp".

        Args:
            name: such as "tp"; an axis under another name of the same dimension, such as "tensor", is found too.

        Raises:
            ConfigError: no mesh has an axis of that name.

        Example:
            >>> accel.single().axis("tp")
            Axis(rank=0, size=1)
        """
        return self.position.axis(name)


def build(
    env: LaunchEnv,
    *,
    device: torch.device,
    precision: Precision,
    timeout_s: float,
    accumulation: int,
    strategy: StrategyName,
    comm: Comm,
) -> DistContext:
    return DistContext(
        rank=comm.rank,  # of an XLA device, it is not the launcher's
        world_size=comm.size,
        local_rank=env.local_rank,
        local_world_size=env.local_world_size,
        node_rank=env.node_rank,
        num_nodes=env.num_nodes,
        device=device,
        backend=comm.backend,
        precision=precision,
        timeout_s=timeout_s,
        position=without_mesh(comm.rank, comm.size),
        accumulation=accumulation,
        strategy=strategy,
        comm=comm,
    )
