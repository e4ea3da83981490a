# SPDX-License-Identifier: Apache-2.0
"""Parts of positions: tensors of a model's forward that hold a rank's positions and report the positions of all ranks.

The rules are in `accel.parallel.parts`. A rule refuses a function that needs positions of other ranks. Here such a
function gathers them if a model's authors mean it: keys and values of an attention, single positions, tokens. Gradients
are summands on each rank, like the gradients of data-parallel ranks: parameters stay plain, and the step sums theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from accel.comm import copied, gathered, gathered_summed
from accel.context import DistContext, group_of
from accel.devices import wide_dtype
from accel.parallel._private import map_kind, runs_in_backward, tensors_of, without_subclasses
from accel.parallel.axes.context._attention import attention_of_all, context_attention
from accel.parallel.axes.context._selected import (
    all_whole,
    changed,
    refused,
    selected,
    whole_of,
)
from accel.parallel.axes.context._split import ALL_POSITIONS, OWN_LOSSES, note_attention
from accel.parallel.logits._logits import DeferredLogits
from accel.parallel.parts import PartTensor, Ranks, RowLayout, make, plain_of
from accel.parallel.parts._attention import own_draws
from accel.parallel.parts._contractions import terms_of
from accel.parallel.parts._elementwise import ELEMENTWISE, writes
from accel.parallel.parts._layout import RowCut, balanced, no_rule
from accel.parallel.parts._nested import NestedPart
from accel.parallel.parts._part import layouts_of, name_of, named, outside, own_rows, whole_shape
from accel.parallel.parts._reductions import LOSSES, lost_weight, reduction_of

_Args = Sequence[Any]
_Named = Mapping[str, Any]


_FACTS = 8  # numbers that ranks compare, at most
_LARGEST = 1e15  # value that they compare: sums with the infinite scores of masks would be equal


class DifferentRankError(RuntimeError):
    """A rank along cp computed something else than the others, or failed."""


class _Met(torch.autograd.Function):
    """The output of a collective. Ranks agree before its backward; the engine runs the backward directly after that."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, ranks: PositionRanks) -> Tensor:
        ctx.ranks = ranks
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.ranks.compare(*grads[0].shape)
        return grads[0], None


