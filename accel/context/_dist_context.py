# SPDX-License-Identifier: Apache-2.0
"""A rank's place, device and settings, its handle on its peers, and refusals of calls that leave the context out."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel.brought import raise_unknown
from accel.comm import Comm, group_along, group_of_rows
from accel.comm._streams import DeviceStreams, streams_of
from accel.config._settings import Settings
from accel.env import LaunchEnv
from accel.errors import ConfigError
from accel.formats import Precision, StrategyName
from accel.topology import AXES, Axes, Axis, MeshPosition, Plan, axis_of, names_of, rank_rows, without_mesh
from accel.tree import Container


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DistContext:
    """This rank's place in the job, its device and its settings; a value that never changes.

    Attributes:
        rank, world_size: position among all ranks.
        local_rank, local_world_size: position among the ranks of this node.
        node_rank, num_nodes: position of this node.
        device: the device that this rank computes on.
        settings: the settings that hold, nothing left to `auto`; the text of a mesh has become `mesh`.
        containers: kinds of containers besides those that `accel.tree` knows; set by `replace`.
        position: coordinate on the mesh, or on the one axis "dp" that all ranks form without a mesh.
        mesh: the mesh of all ranks, if `replace` or `from_mesh` was given one.
        launched: the place where the user wrote each of `accumulation`, `precision`, `mesh`, `plan` and `compile` that
            came by a variable, as from a flag or a file of `accel launch`; a step refuses settings without effect. Not
            part of equality.
        columns: columns of the launcher's terminal, which redraws lines of progress; 0 without one. Not part of
            equality.
        streams: the door to the device's streams; like the mesh not part of equality, nor of what is printed.
        comm: the handle on the process group; not part of them either.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    settings: Settings
    position: MeshPosition
    containers: tuple[Container, ...] = ()
    mesh: DeviceMesh | None = dataclasses.field(default=None, compare=False, repr=False)
    launched: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str], compare=False, repr=False)
    columns: int = dataclasses.field(default=0, compare=False, repr=False)
    streams: DeviceStreams = dataclasses.field(compare=False, repr=False)
    comm: Comm = dataclasses.field(compare=False, repr=False)

    def __deepcopy__(self, memo: object) -> Self:
        """Return the context itself: a copy of a module that holds it talks to the same peers."""
        return self

    @property
    def backend(self) -> str:
        """The c10d backend for the device; "none" for a single process without a group."""
        return self.settings.backend

    @property
    def precision(self) -> Precision:
        """The dtypes of the run's precision; `autocast`, `loss_scale` and `prepare` follow them."""
        return cast(Precision, self.settings.precision)

    @property
    def accumulation(self) -> int:
        """The number of micro-batches asked for in each optimizer step; `train_state` takes it."""
        return cast(int, self.settings.accumulation)

    @property
    def strategy(self) -> StrategyName:
        """The strategy by which `prepare` spreads a model over the ranks."""
        return cast(StrategyName, self.settings.strategy)

    @property
    def plan(self) -> Plan | None:
        """The plan of models that `prepare` gets without a plan; None where nothing sets it."""
        return self.settings.plan if isinstance(self.settings.plan, Plan) else None

    @property
    def timeout_s(self) -> float:
        """Seconds after which a collective that misses a rank fails."""
        return cast(float, self.settings.timeout_s)

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
        """(index, count) of this rank among those with different samples; (rank, world_size) without a mesh.

        Ranks of one tensor, context or pipeline group have the same index.
        """
        return self.position.data

    @property
    def axes(self) -> Axes:
        """The sizes of the mesh's axes; `dp` of all ranks without a mesh.

        In a mesh that another framework made, only axes under their own names count.
        """
        return Axes(**{name: axis.size for name, axis in self.position.axes if name in AXES})

    def axis(self, name: str) -> Axis:
        """Return this rank's index along an axis of the mesh, and the axis's size.

        (0, 1) for an axis that the mesh does not have, so that one script serves all meshes. Without a mesh the ranks
        form one axis, "dp".

        Args:
            name: such as "tp"; an axis under another name of the same dimension, such as "tensor", is found too.
                "dp_shard" is the one axis "dp" under the strategy `fsdp`, "dp_replicate" under `ddp`.

        Raises:
            ConfigError: no mesh has an axis of that name.

        Examples:
            >>> accel.single().axis("tp")
            Axis(rank=0, size=1)
        """
        # torch warns of each cache that a compiled forward would read
        find = axis_of.__wrapped__ if torch.compiler.is_compiling() else axis_of
        return find(self.position.axes, name, self.strategy)


def build(env: LaunchEnv, settings: Settings, device: torch.device, comm: Comm) -> DistContext:
    """Make a context of a place, settled settings, and the handle on a group."""
    return DistContext(
        rank=comm.rank,  # of an XLA device, it is not the launcher's
        world_size=comm.size,
        local_rank=env.local_rank,
        local_world_size=env.local_world_size,
        node_rank=env.node_rank,
        num_nodes=env.num_nodes,
        device=device,
        settings=msgspec.structs.replace(settings, device=str(device), backend=comm.backend, mesh=""),
        position=without_mesh(comm.rank, comm.size),
        columns=env.columns,
        streams=streams_of(device),
        comm=comm,
    )


