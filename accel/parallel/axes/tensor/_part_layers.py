# SPDX-License-Identifier: Apache-2.0
"""Modules that compute with parts: their parameters in a forward, and the module that returns full tensors again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from accel.compiling import ModelUncompiled
from accel.errors import ConfigError, TreeError
from accel.mixins import Mixin
from accel.parallel._local import local_of
from accel.parallel._modules import RANKS, note_module, note_tensor, notes_of, written_class
from accel.parallel._private import (
    REGION,
    call_compiled,
    call_in_one_graph,
    compile_in_place,
    contains_compiled,
    is_compiled,
    map_kind,
    one_graph,
    runs_in_backward,
    tensors_of,
    untraced,
)
from accel.parallel.axes.tensor._layers import Layer, LocalParameters, is_computed_again, needed_rows
from accel.parallel.axes.tensor._overlap import copied_product, summed_product
from accel.parallel.axes.tensor._styles import RowExchange, Rule, row_exchange
from accel.parallel.logits._logits import DeferredLogits, sources_of
from accel.parallel.parts import PartRegion, PartsInGraph, PartTensor, Ranks, RowLayout, leave, make, plain_of
from accel.parallel.parts._layout import even, no_rule, shortest
from accel.parallel.parts._nested import NestedPart, entered_rows, nested, rows_in
from accel.parallel.parts._part import Args, Named, entered, name_of, outside
from accel.parallel.parts._region import leave_uncompiled
from accel.tensors import is_dtensor
from accel.tree import map_tensors

_OF_WHOLE = ("reshape", "scaled_dot_product_attention")


class LayerRanks(Ranks):
    """The ranks of a layer's group. Copies of a model have one of their own, and pickles one of the layer's.

    On a mesh with cp, tensors may be parts of positions too (`nests`).
    """

    __slots__ = ("breaks_around", "depth", "layer", "nests", "overlaps", "sees_tuples")

    def __init__(self, layer: Layer, *, nests: bool = False) -> None:
        super().__init__(layer.group)
        self.layer = layer
        self.nests = nests
        self.overlaps = layer.rule.overlap and not nests
        self.depth = 0  # of the regions that run
        self.breaks_around = False  # whether graphs of a module break around its divided regions alone
        self.sees_tuples = False  # whether the region that runs finds parts in tuples

    def __deepcopy__(self, memo: object) -> LayerRanks:
        return type(self)(self.layer, nests=self.nests)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), nests=self.nests), (self.layer,)

    def nested(self, rows: Tensor, layout: RowLayout | None) -> PartTensor:
        """Return this rank's rows of a tensor, plain or a part of positions, as a part."""
        return nested(rows, layout, self)

    def enter(self, tensor: Tensor) -> Tensor:
        """Return a plain tensor, or a part of positions, for use inside."""
        return entered_rows(tensor, super().enter) if self.nests else super().enter(tensor)

    def begin(self) -> Any:
        """Begin a region. What has entered in a backward, which computes layers again outside of a region, is
        dropped."""
        outer = super().begin()
        return outer if self.depth else {}

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's outputs of a layer, where the sum of its input's gradients overlaps with its matmuls. The
        first layer of an input sums them for all."""
        needs_sum = not isinstance(x, PartTensor) and x.requires_grad and torch.is_grad_enabled()
        if not needs_sum or self.known(x) is not None:
            return functional.linear(entered(x, self), weight, bias)
        output, inside = copied_product(x, plain_of(weight), None if bias is None else plain_of(bias), self.group)
        self.keep(x, inside)
        return output

    def ended_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the sum of the outputs of a layer, with messages that overlap with the matmul. A collective."""
        return summed_product(plain_of(x), plain_of(weight), self.group)

    def returned(self, rule: Rule, output: Any) -> Any:
        """Return what a module of a rule gives back: tensors that these ranks do not divide, or words of logits; of the
        outermost one, also in dataclasses."""
        kinds = (NestedPart if self.nests else PartTensor, DeferredLogits)
        if isinstance(output, Tensor):  # most often
            return rows_in(self.left(rule, output)) if isinstance(output, kinds) else output

        def given_back(each: Tensor) -> Tensor:
            return rows_in(self.left(rule, each)) if isinstance(each, kinds) else each

        output = map_kind(Tensor, given_back, output)
        return in_dataclasses(given_back, output) if self.depth == 1 else output

    def left(self, rule: Rule, part: Tensor) -> Tensor:
        """Return what leaves a module of a rule for a part: this rank's words of logits, or else the whole tensor."""
        if isinstance(part, DeferredLogits):
            if not part.is_part:
                return part
            return part.own_words() if part.classes in rule.words else leave(part.made())
        assert isinstance(part, PartTensor)
        cut = part.division.cut if part.division is not None and part.ranks is self else None
        is_of_words = cut is not None and cut.total in rule.words and cut == even(cut.total, self.size)
        if not is_of_words:
            return leave(part)
        words = outside(plain_of(part))
        if not is_dynamo_compiling():
            note_tensor(words, own_words=True)
        return words

    def without_rule(self, func: Any, args: Args, kwargs: Named, problem: str) -> Any:
        """Compute a function of attention of whole tensors, where no gradient follows: transformers packs the queries
        of a group, which several ranks may hold, for a static cache. Raise `NoRuleError` for others."""
        if torch.is_grad_enabled() or self.nests or self.shares_tokens or name_of(func) not in _OF_WHOLE:
            return super().without_rule(func, args, kwargs, problem)
        given, named = map_kind(PartTensor, leave, (tuple(args), dict(kwargs)))
        return func(*given, **named)

    @contextlib.contextmanager
    def in_region(self) -> Generator[None]:
        """Be in a region that has compiled modules, also where a backward computes one of these again."""
        around = self.depth, self.sees_tuples
        self.depth, self.sees_tuples = max(1, self.depth), not self.nests
        try:
            yield
        finally:
            self.depth, self.sees_tuples = around

    @property
    def runs(self) -> bool:
        """Whether a region runs, or runs again in a backward."""
        return self.depth > 0 or runs_in_backward()


