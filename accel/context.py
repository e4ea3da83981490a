# SPDX-License-Identifier: Apache-2.0
"""`DistContext`: what a rank knows about itself and its peers, as a frozen value, and the ways to make one.

`session` opens what a launcher asked for and closes it again; `from_group` and `from_mesh` adopt what another framework
made; `single` needs nothing. Whatever talks to other ranks takes the context as its first argument.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel.comm import Comm, adopt, alone, connect, mesh_group, place_on_mesh
from accel.env import LaunchEnv, read_env
from accel.errors import ConfigError, DeviceError
from accel.formats import Precision, PrecisionName
from accel.formats import precision as precision_of
from accel.tree import Container

DEFAULT_TIMEOUT_S = 300.0


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
        timeout_s: seconds after which a collective that misses a rank fails.
        containers: kinds of containers besides those that `accel.tree` knows; set by `replace`.
        mesh_place: what the mesh says about `data_parallel`; None without a mesh.
        mesh: the mesh of all ranks, if `replace` or `from_mesh` was given one.
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
    containers: tuple[Container, ...] = ()
    mesh_place: tuple[int, int] | None = None
    mesh: DeviceMesh | None = dataclasses.field(default=None, compare=False, repr=False)
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
        return (self.rank, self.world_size) if self.mesh_place is None else self.mesh_place


def from_env(
    environ: Mapping[str, str] | None = None,
    *,
    device: torch.device | str | None = None,
    backend: str | None = None,
    precision: Precision | PrecisionName | None = None,
    timeout_s: float | None = None,
) -> DistContext:
    """Make a context from a launcher's variables and join the process group. A collective; pair it with `close`.

    An argument beats `ACCEL_*`, which beats the default: the GPU of this local rank with nccl where there is one, else
    the CPU with gloo; fp32; 300 s. Prefer `session`, which closes by itself.

    Args:
        environ: variables; `os.environ` when left out.
        device: where to compute, such as "cpu", "cuda" (the GPU of the local rank) or "cuda:1".
        backend: c10d backend for that device.
        precision: a name such as "bf16", or a record: see `accel.Precision`.
        timeout_s: seconds after which a collective that misses a rank fails.

    Returns:
        The context; with one process it holds no group.

    Raises:
        EnvError: the variables contradict each other.
        DeviceError: the device is not there.
        ConfigError: an argument is outside its range.
        PeerError: the other ranks could not be reached.
    """
    env = read_env(os.environ if environ is None else environ)
    chosen = _choose_device(device, env)
    seconds = _check_timeout(_first(timeout_s, env.timeout_s, DEFAULT_TIMEOUT_S))
    checked_precision = precision_of(_first(precision, env.precision, "fp32"))
    carrier = _check_backend(backend or env.backend)
    comm = connect(env, chosen, carrier, seconds) if env.world_size > 1 else alone()
    return _context(env, device=chosen, precision=checked_precision, timeout_s=seconds, comm=comm)


@contextlib.contextmanager
def session(
    environ: Mapping[str, str] | None = None,
    *,
    device: torch.device | str | None = None,
    backend: str | None = None,
    precision: Precision | PrecisionName | None = None,
    timeout_s: float | None = None,
) -> Generator[DistContext]:
    """Give a context from the environment, and close what it opened at the end of the block. A collective.

    Arguments and errors are those of `from_env`. After the block the context refuses to communicate. The end of the
    block waits for a save in the background and raises what went wrong with it; after an exception it only waits.
    """
    ctx = from_env(environ, device=device, backend=backend, precision=precision, timeout_s=timeout_s)
    try:
        yield ctx
        ctx.comm.finish()
    finally:
        close(ctx)


def close(ctx: DistContext) -> None:
    """Destroy the process group if this context opened it; adopted groups stay. Closing twice does nothing."""
    ctx.comm.close()


def single(device: torch.device | str = "cpu", *, precision: Precision | PrecisionName = "fp32") -> DistContext:
    """Make a context of one process without a process group.

    Args:
        device: where to compute.
        precision: a name such as "bf16", or a record: see `accel.Precision`.

    Raises:
        DeviceError: the device is not there.
        ConfigError: an unknown precision.
    """
    env = LaunchEnv()
    return _context(
        env,
        device=_choose_device(device, env),
        precision=precision_of(precision),
        timeout_s=DEFAULT_TIMEOUT_S,
        comm=alone(),
    )


def from_group(
    group: dist.ProcessGroup,
    *,
    device: torch.device | str | None = None,
    precision: Precision | PrecisionName = "fp32",
    local_rank: int | None = None,
    local_world_size: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> DistContext:
    """Make a context on a process group that another framework made; it is never destroyed here.

    Args:
        group: the group; its rank and size become the context's.
        device: where to compute; by default as in `from_env`.
        precision: a name such as "bf16", or a record: see `accel.Precision`.
        local_rank: this rank's place on its node; by default its rank, as on one node.
        local_world_size: the ranks on this node; by default all.
        timeout_s: what the group's own time-out is, in seconds; the group is not changed.

    Raises:
        ConfigError: ranks outside their range, or an unknown precision.
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
    chosen = _choose_device(device, env)
    return _context(
        env,
        device=chosen,
        precision=precision_of(precision),
        timeout_s=_check_timeout(timeout_s),
        comm=adopt(group, chosen),
    )