F = TypeVar("F", bound=Callable[..., Any])


def context_first(function: F) -> F:
    """Decorate a public function of `ctx`: a call that begins with something else raises `ConfigError`.

    The error of an unknown keyword names the right one.
    """

    # wrapped, as Python reports a missing last argument before a body runs
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[0] if args else kwargs.get("ctx"), DistContext):
            _refuse(function, args)
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            raise_unknown(function, kwargs, error)
            _raise_missing(function, error)
            raise

    # Reports name the outermost frame of this package as the public call.
    checked.__code__ = checked.__code__.replace(co_name=function.__name__)
    functools.update_wrapper(checked, function)
    return cast(F, checked)


def check_context(ctx: object, call: str) -> None:
    """Raise `ConfigError` for another first argument than a context; `call` is the right call, such as
    "mean.value(ctx)"."""
    if not isinstance(ctx, DistContext):
        raise forgotten(call, type(ctx).__name__)


def forgotten(call: str, got: str) -> ConfigError:
    """Make the error of a call without the context."""
    if got == "_GeneratorContextManager":
        got = "a session that was not entered"
    fix = "The context is the `ctx` of a block: with accel.session() as ctx:"
    return ConfigError("pass the context first", expected=f"`{call}`", got=got, fix=fix)


class _CallError(ConfigError, TypeError):
    """A call without an argument that has no default."""


_SOURCES = {"trackers": 'with accel.tracking(ctx, "demo", to=[accel.trackers.jsonl()], dir="runs/demo") as trackers:'}


def _raise_missing(function: Callable[..., Any], error: TypeError) -> None:
    """Raise a `ConfigError` with the line to write if a call failed for a missing argument; else return."""
    if error.__traceback__ is None or error.__traceback__.tb_next is not None or " missing " not in str(error):
        return
    needed: list[str] = []
    for name, each in inspect.signature(function).parameters.items():
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            name = {"scaler": "state"}.get(name, name)
            needed.append(f"{name}={name}" if each.kind is each.KEYWORD_ONLY else name)
    sources = [f", in the block {line}" for name, line in _SOURCES.items() if name in needed]
    raise _CallError(
        "the call lacks an argument",
        got=str(error).partition("() ")[2],
        where=function.__name__,
        fix=f"{_public_place(function)}.{function.__name__}({', '.join(needed)}){''.join(sources)}",
    ) from None


def _refuse(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    others = "" if len(inspect.signature(function).parameters) == 1 else ", ..."
    got = type(args[0]).__name__ if args else "no context"
    raise forgotten(f"{_public_place(function)}.{function.__name__}(ctx{others})", got)


def _public_place(function: Callable[..., Any]) -> str:
    """Return the public module that lists a function; `accel` for the others."""
    parts = function.__module__.split(".")
    above = [".".join(parts[:count]) for count in range(2, len(parts) + 1)]
    others = sorted(name for name in list(sys.modules) if name.startswith("accel.") and "._" not in name)
    return next((name for name in (*above, *others) if _lists(sys.modules.get(name), function)), "accel")


def _lists(module: object, function: Callable[..., Any]) -> bool:
    name = function.__name__
    return name in getattr(module, "__all__", ()) and inspect.unwrap(getattr(module, name)) is inspect.unwrap(function)


@context_first
def group_of(ctx: DistContext, *axes: str) -> dist.ProcessGroup | None:
    """Return the process group of the ranks along axes of the mesh, for torch's own functions.

    It holds this rank and the ranks that differ from it along these axes only, in the mesh's order. The
    first call for several axes of more than one rank is a collective, which opens the group; the session closes it.
    Call it on all ranks.

    Args:
        ctx: the context.
        axes: names as for `ctx.axis`.

    Returns:
        The group; None if it would only have this rank, and in a forward that `prepare` runs on one rank to find a
        plan.

    Raises:
        ConfigError: no mesh has an axis of that name.
        CollectiveMismatch: ranks name other axes.
        PeerError: another rank was lost.
        ContextClosedError: the context is closed.

    Examples:
        >>> accel.group_of(accel.single(), "dp_shard", "cp") is None
        True
    """
    ctx.comm.check_open()
    if ctx.comm.stands_alone:
        return None
    own = list(dict.fromkeys(found for name in axes for found in names_of(ctx.position.axes, name, ctx.strategy)))
    if ctx.mesh is None or ctx.mesh.mesh_dim_names is None:
        return ctx.comm.group if own and ctx.world_size > 1 else None
    if "ep" in own and "ep" not in ctx.mesh.mesh_dim_names:
        return group_of_rows(ctx.comm, rank_rows(ctx.axes, *own), "_".join(own), ctx.timeout_s)
    return group_along(ctx.comm, ctx.mesh, own, ctx.timeout_s)
