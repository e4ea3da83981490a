# SPDX-License-Identifier: Apache-2.0
"""Styles of layers whose forward is known: torch's attention, Transformer and Sequential, and GPT-2's. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from accel.parallel._paths import named_modules
from accel.parallel.tensor._styles import is_linear, is_transposed
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
    modules = list(named_modules(model))
    places = Counter(id(each) for _, module in modules for each in cast(Any, module)._modules.values())
    for path, module in modules:
        for name, style in _styles_in(module, places):
            found.setdefault(f"{path}.{name}".strip("."), style)
    return found


def _styles_in(module: nn.Module, places: Counter[int]) -> Iterator[tuple[str, TensorStyle]]:
    """Styles of a module's own parts, by their names in it.

    Args:
        module: one of a model.
        places: number of the places where each module of the model stands, by `id`.
    """
    if isinstance(module, nn.MultiheadAttention) and _has_forward_of(module, nn.MultiheadAttention):
        if module.bias_k is None and not module.add_zero_attn:
            yield "", "multihead_attention"
            yield "out_proj", "rowwise"
    elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        if _feeds_forward(module):
            yield "linear1", "colwise"
            yield "linear2", "rowwise"
    elif isinstance(module, nn.Sequential) and _has_forward_of(module, nn.Sequential):
        yield from _pairs(module, places)
    elif type(module).__name__ == "GPT2Attention" and _are_transposed(module, "c_attn", "c_proj"):
        crosses = "q_attn" in dict(module.named_children())
        yield "c_attn", "packed_colwise_2" if crosses else "packed_colwise_3"
        yield "c_proj", "rowwise"
        if crosses:
            yield "q_attn", "colwise"
    elif type(module).__name__ == "GPT2MLP" and _are_transposed(module, "c_fc", "c_proj"):
        yield "c_fc", "colwise"
        yield "c_proj", "rowwise"


def _feeds_forward(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> bool:
    """Whether a layer has torch's own forward, with an activation of each element for itself."""
    kind = nn.TransformerEncoderLayer if isinstance(layer, nn.TransformerEncoderLayer) else nn.TransformerDecoderLayer
    own: Any = type(layer)
    activation: Any = layer.activation
    return own._ff_block is cast(Any, kind)._ff_block and _has_forward_of(layer, kind) and _is_elementwise(activation)


def _is_elementwise(activation: Any) -> bool:
    """Whether a part of the features stays a part behind an activation, which is called with a few numbers."""
    if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
        return False
    probe = torch.linspace(-2, 2, 8, device="cpu")
    try:
        return torch.allclose(activation(probe)[:4], activation(probe[:4]))
    except Exception:
        return False  # one that needs another shape


def _pairs(sequence: nn.Sequential, places: Counter[int]) -> Iterator[tuple[str, TensorStyle]]:
    """Each two linear layers of which the second takes the first's outputs, element by element.

    Args:
        sequence: one of a model.
        places: as for `_styles_in`; a layer that stands in several takes whole inputs in some, and parts in others.
    """
    first: str | None = None
    for name, module in cast(Any, sequence)._modules.items():
        if type(module) is nn.Linear and places[id(module)] == 1 and is_linear(module):
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
