# SPDX-License-Identifier: Apache-2.0
"""Options of sharding, the mesh that a model is sharded over, and the dtypes in which its parameters are sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage] - torch has no other name

from accel.comm import merged_mesh, merged_order, mesh_of_group
from accel.context import DistContext
from accel.errors import ConfigError, DeviceError, PrepareError
from accel.formats import Precision
from accel.mixins import KeepsFormat, Mixin, add_mixin
from accel.parallel._labels import STEPPED_ALONE, is_local
from accel.parallel._sharded import MODEL_DIMENSIONS
from accel.parallel._spread import ModelView, SpreadOptions
from accel.parallel.axes.experts import is_expert_parameter
from accel.tensors import is_dtensor
from accel.topology import AXIS_NAMES, Dimension, WireDtype, data_dimension, dimension_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


_WHERE = "prepare_model, strategy fsdp"


class ShardOptions(SpreadOptions, frozen=True, kw_only=True):
    """Options of sharding."""

    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    gather_dtype: WireDtype = "auto"
    reduce_dtype: WireDtype = "auto"
    units: Literal["auto"] | tuple[str, ...] | int = "auto"
    together: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    reshard_after_forward: bool | int | None = None
    prefetch: int | None = None
    offload: bool = False
    methods: tuple[str, ...] = ()


def check_reshard(option: bool | int | None, shards: int, ranks: int, world_size: int) -> None:
    """Raise `ConfigError` for `Plan.reshard_after_forward` that does not divide the shards, or a mesh that torch cannot
    take a part of."""
    if isinstance(option, bool) or option is None or shards == 1:
        return
    if shards % option:
        raise ConfigError(
            "shards cannot be divided among so many ranks after a forward",
            expected=f"a bool, or a number that divides {shards}",
            got=str(option),
            where="Plan.reshard_after_forward",
        )
    if 1 < option < shards and ranks != world_size:
        raise ConfigError(
            "torch opens groups for resharding only on meshes of all ranks",
            expected="a bool, or a mesh without axes for parts of the model",
            got=f"{option}, on a mesh of {ranks} of {world_size} ranks",
            where="Plan.reshard_after_forward",
        )


def reshard_setting(option: bool | int | None, shards: int) -> bool | int | None:
    """Return the argument of `fully_shard`: a bool for a number that means one, its default where nothing is
    sharded."""
    if isinstance(option, bool) or option is None:
        return option
    if shards == 1:
        return None
    return False if option == 1 else True if option == shards or shards % option else option


_SEQUENCE: tuple[Dimension, ...] = ("context", "sequence")


class ShardAxes(NamedTuple):
    """Axes of a mesh by number, in the mesh's order."""

    replicas: tuple[int, ...]  # along these, ranks hold the same shards
    shards: tuple[int, ...]  # along these, each rank holds different shards


def shard_axes(
    names: Sequence[str] | None, sizes: Sequence[int], taken: Sequence[str] = (), *, whole: bool = False
) -> ShardAxes:
    """Return the axes to shard a model along, so that its gradients cross every axis of more than one rank.

    `taken`: axes of tensor parallelism. `whole`: every rank holds whole parameters, so all axes are for replicas.
    """
    listed = list(names) if names is not None else [""] * len(sizes)
    large = [at for at in range(len(listed)) if sizes[at] > 1]
    free = [at for at in large if listed[at] not in taken and dimension_of(listed[at]) != "pipeline"]
    if whole:
        return ShardAxes(tuple(free), ())
    data = [at for at in free if dimension_of(listed[at]) == "shard"]
    # without an axis named for shards, those that are neither for replicas nor for ranks that share samples
    data = data or [at for at in free if dimension_of(listed[at]) in ("data", "expert", None)]
    # ranks that share a sequence need the same parameters
    shards = sorted({*data, *(at for at in free if dimension_of(listed[at]) in _SEQUENCE)})
    if not shards and not any(dimension_of(listed[at]) in MODEL_DIMENSIONS for at in large):
        raise PrepareError(
            "the mesh has no dimension to shard the model along",
            expected=f"one of more than one rank, such as dp, or one of {', '.join(AXIS_NAMES['shard'])}",
            got=", ".join(f"{name}={size}" for name, size in zip(listed, sizes, strict=True)),
            where="prepare_model, strategy fsdp",
            fix='Name one "dp_shard", or use the strategy ddp for replicas.',
        )
    return ShardAxes(tuple(at for at in free if at not in shards), tuple(shards))


_WORLD = ((0,),)  # of a mesh of one dimension

Parts = Sequence[Sequence[int]]


