# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism by parts: between divided layers a rank holds its tokens, and reports all of them.

A matmul that ends a region of divided features scatters its sum by tokens, and the next divided layer gathers them.
Functions of single tokens, such as norms and residuals, compute on the rank's tokens. A function that needs tokens of
other ranks gathers them: a part of tokens is one more way to hold a whole tensor, and results do not depend on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from accel.comm import gathered_summed, scattered
from accel.parallel._private import map_kind, runs_in_backward, tensors_of, untraced, without_subclasses
from accel.parallel.axes.tensor._overlap import gathered_product, scattered_product
from accel.parallel.axes.tensor._part_layers import LayerRanks, in_dataclasses
from accel.parallel.axes.tensor._styles import Rule
from accel.parallel.logits._logits import DeferredLogits
from accel.parallel.parts import PartTensor, Ranks, RowCut, RowLayout, leave, make, plain_of
from accel.parallel.parts._elementwise import writes
from accel.parallel.parts._layout import cut_of, even, no_rule
from accel.parallel.parts._nested import nested, no_views, position_pieces, rows_in, rule_runs, seen
from accel.parallel.parts._part import Args, Named, name_of, own_rows, whole_rows, whole_shape
from accel.tensors import is_view


class _GatheredTokens(NamedTuple):
    """A part of tokens, and all of them as each rank got them."""

    part: PartTensor  # that was gathered
    whole: PartTensor  # all tokens, a part that ranks do not divide
    versions: tuple[int, int]  # numbers of changes in place of both

    def is_written(self) -> bool:
        """Whether all tokens, or a view of some, have been changed in place."""
        return _version_of(self.whole) != self.versions[1]