class PartParameters(LocalParameters):
    """Computes with parts of its parameters: this rank's rows of their layouts."""

    accel_ranks: LayerRanks

    def is_read_local(self, parameter: nn.Parameter) -> bool:
        """Return whether a region runs, or is computed again: another module may read a parameter there.

        One that `fully_shard` has not gathered stays as it is, for readers of its dtype or its device.
        """
        is_sharded = is_dtensor(parameter) and parameter.device_mesh.ndim > 1
        return not is_sharded and (self.accel_ranks.depth > 0 or is_computed_again())

    def parameters_here(self, stored: Mapping[str, nn.Parameter | None]) -> dict[str, Tensor | None]:
        """Return parts, after an exchange of rows where this rank computes with others than it stores."""
        rule = self.accel_layer.rule
        ranks = self.accel_ranks
        if is_dynamo_compiling() and not ranks.sees_tuples:
            raise no_rule("torch.compile of a function of modules; compile these, or the model")
        here = super().parameters_here(stored)
        if rule.summands or (rule.tokens and ranks.runs):
            for name, each in stored.items():
                if each is not None and name not in rule.layouts and (rule.summands or each.dim()):
                    here[name] = make(local_of(each, summands=True, fresh=rule.fresh), None, ranks)
        if exchanges := notes_of(cast(nn.Module, self)).get("exchanges"):
            self._exchange(here, exchanges)
        for name, layout in rule.layouts.items():
            own = here.get(name)
            if own is not None:
                here[name] = make(own, shortest(layout), ranks)  # all rows of a single head of keys
        return here

    def _exchange(self, here: dict[str, Tensor | None], exchanges: Mapping[str, RowExchange]) -> None:
        """Replace the rows that this rank stores of some parameters by those that it computes with."""
        alike: dict[torch.dtype, list[str]] = {}  # names of those to exchange
        for name in exchanges:
            own = here.get(name)
            if own is not None:
                alike.setdefault(own.dtype, []).append(name)
        for names in alike.values():
            own_rows = [cast(Tensor, here[name]) for name in names]
            dims = [self.accel_layer.rule.layouts[name].dim for name in names]
            needed = needed_rows(own_rows, dims, [exchanges[name] for name in names], self.accel_layer)
            here.update(zip(names, needed, strict=True))