class PositionRanks(Ranks):
    """The ranks along cp of a model that computes with parts of positions in its forward.

    Attributes:
        ctx: the context.
        callers: modules that are running their forward, while calls are noted.
        across: modules that needed positions of other ranks in the noted calls, and whether they may be called alone.
        plain: modules that were given no part, of the calls that were noted.
        whole: names of the functions that computed all positions on each rank.
        has_own_loss: whether a loss of own positions was computed.
        has_sum: whether a loss was summed over all positions.
        counts_changes: whether torch counts changes in place, in the calls of compiled modules.
        agrees: whether ranks compare the next call before each collective, as in a proof, where a single rank may fail.
        in_stages: whether stages of a pipeline compute with the parts.
    """

    keeps_rows = True

    __slots__ = (
        "across", "agrees", "callers", "counts_changes", "ctx", "has_own_loss", "has_sum", "in_stages", "plain",
        "whole",
    )  # fmt: skip

    def __init__(self, ctx: DistContext) -> None:
        super().__init__(cast(Any, group_of(ctx, "cp")))
        self.gathers_inputs = False  # `without_rule` gathers positions
        self.ctx = ctx
        self.callers: list[nn.Module] = []
        self.across: dict[nn.Module, bool] = {}
        self.plain: set[nn.Module] = set()
        self.whole: dict[str, None] = {}
        self.agrees = False
        self.has_own_loss = False
        self.has_sum = False
        self.counts_changes = True
        self.in_stages = False

    def __deepcopy__(self, _memo: object) -> PositionRanks:
        """Return the ranks for a copy of the model: process groups are not copied."""
        return PositionRanks(self.ctx)

    def enter(self, tensor: Tensor) -> Tensor:
        """Return a plain tensor as it is: its gradients are summands."""
        return tensor

    def note_cut(self) -> None:
        """Note that a tensor of all positions meets own ones. In a call of a module alone it would be a shorter one."""
        self.note_callers()

    def total(self, summand: Tensor) -> Tensor:
        """Return the sum of the ranks' summands; the backward sums the gradients of all who use it.

        In the backward of a function of the user's it is a gradient, which the step sums: this rank's summand.
        """
        if not is_dynamo_compiling() and runs_in_backward() and not torch.is_grad_enabled():
            return summand
        self.meet(*summand.shape)
        total = copied(super().total(summand), self.group)
        return self.met(total).clone()  # which the model may change in place

    def joined(self, rows: Tensor, dim: int) -> Tensor:
        """Concatenate the rows of all ranks; the backward sums the gradients of each row."""
        self.meet(dim, *rows.shape)
        return self.met(gathered_summed(rows, dim, self.group))

    def loss(self, own: Tensor, count: Tensor | None) -> Tensor:
        """Return the loss of all positions: the sum of what ranks compute of their own, divided by the sum of their
        counts. A collective, unless a model returns losses of own positions. `count`: None for the sum."""
        if OWN_LOSSES.holds(self.ctx):
            self.has_own_loss = True
            return own if count is None else own / count
        if count is None and not is_dynamo_compiling():
            self.has_sum = True
        total = self.total(own)
        return total if count is None else total / self.total(count)

    def meet(self, *facts: int) -> None:
        """Note that positions need the positions of other ranks, before a collective of these facts, and `compare`
        them."""
        self.note_callers()
        self.compare(*facts)

    def compare(self, *facts: int) -> None:
        """Raise `DifferentRankError` on all ranks if one comes with other facts before a collective. A collective, if
        ranks agree before each."""
        if not self.agrees:
            return
        with without_subclasses(), torch.no_grad():
            own = torch.tensor([*facts[:_FACTS], *[0] * (_FACTS - len(facts))], device=self.ctx.device)
            rows = gathered(own, 0, self.group).view(self.size, -1)
            if not bool((rows == own).all()):
                raise DifferentRankError("ranks along cp did not compute the same")

    def note_callers(self, *, may_be_alone: bool = False) -> None:
        """Note that the modules that run need positions of other ranks. `may_be_alone`: whether they compute the same
        if they are called alone with own positions."""
        if not is_dynamo_compiling():  # the proof has noted them
            self.across |= {each: may_be_alone and self.across.get(each, True) for each in self.callers}

    def hold_alike(self, tensor: Tensor, dim: int) -> bool:
        """Return whether all ranks hold the same values of a tensor, which differ along a dimension: ranks that share
        its positions would hold different ones. A tensor of two values may be a mask, and is never alike. A collective.
        """
        if not tensor.numel():
            return False
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        wide = real.to(wide_dtype(tensor.device)).nan_to_num().clamp(-_LARGEST, _LARGEST)
        weights = torch.arange(1, wide.numel() + 1, device=wide.device).to(wide.dtype).view(wide.shape)
        sums = gathered((wide * weights).sum().view(1), 0, self.group)
        least, most = wide.aminmax()
        is_mask = ((wide == least) | (wide == most)).all()
        return bool((sums == sums[0]).all() & ~is_mask & (wide != wide.narrow(dim, 0, 1)).any())

    @contextlib.contextmanager
    def agreeing(self) -> Generator[None]:
        """Let ranks agree before each collective, in a block."""
        self.agrees = True
        try:
            yield
        finally:
            self.agrees = False

    def met(self, output: Tensor) -> Tensor:
        """Let ranks agree before the backward of a collective too; `output` is the collective's."""
        return cast(Any, _Met).apply(output, self) if self.agrees else output

    def part(self, rows: Tensor, dim: int) -> PartTensor:
        """Return own positions, as `split_sequence` gives them, as a part. `NoRuleError` for a part along another
        axis, with rows other than these positions."""
        if isinstance(rows, PartTensor):
            raise no_rule("positions along cp of a tensor that ranks along tp share, as with sequence=True")
        return make(rows.view_as(rows), RowLayout(dim, balanced(rows.shape[dim] * self.size, self.size)), self)

    def part_of(self, whole: Tensor, dim: int) -> Tensor:
        """Return the own positions of a tensor that all ranks hold; those that they cannot share stay on each."""
        rest = whole.shape[dim] % (2 * self.size)
        shared = balanced(whole.shape[dim] - rest, self.size)
        if not shared.total:
            return whole
        cut = RowCut(1, (*shared.segments, (rest, 1))) if rest else shared
        with without_subclasses():
            return make(own_rows(whole, dim, cut, self), RowLayout(dim, cut), self)

    def kept(self, part: PartTensor) -> Tensor:
        """Return all positions of a part. A collective."""
        return whole_of(part)

    def left(self, each: Tensor) -> Tensor:
        """Return what leaves a forward for a tensor: own positions as `split_sequence` gives them, others whole. Rows
        other than positions are on all ranks."""
        if isinstance(each, DeferredLogits):
            return each.left(self.left)
        if not isinstance(each, PartTensor) or each.division is None:
            return whole_of(each)
        ways = [ways for _, ways in each.division.cut.segments]
        return outside(plain_of(each)) if each.ranks is self and ways == [self.size, -self.size] else whole_of(each)

    def without_rule(self, func: Any, args: _Args, kwargs: _Named, problem: str) -> Any:
        """Gather what a function needs of other ranks, or raise `NoRuleError`."""
        name = name_of(func)
        if name in _RECOMPUTED:  # its function would take all positions for those of a rank
            raise no_rule(f"{name}, in a graph")
        parts = [each for each in tensors_of((args, kwargs)) if isinstance(each, PartTensor)]
        if name in ELEMENTWISE and writes(name) and args[0] is parts[0]:
            return func(args[0], *_of_rows(args, kwargs, parts[0])[0][1:], **kwargs)
        if kwargs.get("out") is not None:
            raise refused(name, problem)
        if writes(name):
            return changed(func, args, kwargs)
        if name == "__getitem__" and isinstance(args[1], PartTensor) and not isinstance(args[0], PartTensor):
            return _looked_up(self, func, *args)
        if all(not each.is_floating_point() and not each.is_complex() for each in parts):
            return selected(func, args, kwargs)  # ids and the like: a number each
        if name == "scaled_dot_product_attention":
            return _attended(self, *args, **kwargs)
        if name == "context_attention":
            return _context_attended(self, *args, **kwargs)
        if lost := lost_weight(func):
            raise refused(name, lost)
        shares = any(each.division.cut.is_shared(self.size) for each in parts if each.division is not None)
        if name in ("cross_entropy", "nll_loss") and not shares:
            return _loss(self, func, args, kwargs)
        note_attention(self.ctx)
        gathers = _GATHERS.get(name)
        if gathers is not None:
            given, named_ones = gathers(args, kwargs)
            if sum(isinstance(each, PartTensor) for each in tensors_of((given, named_ones))) < len(parts):
                return func(*given, **named_ones)
        if not is_dynamo_compiling():
            self.whole[name] = None
        found = selected(func, args, kwargs)
        layout = next((each.division for each in parts if each.division is not None), None)
        if layout is None:
            return found
        return map_kind(Tensor, lambda each: self._cut_again(each, layout), found)

    def _cut_again(self, found: Tensor, layout: RowLayout) -> Tensor:
        """Return the own positions of what was computed of all of them, where it has as many."""
        has_all = not isinstance(found, PartTensor) and found.shape[layout.dim : layout.dim + 1] == (layout.cut.total,)
        if not has_all:
            return found
        with without_subclasses():
            return make(own_rows(found, layout.dim, layout.cut, self), layout, self)