def check_mesh(ctx: DistContext, view: ModelView, reshard: bool | int | None = None) -> None:
    """Raise for a mesh that `fully_shard` cannot take, now or after tensor parallelism; as `check_reshard` and
    `open_shard_mesh`."""
    parts = _parts(ctx, view, _taken(view))
    if ctx.mesh is not None and (names := ctx.mesh.mesh_dim_names):
        parts = _parts(ctx, view, [name for name in names if dimension_of(name) == "tensor"])
    sizes = (ctx.world_size,) if ctx.mesh is None else ctx.mesh.shape
    counts = [math.prod(sizes[dim] for dim in part) for part in parts]
    check_reshard(reshard, counts[-1] if counts else 1, math.prod(counts), ctx.world_size)


def open_shard_mesh(ctx: DistContext, view: ModelView) -> DeviceMesh | None:
    """Return the mesh to shard a model over; None where no rank but this one has the same parameters. A collective.

    One dimension for shards, or two: for replicas and for shards. With `ddp`, shards are only on this rank.
    """
    parts = _parts(ctx, view, _taken(view))
    if not parts and any(map(is_expert_parameter, view.parameters.values())):
        parts = ((),)  # only this rank: experts are units of a sharded model there too
    if ctx.mesh is None:
        return mesh_of_group(ctx.comm, ctx.device.type, "fsdp")
    return merged_mesh(ctx.comm, ctx.mesh, parts, ctx.timeout_s) if parts else None


def _taken(view: ModelView) -> set[str]:
    """Names of the axes over which somebody has spread the model."""
    return {name for each in _spread(view) for name in each.device_mesh.mesh_dim_names or ()}


def _spread(view: ModelView) -> Iterator[DTensor]:
    """Parameters that are spread already, but for parameters of experts, which have another mesh."""
    return (each for each in view.parameters.values() if is_dtensor(each) and not is_expert_parameter(each))


def _parts(ctx: DistContext, view: ModelView, taken: Iterable[str]) -> Parts:
    """Return the axes of the context's mesh, by number, for each dimension to shard over; under local SGD,
    only axes along which ranks share samples."""
    if any(True for _ in _spread(view)):
        _check_tensor_parallel(ctx, view)
    if ctx.mesh is None:
        return _WORLD
    if ctx.mesh.device_type != ctx.device.type:
        raise DeviceError(
            "the mesh is of another kind of device than the context",
            expected=ctx.device.type,
            got=ctx.mesh.device_type,
            where=f"{_WHERE}, mesh=",
        )
    names, sizes = ctx.mesh.mesh_dim_names, ctx.mesh.shape
    local_names = [name for name in names or () if is_local(view.model) and dimension_of(name) in STEPPED_ALONE]
    replicas, shards = shard_axes(
        names, sizes, (*taken, *local_names), whole=data_dimension(ctx.strategy) == "replicate"
    )
    if not replicas and not shards:
        return ()
    parts = (replicas, shards) if replicas else (shards,)
    order = [dim for part in merged_order(len(sizes), parts) for dim in part if sizes[dim] > 1]
    if taken and order != sorted(order):
        listed = [", ".join(names[dim] for dim in part) for part in parts] if names else []
        raise PrepareError(
            "torch cannot combine the axes of this mesh",
            expected="those for replicas, then those for shards, then those for tensor parallelism",
            got=f"({', '.join(names or ())}), to merge {' and '.join(filter(None, listed))}",
            where=_WHERE,
            fix="Make the mesh with its axes in this order, as accel does: accel.replace(ctx, mesh=...) with a text.",
        )
    return parts


def _check_tensor_parallel(ctx: DistContext, view: ModelView) -> None:
    if ctx.mesh is None:
        raise PrepareError(
            "tensor parallelism has spread the model over some of the ranks, and it is not known over which",
            expected="a context that knows its mesh",
            got="one without",
            where=_WHERE,
            fix="Tell it: accel.replace(ctx, mesh=mesh), with the mesh that parallelize_module got a part of.",
        )
    for name, parameter in view.parameters.items():
        if parameter.requires_grad and not is_dtensor(parameter):
            raise PrepareError(
                "the gradient of a parameter would not reach every rank",
                expected="tensor parallelism of all trainable parameters, or of none",
                got="one that it left as it was",
                where=f"{_WHERE}, {name}",
                fix="Name its module in the plan of parallelize_module, or freeze it.",
            )


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NARROW = (torch.bfloat16, torch.float16)
_NORMS = (nn.LayerNorm, nn.GroupNorm, _NormBase)  # not RMSNorm, which takes any dtype