def from_mesh(
    mesh: DeviceMesh,
    *,
    data_dims: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    precision: Precision | PrecisionName = "fp32",
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
        precision, local_rank, local_world_size, timeout_s: as for `from_group`.

    Raises:
        ConfigError: a mesh without a group of just its ranks, or without this rank; or as `replace` and `from_group`.
        DeviceError: the device is not there.
    """
    ctx = from_group(
        mesh_group(mesh),
        device=mesh.device_type if device is None else device,
        precision=precision,
        local_rank=local_rank,
        local_world_size=local_world_size,
        timeout_s=timeout_s,
    )
    return replace(ctx, mesh=mesh, data_dims=data_dims)


def replace(
    ctx: DistContext,
    *,
    device: torch.device | str | None = None,
    precision: Precision | PrecisionName | None = None,
    containers: Sequence[Container] | None = None,
    mesh: DeviceMesh | None = None,
    data_dims: Sequence[str] | None = None,
) -> DistContext:
    """Return a copy of the context with something changed; the group is shared. No communication.

    Args:
        ctx: the context.
        device: where to compute; None for where it does.
        precision: a name such as "bf16", or a record; None for what it has.
        containers: kinds of containers besides those that `accel.tree` knows, in place of those that it has; of several
            that fit a value the first is taken. The same on every rank. None for what it has.
        mesh: of the context's ranks; random streams, loaders and steps then follow `data_parallel`, its place on it.
            State it before they are prepared. None for what it has.
        data_dims: names of the mesh's dimensions along which ranks have samples of their own; None for what the names
            say: "dp", "data", "fsdp", "ep" and the like do, "tp", "cp", "sp", "pp" and the like do not. A mesh of one
            dimension without a name is data parallel.

    Raises:
        DeviceError: the device is not there.
        ConfigError: an unknown precision, or something that is no `Container`; a mesh of other ranks, or with a
            dimension of which it is not known what it means.
    """
    if mesh is None and data_dims is not None:
        raise ConfigError("data_dims has no effect without mesh", where="replace(data_dims=)", fix="Pass mesh= too.")
    here = LaunchEnv(rank=ctx.rank, local_rank=ctx.local_rank)
    return dataclasses.replace(
        ctx,
        device=ctx.device if device is None else _choose_device(device, here),
        precision=ctx.precision if precision is None else precision_of(precision),
        containers=ctx.containers if containers is None else _check_containers(containers),
        mesh=ctx.mesh if mesh is None else mesh,
        mesh_place=ctx.mesh_place if mesh is None else place_on_mesh(ctx.comm, mesh, data_dims),
    )


def _context(
    env: LaunchEnv,
    *,
    device: torch.device,
    precision: Precision,
    timeout_s: float,
    comm: Comm,
) -> DistContext:
    return DistContext(
        rank=env.rank,
        world_size=env.world_size,
        local_rank=env.local_rank,
        local_world_size=env.local_world_size,
        node_rank=env.node_rank,
        num_nodes=env.num_nodes,
        device=device,
        backend=comm.backend,
        precision=precision,
        timeout_s=timeout_s,
        comm=comm,
    )


def _choose_device(explicit: torch.device | str | None, env: LaunchEnv) -> torch.device:
    wanted = explicit if explicit is not None else env.device
    where = "device=" if explicit is not None else "ACCEL_DEVICE" if env.device else "the default device"
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            "unknown device", expected="such as cpu, cuda, cuda:0", got=repr(wanted), where=where
        ) from error
    if device.type == "cpu":
        return torch.device("cpu")  # tensors never say cpu:0
    if device.type != "cuda":
        return _check_present(device, where)
    index = cast(int | None, device.index)
    index = env.local_rank if index is None else index
    if not 0 <= index < torch.cuda.device_count():  # torch wraps large numbers
        raise DeviceError(
            f"rank {env.rank} has no GPU",
            expected=f"GPU {index} for local rank {env.local_rank}",
            got=f"{torch.cuda.device_count()} visible GPUs",
            where=where,
            fix="Start fewer processes a node, make more GPUs visible, or pass device='cpu'.",
        )
    return torch.device("cuda", index)


def _check_present(device: torch.device, where: str) -> torch.device:
    try:
        _ = torch.zeros(1, device=device).item()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise DeviceError(
            "nothing can be computed there", expected="a device of this machine", got=str(device), where=where
        ) from error
    return device


def _check_backend(name: str | None) -> str | None:
    if name is not None and not dist.is_backend_available(name.lower()):
        raise ConfigError(
            "this build of torch has no such backend",
            expected="gloo, nccl or another that torch.distributed.is_backend_available knows",
            got=repr(name),
            where="backend=, ACCEL_BACKEND",
        )
    return name


def _check_containers(containers: Sequence[Container]) -> tuple[Container, ...]:
    for container in containers:
        if not isinstance(container, Container):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass classes
            raise ConfigError(
                "not a kind of container",
                expected="accel.Container(kind, take_apart, put_together)",
                got=repr(container),
                where="replace, containers=",
            )
    return tuple(containers)


def _check_timeout(seconds: float) -> float:
    if not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError("not a time-out", expected="seconds, above 0", got=repr(seconds), where="timeout_s=")
    return seconds


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