def in_dataclasses(given_back: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Return an output, parts in dataclasses replaced by what a function gives back for them."""
    if any(isinstance(each, PartTensor | DeferredLogits) for each in tensors_of(output)):
        with contextlib.suppress(TreeError):  # an object of another kind; nobody can use its tensors outside
            return map_tensors(given_back, output)
    return output


def exchanges_of(layouts: Mapping[str, RowLayout], rank: int, size: int) -> dict[str, RowExchange]:
    """Return exchanges by parameter, for parameters with a layout of other rows than a rank stores."""
    cuts = {name: layout.cut for name, layout in layouts.items()}
    return {name: row_exchange(cut, rank, size) for name, cut in cuts.items() if cut != even(cut.total, size)}


class GraphedCall(PartRegion):
    """A module around divided layers. If torch compiles it, its graphs do not break between these: parts do not pass
    from one graph to the next."""

    accel_ranks: LayerRanks  # pyright: ignore[reportIncompatibleVariableOverride]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; as it is from now on, if its graph breaks between divided layers."""
        module = cast(nn.Module, self)
        own: Any = super(PartRegion, self)
        if is_dynamo_compiling() or not is_compiled(module):  # also a slice of an nn.Sequential, which has no ranks
            return own.__call__(*args, **kwargs)
        if self.accel_ranks.depth or ("within" in notes_of(module) and runs_in_backward()):
            note_module(module, within=True)  # a backward may compute it again
            return super().__call__(*args, **kwargs)
        region = vars(module).get(REGION)
        if region is not None and region.fullgraph:
            return own.__call__(*args, **kwargs)
        if not self.accel_ranks.breaks_around:  # a graph break is found before anything is computed and sent
            found, end = call_in_one_graph(own.__call__, *args, **kwargs)
            if end is None:
                return found
            ends = [name for file, name in end.functions if file == __file__ and name.startswith("forward")]
            if len(ends) > 1:  # of `RegionEnd`: in a block, and not around blocks
                leave_uncompiled(module, end.problem)
                return own.__call__(*args, **kwargs)
            self.accel_ranks.breaks_around = True
        found, end = call_compiled(own.__call__, *args, **kwargs)
        if end is None:
            return found
        raise ConfigError(
            "torch has compiled a first part of the module, and cannot compile its divided layers in one graph",
            expected="no graph break between layers that ranks divide",
            got=end.problem,
            where=f"forward of {written_class(module).__name__}, compiled",
            fix='Compile blocks alone: accel.compile_model(model, "repeated"). One with such a graph break runs '
            "uncompiled.",
        )


@untraced
def _called_eagerly(block: ModelUncompiled, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a model outside of graphs, such as one that a graph of torch.compile has broken in: parts do
    not pass from one graph to the next. Modules in it that torch compiles by themselves still are."""
    with block:
        return forward(*args, **kwargs)


class RegionEnd(Mixin):
    """A module around others that compute with parts, or one of these that is called by itself; what it returns is
    whole."""

    accel_layer: Layer
    accel_ranks: LayerRanks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, and make parts whole that it returns."""
        ranks: LayerRanks | None = getattr(self, RANKS, None)
        if ranks is None:  # a slice of an nn.Sequential, which its class makes
            return super().forward(*args, **kwargs)
        is_traced = is_dynamo_compiling()
        if not self.accel_layer.rule.ends and (ranks.depth or (not is_traced and runs_in_backward())):
            return super().forward(*args, **kwargs)
        outer = ranks.begin()
        ranks.depth += 1
        sees_around = ranks.sees_tuples
        module = cast(nn.Module, self)
        is_outermost = ranks.depth == 1
        if is_outermost:  # regions in others have modules of theirs
            has_graphs = is_traced or contains_compiled(module)
            if has_graphs and not is_traced:
                _ = compile_in_place(module)  # blocks that a user has compiled after `prepare`
            ranks.sees_tuples = has_graphs and not ranks.nests  # torch compiles nothing of parts along two axes
        is_block = is_traced and not is_outermost and ranks.breaks_around
        eager = ModelUncompiled(tensors_of((args, kwargs))) if is_outermost and not is_traced else None
        try:
            with (
                PartsInGraph() if ranks.sees_tuples else contextlib.nullcontext(),
                one_graph() if is_block else contextlib.nullcontext(),
            ):
                if eager is not None and not ranks.breaks_around:
                    output = _called_eagerly(eager, super().forward, *args, **kwargs)
                else:
                    output = super().forward(*args, **kwargs)
            output = ranks.returned(self.accel_layer.rule, output)
            if eager is not None:
                eager.end(sources_of(output))
            return output
        finally:
            ranks.sees_tuples = sees_around
            ranks.depth -= 1
            ranks.end(outer)
