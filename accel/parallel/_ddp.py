# SPDX-License-Identifier: Apache-2.0
"""Data parallel: a replica on every rank, gradients averaged by torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm import broadcast_flat
from accel.context import DistContext
from accel.errors import DeviceError, PrepareError, StepError
from accel.parallel._unwrap import wrapped_name


class Replica(DistributedDataParallel):
    """DDP that knows which parameters it exchanges, and whether all of them must take part in every backward."""

    def __init__(self, module: nn.Module, *, find_unused_parameters: bool, **options: Any) -> None:
        cast(Any, super()).__init__(module, find_unused_parameters=find_unused_parameters, **options)
        named = tuple(module.named_parameters())
        self.exchanged = tuple((name, parameter) for name, parameter in named if parameter.requires_grad)
        self.frozen = tuple((name, parameter) for name, parameter in named if not parameter.requires_grad)
        self.uses_all = not find_unused_parameters


class _Touch(nn.Module):
    """A forward that uses every trainable parameter of a model, and whose gradients are zero."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model  # a submodule, because DDP looks for the buffers to synchronise

    def forward(self) -> torch.Tensor:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        real = [torch.view_as_real(each) if each.is_complex() else each for each in trained]
        return torch.stack([each.flatten()[:1].sum().double() * 0 for each in real]).sum()


def prepare_model(
    ctx: DistContext,
    model: nn.Module,
    *,
    find_unused_parameters: bool = False,
    bucket_cap_mb: float = 25.0,
    static_graph: bool = False,
) -> nn.Module:
    """Move the model to the context's device, and wrap it in DDP when there are more ranks than one. A collective.

    Every rank gets rank 0's parameters and buffers. A model without trainable parameters is returned unwrapped; a
    model that is wrapped already is returned as it is.

    Args:
        ctx: the context.
        model: on the CPU or on the context's device. Moved in place.
        find_unused_parameters, bucket_cap_mb, static_graph: as in DistributedDataParallel; the bucket's unit is MiB.

    Returns:
        The model to call in the training loop.

    Raises:
        DeviceError: a parameter or buffer on another device; named.
        PrepareError: not a module.
    """
    ctx.comm.check_open()
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
        raise PrepareError("not a model", expected="a torch.nn.Module", got=type(model).__name__, where="prepare_model")
    if _replica(model) is not None:
        return model
    check_devices(ctx, model)
    model.to(ctx.device)
    if ctx.world_size == 1:
        return model
    if not any(parameter.requires_grad for parameter in model.parameters()):
        for tensor in [*model.parameters(), *model.buffers()]:
            broadcast_flat(ctx.comm, tensor.detach(), source=0)
        return model
    replica = Replica(
        model,
        device_ids=None if ctx.device.type == "cpu" else [ctx.device],
        process_group=ctx.comm.group,
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mb=bucket_cap_mb,
        static_graph=static_graph,
        gradient_as_bucket_view=True,
    )
    if not find_unused_parameters and not static_graph:
        _fix_buckets(replica)
    return replica


def check_devices(ctx: DistContext, model: nn.Module) -> None:
    """Raise `DeviceError` for a model with a tensor that is neither on the CPU nor on the context's device."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "cpu" and tensor.device != ctx.device:
            raise DeviceError(
                "the model is on a device that is not this rank's",
                expected=f"cpu or {ctx.device}",
                got=str(tensor.device),
                where=f"prepare_model, {name}",
                fix="Build it on the CPU, or on ctx.device.",
            )


def no_sync(ctx: DistContext, model: nn.Module) -> AbstractContextManager[None]:
    """Keep the gradients of backward passes in this block on their rank; forward belongs into the block too.

    Args:
        ctx: the context.
        model: from `prepare_model`.

    Returns:
        A context manager for one block.

    Raises:
        PrepareError: a trainable model that is not prepared, on more ranks than one.
    """
    replica = check_prepared(ctx, model)
    return contextlib.nullcontext() if replica is None else cast(Any, replica).no_sync()


def check_prepared(ctx: DistContext, model: nn.Module) -> DistributedDataParallel | None:
    """Return what exchanges the model's gradients, None if nothing has to.

    Raises:
        PrepareError: the model has a trainable parameter whose gradient nobody would exchange.
    """
    replica = _replica(model)
    if replica is None and ctx.world_size > 1 and any(parameter.requires_grad for parameter in model.parameters()):
        raise PrepareError(
            "the model is not prepared, so its gradients would stay on each rank",
            expected="model = accel.prepare_model(ctx, model)",
            got=f"a plain {type(model).__name__} on {ctx.world_size} ranks",
            where=f"rank {ctx.rank}",
            fix="Prepare the model before the loop.",
        )
    for name, parameter in replica.frozen if isinstance(replica, Replica) else ():
        if parameter.requires_grad:
            raise PrepareError(
                "a parameter became trainable after preparing, so its gradient would stay on each rank",
                expected="the parameters that were trainable then",
                got=f"{name} as well",
                where=f"rank {ctx.rank}",
                fix="Set requires_grad first, then prepare: accel.prepare_model(ctx, accel.unwrap_model(model)).",
            )
    return replica


def check_exchanged(ctx: DistContext, model: nn.Module) -> None:
    """Raise `StepError` if a parameter took no part in a backward that was to exchange gradients.

    DDP waits for all parameters of a bucket before it exchanges any of them.
    """
    replica = _replica(model)
    if ctx.world_size == 1 or not isinstance(replica, Replica) or not replica.uses_all:
        return
    unused = [name for name, each in replica.exchanged if each.grad is None and each.requires_grad]
    if unused:
        raise StepError(
            "parameters took no part in the loss, so gradients were not exchanged",
            expected="every trainable parameter in every backward that ends a window",
            got=f"no gradient for {', '.join(unused)}",
            where=f"rank {ctx.rank}, accumulate",
            fix="Freeze them before preparing, or use accel.prepare_model(ctx, model, find_unused_parameters=True).",
        )


def _fix_buckets(replica: DistributedDataParallel) -> None:
    """Let DDP settle the layout of its buckets now, on an order of parameters that is the same in every run.

    DDP lays its buckets out anew after the first backward, in the order in which gradients came. Where a gradient lies
    in its bucket decides in which order ranks are summed, so a run that was resumed would differ in the last bits from
    one that went on.
    """
    model = cast(nn.Module, cast(Any, replica).module)
    replica.module = _Touch(model)
    try:
        with torch.enable_grad():
            for _ in range(2):  # the first backward tells the order, the next forward lays the buckets out
                replica().backward()
    finally:
        replica.module = model
    for parameter in model.parameters():
        parameter.grad = None


def _replica(model: nn.Module) -> DistributedDataParallel | None:
    while (name := wrapped_name(model)) is not None:
        if isinstance(model, DistributedDataParallel):
            return model
        model = getattr(model, name)
    return None
