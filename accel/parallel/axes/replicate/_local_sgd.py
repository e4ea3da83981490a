# SPDX-License-Identifier: Apache-2.0
"""Local SGD: ranks step on their own gradients, and average their parameters every few steps.

Stich 2019, "Local SGD converges fast and communicates little", arXiv:1805.09767.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from accel.collectives import reduce
from accel.comm import Call, adopt, call_site, exchange, refuse_replaced
from accel.context import DistContext, context_first, group_of
from accel.errors import ConfigError, DeviceError, PrepareError
from accel.errors._checks import check_count
from accel.parallel._empty import move_model
from accel.parallel._labels import STEPPED_ALONE, is_local, keep_state_on_host_, label_parameters, mark_local
from accel.parallel._modules import is_pipelined, note_prepared, unwrap_model
from accel.parallel._prepare_model import check_axes, compile_as_set, composition, options_of
from accel.parallel._refused import DEVICES, PrepareCall, check_sparse, refused, report
from accel.parallel._same_batches import SHARING, compare_batches
from accel.parallel._sharded import is_sharded
from accel.parallel._spread import ModelView, ReplicateOptions, average_along_, begin_with_rank_0_, replicated_tensors
from accel.parallel.axes.replicate._ddp import replica_of
from accel.parallel.axes.shard import SHARD
from accel.tensors import local_part, packed_weights
from accel.topology import Dimension, Plan, dimension_of

_WITHIN: tuple[Dimension, ...] = ("pipeline", "tensor", "context")  # spread a replica


class LocalSgd(msgspec.Struct, frozen=True):
    """Position of a run between two averages.

    Attributes:
        every: optimizer steps from one average to the next.
        taken: optimizer steps since the last average.
        averages: averages since the run began.
    """

    every: int = 8
    taken: int = 0
    averages: int = 0

    def __post_init__(self) -> None:
        check_count(self.every, "the number of steps is not valid", where="LocalSgd")

    def check_saveable(self) -> None:
        """Raise `ConfigError` between two averages, where ranks hold different models and a checkpoint only one."""
        if self.taken:
            raise ConfigError(
                "ranks hold different models between two averages",
                expected="a checkpoint right after an average",
                got=f"{self.taken} of {self.every} steps",
                where="LocalSgd",
                fix="Save when local.taken is 0; local_sgd_step(..., last=True) averages at once.",
            )


@context_first
def prepare_local_model(ctx: DistContext, model: nn.Module, *, plan: Plan | None = None) -> nn.Module:
    """Move the model to the context's device and start it from rank 0's values, for local SGD. A collective.

    It is not wrapped: no backward exchanges its gradients between ranks with other samples. Along `tp`, `cp` and `pp`
    the model is spread as by `prepare_model`, so that the ranks of one replica step together.

    Args:
        ctx: the context.
        model: on the CPU or on the context's device. Mutated.
        plan: styles and stages for these axes, as for `prepare_model`; None for `ctx.plan`.

    Returns:
        The model that was passed.

    Raises:
        DeviceError: a parameter or buffer on another device, or without values; named.
        PrepareError: a wrapped or sharded model, because its gradients are exchanged; a mesh with an expert
            dimension; or as `prepare_model` for the axes within a replica.
        ConfigError: as `prepare_model`.
    """
    ctx.comm.check_open()
    _check_local(model, "prepare_local_model")
    view = ModelView(model)
    _check_values(ctx, view)
    check_sparse(view, {"local SGD": True}, "prepare_local_model")
    plan = ctx.plan if plan is None else plan
    if plan is not None and plan.offload == "optimizer":
        keep_state_on_host_(model.parameters())  # those that replace them follow
    within = [each for each in composition(ctx) if each.dimension in _WITHIN] if ctx.world_size > 1 else []
    if not within:
        if ctx.world_size > 1:
            check_axes(ctx, spreads=False)
        move_model(view, ctx.streams)
        view = view.after()
        label_parameters(view.parameters)
        if ctx.world_size > 1:
            begin_with_rank_0_(ctx, replicated_tensors(view))
        mark_local(model)
        compile_as_set(ctx, model)
        return model
    _check_experts(ctx)
    spreads = [*within, *(each for each in (SHARD,) if ctx.axis("cp").size > 1)]
    keywords = ReplicateOptions(broadcast_buffers=False)
    own = [options_of(each, plan or Plan(), keywords, view) for each in spreads]
    pairs = [*zip(spreads, own, strict=True)]
    errors = [error for each, options in pairs for error in each.refusals(ctx, view, options)]
    report(errors, "prepare_local_model")
    mark_local(model)
    for each, options in pairs:
        view = view.after(each.spread(ctx, view, options, is_empty=False))
    mark_local(model)  # with the parameters that it has now
    if not SHARING.isdisjoint(each.dimension for each in spreads):
        compare_batches(ctx, view)
    if plan is not None and plan.micro_batches is not None:
        note_prepared(model, micro_batches=plan.micro_batches)
    compile_as_set(ctx, model)
    return model


@context_first
def local_sgd_step(
    ctx: DistContext,
    model: nn.Module,
    local: LocalSgd,
    *,
    optimizer: Optimizer | None = None,
    last: bool = False,
) -> LocalSgd:
    """Count an optimizer step, and replace the model by the mean over ranks when it is time. Then a collective.

    One message for each dtype carries all parameters and floating-point buffers; 16-bit ones are averaged in float32.
    Each rank's part is exchanged among the ranks with the same part and other samples.

    Args:
        ctx: the context.
        model: from `prepare_local_model`. Mutated.
        local: the record; the same on every rank.
        optimizer: its floating-point state is averaged too, so that ranks are equal afterwards in all that a checkpoint
            holds. None leaves each rank its own.
        last: whether no step follows, so that the average is due in any case.

    Returns:
        The record to keep.

    Raises:
        PrepareError: a wrapped or sharded model, because its gradients are exchanged.
        StepError: a block, such as `Ema.applied_to`, has replaced the weights.
        CollectiveMismatch: ranks do not average at the same step, or hold other tensors.
    """
    ctx.comm.check_open()
    _check_local(model, "local_sgd_step")
    refuse_replaced(model.parameters(), "accel.local_sgd_step")
    taken = local.taken + 1
    if taken < local.every and not last:
        return msgspec.structs.replace(local, taken=taken)
    if ctx.world_size > 1:
        _average(ctx, _tensors(model, optimizer))
    return msgspec.structs.replace(local, taken=0, averages=local.averages + 1)


def _tensors(model: nn.Module, optimizer: Optimizer | None) -> list[torch.Tensor]:
    plain = unwrap_model(model)
    frozen = packed_weights(plain)  # quantized, and alike since the begin
    found = [each for name, each in plain.named_parameters() if name not in frozen] + list(plain.buffers())
    if optimizer is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = cast("dict[str, Any]", optimizer.state.get(parameter, {}))
                found += [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
    return [local_part(tensor) for tensor in found if tensor.is_floating_point() or tensor.is_complex()]


def _average(ctx: DistContext, tensors: list[torch.Tensor]) -> None:
    there = [tensor.to(ctx.device) for tensor in tensors]  # optimizer state may be on the host
    wide = [tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor for tensor in there]
    for tensor, mean in zip(tensors, _means(ctx, wide), strict=True):
        _ = tensor.copy_(mean)


def _means(ctx: DistContext, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the means over the ranks with the same parts of a model and other samples."""
    names = [name for name, axis in ctx.position.axes if dimension_of(name) in STEPPED_ALONE and axis.size > 1]
    if ctx.data_parallel[1] == ctx.world_size:
        return reduce(ctx, tensors, "mean")
    group = group_of(ctx, *names) if names else None
    if group is None:
        return tensors
    comm = adopt(group, ctx.device)
    shapes = "\n".join(f"{each.dtype} {list(each.shape)}" for each in tensors)
    _ = exchange(comm, Call("local_sgd_step", shapes, call_site()), torch.empty(0, dtype=torch.uint8))
    made = [each.clone() for each in tensors]
    average_along_(comm, made)
    return made