class TokenRanks(Ranks):
    """The ranks of parts of tokens: the ranks of the divided layers, by which `SequenceRanks` recognizes such parts."""

    __slots__ = ("layers",)

    def __init__(self, layers: SequenceRanks) -> None:
        self.layers = layers
        super().__init__(layers.group)
        self.gathers_inputs = False  # `without_rule` gathers tokens

    @property
    def nests(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether tokens may be parts of positions too."""
        return self.layers.nests

    @property
    def of_region(self) -> Ranks:
        """The ranks of the divided layers."""
        return self.layers

    def nested(self, rows: Tensor, layout: RowLayout | None) -> PartTensor:
        """Return this rank's tokens, plain or a part of positions, as a part."""
        return nested(rows, layout, self)

    def enter(self, tensor: Tensor) -> Tensor:
        """Return a plain tensor for use inside, as for parts of features."""
        self._check()
        return self.layers.enter(tensor)

    def total(self, summand: Tensor) -> Tensor:
        """Return the sum over the tokens of all ranks. A collective."""
        self._check()
        return super().total(summand)

    def input_of_layer(self, part: PartTensor) -> PartTensor:
        """Return all tokens."""
        self._check()
        return self.layers.all_tokens(part)

    def product_of_rows(self, part: PartTensor, weight: PartTensor, bias: Tensor | None) -> Tensor | None:
        """Return this rank's outputs of a layer that takes tokens as they arrive, where messages overlap."""
        self._check()
        return self.layers.product_of_tokens(part, weight, bias)

    def _check(self) -> None:
        if not self.layers.runs:
            raise no_rule("this rank's tokens, outside of the model: return them in a tuple, a dict or a dataclass")

    def without_rule(self, func: Any, args: Args, kwargs: Named, problem: str) -> Any:
        """Compute a function that needs tokens of other ranks."""
        self._check()
        return self.layers.without_rule(func, args, kwargs, problem)


class SequenceRanks(LayerRanks):
    """The ranks of divided layers, between which each rank holds its tokens.

    Attributes:
        tokens: the ranks of these parts.
        scatters: number of sums that were scattered by tokens.
        gathers: names of functions that needed tokens of other ranks, outside of divided layers.
    """

    shares_tokens = True

    __slots__ = ("_gathered", "_layouts", "gathers", "scatters", "tokens")

    def __init__(self, layer: Any, *, nests: bool = False) -> None:
        super().__init__(layer, nests=nests)
        self.tokens = TokenRanks(self)
        self.scatters = 0
        self.gathers: dict[str, None] = {}
        self._gathered: list[_GatheredTokens] = []
        self._layouts: dict[tuple[int, ...], RowLayout] = {}  # of gathered tokens, by the shape without features

    def begin(self) -> Any:
        """Begin a region, in which nothing has been gathered."""
        outer = super().begin(), self._gathered, self._layouts
        self._gathered, self._layouts = [], {}
        return outer

    def end(self, outer: Any) -> None:
        """Go on with the region around one that has ended."""
        entered, self._gathered, self._layouts = outer
        super().end(entered)

    def enter(self, tensor: Tensor) -> Tensor:
        """Return a plain tensor for use inside; kept for others of the region, which a forward that is computed again
        has not always around it."""
        if self.depth:
            return super().enter(tensor)
        if not self.runs:
            raise no_rule("a plain tensor, outside of the model")
        outer = self.begin()
        try:
            return super().enter(tensor)
        finally:
            self.end(outer)

    def from_module(self, output: Any) -> Any:
        """Return the output of a module of the model, inside of it."""
        return no_views(output) if self.nests else output

    def in_graph(self, rows: Tensor, layout: RowLayout | None, *, is_own: bool) -> PartTensor:
        """Return this rank's rows of a tensor as a part, of features or of tokens."""
        return make(rows, layout, self if is_own else self.tokens)

    def returned(self, rule: Rule, output: Any) -> Any:
        """Return what a module of a rule gives back: this rank's tokens inside of the model, and whole tensors at its
        end, also in dataclasses. Raises `NoRuleError` where the forward changed gathered tokens, which are a copy."""
        if any(each.is_written() for each in self._gathered):
            raise no_rule("a change in place of some tokens of a tensor that ranks share by tokens")
        is_end = rule.ends == "all"
        is_inside = not is_end and (self.depth > 1 or runs_in_backward())

        def given_back(each: Tensor) -> Tensor:
            if isinstance(each, DeferredLogits):
                return self.left(rule, each)
            if not isinstance(each, PartTensor) or each.ranks.group is not self.group:
                return each
            is_kept = is_inside and (each.division is None or each.ranks is self.tokens)
            return each if is_kept else _changeable(rows_in(self.left(rule, each)))

        output = map_kind(Tensor, given_back, output)
        return in_dataclasses(given_back, output) if is_end else output

    def ended(self, summand: Tensor) -> Tensor:
        """Return this rank's tokens of the sum of the ranks' summands; all of a sum without enough tokens."""
        shape = tuple(summand.shape)
        summand = seen(summand)
        layout = self._layout_for(shape, position_pieces(summand))
        if layout is None:
            return rows_in(self.total(summand))
        dim, (repeat, segments) = layout
        if len(segments) > 1:
            with self._rule():
                rows = _changeable(own_rows(self.total(summand), dim, layout.cut, self))
        elif repeat == 1:
            rows = scattered(summand, dim, self.group)
        else:
            by_row = summand.reshape(*summand.shape[:dim], repeat, -1, *summand.shape[dim + 1 :])
            rows = scattered(by_row, dim + 1, self.group).flatten(dim, dim + 1)
        return self._tokens_of(rows, layout)

    def ended_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's tokens of the sum of a layer's outputs, with messages that may overlap with the matmul."""
        shape = (*x.shape[:-1], len(weight))
        if self.scatters_evenly(shape):
            return self.scattered(shape, scattered_product(plain_of(x), plain_of(weight), self.group))
        return self.ended(functional.linear(x, weight))

    def scattered(self, shape: tuple[int, ...], rows: Tensor) -> PartTensor:
        """Return this rank's rows of a sum of a full shape as its tokens."""
        return self._tokens_of(rows, self._layout_for(shape))

    def _tokens_of(self, rows: Tensor, layout: RowLayout | None) -> PartTensor:
        if not is_dynamo_compiling():  # a graph would be of this number alone
            self.scatters += 1
        rows = rows.contiguous()  # as a whole sum, which models view in other shapes
        return make(rows, layout, self.tokens)

    def scatters_evenly(self, shape: tuple[int, ...]) -> bool:
        """Return whether a sum of a full shape, [batch, tokens, ..., features], is scattered in equal pieces."""
        return self._is_even(self._layout_for(shape))

    def even_rows(self, x: Tensor) -> Tensor | None:
        """Return this rank's tokens of [batch, tokens, ..., features] as a plain tensor; None for tokens that ranks do
        not divide in equal pieces."""
        is_even = isinstance(x, PartTensor) and x.ranks is self.tokens and self._is_even(x.division)
        return plain_of(x) if is_even else None

    def _is_even(self, layout: RowLayout | None) -> bool:
        return layout is not None and layout == RowLayout(1, even(layout.cut.total, self.size))

    def _layout_for(self, shape: tuple[int, ...], pieces: int = 1) -> RowLayout | None:
        """The tokens of a sum: those that were gathered in this shape, or [batch, tokens, ..., features]. Of positions
        that ranks along cp divide in so many pieces, each rank has some of each piece."""
        known = self._layouts.get(shape[:-1])
        if known is not None or len(shape) < 3 or pieces < 1:
            return known
        if pieces > 1:
            cut = RowCut(pieces, ((shape[1] // pieces, self.size),))
            return None if shape[1] % (pieces * self.size) else RowLayout(1, cut)
        rest = shape[1] % self.size  # tokens that all ranks hold
        cut = cut_of(1, [each for each in ((shape[1] - rest, self.size), (rest, 1)) if each[0]])
        return None if cut is None else RowLayout(1, cut)

    def _rule(self) -> contextlib.AbstractContextManager[None]:
        """A block that computes with this rank's rows, as a rule does."""
        return rule_runs(self) if self.nests else without_subclasses()

    def product_of_tokens(self, part: PartTensor, weight: PartTensor, bias: Tensor | None) -> Tensor | None:
        """Return this rank's outputs of a layer by messages that overlap with the matmul, and keep all tokens for
        others; None where they do not overlap. A collective."""
        rows = self.even_rows(part)
        if not self.overlaps or is_dynamo_compiling() or rows is None or self._known_tokens(part) is not None:
            return None
        self._keep_layout(part)
        own_bias = None if bias is None else plain_of(bias)
        output, whole = gathered_product(rows, plain_of(weight), own_bias, self.group)
        self._keep_tokens(part, make(whole, None, self))
        return output

    def all_tokens(self, part: PartTensor) -> PartTensor:
        """Return all tokens of a part on each rank, gathered once for all who ask in this region. A collective."""
        known = self._known_tokens(part)
        if known is not None:
            return known
        whole = self._all(part)
        self._keep_tokens(part, whole)
        return whole

    def _known_tokens(self, part: PartTensor) -> PartTensor | None:
        """All tokens of a part, as they were gathered before; None where they were not, or are others by now."""
        for each in self._gathered:
            if each.part is part and each.versions == (_version_of(part), _version_of(each.whole)):
                return each.whole
        return None

    def _keep_tokens(self, part: PartTensor, whole: PartTensor) -> None:
        if self.depth:
            self._gathered.append(_GatheredTokens(part, whole, (_version_of(part), _version_of(whole))))

    def _all(self, part: PartTensor) -> PartTensor:
        if part.division is None:  # of one token, as a time step takes it
            return part
        with self._rule():
            self._keep_layout(part)
            whole = whole_rows(part, lambda rows, dim: gathered_summed(rows, dim, self.group))
            return make(_changeable(whole), None, self)

    def _keep_layout(self, part: PartTensor) -> None:
        """Let sums of a layer that takes these tokens be scattered alike."""
        layout = part.division
        shape = tuple(whole_shape(part))
        if layout is not None and layout.dim < len(shape) - 1:
            self._layouts[shape[:-1]] = layout

    @untraced  # a graph counts no changes in place
    def without_rule(self, func: Any, args: Args, kwargs: Named, problem: str) -> Any:
        """Compute a function without a rule on all tokens, or on plain tensors where ranks divide none."""
        parts = [each for each in tensors_of((args, kwargs)) if isinstance(each, PartTensor)]
        divided = [each for each in parts if each.division is not None]
        of_tokens = [each for each in divided if each.ranks is self.tokens]
        name = name_of(func)
        if kwargs.get("out") is not None or (divided and not of_tokens):
            return super().without_rule(func, args, kwargs, problem)
        if self.nests and of_tokens and runs_in_backward() and not torch.is_grad_enabled():
            raise no_rule(f"{name}, in the backward of a function, with this rank's tokens along tp and cp")
        if not divided:
            return self._alike(func, args, kwargs)
        if len(of_tokens) == len(divided):
            self.gathers[name] = None
        if (writes(name) or kwargs.get("inplace")) and any(args[0] is each for each in of_tokens):
            return self._written(func, args[0], args[1:], kwargs)
        given, named = map_kind(PartTensor, self._whole, (tuple(args), dict(kwargs)))
        return func(*given, **named)

    def _alike(self, func: Any, args: Args, kwargs: Named) -> Any:
        """Compute what all ranks compute alike; a plain tensor that the function changes stays plain. Outside of the
        model all is plain, such as a loss that the model keeps in an attribute."""
        target = args[0] if args else None
        is_plain = isinstance(target, Tensor) and not isinstance(target, PartTensor)
        if not self.runs or (is_plain and writes(name_of(func))):
            given, named = map_kind(PartTensor, leave, (tuple(args), dict(kwargs)))
            return func(*given, **named)

        def inside(each: Tensor) -> Tensor:
            return plain_of(each) if isinstance(each, PartTensor) else self.enter(each)

        given, named = map_kind(Tensor, inside, (tuple(args), dict(kwargs)))
        found = func(*given, **named)
        return map_kind(Tensor, lambda each: target if each is given[0] else make(each, None, self), found)

    def _whole(self, part: PartTensor) -> PartTensor:
        is_of_tokens = part.division is not None and part.ranks is self.tokens
        return self.all_tokens(part) if is_of_tokens else part

    def _written(self, func: Any, target: PartTensor, args: Sequence[Any], kwargs: Named) -> Any:
        """Change all tokens of a part, and keep the own ones."""
        layout = target.division
        assert layout is not None
        changed = [each for each in self._gathered if each.part is target and each.is_written()]
        # those changed by a view, as `x[:, 0] += 1` does before it writes them, are taken
        self._gathered = [each for each in self._gathered if not any(each is other for other in changed)]
        whole = changed[0].whole if changed else self._all(target)
        given, named = map_kind(PartTensor, self._whole, (tuple(args), dict(kwargs)))
        _ = func(whole, *given, **named)
        with self._rule():
            _ = plain_of(target).copy_(own_rows(whole, layout.dim, layout.cut, self))
        return target


def _changeable(tensor: Tensor) -> Tensor:
    """A tensor that a model may change in place, as torch forbids of views that a function with a gradient returns."""
    return tensor.clone() if not is_dynamo_compiling() and is_view(tensor) else tensor


def _version_of(tensor: Tensor) -> int:
    if is_dynamo_compiling():
        return 0
    with without_subclasses():
        return 0 if tensor.is_inference() else tensor._version
