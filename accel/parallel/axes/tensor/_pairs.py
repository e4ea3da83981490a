# SPDX-License-Identifier: Apache-2.0
"""Layers with a known forward, and pairs of linear layers in a Sequential that only its forward may call."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accel.errors import PrepareError
from accel.mixins import Mixin, add_mixin
from accel.parallel._modules import named_modules, note_module, notes_of
from accel.parallel._private import forward_hooks, forward_pre_hooks, runs_in_backward
from accel.parallel.axes.tensor._styles import is_linear
from accel.topology import TensorStyle

_OWN = ("accel.", "torch.distributed.")  # modules that define hooks which support parts: this package and `fully_shard`


class LinearPair(NamedTuple):
    """Two linear layers of a Sequential, where the second takes the first's outputs element by element."""

    sequence: str  # path of the Sequential, "" for the model itself
    layers: tuple[str, ...]  # names in it of the first layer, the modules between, and the last layer

    @property
    def ends(self) -> tuple[str, str]:
        """Paths of the first and the last layer."""
        first, last = (f"{self.sequence}.{name}".strip(".") for name in (self.layers[0], self.layers[-1]))
        return first, last


class _Guard:
    """State that the parts of one Sequential share with it; views of the model too. Copies and pickles have their own.

    Attributes:
        path: of the Sequential.
        pairs: names of the layers of each pair, and of those between.
        way_out: the line to write instead.
        runs: whether the Sequential's forward runs now.
    """

    __slots__ = ("pairs", "path", "runs", "way_out")

    def __init__(self, path: str, pairs: Sequence[tuple[str, ...]], way_out: str) -> None:
        self.path = path
        self.pairs = tuple(pairs)
        self.way_out = way_out
        self.runs = False

    def refused(self, problem: str, got: str) -> PrepareError:
        """Return the error of a call that would compute with a part of the features as if it were all of them."""
        named = repr(self.path) if self.path else "the model"
        return PrepareError(
            problem,
            expected=f"layers that run in the forward of {named} alone, and nothing that reads between them, where each"
            " rank has a part of the features",
            got=got,
            where="forward, plan.tensor",
            fix=self.way_out,
        )


class _Whole(Mixin):
    """A Sequential with pairs in it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        guard: _Guard | None = notes_of(cast(nn.Module, self)).get("pairs")
        if guard is None:  # a slice, which torch makes of the same class
            return cast(Any, nn.Sequential).forward(self, *args, **kwargs)
        _check_hooks(guard, cast(nn.Module, self))
        outer, guard.runs = guard.runs, True
        try:
            return super().forward(*args, **kwargs)
        finally:
            guard.runs = outer


class _PairPart(Mixin):
    """A linear layer of a pair."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        guard: _Guard = cast(_Guard, notes_of(cast(nn.Module, self)).get("pairs"))
        if not guard.runs and not runs_in_backward():  # there a layer with its own checkpoint is recomputed
            raise guard.refused(
                "a linear layer that tensor parallelism divides with another of its Sequential is called by itself",
                f"a call of {notes_of(cast(nn.Module, self)).get('path')}",
            )
        return super().forward(*args, **kwargs)


def guard_pairs(model: nn.Module, pairs: Sequence[LinearPair], keys: Mapping[str, str]) -> None:
    """Let the layers of pairs refuse to run outside of their Sequential, or with a hook. `keys` are the patterns of the
    plan. Mutates the model."""
    way_out = _way_out(keys[path] for pair in pairs for path in pair.ends)
    wholes: list[nn.Module] = []
    parts: list[nn.Module] = []
    for sequence in dict.fromkeys(pair.sequence for pair in pairs):
        own = [pair for pair in pairs if pair.sequence == sequence]
        whole: Any = model.get_submodule(sequence)
        guard = _Guard(sequence, [pair.layers for pair in own], way_out)
        note_module(whole, pairs=guard)
        wholes.append(whole)
        for path in (path for pair in own for path in pair.ends):
            part: Any = model.get_submodule(path)
            note_module(part, pairs=guard, path=path)
            parts.append(part)
    # All at once, so that modules of one class stay of one class, for which torch.compile compiles once.
    add_mixin(wholes, _Whole)
    add_mixin(parts, _PairPart)


def _way_out(patterns: Iterable[str]) -> str:
    styles = ", ".join(f'"{pattern}": "replicated"' for pattern in dict.fromkeys(patterns))
    return (
        "Keep these pairs whole on each rank: "
        f"plan=accel.parallel.Plan(tensor={{**accel.parallel.tensor_plan(model), {styles}}})."
        " Leave out a pair if its Sequential is always called as a whole. If only element-wise functions"
        " are between the layers, confirm it: plan=accel.parallel.Plan(tensor=accel.parallel.tensor_plan(model))."
    )


def _check_hooks(guard: _Guard, sequence: nn.Module) -> None:
    """Raise for a foreign hook that sees values between the first and the last layer of a pair."""
    children: Mapping[str, nn.Module] = cast(Any, sequence)._modules
    for layers in guard.pairs:
        for at, name in enumerate(layers):
            inputs = forward_pre_hooks(children[name]) if at else None
            outputs = forward_hooks(children[name]) if at < len(layers) - 1 else None
            if inputs or outputs:
                _check_owners(guard, name, [*(inputs or {}).values(), *(outputs or {}).values()])


def _check_owners(guard: _Guard, name: str, hooks: Iterable[object]) -> None:
    for hook in hooks:
        owner = _function_of(hook)
        if not str(getattr(owner, "__module__", "")).startswith(_OWN):
            named = getattr(owner, "__qualname__", type(owner).__qualname__)
            raise guard.refused(
                "a forward hook reads a part of the features as if it were all of them",
                f"the hook {named} on {guard.path}.{name}".replace(" on .", " on "),
            )


def _function_of(hook: object) -> object:
    """A hook without its wrappers, such as the wrapper of torch.compiler.disable."""
    while isinstance(hook, functools.partial) or hasattr(hook, "__wrapped__"):
        hook = cast(Any, hook).func if isinstance(hook, functools.partial) else cast(Any, hook).__wrapped__
    return hook


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


def known_pairs(model: nn.Module) -> list[LinearPair]:
    """Return the pairs of linear layers that `known_styles` divides in each nn.Sequential of a model."""
    modules = list(named_modules(model))
    places = _places(modules)
    whole = [(path, each) for path, each in modules if isinstance(each, nn.Sequential)]
    return [
        LinearPair(path, layers)
        for path, each in whole
        if _has_forward_of(each, nn.Sequential)
        for layers in _pairs(each, places)
    ]


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
        for first, *_, last in _pairs(module, places):
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


def _pairs(sequence: nn.Sequential, places: Counter[int]) -> Iterator[tuple[str, ...]]:
    """Names of each two linear layers, where the second takes the first's outputs, and of the layers between; a layer
    in several places is in none."""
    begun: list[str] = []
    for name, module in cast(Any, sequence)._modules.items():
        if type(module) is nn.Linear and places[id(module)] == 1 and is_linear(module):
            if begun:
                yield (*begun, name)
                begun = []
            else:
                begun = [name]
        elif not _has_forward_of(module, *_ELEMENTWISE):
            begun = []
        elif begun:
            begun.append(name)


def _has_forward_of(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module runs the forward of one of these classes, and not a subclass's or the instance's own."""
    if "forward" in vars(module):
        return False
    for own in type(module).__mro__:
        if "forward" in vars(own) and not issubclass(own, Mixin):
            return own in kinds
    return False
