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
from accel.context import DistContext, context_first
from accel.errors import ConfigError, PrepareError
from accel.parallel._composition import check_axes
from accel.parallel._ddp import replica_of
from accel.parallel._labels import label_parameters
from accel.parallel._move import move_model
from accel.parallel._prepare_model import check_devices
from accel.parallel._replicas import begin_with_rank_0_
from accel.parallel._sharded import is_sharded
from accel.parallel._unwrap import unwrap_model


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
        if type(self.every) is not int or self.every < 1:
            raise ConfigError(
                "not a number of steps", expected="an integer of at least 1", got=repr(self.every), where="LocalSgd"
            )

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
def prepare_local_model(ctx: DistContext, model: nn.Module) -> nn.Module:
    """Move the model to the context's device and start it from rank 0's values, for local SGD. A collective.

    It is not wrapped: no backward exchanges its gradients, so leave it out of `accumulate(ctx, accum)`.

    Args:
        ctx: the context.
        model: on the CPU or on the context's device. Moved in place.

    Returns:
        The model that was passed.

    Raises:
        DeviceError: a parameter or buffer on another device; named.
        PrepareError: a model that is wrapped or sharded, whose gradients are exchanged; or a mesh with a pipeline,
            expert or context dimension.
    """
    ctx.comm.check_open()
    _check_local(model, "prepare_local_model")
    check_devices(ctx, model)
    if ctx.world_size > 1:
        check_axes(ctx, spreads=False)
        _check_whole_sequences(ctx)
    move_model(model, ctx.device)
    label_parameters(model)
    if ctx.world_size > 1:
        begin_with_rank_0_(ctx, [*model.parameters(), *model.buffers()])
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
        PrepareError: a model that is wrapped or sharded, whose gradients are exchanged.
        CollectiveMismatch: ranks do not average at the same step, or hold other tensors.
    """
    ctx.comm.check_open()
    _check_local(model, "local_sgd_step")
    taken = local.taken + 1
    if taken < local.every and not last:
        return msgspec.structs.replace(local, taken=taken)
    if ctx.world_size > 1:
        _average(ctx, _tensors(model, optimizer))
    return msgspec.structs.replace(local, taken=0, averages=local.averages + 1)


def _tensors(model: nn.Module, optimizer: Optimizer | None) -> list[torch.Tensor]:
    plain = unwrap_model(model)
    found = [*plain.parameters(), *plain.buffers()]
    if optimizer is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = cast("dict[str, Any]", optimizer.state.get(parameter, {}))
                found += [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
    return [tensor.detach() for tensor in found if tensor.is_floating_point() or tensor.is_complex()]


def _average(ctx: DistContext, tensors: list[torch.Tensor]) -> None:
    wide = [tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor for tensor in tensors]
    for tensor, mean in zip(tensors, reduce(ctx, wide, "mean"), strict=True):
        _ = tensor.copy_(mean)


def _check_whole_sequences(ctx: DistContext) -> None:
    """Raise for ranks that hold parts of sequences, each with a part of every gradient."""
    if ctx.axis("cp").size == 1:
        return
    raise PrepareError(
        "ranks that share sequences exchange gradients at every step",
        expected="a mesh without cp",
        got=f"cp={ctx.axis('cp').size}",
        where="prepare_local_model, ctx.mesh",
        fix="Take cp out of the mesh, or prepare the model by accel.prepare.",
    )


def _check_local(model: nn.Module, where: str) -> None:
    wrapped = replica_of(model) is not None
    if not wrapped and not is_sharded(model):
        return
    raise PrepareError(
        "ranks exchange this model's gradients at every step",
        expected="a model from prepare_local_model",
        got="one that DDP wraps" if wrapped else "a sharded one",
        where=where,
        fix="Pass accel.unwrap_model(model), and use that from here on." if wrapped else "Pass a plain one.",
    )