_RECOMPUTED = ("checkpoint", "tag_activation_checkpoint")
_Again = tuple[_Args, _Named]


def _of_product(args: _Args, kwargs: _Named) -> _Again:
    """Gather the second operand of a matmul, keys or values; the first if only the first is contracted."""
    x, y = [*tensors_of((args, kwargs))][-2:]
    own, other = (each.division if isinstance(each, PartTensor) else None for each in (x, y))
    is_first = other is None or (own is not None and own.dim == x.dim() - 1 and other.dim != max(y.dim() - 2, 0))
    return _with_whole(args, kwargs, {id(x if is_first else y)})


def _with_whole(args: _Args, kwargs: _Named, chosen: set[int]) -> _Again:
    """Gather the tensors among arguments that have one of these `id`s."""
    return map_kind(
        PartTensor, lambda each: whole_of(each) if id(each) in chosen else each, (tuple(args), dict(kwargs))
    )


def _of_terms(args: _Args, kwargs: _Named) -> _Again:
    """Gather the operands of an einsum, but those along the first divided letter that its result has."""
    equation, *given = args
    listed: list[Tensor] = [*given[0]] if isinstance(given[0], list | tuple) else given
    terms, result = terms_of(equation, [each.dim() for each in listed])
    letters = [
        term[each.division.dim] if isinstance(each, PartTensor) and each.division is not None else ""
        for term, each in zip(terms, listed, strict=True)
    ]
    kept = next((letter for letter in letters if letter and letter in result), None)
    return (equation, *(each if at == kept else whole_of(each) for at, each in zip(letters, listed, strict=True))), {}


