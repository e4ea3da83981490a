# SPDX-License-Identifier: Apache-2.0
"""Contexts of groups and meshes that another framework made, and changed copies of a context."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel.comm import adopt, mesh_group, open_mesh, position_on_mesh
from accel.context._checks import DEFAULT_TIMEOUT_S, check_accumulation, check_containers, check_strategy, check_timeout
from accel.context._device import choose_device
from accel.context._first import context_first
from accel.context._record import DistContext, build
from accel.env import LaunchEnv
from accel.errors import ConfigError
from accel.formats import Precision, PrecisionName, StrategyName
from accel.formats import precision as precision_of
from accel.topology import fit_mesh, without_mesh
from accel.tree import Container


def from_group(
    group: dist.ProcessGroup,
    *,
    device: torch.device | str | None = None,
    precision: Precision | PrecisionName = "fp32",
    accumulation: int = 1,
    strategy: StrategyName = "ddp",
    local_rank: int | None = None,
    local_world_size: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> DistContext:
    """Make a context on a process group that another framework made; it is never destroyed here.

    On XLA devices a collective: a group for what lies on the CPU is opened beside it, which `close` ends.

    Args:
        group: the group; its rank and size become the context's.
        device: where to compute; by default as in `from_env`.
        precision: a name such as "bf16", or a record: see `accel.Precision`.
        accumulation: how many micro-batches make one optimizer step; the script reads it from the context.
        strategy: how `prepare` spreads a model over the ranks: "ddp" or "fsdp".
        local_rank: this rank's place on its node; by default its rank, as on one node.
        local_world_size: the ranks on this node; by default all.
        timeout_s: what the group's own time-out is, in seconds; the group is not changed.

    Raises:
        ConfigError: ranks outside their range, or an unknown precision or strategy.
        DeviceError: the device is not there.
    """
    rank, size = group.rank(), group.size()
    per_node = size if local_world_size is None else local_world_size
    on_node = rank % per_node if per_node > 0 and local_rank is None else local_rank
    if on_node is None or per_node < 1 or size % per_node or not 0 <= on_node < per_node:
        raise ConfigError(
            "local ranks do not fit the group",
            expected=f"local_world_size dividing {size}, and local_rank below it",
            got=f"local_rank={local_rank}, local_world_size={local_world_size}",
            where="from_group",
        )
    env = LaunchEnv(
        rank=rank,
        world_size=size,
        local_rank=on_node,
        local_world_size=per_node,
        node_rank=rank // per_node,
        num_nodes=size // per_node,
    )
    chosen = choose_device(device, env)
    return build(
        env,
        device=chosen,
        precision=precision_of(precision),
        accumulation=check_accumulation(accumulation),
        strategy=check_strategy(strategy),
        timeout_s=check_timeout(timeout_s),
        comm=adopt(group, chosen),
    )


def from_mesh(
    mesh: DeviceMesh,
    *,
    data_dims: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    precision: Precision | PrecisionName = "fp32",
    accumulation: int = 1,
    strategy: StrategyName = "ddp",
    local_rank: int | None = None,
    local_world_size: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> DistContext:
    """Make a context on the ranks of a mesh that another framework made; nothing of it is destroyed here.

    Its group is the default one if the mesh has all ranks, else that of the mesh's only dimension.

    Args:
        mesh: of this rank and others.
        data_dims: as for `replace`.
        device: where to compute; by default the mesh's kind of device.
        precision, accumulation, strategy, local_rank, local_world_size, timeout_s: as for `from_group`.

    Raises:
        ConfigError: a mesh without a group of just its ranks, or without this rank; or as `replace` and `from_group`.
        DeviceError: the device is not there.
    """
    ctx = from_group(
        mesh_group(mesh),
        device=mesh.device_type if device is None else device,
        precision=precision,
        accumulation=accumulation,
        strategy=strategy,
        local_rank=local_rank,
        local_world_size=local_world_size,
        timeout_s=timeout_s,
    )
    return replace(ctx, mesh=mesh, data_dims=data_dims)


@context_first
def replace(
    ctx: DistContext,
    *,
    device: torch.device | str | None = None,
    precision: Precision | PrecisionName | None = None,
    accumulation: int | None = None,
    strategy: StrategyName | None = None,
    containers: Sequence[Container] | None = None,
    mesh: DeviceMesh | str | None = None,
    data_dims: Sequence[str] | None = None,
) -> DistContext:
    """Return a copy of the context with something changed; the group is shared. No communication but for a new mesh.

    A setting that is given here is the script's: the first step does not ask whether what the launcher set has an
    effect.

    Args:
        ctx: the context.
        device: where to compute; None for where it does.
        precision: a name such as "bf16", or a record; None for what it has.
        accumulation: how many micro-batches make one optimizer step; None for what it has.
        strategy: how `prepare` spreads a model over the ranks, "ddp" or "fsdp"; None for what it has.
        containers: kinds of containers besides those that `accel.tree` knows, in place of those that it has; of several
            that fit a value the first is taken. The same on every rank. None for what it has.
        mesh: of the context's ranks; random streams, loaders and steps then follow `data_parallel`, its place on it.
            State it before they are prepared. A text such as "dp=2,tp=2" opens one as `session` does, a collective;
            `close` ends it. None for what it has, an empty text for none.
        data_dims: names of the mesh's dimensions along which ranks have samples of their own; None for what the names
            say: "dp", "data", "fsdp", "ep" and the like do, "tp", "cp", "sp", "pp" and the like do not. A mesh of one
            dimension without a name is data parallel.

    Raises:
        DeviceError: the device is not there.
        ConfigError: an unknown precision or strategy, no number of micro-batches, or something that is no `Container`;
            a mesh of other ranks, or with a dimension of which it is not known what it means.
    """
    if data_dims is not None and (mesh is None or mesh == ""):
        raise ConfigError("data_dims has no effect without mesh", where="replace(data_dims=)", fix="Pass mesh= too.")
    here = LaunchEnv(rank=ctx.rank, local_rank=ctx.local_rank)
    place = ctx.device if device is None else choose_device(device, here)
    handle = ctx.mesh if mesh is None else None
    position = ctx.position if mesh is None else without_mesh(ctx.rank, ctx.world_size)
    if isinstance(mesh, str):
        sizes = fit_mesh(mesh, ctx.world_size, where="mesh=")
        mesh = open_mesh(ctx.comm, sizes, place, ctx.timeout_s) if sizes else None
    if mesh is not None:
        handle = mesh
        position = position_on_mesh(ctx.comm, mesh, data_dims)
    arguments = {"accumulation": accumulation, "precision": precision, "mesh": mesh}
    return dataclasses.replace(
        ctx,
        launched=ctx.launched - {name for name, given in arguments.items() if given is not None},
        device=place,
        precision=ctx.precision if precision is None else precision_of(precision),
        accumulation=ctx.accumulation if accumulation is None else check_accumulation(accumulation),
        strategy=ctx.strategy if strategy is None else check_strategy(strategy),
        containers=ctx.containers if containers is None else check_containers(containers),
        mesh=handle,
        position=position,
    )
