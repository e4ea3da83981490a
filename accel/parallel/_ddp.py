# SPDX-License-Identifier: Apache-2.0
"""Data parallel: a replica on every rank, gradients averaged by torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm import broadcast_flat
from accel.context import DistContext
from accel.errors import DeviceError, PrepareError
from accel.parallel._labels import label_parameters
from accel.parallel._sharded import check_sharded, is_sharded
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
    model that is wrapped already, or that `fully_shard` or tensor parallelism has spread, is returned as it is.

    Args:
        ctx: the context.
        model: on the CPU or on the context's device. Moved in place.
        find_unused_parameters, bucket_cap_mb, static_graph: as in DistributedDataParallel; the bucket's unit is MiB.

    Returns:
        The model to call in the training loop.

    Raises:
        DeviceError: a parameter or buffer on another device; named.
        PrepareError: not a module, or a sharded one whose gradients would not reach every rank.
    """
    ctx.comm.check_open()
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
        raise PrepareError("not a model", expected="a torch.nn.Module", got=type(model).__name__, where="prepare_model")
    if replica_of(model) is not None:
        return model
    check_devices(ctx, model)
    if is_sharded(model):
        check_sharded(ctx, model)
        label_parameters(model, exchanged=False)
        return model
    model.to(ctx.device)
    label_parameters(model, exchanged=ctx.world_size > 1 and not find_unused_parameters)
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


def replica_of(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP around a model, torch.compile outside or inside of it; None if there is none."""
    while (name := wrapped_name(model)) is not None:
        if isinstance(model, DistributedDataParallel):
            return model
        model = getattr(model, name)
    return None
