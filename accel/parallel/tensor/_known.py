# SPDX-License-Identifier: Apache-2.0
"""Styles of layers whose forward is known: torch's attention, Transformer and Sequential, and GPT-2's. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from accel.parallel._paths import named_modules
from accel.parallel.tensor._styles import is_transposed
from accel.topology import TensorStyle

# Layers that compute each element for itself, so that a part of the features stays a part.
_ELEMENTWISE = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign,
    nn.Tanh, nn.Tanhshrink, nn.Dropout,
)  # fmt: skip


def known_styles(model: nn.Module) -> dict[str, TensorStyle]:
    """Return the styles of the layers in a model whose forward is known, by path."""
    found: dict[str, TensorStyle] = {}
    for path, module in named_modules(model):
        for name, style in _styles_in(module):
            found.setdefault(f"{path}.{name}".strip("."), style)
    return found


def _styles_in(module: nn.Module) -> Iterator[tuple[str, TensorStyle]]:
    """Styles of a module's own parts, by their names in it."""
    if isinstance(module, nn.MultiheadAttention) and _has_forward_of(module, nn.MultiheadAttention):
        if module.bias_k is None and not module.add_zero_attn:
            yield "", "multihead_attention"
            yield "out_proj", "rowwise"
    elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        yield "linear1", "colwise"
        yield "linear2", "rowwise"
    elif isinstance(module, nn.Sequential) and _has_forward_of(module, nn.Sequential):
        yield from _pairs(module)
    elif type(module).__name__ == "GPT2Attention" and _are_transposed(module, "c_attn", "c_proj"):
        crosses = "q_attn" in dict(module.named_children())
        yield "c_attn", "packed_colwise_2" if crosses else "packed_colwise_3"
        yield "c_proj", "rowwise"
        if crosses:
            yield "q_attn", "colwise"
    elif type(module).__name__ == "GPT2MLP" and _are_transposed(module, "c_fc", "c_proj"):
        yield "c_fc", "colwise"
        yield "c_proj", "rowwise"


def _pairs(sequence: nn.Sequential) -> Iterator[tuple[str, TensorStyle]]:
    """Each two linear layers of which the second takes the first's outputs, element by element."""
    first: str | None = None
    for name, module in sequence.named_children():
        if type(module) is nn.Linear:
            if first is None:
                first = name
            else:
                yield first, "colwise"
                yield name, "rowwise"
                first = None
        elif not isinstance(module, _ELEMENTWISE):
            first = None


def _has_forward_of(module: nn.Module, kind: type[nn.Module]) -> bool:
    return cast(object, type(module).forward) is cast(Any, kind).forward


def _are_transposed(module: nn.Module, *names: str) -> bool:
    return all(is_transposed(_layer(module, name)) for name in names)


def _layer(module: nn.Module, name: str) -> nn.Module:
    """A layer, without the adapters that are around it."""
    child = module.get_submodule(name)
    return child.get_submodule("base_layer") if "base_layer" in dict(child.named_children()) else child