class WireFormat(NamedTuple):
    """Dtypes in which an FSDP unit's tensors are sent; None for the tensors' dtypes."""

    gather: torch.dtype | None  # dtype of the gathered parameters, and so of the computation
    reduce: torch.dtype | None  # dtype of gradients while they are summed


def check_formats(gather: WireDtype, precision: Precision) -> None:
    """Raise `ConfigError` for a dtype of gathered parameters other than the context's compute dtype."""
    if gather in ("auto", "fp32", precision.compute):
        return
    raise ConfigError(
        "parameters would be gathered in a format in which the context does not compute",
        expected=f"'auto' or 'fp32', or precision={gather!r} of the context",
        got=f"gather_dtype={gather!r} and a context that computes in {precision.compute}",
        where="Plan.gather_dtype",
        fix=f"Leave it out, or make the context with precision={gather!r}.",
    )


def wide_parameters(view: ModelView) -> frozenset[int]:
    """Return the `id` of each parameter of modules that compute in the dtype in which it is stored."""
    wide = (each for each in view.modules.values() if isinstance(each, KeepsFormat))
    return frozenset(id(parameter) for module in wide for parameter in module.parameters(recurse=False))


def wire_format(
    parameters: Iterable[nn.Parameter], wide: frozenset[int], precision: Precision, gather: WireDtype, reduce: WireDtype
) -> WireFormat:
    """Return the dtypes for the parameters of one FSDP unit, by the context's precision and `gather_dtype` and
    `reduce_dtype` of `Plan`."""
    listed = [each for each in parameters if each.is_floating_point()]
    dtypes = {each.dtype for each in listed}
    narrow = _DTYPES[precision.compute] if precision.compute in ("bf16", "fp16") and gather != "fp32" else None
    # autocast does not change fp64
    if dtypes - {torch.float32, *_NARROW} or torch.float32 not in dtypes or any(id(each) in wide for each in listed):
        narrow = None
    if reduce != "auto":
        return WireFormat(narrow, _DTYPES[reduce])
    computed = narrow or next((each.dtype for each in listed if each.requires_grad), None)
    return WireFormat(narrow, torch.float32 if computed in _NARROW else None)


class InAutocast(Mixin, nn.Module):
    """Mixin of modules with parameters gathered in autocast's dtype: their forward always runs in autocast."""

    _accel_device_type = "cpu"
    _accel_dtype = torch.bfloat16

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, in autocast; raise `PrepareError` in a block that turns autocast off."""
        if torch.is_autocast_enabled(self._accel_device_type):
            return super().forward(*args, **kwargs)
        if not torch.compiler.is_compiling() and _is_turned_off():
            raise PrepareError(
                "a module computes without autocast, but its parameters were gathered in a narrow format",
                expected="autocast around its forward",
                got=f"a block that turns it off, and parameters in {self._accel_dtype}",
                where=type(self).__name__,
                fix="Name it in Precision.fp32_modules, or prepare the model with Plan(gather_dtype='fp32').",
            )
        with torch.autocast(self._accel_device_type, dtype=self._accel_dtype):
            return super().forward(*args, **kwargs)


class NormInFp32(Mixin, nn.Module):
    """Mixin of norms with parameters gathered in 16 bits: they compute with fp32 ones, as in autocast.

    Autocast converts them for some norms on some devices; elsewhere torch refuses parameters in another dtype than the
    inputs or the statistics.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the norm's own forward with its parameters in fp32."""
        stored = dict(self._parameters)
        for name, parameter in stored.items():
            if parameter is not None and parameter.dtype in _NARROW:
                self._parameters[name] = cast(Any, parameter.float())
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(stored)


def compute_in(formats: Mapping[nn.Module, torch.dtype | None], device_type: str) -> None:
    """Let units, not sharded yet, compute with parameters in the dtype of autocast; None leaves one as it is.

    Mutates their modules. Those of one class stay of one class, as `compile_model` and "repeated" expect of blocks.
    """
    narrow = {unit: dtype for unit, dtype in formats.items() if dtype is not None}
    inside = [each for unit in narrow for each in unit.modules()]
    add_mixin((each for each in inside if isinstance(each, _NORMS) and not isinstance(each, KeepsFormat)), NormInFp32)
    for dtype in dict.fromkeys(narrow.values()):
        units = [unit for unit, own in narrow.items() if own is dtype]
        add_mixin(units, InAutocast, _accel_device_type=device_type, _accel_dtype=dtype)


def _is_turned_off() -> bool:
    """Whether this is in a block of autocast, given that autocast is off."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1
