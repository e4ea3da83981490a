# SPDX-License-Identifier: Apache-2.0
"""Fully sharded: each rank keeps its part of every parameter, and torch's `fully_shard` gathers a block at a time.

Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded data parallel", arXiv:2304.11277;
torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from accel.comm import Comm
from accel.context import DistContext
from accel.errors import ConfigError, DeviceError, PrepareError
from accel.parallel._ddp import replica_of
from accel.parallel._empty import allocate_empty, make_room
from accel.parallel._labels import label_parameters, replace_parameter
from accel.parallel._move import move_model
from accel.parallel._quantized import check_quantized
from accel.parallel._refusals import check_all
from accel.parallel._replicas import stage_comm
from accel.parallel._sharded import is_sharded, sharded_roots, spans_all
from accel.parallel._spread import Spread, compare_models
from accel.parallel._unwrap import is_pipelined, stage_modules, unwrap_model
from accel.parallel.experts import exchange_mesh, expert_modules, shard_experts
from accel.parallel.pipeline import SPLIT_BACKWARDS, pipeline_of
from accel.parallel.shard._chosen import ignored_ids, ignored_parameters, units_in
from accel.parallel.shard._first_values import begin_alike
from accel.parallel.shard._formats import check_formats, compute_in, wide_parameters, wire_format
from accel.parallel.shard._hooks import follow_first, gather_outside_of_inference, prefetch, reshard_after_evaluation
from accel.parallel.shard._mesh import check_mesh, open_shard_mesh
from accel.parallel.shard._options import ShardOptions, reshard_setting
from accel.parallel.shard._units import plan_units
from accel.tensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_WHERE = "prepare_model, strategy fsdp"


def _is_done(ctx: DistContext, model: nn.Module) -> bool:
    """Tensor parallelism over some of the ranks leaves the others to shard over, experts the dense parameters."""
    if replica_of(model) is not None or sharded_roots(model):
        return True
    return is_sharded(model) and not expert_modules(model) and spans_all(ctx, model)


def _check(ctx: DistContext, model: nn.Module, options: ShardOptions) -> None:
    inner = unwrap_model(model)
    checks = (
        lambda: _check_device(ctx),
        lambda: check_quantized(inner, _WHERE, left_out=ignored_ids(inner, options.ignored)),
        lambda: check_formats(options.gather_dtype, ctx.precision),
        lambda: ignored_parameters(inner, options.ignored),
        lambda: plan_units(
            inner, units=options.units, wide=wide_parameters(inner), ignored=ignored_ids(inner, options.ignored)
        ),
        lambda: check_mesh(ctx, inner, options.reshard_after_forward),
    )
    check_all(checks, "the plan does not fit the model or the mesh", _WHERE)


def _check_device(ctx: DistContext) -> None:
    if ctx.device.type == "xla":
        raise ConfigError("fully_shard does not know XLA devices", where=_WHERE, fix="Take the strategy ddp.")
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


def _spread(ctx: DistContext, model: nn.Module, options: ShardOptions, *, is_empty: bool) -> nn.Module:
    inner = unwrap_model(model)
    before = dict(inner.named_parameters())
    compare_models(ctx, options, before)
    stage = stage_comm(ctx)
    mesh = open_shard_mesh(ctx, inner)
    if mesh is None:
        move_model(inner, ctx.device)
        label_parameters(inner)
        return model
    below = ignored_ids(inner, options.ignored)
    ignored = [each for each in inner.parameters() if id(each) in below]
    units = [_shard(ctx, inner, root, mesh, stage, options, is_empty=is_empty) for root in stage_modules(inner)]
    if is_empty:
        allocate_empty(inner, torch.device("cpu") if options.offload else ctx.device)
    else:
        make_room(ignored, ctx.device)
        _move(ignored, ctx.device)
        begin_alike(ctx, stage, mesh, ignored)
    for name, after in inner.named_parameters():
        if after is not before[name]:
            replace_parameter(name, before[name], after)
    label_parameters(inner, needed=not options.find_unused_parameters)
    if options.find_unused_parameters:
        for root in stage_modules(inner):
            cast(Any, root).set_reduce_scatter_unused_params(True)
    if not is_empty:
        begin_alike(ctx, stage, mesh, inner.buffers())
    for each in units:
        if options.prefetch is not None:
            prefetch(each, options.prefetch)
        reshard_after_evaluation(each)
        if options.broadcast_buffers and any(True for _ in each[-1].buffers()):
            follow_first(stage, each[-1])
    return model


def _shard(
    ctx: DistContext,
    model: nn.Module,
    root: nn.Module,
    mesh: DeviceMesh,
    stage: Comm,
    options: ShardOptions,
    *,
    is_empty: bool,
) -> Sequence[nn.Module]:
    """Shard one unit after another, so that the device needs room for one whole one at a time, and return them.

    Parameters of a pipeline's stages stay whole between micro-batches. Those of experts do where a schedule computes
    gradients of weights later: it looks for the parameters that the forward has used.

    Args:
        ctx, mesh, stage, options: as of `_spread`.
        model: the whole one, by whose names the options choose modules.
        root: the model, or one of its stages.
        is_empty: whether no rank has values yet.
    """
    from torch.distributed.fsdp import (  # its import takes most of a second
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    below = ignored_ids(model, options.ignored)
    ignored = {each for each in root.parameters() if id(each) in below}
    waiting = {id(each) for each in root.parameters()} - below
    experts = expert_modules(root)
    same_experts = exchange_mesh(ctx) if experts else mesh
    wide = wide_parameters(root)
    names = plan_units(root, experts, units=units_in(root, model, options.units), wide=wide, ignored=below)
    # memory is pinned where it is copied to a device
    offload = CPUOffloadPolicy(pin_memory=ctx.device.type != "cpu") if options.offload else OffloadPolicy()
    for name in names:
        unit = root.get_submodule(name)
        own = [each for each in unit.parameters() if id(each) in waiting]
        along = same_experts if name in experts else mesh
        if not is_empty:
            make_room([*own, *unit.buffers()], ctx.device)
            _move([*own, *unit.buffers()], ctx.device)
            begin_alike(ctx, stage, along, own)
        travels = wire_format(own, wide, ctx.precision, options.gather_dtype, options.reduce_dtype)
        if travels.gather is not None:
            compute_in(travels.gather, unit, ctx.device.type)
        stays = is_pipelined(model) and (name not in experts or _splits_backward(model))
        reshard = False if stays else reshard_setting(options.reshard_after_forward, along.size(along.ndim - 1))
        how: dict[str, Any] = {
            "mp_policy": MixedPrecisionPolicy(travels.gather, travels.reduce, cast_forward_inputs=False),
            "offload_policy": offload,
            "reshard_after_forward": reshard,
            "ignored_params": ignored or None,
        }
        try:
            if name in experts:
                shard_experts(ctx, unit, along, **how)
            else:
                fully_shard(unit, mesh=along, **how)
        except (ValueError, AssertionError, NotImplementedError, RuntimeError) as error:
            where = f"{_WHERE}, {name or type(root).__name__}"
            raise PrepareError("torch cannot shard this", got=str(error), where=where) from error
        gather_outside_of_inference(unit)
        waiting -= {id(each) for each in own}
        for each in own:
            _release(each)
    return [root.get_submodule(name) for name in names]


def _splits_backward(model: nn.Module) -> bool:
    pipeline = pipeline_of(model)
    return pipeline is not None and pipeline.layout.schedule in SPLIT_BACKWARDS


def _move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move tensors in place; not those that inner units have sharded, which may have been offloaded."""
    for each in tensors:
        if each.device != device:
            each.data = each.data.to(device)


def _release(parameter: nn.Parameter) -> None:
    """Free the memory of a parameter that was sharded, though an optimizer may hold it still."""
    if not is_dtensor(parameter):
        parameter.data = parameter.data.new_empty(0)


SHARD = Spread(dimension="shard", options=ShardOptions, is_done=_is_done, check=_check, spread=_spread, replaces=True)
