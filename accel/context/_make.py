# SPDX-License-Identifier: Apache-2.0
"""Contexts from the environment, of one process, and of groups and meshes that another framework made."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Unpack, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel import xla
from accel.brought import keyword_fix
from accel.comm import adopt, alone, connect, mesh_group, open_mesh, position_on_mesh
from accel.config._schema import from_plain
from accel.config._settings import SETTINGS, GroupKeywords, SettingKeywords, Settings
from accel.context._dist_context import DistContext, build, context_first
from accel.devices import count_devices, find_accelerator, kind_of_device
from accel.env import LaunchEnv, read_env
from accel.errors import ConfigError, DeviceError, EnvError
from accel.formats import GROUPED, compilation, precision as precision_of
from accel.topology import axes_position, fit_axes, mesh_sizes, without_mesh
from accel.tree import Container

_CHECKED_ELSEWHERE = ("device", "precision")  # they take values of torch's and records, too


def settle(keywords: Mapping[str, Any], asked: Settings, known: type[GroupKeywords] = GroupKeywords) -> Settings:
    """Return the settings that hold: a keyword beats the setting before, which beats the fallback; None leaves it.

    Raises `ConfigError` for a value outside its range, `TypeError` for an unknown keyword.
    """
    if unknown := sorted(keywords.keys() - known.__annotations__):
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}. {keyword_fix(unknown[0], known.__annotations__)}")
    given = {name: value for name, value in keywords.items() if value is not None}
    values = {field.name: getattr(asked, field.name) for field in SETTINGS} | given
    for field in SETTINGS:
        value = values[field.name]
        if field.name in given and field.name not in _CHECKED_ELSEWHERE:
            value = from_plain(field, value, where=f"{field.name}=")
        values[field.name] = field.fallback if value == "auto" else value
    values["precision"] = precision_of(values["precision"])
    values["compile"] = compilation(values["compile"])
    return Settings(**values)


def check_backend(name: str, where: str) -> None:
    """Raise `ConfigError`, with the place that names it, for a backend that this build of torch lacks."""
    if name != "auto" and not dist.is_backend_available(name.lower()):
        raise ConfigError(
            "this build of torch has no such backend",
            expected="gloo, nccl or another that torch.distributed.is_backend_available knows",
            got=repr(name),
            where=where,
        )


def check_containers(containers: Sequence[Container]) -> tuple[Container, ...]:
    """Return kinds of containers as a tuple; raise `ConfigError` for anything but a `Container`."""
    for container in containers:
        if not isinstance(container, Container):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass classes
            raise ConfigError(
                "the value does not describe a container",
                expected="accel.tree.Container(kind, take_apart, put_together)",
                got=repr(container),
                where="replace, containers=",
            )
    return tuple(containers)


_IMPORT = "If a vendor's package registers it with torch, import that package first."


def choose_device(explicit: torch.device | str | None, env: LaunchEnv) -> torch.device:
    """Return the device of a rank: the argument's, else the environment's, else the machine's accelerator.

    Missing devices are `DeviceError`; a process without a place among several TPU hosts is `EnvError`.
    """
    wanted = explicit if explicit is not None else env.device
    where = "device=" if explicit is not None else env.sources.get("device", "the default device")
    if wanted == "auto":
        wanted = find_accelerator()
    if str(wanted).partition(":")[0] == "xla":
        xla.require_xla()  # before torch knows the device
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            "unknown device",
            expected="such as cpu, cuda, cuda:0",
            got=repr(wanted),
            where=where,
            fix=_IMPORT if isinstance(wanted, str) else "",
        ) from error
    if device.type == "cpu":
        return torch.device("cpu")  # tensors report "cpu", never "cpu:0"
    if device.type == "xla":
        return _choose_xla(device, env, where)
    count = count_devices(device.type)
    if not kind_of_device(device).numbered or (device.type != "cuda" and not count):
        return _check_present(device, where)
    index = cast(int | None, device.index)
    index = env.local_rank if index is None else index
    if not 0 <= index < count:  # torch wraps large numbers
        name = "GPU" if device.type == "cuda" else f"{device.type} device"
        raise DeviceError(
            f"rank {env.rank} has no {name}",
            expected=f"{name} {index} for local rank {env.local_rank}",
            got=f"{count} visible {name}s",
            where=where,
            fix=f"Start fewer processes a node, make more {name}s visible, or pass device='cpu'.",
        )
    return torch.device(device.type, index)


def _choose_xla(device: torch.device, env: LaunchEnv, where: str) -> torch.device:
    """Return the one XLA device of a process; nothing may touch it before processes have found each other."""
    if env.tpu_hosts > 1 and env.launcher == "none":
        raise EnvError(
            "this host is one of several of a TPU slice, and this process was started without a place among theirs",
            expected=f"a process for each TPU chip of all {env.tpu_hosts} hosts",
            got="TPU_WORKER_HOSTNAMES, and no launcher's variables",
            where=where,
            fix="Run `accel launch --device xla train.py` on every host.",
        )
    own = torch.device("xla", device.index or 0)
    return own if env.world_size > 1 else _check_present(own, where)


def _check_present(device: torch.device, where: str) -> torch.device:
    try:
        _ = torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        brought = device.type != "meta" and not hasattr(torch, device.type)
        raise DeviceError(
            "the device cannot compute",
            expected="a device of this machine",
            got=str(device),
            where=where,
            fix=_IMPORT if brought else "",
        ) from error
    return device


def from_group(
    group: dist.ProcessGroup,
    *,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    **settings: Unpack[GroupKeywords],
) -> DistContext:
    """Make a context on a process group that another framework made; it is never destroyed here.

    On XLA devices a collective: it also opens a group for tensors on the CPU, which `close` ends.

    Args:
        group: the group; its rank and size become the context's.
        local_rank: this rank's place on its node; by default its rank, as on one node.
        local_world_size: number of ranks on this node; by default all.
        settings: `device`, `precision`, `accumulation`, `strategy` and `deepspeed`, as for `from_env`; `timeout_s`, the
            group's own time-out in seconds, for the group is not changed. The defaults are the same as in `from_env`.

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

    Its group is the default one if the mesh has all ranks, else the group of the mesh's only dimension.

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
        data_dims: names of the mesh's dimensions along which ranks have different samples; None to go by
            names: "dp", "data", "fsdp", "ep" and the like do, "tp", "cp", "sp", "pp" and the like do not. A mesh of one
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


