# SPDX-License-Identifier: Apache-2.0
"""Data parallel: a replica on every rank, gradients averaged by torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm import Call, broadcast_flat, call_site, exchange
from accel.context import DistContext
from accel.errors import DeviceError, PrepareError
from accel.parallel._hooks import CommHook, DdpOptions, register_hook
from accel.parallel._labels import label_parameters
from accel.parallel._sharded import check_sharded, is_sharded
from accel.parallel._unwrap import wrapped_name


class Replica(DistributedDataParallel):
    """DDP that knows which parameters it exchanges, and whether all of them must take part in every backward."""

    def __init__(self, module: nn.Module, *, find_unused_parameters: bool, static_graph: bool, **options: Any) -> None:
        cast(Any, super()).__init__(
            module, find_unused_parameters=find_unused_parameters, static_graph=static_graph, **options
        )
        named = tuple(module.named_parameters())
        self.exchanged = tuple((name, parameter) for name, parameter in named if parameter.requires_grad)
        self.frozen = tuple((name, parameter) for name, parameter in named if not parameter.requires_grad)
        self.uses_all = not find_unused_parameters and not static_graph


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
    broadcast_buffers: bool = True,
    gradient_as_bucket_view: bool = True,
    comm_hook: CommHook | None = None,
) -> nn.Module:
    """Move the model to the context's device, and wrap it in DDP when there are more ranks than one. A collective.

    Every rank gets rank 0's parameters and buffers. A model without trainable parameters is returned unwrapped; a
    model that is wrapped already, or that `fully_shard` or tensor parallelism has spread, is returned as it is.

    Args:
        ctx: the context.
        model: on the CPU or on the context's device. Moved in place.
        find_unused_parameters, bucket_cap_mb, static_graph, broadcast_buffers, gradient_as_bucket_view: as in
            DistributedDataParallel; the bucket's unit is MiB.
        comm_hook: how gradients travel: "fp16" or "bf16" sends them in that dtype, a `PowerSgd` as thin matrices; or a
            function for DDP's register_comm_hook, whose state is the process group. None sends them as they are.

    Returns:
        The model to call in the training loop. With one rank, options have nothing to do.

    Raises:
        DeviceError: a parameter or buffer on another device; named.
        PrepareError: not a module, one that is wrapped or spread already beside options that it would need to be
            wrapped with, or a sharded one whose gradients would not reach every rank.
        ConfigError: options outside their range, or that contradict each other.
        MissingExtraError: PowerSGD without numpy.
        CollectiveMismatch: ranks passed other options, or models of other parameters.
    """
    ctx.comm.check_open()
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
        raise PrepareError("not a model", expected="a torch.nn.Module", got=type(model).__name__, where="prepare_model")
    options = DdpOptions(
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mb=bucket_cap_mb,
        static_graph=static_graph,
        broadcast_buffers=broadcast_buffers,
        gradient_as_bucket_view=gradient_as_bucket_view,
        comm_hook=comm_hook,
    )
    options.check()
    if (replica := replica_of(model)) is not None:
        _check_free_of_options(options)
        _adopt(replica)
        return model
    check_devices(ctx, model)
    if is_sharded(model):
        _check_free_of_options(options)
        check_sharded(ctx, model)
        label_parameters(model)
        return model
    model.to(ctx.device)
    if ctx.world_size == 1:
        label_parameters(model)
        return model
    uses_all = not find_unused_parameters and not static_graph
    label_parameters(model, needed=uses_all, viewed=gradient_as_bucket_view)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        for tensor in [*model.parameters(), *model.buffers()]:
            broadcast_flat(ctx.comm, tensor.detach(), source=0)
        return model
    return _replicate(ctx, model, options)


def _replicate(ctx: DistContext, model: nn.Module, options: DdpOptions) -> Replica:
    trained = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
    facts = [options.describe(), *(f"{name}: {each.dtype} {list(each.shape)}" for name, each in trained)]
    call = Call("prepare_model", "\n".join(facts), call_site())
    _ = exchange(ctx.comm, call, torch.empty(0, dtype=torch.uint8))
    replica = Replica(
        model,
        device_ids=None if ctx.device.type == "cpu" else [ctx.device],
        process_group=ctx.comm.group,
        find_unused_parameters=options.find_unused_parameters,
        bucket_cap_mb=options.bucket_cap_mb,
        static_graph=options.static_graph,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        **_buffer_options(ctx, model, options),
    )
    if not options.find_unused_parameters and not options.static_graph:
        _fix_buckets(replica)
    register_hook(replica, ctx.comm.group, options.comm_hook)
    return replica


def _adopt(replica: DistributedDataParallel) -> None:
    """Label what somebody else has wrapped."""
    if not isinstance(replica, Replica):
        uses_all = not replica.find_unused_parameters and not replica.static_graph
        label_parameters(cast(nn.Module, cast(Any, replica).module), needed=uses_all)


def _buffer_options(ctx: DistContext, model: nn.Module, options: DdpOptions) -> dict[str, bool]:
    """How this torch says that buffers are not sent in forward; at the start they are rank 0's in any case."""
    if options.broadcast_buffers:
        return {}
    for buffer in model.buffers():
        broadcast_flat(ctx.comm, buffer.detach(), source=0)
    new = "forward_sync_buffers"  # of torch 2.13, which warns about the old name
    known = inspect.signature(cast(Any, DistributedDataParallel)).parameters
    return {new if new in known else "broadcast_buffers": False}


def _check_free_of_options(options: DdpOptions) -> None:
    if options != DdpOptions():
        raise PrepareError(
            "the model is wrapped or spread already, so these options would change nothing",
            expected="options when the model is wrapped, and none later",
            got=options.describe(),
            where="prepare_model",
            fix="Pass them to the first prepare_model, before prepare.",
        )


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
