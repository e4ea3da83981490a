# SPDX-License-Identifier: Apache-2.0
"""Styles of layers with a known forward: torch's attention, and pairs of linear layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn

from accel.mixins import Mixin
from accel.parallel._modules import named_modules
from accel.parallel.axes.tensor._styles import is_linear
from accel.topology import TensorStyle

# Layers that compute each element for itself, so that a part of the features stays a part.
_ELEMENTWISE = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign,
    nn.Tanh, nn.Tanhshrink, nn.Dropout,
)  # fmt: skip


def known_styles(model: nn.Module) -> dict[str, TensorStyle]:
    """Return the styles of the layers with a known forward in a model, by path."""
    found: dict[str, TensorStyle] = {}
    modules = list(named_modules(model))
    places = _places(modules)
    for path, module in modules:
        for name, style in _styles_in(module, places):
            found.setdefault(f"{path}.{name}".strip("."), style)
    return found


def _places(modules: Iterable[tuple[str, nn.Module]]) -> Counter[int]:
    """The number of places of each module, by `id`."""
    return Counter(id(each) for _, module in modules for each in cast(Any, module)._modules.values())


def _styles_in(module: nn.Module, places: Counter[int]) -> Iterator[tuple[str, TensorStyle]]:
    """Styles of a module's own parts, by their names in it."""
    if isinstance(module, nn.MultiheadAttention) and _has_forward_of(module, nn.MultiheadAttention):
        yield "", "multihead_attention"
        yield "out_proj", "rowwise"
    elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        if _feeds_forward(module):
            yield "linear1", "colwise"
            yield "linear2", "rowwise"
    elif isinstance(module, nn.Sequential) and _has_forward_of(module, nn.Sequential):
        for first, last in _pairs(module, places):
            yield first, "colwise"
            yield last, "rowwise"


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


def _pairs(sequence: nn.Sequential, places: Counter[int]) -> Iterator[tuple[str, str]]:
    """Names of each two linear layers, where the second takes the first's outputs element by element; a layer in
    several places is in none."""
    first = ""
    for name, module in cast(Any, sequence)._modules.items():
        if type(module) is nn.Linear and places[id(module)] == 1 and is_linear(module):
            if first:
                yield first, name
            first = "" if first else name
        elif not _has_forward_of(module, *_ELEMENTWISE):
            first = ""


def _has_forward_of(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module runs the forward of one of these classes, and not a subclass's or the instance's own."""
    if "forward" in vars(module):
        return False
    for own in type(module).__mro__:
        if "forward" in vars(own) and not issubclass(own, Mixin):
            return own in kinds
    return False
