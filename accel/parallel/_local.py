# SPDX-License-Identifier: Apache-2.0
"""This rank's part of a parameter, from which gradients flow back to the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from accel.comm import own_gradient
from accel.errors import PrepareError
from accel.parallel._labels import name_of
from accel.parallel._private import in_function_transform, part_alone
from accel.tensors import dtensor_around, dtensor_of, is_dtensor, local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local_of(parameter: torch.Tensor, *, summands: bool, fresh: bool = False) -> torch.Tensor:
    """Return this rank's part of a parameter, from which gradients flow back to the whole.

    `summands`: a replicated parameter's gradient awaits its sum over ranks. `fresh`: it comes in new memory.
    """
    if not is_dtensor(parameter):
        return parameter
    if parameter.device_mesh.ndim > 1:
        raise PrepareError(
            "a layer computes with a parameter that is not gathered along dp",
            expected="the forward of the unit of fully_shard around it, which gathers its parameters",
            got=name_of(parameter) or f"a parameter of shape {list(parameter.shape)}",
            where="forward",
            fix="Call the unit itself, not another method; or choose other units: plan=accel.parallel.Plan(units=...).",
        )
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return local_part(parameter)
    is_whole = parameter.placements[0].is_replicate()
    if torch.compiler.is_compiling() or not parameter.is_contiguous() or (summands and is_whole):
        part = _own_part(parameter, summands=summands)  # torch.compile knows the method
        return own_gradient(part) if is_whole and not fresh else part
    function = _OwnPartInTransform if in_function_transform() else _OwnPart
    return cast(Any, function).apply(parameter, is_whole and not fresh)


def _own_part(parameter: DTensor, *, summands: bool) -> torch.Tensor:
    """The part by DTensor's own method."""
    if not parameter.placements[0].is_replicate():
        return parameter.to_local()
    from torch.distributed.tensor import Partial, Replicate

    return parameter.to_local(grad_placements=[Partial() if summands else Replicate()])


class _OwnPart(torch.autograd.Function):
    """`to_local` of a contiguous parameter. Its gradient becomes a DTensor without a view."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, copies: bool) -> torch.Tensor:
        ctx.parameter = parameter
        ctx.copies = copies
        return part_alone(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[DTensor, None]:
        parameter: DTensor = ctx.parameter
        # autograd does not see behind a DTensor that another gradient, such as a summand's, shares its memory
        grad = grads[0].clone(memory_format=torch.contiguous_format) if ctx.copies else grads[0].contiguous()
        if grad.requires_grad or grad.dtype != parameter.dtype:  # a backward that is differentiated, for one
            return dtensor_of(grad, parameter), None
        return dtensor_around(grad, parameter), None


class _OwnPartInTransform(_OwnPart):
    """The same within `torch.func.vjp` and `grad`, which take no other form; the usual one costs a quarter of it."""

    @staticmethod
    def forward(parameter: DTensor, copies: bool) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return part_alone(parameter)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[DTensor, bool], output: torch.Tensor) -> None:
        ctx.parameter, ctx.copies = inputs

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[torch.Tensor, None]:
        """Return the same part for all that `torch.vmap` maps."""
        return cast(Any, _OwnPartInTransform).apply(*args), None
