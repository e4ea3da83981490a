# SPDX-License-Identifier: Apache-2.0
"""Data parallel: a replica on every rank, gradients averaged by torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.context import DistContext
from accel.errors import DeviceError, PrepareError


def prepare_model(
    ctx: DistContext,
    model: nn.Module,
    *,
    find_unused_parameters: bool = False,
    bucket_cap_mb: float = 25.0,
    static_graph: bool = False,
) -> nn.Module:
    """Move the model to the context's device, and wrap it in DDP when there are more ranks than one.

    A collective: DDP gives every rank the parameters of rank 0. A model without trainable parameters is moved and
    returned as it is, on any number of ranks; so is one that is wrapped already.

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
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
        raise PrepareError("not a model", expected="a torch.nn.Module", got=type(model).__name__, where="prepare_model")
    if _replica(model) is not None:
        return model
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "cpu" and tensor.device != ctx.device:
            raise DeviceError(
                "the model is on a device that is not this rank's",
                expected=f"cpu or {ctx.device}",
                got=str(tensor.device),
                where=f"prepare_model, {name}",
                fix="Build it on the CPU, or on ctx.device.",
            )
    model.to(ctx.device)
    if ctx.world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    return DistributedDataParallel(
        model,
        device_ids=None if ctx.device.type == "cpu" else [ctx.device],
        process_group=ctx.comm.group,
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mb=bucket_cap_mb,
        static_graph=static_graph,
        gradient_as_bucket_view=True,
    )


@contextlib.contextmanager
def no_sync(ctx: DistContext, model: nn.Module) -> Generator[None]:
    """Keep the gradients of backward passes in this block on their rank; forward belongs into the block too.

    Args:
        ctx: the context.
        model: from `prepare_model`.

    Raises:
        PrepareError: a trainable model that is not prepared, on more ranks than one.
    """
    check_prepared(ctx, model)
    replica = _replica(model)
    with replica.no_sync() if replica is not None else contextlib.nullcontext():
        yield


def check_prepared(ctx: DistContext, model: nn.Module) -> None:
    """Raise `PrepareError` for a trainable model whose gradients nobody would exchange."""
    if ctx.world_size == 1 or _replica(model) is not None:
        return
    if any(parameter.requires_grad for parameter in model.parameters()):
        raise PrepareError(
            "the model is not prepared, so its gradients would stay on each rank",
            expected="model = accel.prepare_model(ctx, model)",
            got=f"a plain {type(model).__name__} on {ctx.world_size} ranks",
        )


def _replica(model: nn.Module) -> DistributedDataParallel | None:
    inner = getattr(model, "_orig_mod", model)  # torch.compile may have wrapped it
    return inner if isinstance(inner, DistributedDataParallel) else None