def _of_rows(args: _Args, kwargs: _Named, kept: PartTensor | None = None) -> _Again:
    """Gather tensors that are not divided as the one to keep, or not along the rows, the first of a result."""
    parts = [each for each in tensors_of((args, kwargs)) if isinstance(each, PartTensor)]
    places = {id(each): (each.dim() - each.division.dim, each.division.cut) for each in parts if each.division}
    rows = max(place for place, _ in places.values())
    own = places.get(id(kept))
    chosen = {at for at, each in places.items() if (each[0] != rows if kept is None else each != own)}
    return _with_whole(args, kwargs, chosen)


_GATHERS: Mapping[str, Callable[[_Args, _Named], _Again]] = {
    **dict.fromkeys(("matmul", "__matmul__", "mm", "bmm", "mv", "linalg_matmul", "addmm", "baddbmm"), _of_product),
    "einsum": _of_terms,
    **dict.fromkeys((*ELEMENTWISE, *LOSSES), _of_rows),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _of_rows),
}


def _loss(ranks: PositionRanks, func: Any, args: _Args, kwargs: _Named) -> Any:
    """A loss of classes at all positions: each rank computes its own, and counts those of them that count, or their
    weight."""
    given = named("input target weight", args, kwargs)
    reduction = reduction_of(given)
    x: Tensor = given.pop("input")
    target: Tensor = given.pop("target")
    has_numbers = not target.is_floating_point()
    if reduction not in ("none", "sum", "mean") or x.dim() < 2:
        raise refused(name_of(func), "of one position" if x.dim() < 2 else f"reduction={reduction!r}")
    shape = target.shape if has_numbers else (x.shape[0], *x.shape[2:])
    x = _by_position(x)
    target = target.flatten() if has_numbers else _by_position(target)
    if len(set(layouts_of((x, target)))) > 1:  # positions that are cut in another way
        target = whole_of(target)
    with without_subclasses():
        layouts = layouts_of((x, target))
        if any(each.dim for each in layouts):
            raise refused(name_of(func), "of classes that ranks divide")
        rows, labels = (plain_of(own_rows(each, 0, layouts[0].cut, ranks)) for each in (x, target))
        own = func(rows, labels, **given, reduction="none")
        counted = labels != given.get("ignore_index", -100) if has_numbers else torch.ones_like(own)
        weight = given.get("weight") if has_numbers else None
        count = counted.sum() if weight is None else (weight[labels * counted] * counted).sum()
        total = own.sum()
        losses = make(own, layouts[0], ranks)
    return losses.view(shape) if reduction == "none" else ranks.loss(total, None if reduction == "sum" else count)


def _by_position(x: Tensor) -> Tensor:
    """Return scores of classes, the second dimension, as a row for each position."""
    return (x.movedim(1, -1) if x.dim() > 2 else x).flatten(0, -2)


def _looked_up(ranks: PositionRanks, func: Any, table: Tensor, at: PartTensor) -> Any:
    """Return the rows of a table for own numbers; all positions for a mask."""
    if at.dtype == torch.bool or at.division is None:
        return func(table, whole_of(at))
    with without_subclasses():
        return make(func(table, plain_of(at)), at.division, ranks)


