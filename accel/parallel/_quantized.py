# SPDX-License-Identifier: Apache-2.0
"""Refusals of quantized weights that would be divided, or trained."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from accel.errors import PrepareError
from accel.tensors import packed_weights

_SHOWN = 3


def check_quantized(model: nn.Module, where: str, *, left_out: Collection[int] = ()) -> None:
    """Refuse a model whose quantized weights would be divided among ranks: scales and elements do not lie alike.

    Args:
        model: the model, without wrappers.
        where: place of the error.
        left_out: `id` of each parameter that stays whole.

    Raises:
        PrepareError: such a model; the first weights are named.
    """
    names = [name for name, each in _quantized(model) if id(each) not in left_out]
    if names:
        raise PrepareError(
            "quantized weights cannot be divided among ranks",
            expected="a model of plain weights",
            got=f"{len(names)} quantized: {', '.join(names[:_SHOWN])}",
            where=where,
            fix='Take strategy="ddp", where each rank has all of them.',
        )


def check_frozen(model: nn.Module) -> None:
    """Refuse quantized weights that ask for gradients: autograd gives them none, and no error.

    Raises:
        PrepareError: such a model; the first weights are named.
    """
    names = [name for name, each in _quantized(model) if each.requires_grad]
    if names:
        raise PrepareError(
            "quantized weights cannot be trained",
            expected="frozen ones, beside adapters that train",
            got=f"{len(names)} with requires_grad: {', '.join(names[:_SHOWN])}",
            where="prepare_model",
            fix="Freeze them, by model.get_parameter(name).requires_grad_(False).",
        )


def _quantized(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the quantized weights; one that an engine casts while it is gathered holds a plain weight."""
    for name, weight in packed_weights(model).items():
        parameter = model.get_parameter(name)
        elements = weight.parts[weight.first]
        is_plain = elements.is_floating_point() and elements.dtype == parameter.dtype
        if not is_plain or elements.shape != parameter.shape:
            yield name, parameter
