# SPDX-License-Identifier: Apache-2.0
"""Contexts of groups and meshes that another framework made, and changed copies of a context."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Unpack

import msgspec
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel.comm import adopt, mesh_group, open_mesh, position_on_mesh
from accel.config import GroupKeywords
from accel.context._device import choose_device
from accel.context._first import context_first
from accel.context._record import DistContext, build
from accel.context._settings import check_containers, settle
from accel.env import LaunchEnv
from accel.errors import ConfigError
from accel.topology import axes_position, fit_axes, mesh_sizes, without_mesh
from accel.tree import Container


def from_group(
    group: dist.ProcessGroup,
    *,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    **settings: Unpack[GroupKeywords],
) -> DistContext:
    """Make a context on a process group that another framework made; it is never destroyed here.

    On XLA devices a collective: a group for what lies on the CPU is opened beside it, which `close` ends.

    Args:
        group: the group; its rank and size become the context's.
        local_rank: this rank's place on its node; by default its rank, as on one node.
        local_world_size: number of ranks on this node; by default all.
        settings: `device`, `precision`, `accumulation`, `strategy` and `deepspeed`, as for `from_env`; `timeout_s`, the
            group's own time-out in seconds, for the group is not changed. The defaults are those of `from_env`.

    Raises:
        ConfigError: ranks or a setting outside their range.
        DeviceError: the device is not there.
    """
    rank = group.rank()
    size = group.size()
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
    settled = settle(settings, env)
    device = choose_device(settings.get("device"), env)
    return build(env, settled, device, adopt(group, device))


def from_mesh(
    mesh: DeviceMesh,
    *,
    data_dims: Sequence[str] | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    **settings: Unpack[GroupKeywords],
) -> DistContext:
    """Make a context on the ranks of a mesh that another framework made; nothing of it is destroyed here.

    Its group is the default one if the mesh has all ranks, else that of the mesh's only dimension.

    Args:
        mesh: mesh of this rank and others.
        data_dims: as for `replace`.
        local_rank, local_world_size, settings: as for `from_group`; the device is by default of the mesh's kind.

    Raises:
        ConfigError: a mesh without a group of just its ranks, or without this rank; or as `replace` and `from_group`.
        DeviceError: the device is not there.
    """
    if settings.get("device") is None:
        settings["device"] = mesh.device_type
    ctx = from_group(mesh_group(mesh), local_rank=local_rank, local_world_size=local_world_size, **settings)
    return replace(ctx, mesh=mesh, data_dims=data_dims)


@context_first
def replace(
    ctx: DistContext,
    *,
    containers: Sequence[Container] | None = None,
    mesh: DeviceMesh | str | None = None,
    data_dims: Sequence[str] | None = None,
    **settings: Unpack[GroupKeywords],
) -> DistContext:
    """Return a copy of the context with something changed; the group is shared. No communication but for a new mesh.

    A setting that is given here is the script's: the first step does not ask whether what the launcher set has an
    effect.

    Args:
        ctx: the context.
        containers: kinds of containers besides those that `accel.tree` knows, in place of those that it has; of several
            that fit a value the first is taken. The same on every rank. None for what it has.
        mesh: a mesh of the context's ranks; random streams, loaders and steps then follow `data_parallel`, the place on
            it. State it before they are prepared. A text such as "dp=2,tp=2" opens one as `session` does, a collective;
            `close` ends it. None for what it has, an empty text for none.
        data_dims: names of the mesh's dimensions along which ranks have samples of their own; None for what the names
            say: "dp", "data", "fsdp", "ep" and the like do, "tp", "cp", "sp", "pp" and the like do not. A mesh of one
            dimension without a name is data parallel.
        settings: `device`, `precision`, `accumulation`, `strategy`, `deepspeed`, `plan`, `compile` and `timeout_s`, as
            for `from_group`; the others stay as they are.

    Raises:
        DeviceError: the device is not there.
        ConfigError: a setting is outside its range; something that is no `Container`; a mesh of other ranks, or with a
            dimension of unknown meaning.
    """
    if data_dims is not None and (mesh is None or mesh == ""):
        raise ConfigError("data_dims has no effect without mesh", where="replace(data_dims=)", fix="Pass mesh= too.")
    settled = settle(settings, ctx.settings)
    here = LaunchEnv(rank=ctx.rank, local_rank=ctx.local_rank)
    asked = settings.get("device")
    device = ctx.device if asked is None else choose_device(asked, here)
    given = {name for name, value in {**settings, "mesh": mesh}.items() if value is not None}
    handle = ctx.mesh if mesh is None else None
    position = ctx.position if mesh is None else without_mesh(ctx.rank, ctx.world_size)
    if isinstance(mesh, str):
        axes = fit_axes(mesh, ctx.world_size, where="mesh=")
        if axes is not None:
            names = mesh_sizes(mesh, where="mesh=")
            sizes = {name: getattr(axes, name) for name in names if name != "ep"}
            handle = open_mesh(ctx.comm, sizes or {"dp": 1}, device, ctx.timeout_s)
            position = axes_position(axes, names, ctx.rank)
            if data_dims is not None:
                position = position_on_mesh(ctx.comm, handle, data_dims)
    elif mesh is not None:
        handle = mesh
        position = position_on_mesh(ctx.comm, mesh, data_dims)
    return dataclasses.replace(
        ctx,
        launched={name: place for name, place in ctx.launched.items() if name not in given},
        device=device,
        settings=msgspec.structs.replace(settled, device=str(device)),
        containers=ctx.containers if containers is None else check_containers(containers),
        mesh=handle,
        position=position,
    )