def _attended(
    ranks: PositionRanks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return what torch's `scaled_dot_product_attention` returns for these arguments. A collective.

    Own queries see all keys by the method of the plan; other forms gather their keys and values.
    """
    note_attention(ranks.ctx)
    if _cross(ranks, query, key, value):
        ranks.note_callers()
        given: dict[str, Any] = {"causal": is_causal, "scale": scale, "attn_mask": attn_mask, "dropout_p": dropout_p}
        return _across(ranks, query, key, value, **given)
    rows = query.dim() - 2
    layout = query.division if isinstance(query, PartTensor) else None
    key = whole_of(key)
    value = whole_of(value)
    query = query if layout is not None and layout.dim == rows else whole_of(query)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    own = query.division if isinstance(query, PartTensor) else None
    mask = _own(attn_mask, -2, own, ranks)
    with own_draws("cp", ranks.rank, query.device) if dropout_p and own is not None else contextlib.nullcontext():
        out = functional.scaled_dot_product_attention(
            plain_of(query), key, value, mask, dropout_p, scale=scale, enable_gqa=enable_gqa
        )
    return out if own is None else make(out, own, ranks)


def _context_attended(ranks: PositionRanks, ctx: DistContext, *tensors: Tensor, **given: Any) -> Tensor:
    """Return what `context_attention` returns, with arguments for all positions. A collective."""
    if _cross(ranks, *tensors):
        ranks.note_callers(may_be_alone=True)
        return _across(ranks, *tensors, **given)
    note_attention(ctx)
    with ALL_POSITIONS.begun(ctx):
        return context_attention(ctx, *all_whole(tensors), **all_whole(given))


def _cross(ranks: PositionRanks, *tensors: Tensor) -> bool:
    """Return whether own queries see all keys by the method of the plan: all tensors are cut as sequences are."""
    layouts = [each.division if isinstance(each, PartTensor) else None for each in tensors]
    return tensors[0].dim() in (3, 4) and all(
        each is not None and each == RowLayout(tensors[0].dim() - 2, balanced(each.cut.total, ranks.size))
        for each in layouts
    )


def _across(ranks: PositionRanks, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    """Return attention by the method of the plan, a part. `given`: arguments of `context_attention`, for all
    positions."""
    queries, keys = [cast(PartTensor, each).division for each in (query, key)]
    q, k, v = [plain_of(each) for each in (query, key, value)]
    given["attn_mask"] = mask = _own(given.get("attn_mask"), -2, queries, ranks)
    for name, layout in (("documents", queries), ("key_padding_mask", keys)):
        if given.get(name) is not None:
            given[name] = _own(given[name], 1, layout, ranks)
    if query.dim() == 4:
        out = attention_of_all(ranks, q, k, v, **given)
    else:
        given["attn_mask"] = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
        out = attention_of_all(ranks, q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), **given).squeeze(1)
    return make(out, queries, ranks)


def _own(tensor: Any, dim: int, layout: RowLayout | None, ranks: PositionRanks) -> Any:
    """Return the own rows of a dimension of all positions, plain; all of them if there is no layout, or one row."""
    if tensor is None or layout is None:
        return whole_of(tensor)
    dim %= tensor.dim()
    if isinstance(tensor, PartTensor) and tensor.division != RowLayout(dim, layout.cut):
        tensor = cast(Tensor, whole_of(tensor))
    with without_subclasses():
        return plain_of(tensor if whole_shape(tensor)[dim] == 1 else own_rows(tensor, dim, layout.cut, ranks))


def position_ranks(*tensors: Tensor) -> PositionRanks | None:
    """Return the ranks of the first tensor that is a part of positions, or has rows along tp that are one; None if
    there is no such tensor."""
    for each in tensors:
        rows = each.rows if isinstance(each, NestedPart) else each
        if isinstance(rows, PartTensor) and rows.division is not None and isinstance(rows.ranks, PositionRanks):
            return rows.ranks
    return None