_CHECKED = ("accumulation", "precision", "mesh", "plan", "compile")  # by the first step


def from_env(
    environ: Mapping[str, str] | None = None, *, init_method: str | None = None, **settings: Unpack[SettingKeywords]
) -> DistContext:
    """Make a context from a launcher's variables and join the process group. A collective; pair it with `close`.

    An argument beats `ACCEL_*`, which beats the default: the GPU of this local rank with nccl where there is one, else
    the CPU with gloo; fp32; 1 micro-batch a step; ddp; no mesh; 300 s. Prefer `session`, which closes by itself.

    Args:
        environ: variables; `os.environ` when left out.
        init_method: place where ranks meet, as in torch's `init_process_group`: "tcp://HOST:PORT", served by rank 0, or
            "file:///PATH" of a file system that all share. None or "env://" for the launcher's address. A single
            process meets nobody.
        settings: any of these.
            device: the device to compute on, such as "cpu", "cuda" (the GPU of the local rank) or "cuda:1".
            precision: a name such as "bf16", or a record: see `accel.precision.Precision`.
            accumulation: number of micro-batches in an optimizer step; the script reads it from the context.
            strategy: "ddp" or "fsdp", the way in which `prepare` spreads a model over the ranks.
            deepspeed: options of the strategy "deepspeed", an `accel.engines.deepspeed.DeepSpeed` or the path of a
                DeepSpeed JSON.
            plan: an `accel.parallel.Plan`, for models that `prepare` gets without a plan.
            compile: "whole", "repeated" or an `accel.Compile`: what torch compiles of the models that `prepare` takes.
            mesh: axes of a mesh of all ranks, such as "dp=2,tp=2" or "dp=-1,tp=4", in any order; -1 means all
                ranks that the others leave. Ranks are numbered as by `Axes`. It becomes `ctx.mesh`. No mesh if empty.
            backend: c10d backend for that device.
            timeout_s: seconds after which a collective that misses a rank fails.

    Returns:
        The context; with one process, no mesh and no engine that needs one it holds no group.

    Raises:
        EnvError: the variables contradict each other.
        DeviceError: the device is not there.
        ConfigError: an argument is outside its range.
        PeerError: the other ranks could not be reached.
    """
    env = read_env(os.environ if environ is None else environ, init_method=init_method)
    settled = settle(settings, env, SettingKeywords)
    device = choose_device(settings.get("device"), env)
    check_backend(settled.backend, "backend=" if settings.get("backend") else env.sources.get("backend", ""))
    _ = fit_axes(settled.mesh, env.world_size, where="mesh=")
    backend = None if settled.backend == "auto" else settled.backend
    grouped = env.world_size > 1 or settled.mesh or settled.strategy in GROUPED
    comm = connect(env, device, backend, cast(float, settled.timeout_s)) if grouped else alone()
    ctx = build(env, settled, device, comm)
    launched = {name: env.sources[name] for name in _CHECKED if name in env.sources and settings.get(name) is None}
    try:
        return dataclasses.replace(replace(ctx, mesh=settled.mesh), launched=launched)
    except BaseException:
        close(ctx)
        raise


@contextlib.contextmanager
def session(
    environ: Mapping[str, str] | None = None, *, init_method: str | None = None, **settings: Unpack[SettingKeywords]
) -> Generator[DistContext]:
    """Give a context from the environment, and close what it opened at the end of the block. A collective.

    Arguments and errors are the same as in `from_env`. After the block the context refuses to communicate. The end of
    the block waits for a save in the background, and raises its error and the error of a deferred step. After an
    exception it only waits.

    Examples:
        >>> with accel.session() as ctx:
        ...     ctx.rank, ctx.world_size
        (0, 1)
    """
    ctx = from_env(environ, init_method=init_method, **settings)
    try:
        yield ctx
        try:
            ctx.comm.settle()
        finally:
            ctx.comm.finish()
    finally:
        close(ctx)


@context_first
def close(ctx: DistContext) -> None:
    """Destroy the process group if this context opened it; adopted groups stay. Closing twice does nothing.

    Raises:
        NonFiniteError: a gradient of a deferred step was not finite, unless an exception is on its way; the context is
            closed all the same.
    """
    try:
        if sys.exc_info()[0] is None:
            ctx.comm.settle()
    finally:
        ctx.comm.close()


def single(on: torch.device | str = "cpu", /, **settings: Unpack[GroupKeywords]) -> DistContext:
    """Make a context of one process without a process group.

    Args:
        on: the device to compute on, as `device=`.
        settings: as for `from_group`.

    Raises:
        DeviceError: the device is not there.
        ConfigError: a setting is outside its range.
    """
    env = LaunchEnv()
    settled = settle(settings, env)
    return build(env, settled, choose_device(settings.get("device", on), env), alone())
