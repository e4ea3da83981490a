# SPDX-License-Identifier: Apache-2.0
"""Refusals of models that another wrapper holds, that lie on devices of others, or whose parameters have no shape."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from accel.context import DistContext
from accel.errors import DeviceError, PrepareError
from accel.parallel._paths import named_modules

# by name: of torch, Apex, FairScale, DeepSpeed and others, which are not imported for it
_WRAPPERS = frozenset(
    {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "ShardedDataParallel", "DeepSpeedEngine"}
)


def check_bare(model: nn.Module) -> None:
    """Raise for a model with a module inside whose gradients another wrapper exchanges already."""
    for name, module in named_modules(model):
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if kinds & _WRAPPERS:
            raise PrepareError(
                "the model holds a module that is wrapped already, so gradients would be exchanged twice",
                expected="a model without a wrapper inside",
                got=f"{type(module).__module__}.{type(module).__name__}",
                where=f"prepare_model, {name or 'the model'}",
                fix="Pass the module that was wrapped, before it is wrapped; or leave the model out of prepare.",
            )


def check_shapes(model: nn.Module) -> None:
    """Raise for parameters and buffers of lazy modules that have no shape yet, as ranks cannot compare them."""
    named = [*model.named_parameters(), *model.named_buffers()]
    if without := [name for name, each in named if is_lazy(each)]:
        raise PrepareError(
            "the model has parameters without a shape yet",
            expected="a model whose lazy modules have seen an input",
            got=", ".join(without),
            where="prepare_model",
            fix="Run the model once on the CPU, before it is prepared.",
        )


def check_devices(ctx: DistContext, model: nn.Module) -> None:
    """Raise `DeviceError` for a model with a tensor that is neither on the CPU nor on the context's device.

    An empty model may have any tensor on the meta device.
    """
    is_empty = any(each.is_meta for each in model.parameters())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "cpu" and tensor.device != ctx.device and not (tensor.is_meta and is_empty):
            raise DeviceError(
                "the model is on a device that is not this rank's",
                expected=" or ".join(dict.fromkeys(("cpu", str(ctx.device)))),
                got=str(tensor.device),
                where=f"prepare_model, {name}",
                fix="Build it on the CPU, or on ctx.device.",
            )
