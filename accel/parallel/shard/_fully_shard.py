# SPDX-License-Identifier: Apache-2.0
"""Fully sharded: each rank keeps its part of every parameter, and torch's `fully_shard` gathers a block at a time.

Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded data parallel", arXiv:2304.11277;
torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from itertools import filterfalse
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from accel.comm import Comm
from accel.context import DistContext
from accel.errors import ConfigError, DeviceError, PrepareError
from accel.parallel._ddp import replica_of
from accel.parallel._labels import label_parameters, replace_parameter
from accel.parallel._move import move_model
from accel.parallel._replicas import follow_first_, stage_comm
from accel.parallel._sharded import is_sharded, sharded_roots, spans_all
from accel.parallel._spread import Spread, SpreadOptions, compare_models
from accel.parallel._stage_modules import is_pipelined, stage_modules
from accel.parallel._unwrap import unwrap_model
from accel.parallel.experts import exchange_mesh, expert_modules, shard_experts
from accel.parallel.shard._first_values import begin_alike
from accel.parallel.shard._formats import check_formats, compute_in, wide_parameters, wire_format
from accel.parallel.shard._mesh import check_mesh, open_shard_mesh
from accel.parallel.shard._units import plan_units
from accel.tensors import is_dtensor
from accel.topology import WireDtype

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_WHERE = "prepare_model, strategy fsdp"


class ShardOptions(SpreadOptions, frozen=True, kw_only=True):
    """Options of sharding."""

    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    gather_dtype: WireDtype = "auto"
    reduce_dtype: WireDtype = "auto"

    def check(self) -> None:
        """Raise `ConfigError` for what this torch does not have."""
        if not self.find_unused_parameters:
            return
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ConfigError(
                "fully_shard of this torch cannot leave out parameters",
                got=f"torch {torch.__version__}",
                where=f"{_WHERE}, find_unused_parameters=",
                fix="Update torch, or use the strategy ddp.",
            )


def _is_done(ctx: DistContext, model: nn.Module) -> bool:
    """Tensor parallelism over some of the ranks leaves the others to shard over, experts the dense parameters."""
    if replica_of(model) is not None or sharded_roots(model):
        return True
    return is_sharded(model) and not expert_modules(model) and spans_all(ctx, model)


def _check(ctx: DistContext, model: nn.Module, options: ShardOptions) -> None:
    if ctx.device.type == "xla":
        raise ConfigError("fully_shard does not know XLA devices", where=_WHERE, fix="Take the strategy ddp.")
    check_formats(options.gather_dtype, ctx.precision)
    inner = unwrap_model(model)
    _ = plan_units(inner, wide=wide_parameters(inner))
    check_mesh(ctx, inner)
    if ctx.device.type == "cpu":
        return
    current = torch.get_device_module(ctx.device).current_device()
    if current != ctx.device.index:
        raise DeviceError(
            "fully_shard computes on the current device",
            expected=str(ctx.device),
            got=f"{ctx.device.type}:{current}",
            where=_WHERE,
            fix="Call torch.cuda.set_device(ctx.device) first.",
        )


def _spread(ctx: DistContext, model: nn.Module, options: ShardOptions) -> nn.Module:
    inner = unwrap_model(model)
    before = dict(inner.named_parameters())
    compare_models(ctx, options, before)
    stage = stage_comm(ctx)
    mesh = open_shard_mesh(ctx, inner)
    if mesh is None:
        move_model(inner, ctx.device)
        label_parameters(inner)
        return model
    for root in stage_modules(inner):
        _shard(ctx, root, mesh, stage, options, stays=is_pipelined(inner))
    for name, after in inner.named_parameters():
        replace_parameter(name, before[name], after)
    label_parameters(inner, needed=not options.find_unused_parameters)
    if options.find_unused_parameters:
        for root in stage_modules(inner):
            cast(Any, root).set_reduce_scatter_unused_params(True)
    begin_alike(ctx, stage, mesh, inner.buffers())
    for root in stage_modules(inner):
        _reshard_after_evaluation(root)
        if options.broadcast_buffers and any(True for _ in root.buffers()):
            _follow_first(stage, root)
    return model


def _shard(
    ctx: DistContext, model: nn.Module, mesh: DeviceMesh, stage: Comm, options: ShardOptions, *, stays: bool
) -> None:
    """Shard one unit after another, so that the device needs room for one whole one at a time.

    Parameters of a pipeline's stages stay whole between micro-batches: schedules with split backward passes need them.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # its import takes most of a second

    waiting = {id(each) for each in model.parameters()}
    experts = expert_modules(model)
    same_experts = exchange_mesh(ctx) if experts else mesh
    wide = wide_parameters(model)
    for name in plan_units(model, experts, wide):
        unit = model.get_submodule(name)
        unit.to(ctx.device)
        own = [each for each in unit.parameters() if id(each) in waiting]
        along = same_experts if name in experts else mesh
        begin_alike(ctx, stage, along, own)
        travels = wire_format(own, wide, ctx.precision, options.gather_dtype, options.reduce_dtype)
        if travels.gather is not None:
            compute_in(travels.gather, unit, ctx.device.type)
        policy = MixedPrecisionPolicy(travels.gather, travels.reduce, cast_forward_inputs=False)
        try:
            if name in experts:
                shard_experts(ctx, unit, along, mp_policy=policy)
            else:
                whole: Any = {"reshard_after_forward": False} if stays else {}
                fully_shard(unit, mesh=along, mp_policy=policy, **whole)
        except (ValueError, AssertionError, NotImplementedError, RuntimeError) as error:
            where = f"{_WHERE}, {name or type(model).__name__}"
            raise PrepareError("torch cannot shard this", got=str(error), where=where) from error
        _gather_outside_of_inference(unit)
        waiting -= {id(each) for each in own}
        for each in own:
            _release(each)


def _release(parameter: nn.Parameter) -> None:
    """Free the memory of a parameter that was sharded, though an optimizer may hold it still."""
    if not is_dtensor(parameter):
        parameter.data = parameter.data.new_empty(0)


def _gather_outside_of_inference(unit: nn.Module) -> None:
    """Make whole parameters ordinary tensors, also where the first forward is in torch.inference_mode.

    `fully_shard` makes them once, and training cannot use tensors made in that mode.
    """

    def gather(module: nn.Module, _inputs: Any) -> None:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                cast(Any, module).unshard()

    _ = unit.register_forward_pre_hook(cast(Any, torch.compiler).disable(gather), prepend=True)


def _reshard_after_evaluation(model: nn.Module) -> None:
    """Shard the model again after a forward without backward.

    `fully_shard` would leave the outermost module's parameters whole, and changes of those are lost.
    """

    def reshard(module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if not torch.is_grad_enabled():
            cast(Any, module).reshard()

    _ = model.register_forward_hook(cast(Any, torch.compiler).disable(reshard))


def _follow_first(stage: Comm, model: nn.Module) -> None:
    """Replace buffers by those of the stage's first rank before each forward, as DDP does."""

    def follow(module: nn.Module, _inputs: Any) -> None:
        follow_first_(stage, filterfalse(is_dtensor, module.buffers()))

    _ = model.register_forward_pre_hook(cast(Any, torch.compiler).disable(follow))


SHARD = Spread(dimension="shard", options=ShardOptions, is_done=_is_done, check=_check, spread=_spread, replaces=True)