def _check_values(ctx: DistContext, view: ModelView) -> None:
    report(refused(PrepareCall(ctx, view), [DEVICES]), "prepare_local_model")
    if empty := [name for name, each in view.parameters.items() if each.is_meta]:
        raise DeviceError(
            "a model for local SGD has no values",
            expected="values on the CPU or on the context's device",
            got=f"{len(empty)} parameters on the meta device, such as {empty[0]}",
            where="prepare_local_model",
            fix="Give it values first: model.to_empty(device='cpu'), then load or initialise them.",
        )


def _check_experts(ctx: DistContext) -> None:
    """Raise for ranks that bring each other tokens at every step."""
    if ctx.axes.ep > 1:
        raise PrepareError(
            "ranks that share experts exchange tokens at every step",
            expected="a mesh without ep",
            got=f"ep={ctx.axes.ep}",
            where="prepare_local_model, ctx.mesh",
            fix="Take ep out of the mesh, or prepare the model by accel.prepare.",
        )


def _check_local(model: nn.Module, where: str) -> None:
    wrapped = replica_of(model) is not None
    if not wrapped and (is_local(model) or not (is_sharded(model) or is_pipelined(model))):
        return
    raise PrepareError(
        "ranks exchange this model's gradients at every step",
        expected="a model from prepare_local_model",
        got="one that DDP wraps" if wrapped else "a sharded one",
        where=where,
        fix="Pass accel.unwrap_model(model), and use that from here on." if wrapped else "Pass a plain one.",
    )
