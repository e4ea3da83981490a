# SPDX-License-Identifier: Apache-2.0
"""Laws of parts: a rank's rows of what a function makes of the whole are what its rule makes of the rank's rows."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional

from accel.comm import ThreadGroup, run_in_threads
from accel.errors import PrepareError
from accel.parallel import local_map
from accel.parallel.parts import NoRuleError, PartTensor, Ranks, RowCut, RowLayout, leave, make, plain_of, rows_of
from accel.parallel.parts._layout import cut_of, fit, scaled
from accel.parallel.parts._rules import find_rule

RANDOM = st.integers(0, 2**32).map(random.Random)


class NeedsOthersError(Exception):
    """A message: the functions of two ranks are compared below."""


class Alone:
    """A group of which one rank computes, without messages."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, *_: object) -> None:
        raise NeedsOthersError

    all_gather_single = allreduce


def alone(rank: int, size: int) -> Ranks:
    return Ranks(cast(Any, Alone(rank, size)))


def own(whole: Tensor, layout: RowLayout | None, ranks: Ranks) -> Tensor:
    if layout is None:
        return whole
    rows = torch.tensor(rows_of(layout.cut, ranks.rank, ranks.size), dtype=torch.int64)
    return whole.index_select(layout.dim, rows)


def a_cut(draw: random.Random, size: int, lengths: Sequence[int] = (4, 8, 12)) -> RowCut:
    while True:
        segments = [(draw.choice(lengths), draw.choice([1, 2, size])) for _ in range(draw.choice([1, 1, 2, 3]))]
        cut = cut_of(draw.choice([1, 1, 2, 3]), segments)
        if cut is not None:
            return cut


def factors(draw: random.Random, length: int) -> list[int]:
    """Numbers whose product is a length."""
    found: list[int] = []
    for prime in (2, 2, 2, 3, 3, 5):
        if length % prime == 0 and draw.random() < 0.6:
            found.append(prime)
            length //= prime
    found.append(length)
    draw.shuffle(found)
    return found


class Drawn(NamedTuple):
    """Arguments of a case: a shape whose dimension `dim` is divided, another dimension, and what they allow."""

    draw: random.Random
    shape: list[int]
    dim: int
    other: int
    cut: RowCut

    @property
    def length(self) -> int:
        return self.shape[self.dim]

    def slice_of(self, entry: Any) -> tuple[Any, ...]:
        return (*[slice(None)] * self.dim, entry)

    def first_of_other(self) -> tuple[Any, ...]:
        return (*[slice(None)] * self.other, slice(0, 1))

    def divisor(self) -> int:
        return self.draw.choice([each for each in range(1, self.length + 1) if self.length % each == 0])

    def view(self) -> list[int]:
        new = [
            each for size in self.shape for each in (factors(self.draw, size) if self.draw.random() < 0.7 else [size])
        ]
        for _ in range(self.draw.randrange(3)):
            if len(new) > 1:
                at = self.draw.randrange(len(new) - 1)
                new[at : at + 2] = [new[at] * new[at + 1]]
        return new

    def whole(self) -> Tensor:
        """A plain tensor that broadcasts."""
        return torch.randn([each if self.draw.random() < 0.6 else 1 for each in self.shape])


def a_case(draw: random.Random, size: int) -> Drawn:
    cut = a_cut(draw, size)
    shape = [draw.choice([1, 2, 3, 4]) for _ in range(3)]
    dim = draw.randrange(3)
    other = draw.randrange(3)
    if draw.random() < 0.2:
        cut = a_cut(draw, size, (4, 7, 10))  # unequal pieces
    shape[dim] = cut.total
    return Drawn(draw, shape, dim, other, cut)


def _slice(given: Drawn) -> Callable[[Tensor], Any]:
    start = given.draw.randrange(given.length)
    entry = slice(start, given.draw.randrange(start, given.length) + 1)
    return lambda t: t[given.slice_of(entry)]


def _of(make_function: Callable[[Drawn, Any], Any], *arguments: Callable[[Drawn], Any]) -> Callable[[Drawn], Any]:
    """A case whose arguments are drawn once, for the whole and the rows."""

    def case(given: Drawn) -> Any:
        values = [each(given) for each in arguments]
        return lambda t: make_function(given, t, *values)  # type: ignore[call-arg]

    return case


def _new(make_function: Callable[..., Any]) -> Callable[[Drawn], Any]:
    return _of(make_function)


def _rows_of_other(given: Drawn) -> Tensor:
    return torch.tensor([given.draw.randrange(given.shape[given.other]) for _ in range(3)])


def _seeded(t: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    torch.manual_seed(3)
    return function(t)


_SPECIAL = "erf erfc erfcx erfinv exp2 expm1 log1p gammaln digamma psi sinc ndtr ndtri i0 i0e i1 i1e entr logit"
SPECIAL: list[Callable[[Tensor], Tensor]] = [getattr(torch.special, each) for each in _SPECIAL.split()]
CASES: Mapping[str, Callable[[Drawn], Any]] = {
    "view": _of(lambda g, t, new: t.view(new), Drawn.view),
    "there and back": _of(lambda g, t, new: t.view(new).view(g.shape), Drawn.view),
    "reshape with -1": _of(lambda g, t, new: t.reshape([-1, *new[1:]]), Drawn.view),
    "permute": _new(lambda g, t: t.permute(2, 0, 1).reshape(-1, g.shape[1])),
    "transpose": _new(lambda g, t: t.transpose(0, g.other).contiguous()),
    "movedim": _new(lambda g, t: t.movedim(g.other, 0)),
    "mT": _new(lambda g, t: t.mT),
    "flatten": _new(lambda g, t: t.flatten(0, 1)),
    "unflatten": _of(lambda g, t, by: t.unflatten(g.dim, (by, -1)), Drawn.divisor),
    "squeeze": _new(lambda g, t: t.squeeze()),
    "unsqueeze": _new(lambda g, t: t.unsqueeze(g.other)),
    "new dimensions": _new(lambda g, t: t[None, ..., None]),
    "expand": _new(
        lambda g, t: t.unsqueeze(g.dim).expand(*g.shape[: g.dim], 3, *g.shape[g.dim :]).flatten(g.dim, g.dim + 1)
    ),
    "repeat": _new(lambda g, t: t.repeat(2, 1, 3)),
    "repeat_interleave": _new(lambda g, t: t.repeat_interleave(2, g.dim)),
    "split": _of(lambda g, t, by: t.split(by, g.dim), Drawn.divisor),
    "split by sizes": _of(lambda g, t, by: t.split([by, g.length - by], dim=g.dim), Drawn.divisor),
    "chunk": _of(lambda g, t, by: t.chunk(by, g.other), lambda g: g.draw.choice([2, 3])),
    "tensor_split": _of(lambda g, t, by: torch.tensor_split(t, by, dim=g.dim), Drawn.divisor),
    "unbind": _new(lambda g, t: t.unbind(g.other)),
    "slice": _slice,
    "slice of another": _new(lambda g, t: t[(slice(None),) * g.other + (slice(0, 1),)]),
    "narrow": _of(lambda g, t, by: t.narrow(g.dim, 0, by), Drawn.divisor),
    "an int": _of(lambda g, t, at: t[g.slice_of(at)], lambda g: g.draw.randrange(g.length)),
    "select": _new(lambda g, t: t.select(g.other, 0)),
    "steps": _new(lambda g, t: t[g.slice_of(slice(1, None, 2))]),
    "a list of rows": _new(lambda g, t: t[g.slice_of([0, 1, 2, 3])]),
    "rows by a tensor": _of(lambda g, t, rows: t[(slice(None),) * g.other + (rows,)], _rows_of_other),
    "rows and an int": _of(lambda g, t, rows: t[rows, :, 0], lambda g: torch.zeros(2, 3, dtype=torch.long)),
    "rows beside rows": _of(lambda g, t, rows: t[rows, 0], lambda g: torch.zeros(2, dtype=torch.long)),
    "rows apart": _of(lambda g, t, rows: t[rows, :, rows], lambda g: torch.zeros(2, 2, dtype=torch.long)),
    "index_select": _of(lambda g, t, rows: t.index_select(g.other, rows), _rows_of_other),
    "gather": _new(lambda g, t: t.gather(g.other, t.argsort(g.other))),
    "index_add": _of(
        lambda g, t, rows: torch.zeros_like(t).index_add(g.other, rows, t.index_select(g.other, rows)), _rows_of_other
    ),
    "scatter_add": _new(lambda g, t: torch.zeros_like(t).scatter_add(g.other, t.argsort(g.other) // 2, t)),
    "scatter_": _new(lambda g, t: t.clone().scatter_(g.other, t.argsort(g.other)[g.first_of_other()], 7.0)),
    "scatter_reduce": _new(
        lambda g, t: t.scatter_reduce(g.other, t.argsort(g.other) // 2, t * 2, "amax", include_self=False)
    ),
    "assigned": _of(lambda g, t, at: _assign(g, t, at), lambda g: g.draw.randrange(g.shape[g.other])),
    "cat along": _new(lambda g, t: torch.cat([t, t], g.dim)),
    "cat along, with a whole": _of(lambda g, t, w: torch.cat([t, w], g.dim), lambda g: torch.randn(g.shape)),
    "cat": _new(lambda g, t: torch.cat([t, -t], g.other)),
    "names of NumPy": _new(lambda g, t: torch.concat((t, t.amax(axis=g.other, keepdims=True)), axis=g.other)),
    "stack": _new(lambda g, t: torch.stack([t, -t], g.other)),
    "stack with a whole": _of(lambda g, t, w: torch.stack([t, w], -1), lambda g: torch.randn(g.shape)),
    "whole beside": _of(lambda g, t, w: t * w + w, Drawn.whole),
    "where": _of(lambda g, t, w: torch.where(w > 0, t, -t), Drawn.whole),
    "masked_fill": _of(lambda g, t, w: t.masked_fill(w > 0, -1.0), Drawn.whole),
    "masked_fill_": _of(lambda g, t, w: t.clone().masked_fill_(w > 0, -1.0), Drawn.whole),
    "clamp": _of(lambda g, t, w: t.clamp(min=w), Drawn.whole),
    "in place": _of(lambda g, t, w: t.clone().add_(t).mul_(w), Drawn.whole),
    "activations": _new(lambda g, t: functional.silu(functional.relu(t, inplace=False)) * functional.gelu(t)),
    "pow": _new(lambda g, t: t.square().add(1).rsqrt() ** 2.0),
    "functions of other names": _new(lambda g, t: functional.threshold(functional.logsigmoid(t), -1.0, -2.0)),
    "special": _new(lambda g, t: torch.special.xlogy(torch.special.expit(t), torch.special.log_ndtr(t).exp())),
    "special, alone": _new(lambda g, t: tuple(each(t.sigmoid()) for each in SPECIAL)),
    "hinge": _new(lambda g, t: functional.hinge_embedding_loss(t, t.sign(), reduction="none")),
    "softmax": _new(lambda g, t: t.softmax(g.other)),
    "cumsum": _new(lambda g, t: t.cumsum(g.other)),
    "sum": _new(lambda g, t: t.sum(g.other, keepdim=True) + t.mean((g.other,), keepdim=True)),
    "sum of one": _new(lambda g, t: t.sum(g.other)),
    "max": _new(lambda g, t: t.max(g.other).values),
    "amax": _new(lambda g, t: t.amax(dim=(g.other,))),
    "var": _new(lambda g, t: t.var(dim=g.other, correction=0)),
    "a loss of each": _of(lambda g, t, w: functional.huber_loss(t, w.expand(g.shape), reduction="none"), Drawn.whole),
    "cosine_similarity": _of(lambda g, t, w: functional.cosine_similarity(t, w.expand(g.shape), g.other), Drawn.whole),
    "logsumexp": _new(lambda g, t: t.logsumexp(g.other)),
    "cummax": _new(lambda g, t: t.cummax(g.other).values),
    "spectrum": _new(lambda g, t: torch.view_as_real(torch.fft.rfft(t, dim=g.other)).sum(-1)),
    "there and back by fft": _new(lambda g, t: torch.fft.irfft(torch.fft.fft2(t, dim=(0, g.other)), dim=0)),
    "windows": _new(lambda g, t: t.unfold(g.other, 1, 1)),
    "blocks of images": _new(lambda g, t: functional.unfold(t[None], (2, 1), padding=1)),
    "blocks of samples": _new(lambda g, t: functional.unfold(t[:, None], (2, 1), padding=1)),
    "pixels": _new(lambda g, t: functional.pixel_shuffle(t.repeat_interleave(4, 0), 2)),
    "pixels as channels": _new(lambda g, t: functional.pixel_unshuffle(t.repeat(1, 2, 2), 2)),
    "plain as a part": _of(lambda g, t, w: w.view_as(t) * t, lambda g: torch.randn(g.shape).flatten()),
    "Frobenius norm": _new(lambda g, t: t.norm(dim=g.other)),
    "kernels of one row": _of(lambda g, t, w: functional.conv1d(t, w), lambda g: torch.randn(5, g.shape[1], 1)),
    "in place by itself": _new(lambda g, t: t.clone().abs_().log1p_().sin_()),
    "topk": _new(lambda g, t: t.topk(1, dim=g.other)[0]),
    "flip": _new(lambda g, t: t.flip(g.other)),
    "roll": _new(lambda g, t: t.roll(1, g.other)),
    "glu": _new(lambda g, t: functional.glu(torch.cat([t, t], g.other), g.other)),
    "pad": _of(lambda g, t, widths: functional.pad(t, widths), lambda g: [g.draw.randrange(2) for _ in range(4)]),
    "complex": _new(lambda g, t: torch.view_as_real(torch.view_as_complex(torch.stack([t, -t], -1)) * 1j).flatten(-2)),
    "triu": _new(lambda g, t: t.triu()),
    "layer_norm": _new(lambda g, t: functional.layer_norm(t, [g.shape[-1]])),
    "group_norm": _new(lambda g, t: functional.group_norm(t, 4)),
    "avg_pool": _new(lambda g, t: functional.avg_pool1d(t, 2, padding=1)),
    "max_pool": _new(lambda g, t: functional.max_pool1d(t, 2, padding=1)),
    "interpolate": _new(lambda g, t: functional.interpolate(t, scale_factor=2)),
    "a channel each": _of(
        lambda g, t, w: functional.conv1d(t, w, groups=g.shape[1], padding=1),
        lambda g: torch.randn(2 * g.shape[1], 1, 3),
    ),
    "dropout": _new(lambda g, t: _seeded(t, lambda each: functional.dropout(each, 0.5))),
    "dropout in place": _new(
        lambda g, t: _seeded(t.clone(), lambda each: (functional.dropout(each, 0.5, True, True), each)[1])
    ),
    "dropout of channels": _new(lambda g, t: _seeded(t, lambda each: functional.dropout1d(each, 0.5))),
    "randn_like": _new(lambda g, t: _seeded(t, torch.randn_like)),
    "rand_like of heads": _new(lambda g, t: _seeded(t, lambda each: torch.rand_like(each.transpose(0, g.other)))),
    "rand_like of equal ones": _new(
        lambda g, t: _seeded(t, lambda each: torch.rand_like(each[:, None].expand(-1, 2, *each.shape[1:])))
    ),
    "dtypes": _new(lambda g, t: t.double().to(torch.float32).type_as(t)),
    "sizes": _new(lambda g, t: t.new_zeros(t.shape[g.dim], t.size(0)) + t.numel() + len(t)),
}


# Functions of [samples, tokens, heads, features], of which a rank has one head: torch forgets its place in memory.
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "of one": lambda t: t.transpose(1, 2).relu(),
    "of a number": lambda t: functional.elu(t.transpose(1, 2)) + 1,
    "of several": lambda t: t.transpose(1, 2) * t.transpose(1, 2).exp(),
    "of a full one": lambda t: t.transpose(1, 2) * torch.arange(20.0).view(5, 4),
    "there and back": lambda t: t.transpose(1, 2).exp().transpose(1, 2),
    "among others": lambda t: t.permute(2, 0, 1, 3).exp() * 2,
    "contiguous": lambda t: t.transpose(1, 2).contiguous(),
    "contiguous behind": lambda t: t.transpose(1, 2).exp().contiguous(),
    "contiguous before": lambda t: t.transpose(1, 2).contiguous().exp(),
    "contiguous clone": lambda t: t.transpose(1, 2).clone(memory_format=torch.contiguous_format),
    "innermost": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3).exp(),
    "by a mask": lambda t: t.transpose(1, 2).masked_fill(torch.eye(5, 4).bool(), 2),
    "by where": lambda t: torch.where(torch.eye(5, 4).bool(), t.transpose(1, 2), 2.0),
    "logsigmoid": lambda t: functional.logsigmoid(t.transpose(1, 2)),
    "dtypes": lambda t: t.transpose(1, 2).double().float(),
    "of dropout": lambda t: functional.dropout(t.transpose(1, 2), 0.5) + 1,
    "scores": lambda t: torch.einsum("bqhd,bkhd->bhqk", t, t) / 2,
    "attention": lambda t: torch.einsum("bhqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bhqk", t, t), t).exp(),
    "elements": lambda t: torch.einsum("bqhd,bqhd->bhqd", t, t),
}


@pytest.mark.parametrize("name", ORDERS)
def test_dropout_of_one_head_draws_in_the_memory_of_all(name: str) -> None:
    def dropped(t: Tensor) -> Tensor:
        return _seeded(ORDERS[name](t), lambda each: functional.dropout(each, 0.5))

    whole = torch.rand(3, 5, 2, 4, generator=torch.Generator().manual_seed(1)) + 0.1
    want, layout = dropped(whole), RowLayout(2, RowCut(1, ((2, 2),)))
    for ranks in (alone(0, 2), alone(1, 2)):
        got = dropped(make(own(whole, layout, ranks).clone(), layout, ranks))
        assert isinstance(got, PartTensor)
        torch.testing.assert_close(plain_of(got), own(want, got.division, ranks))


def test_contiguous_rows_of_one_head_are_a_copy_as_those_of_all() -> None:
    layout = RowLayout(2, RowCut(1, ((2, 2),)))
    part = make(torch.ones(3, 5, 1, 4), layout, alone(0, 2))
    _ = part.transpose(1, 2).contiguous().zero_()
    assert plain_of(part).all()
    assert part.contiguous() is part


def _assign(given: Drawn, t: Tensor, at: int) -> Tensor:
    made = t.clone()
    made[(slice(None),) * given.other + (at,)] = 0.0
    made[..., :1] = 2.0
    return made


def law(name: str, draw: random.Random) -> bool:
    """Check a case; return whether it has a rule."""
    return agrees(CASES[name], draw)


def agrees(case_of: Callable[[Drawn], Callable[[Tensor], Any]], draw: random.Random) -> bool:
    """Check that a function of rows gives rows of the function; return whether it has a rule."""
    size = draw.choice([2, 4])
    ranks = alone(draw.randrange(size), size)
    case = a_case(draw, size)
    layout = RowLayout(case.dim, case.cut)
    whole = torch.randn(case.shape, generator=torch.Generator().manual_seed(draw.randrange(100)))
    function = case_of(case)
    try:
        want = function(whole)
    except (RuntimeError, IndexError):
        return False  # torch refuses the arguments themselves
    try:
        got = function(make(own(whole, layout, ranks).clone(), layout, ranks))
    except (NoRuleError, NeedsOthersError):
        return False
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for part, each in pairs:
        assert part.shape == each.shape
        mine = own(each, part.division, ranks) if isinstance(part, PartTensor) else each
        torch.testing.assert_close(plain_of(part), mine)
    return True


@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_function_are_a_function_of_rows(name: str) -> None:
    counts = [law(name, random.Random(seed)) for seed in range(25)]
    assert any(counts)


@given(RANDOM, st.sampled_from(sorted(CASES)))
def test_no_arguments_give_other_rows(draw: random.Random, name: str) -> None:
    law(name, draw)


# What may share memory with a tensor of three dimensions, one of which ranks divide.
VIEWS: Mapping[str, Callable[[Drawn, Tensor], Tensor]] = {
    "a row": lambda g, t: t.select(g.other, 0),
    "a row of parts": lambda g, t: t.select(g.dim, -1),
    "a row by index": lambda g, t: t[g.slice_of(0)],
    "rows": lambda g, t: t[g.slice_of(slice(0, g.length // 2))],
    "every second row": lambda g, t: t[g.slice_of(slice(0, None, 2))],
    "narrow": lambda g, t: t.narrow(g.other, 0, 1),
    "unbind": lambda g, t: t.unbind(g.other)[0],
    "split": lambda g, t: t.split(g.length // 2 or 1, g.dim)[0],
    "chunk of a row": lambda g, t: t.chunk(2, g.dim)[0].select(g.other, 0),
    "view": lambda g, t: t.view(-1),
    "flatten": lambda g, t: t.flatten(),
    "transpose": lambda g, t: t.transpose(0, g.other),
    "permute": lambda g, t: t.permute(2, 0, 1)[0],
    "unsqueeze": lambda g, t: t.unsqueeze(g.other),
    "squeeze": lambda g, t: t.squeeze(),
    "ends": lambda g, t: t[..., None, :1],
    "diagonal": lambda g, t: t.diagonal(),
    "detach": lambda g, t: t.detach(),
    "expand_as": lambda g, t: t.expand_as(t),
    "contiguous": lambda g, t: t.contiguous(),
    "no dropout": lambda g, t: functional.dropout(t, 0.5, training=False),
}
WRITES: Mapping[str, Callable[[Tensor], object]] = {
    "copy_": lambda t: t.copy_(torch.arange(1.0, t.numel() + 1).view(t.shape)),
    "copy_ of a number": lambda t: t.copy_(torch.tensor(3.0)),
    "mul_": lambda t: t.mul_(2.0),
    "add_ of itself": lambda t: t.add_(t * 2.0),
    "fill_": lambda t: t.fill_(3.0),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, 0.5),
    "an index": lambda t: t.__setitem__(0, 4.0),
    "all": lambda t: t.__setitem__(Ellipsis, torch.ones(t.shape)),
    "a sum": lambda t: t.__setitem__(slice(None), t[:] + 1.0),
}


def _written_through(case: Drawn, view: str, write: str) -> Callable[[Tensor], Tensor]:
    def function(t: Tensor) -> Tensor:
        made = t * 1.0
        WRITES[write](VIEWS[view](case, made))
        return made

    return function


@given(RANDOM, st.sampled_from(sorted(VIEWS)), st.sampled_from(sorted(WRITES)))
def test_a_write_into_a_view_reaches_the_part_or_is_refused(draw: random.Random, view: str, write: str) -> None:
    agrees(lambda case: _written_through(case, view, write), draw)


@pytest.mark.parametrize("write", WRITES)
def test_writes_into_most_views_have_a_rule(write: str) -> None:
    def has_rule(view: str) -> bool:
        return any(agrees(lambda case: _written_through(case, view, write), random.Random(seed)) for seed in range(12))

    assert sum(map(has_rule, ("a row", "rows", "narrow", "unbind", "chunk of a row", "transpose"))) >= 3


@given(RANDOM, st.sampled_from([2, 4]))
def test_a_cut_is_found_by_the_rows_that_ranks_need(draw: random.Random, size: int) -> None:
    cut = a_cut(draw, size)
    held = [frozenset(rows_of(cut, rank, size)) for rank in range(size)]
    dead = {row for row in range(cut.total) if draw.random() < 0.1}
    needed = [rows - dead for rows in held]
    found = fit(needed, cut.total)
    if found is not None:  # each rank has all rows that it needs
        assert all(rows <= {*rows_of(found, rank, size)} for rank, rows in enumerate(needed))
    if not dead:
        assert found is not None
        assert [frozenset(rows_of(found, rank, size)) for rank in range(size)] == held


class Region(NamedTuple):
    """A function of parts and plain tensors that may send messages.

    Attributes:
        function: of all tensors.
        shapes: of them.
        layouts: of those that ranks divide, None for plain ones.
    """

    function: Callable[..., Any]
    shapes: list[tuple[int, ...]]
    layouts: list[RowLayout | None]


def _batch_normed(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """A batch norm in training, and the running statistics that it leaves, which all ranks need in full."""
    mean, variance = (torch.linspace(low, 3, x.shape[1], dtype=x.dtype) for low in (-1, 1))
    normed = functional.batch_norm(x, mean, variance, weight, bias, training=True, momentum=0.3)
    return normed + (mean * variance).view(-1, *[1] * (x.dim() - 2))


def _instance_normed(x: Tensor) -> Tensor:
    """An instance norm, which updates running statistics by default."""
    mean, variance = torch.zeros(2, x.shape[1], dtype=x.dtype)
    return functional.instance_norm(x, mean, variance) + (mean * variance)[:, None]


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _multi_head(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, out_bias: Tensor) -> Any:
    return functional.multi_head_attention_forward(
        x, x, x, 8, 4, weight, bias, None, None, False, 0.0, out, out_bias, need_weights=True
    )


def _written(x: Tensor, y: Tensor) -> Tensor:
    """A plain tensor that parts are written into, as a cache of keys is."""
    whole = torch.zeros(2, x.size(1), 4, dtype=torch.float64)
    whole[:, :, 1:3] = x[:, :, 1:3]
    return whole.index_copy_(2, torch.tensor([0]), x[:, :, :1]).add_(x) * y


class Kernel(torch.autograd.Function):
    """`x * y.sigmoid()` by memory that torch does not see, of equal shapes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return torch.from_numpy(x.numpy() / (1 + (-y.contiguous()).exp().numpy()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        gate = y.sigmoid()
        return grads[0] * gate, grads[0] * x * gate * (1 - gate)


def _gated(x: Tensor, y: Tensor) -> Tensor:
    assert type(x) is type(y) is Tensor
    return cast(Any, Kernel).apply(*torch.broadcast_tensors(x, y))


def _normed(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    assert type(x) is type(scale) is Tensor
    spread = x.square().mean(-1).add(1.0).rsqrt()
    return x * spread.unsqueeze(-1) * scale, spread


def _turned(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys by heads, [batch, heads, tokens, features], by the angles of tokens."""
    assert {type(q), type(k), type(angles)} == {Tensor}
    return q * angles.cos(), k.flip(-1) * angles.sin()


def _scanned(q: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """A recurrence over tokens, [batch, tokens, heads, features], with a decay for each head; keys are of groups."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    state, found = torch.zeros_like(q[:, 0]), []
    for at in range(q.shape[1]):
        state = state * decay.sigmoid().unsqueeze(-1) + k[:, at] * k[:, at].sum(-1, keepdim=True)
        found.append(q[:, at] * state)
    return torch.stack(found, 1)


_BAG, _STARTS = torch.tensor([6, 0, 3, 3, 1, 5]), torch.tensor([0, 2, 2, 4])  # the second bag is empty
_INFINITE = torch.tensor([[torch.inf], [0.0], [0.0], [0.0], [torch.inf], [0.0], [0.0]], dtype=torch.float64)


def regions(draw: random.Random, size: int) -> Mapping[str, Region]:
    """Functions that contract or sum the divided dimension, or take whole tensors beside parts."""
    cut = a_cut(draw, size)
    n = cut.total
    even = RowCut(draw.choice([1, 2]), ((8, size),))
    m = even.total
    heads = RowCut(1, ((4, size),))
    unequal = RowCut(1, ((7, size),))
    few = RowCut(1, ((5, size),))  # of four ranks the last has none
    return {
        "column": Region(functional.linear, [(3, 5), (n, 5), (n,)], [None, RowLayout(0, cut), RowLayout(0, cut)]),
        "column, whole bias": Region(functional.linear, [(3, 5), (n, 5), (n,)], [None, RowLayout(0, cut), None]),
        "row": Region(functional.linear, [(3, m), (5, m), (5,)], [RowLayout(1, even), RowLayout(1, even), None]),
        "row of whole inputs": Region(functional.linear, [(3, m), (5, m), (5,)], [None, RowLayout(1, even), None]),
        "whole weight": Region(functional.linear, [(2, m, 4), (5, 4), (5,)], [RowLayout(1, even), None, None]),
        "whole contracted weight": Region(functional.linear, [(2, m), (5, m)], [RowLayout(1, even), None]),
        "pair": Region(
            lambda x, up, down: functional.linear(functional.gelu(functional.linear(x, up)), down) + x,
            [(3, 5), (m, 5), (5, m)],
            [None, RowLayout(0, even), RowLayout(1, even)],
        ),
        "pair of unequal rows": Region(
            lambda x, up, down, mask: functional.linear(functional.gelu(functional.linear(x, up)) * mask, down) + x,
            [(3, 5), (7, 5), (5, 7), (7,)],
            [None, RowLayout(0, unequal), RowLayout(1, unequal), None],
        ),
        "column of unequal rows": Region(
            functional.linear, [(2, 3, 5), (7, 5), (7,)], [None, RowLayout(0, unequal), RowLayout(0, unequal)]
        ),
        "addmm": Region(torch.addmm, [(5,), (3, m), (m, 5)], [None, RowLayout(1, even), RowLayout(0, even)]),
        "addmm by columns": Region(torch.addmm, [(n,), (3, 5), (5, n)], [None, None, RowLayout(1, cut)]),
        "baddbmm of memory that is not read": Region(
            lambda x, y: torch.baddbmm(
                torch.full((n, 3, 4), torch.nan, dtype=torch.float64), x, y, beta=0.0, alpha=0.5
            ),
            [(n, 3, 5), (n, 5, 4)],
            [RowLayout(0, cut), RowLayout(0, cut)],
        ),
        "scatter_add to heads": Region(
            lambda x, y: x.scatter_add(0, torch.arange(3)[:, None].expand(3, n) % 2, y),
            [(2, n), (3, n)],
            [RowLayout(1, cut), draw.choice([None, RowLayout(1, cut)])],
        ),
        "matmul of heads": Region(
            torch.matmul, [(2, n, 3, 5), (2, n, 5, 3)], [RowLayout(1, cut), draw.choice([None, RowLayout(1, cut)])]
        ),
        "matmul of a batch": Region(torch.matmul, [(n, 3, 5), (5, 4)], [RowLayout(0, cut), None]),
        "matmul of rows": Region(torch.matmul, [(n, 5), (2, 5, 4)], [RowLayout(0, cut), None]),
        "einsum of heads": Region(
            lambda x, w: torch.einsum("...d,hd->...h", x, w), [(2, 3, 5), (n, 5)], [None, RowLayout(0, cut)]
        ),
        "einsum over heads": Region(
            lambda x, w: torch.einsum("bthd,hdo->bto", x, w), [(2, 3, m, 2), (m, 2, 5)], [RowLayout(2, even), None]
        ),
        "a gated cell": Region(
            torch.gru_cell,
            [(3, 5), (3, m), (3 * m, 5), (3 * m, m), (3 * m,), (3 * m,)],
            [None, None, *[RowLayout(0, RowCut(3 * even.repeat, even.segments))] * 3, None],
        ),
        "a cell with memory": Region(
            lambda x, h, c, *weights: torch.lstm_cell(x, (h, c), *weights),
            [(3, 5), (3, m), (3, m), (4 * m, 5), (4 * m, m)],
            [
                None,
                None,
                draw.choice([None, RowLayout(1, even)]),
                *[RowLayout(0, RowCut(4 * even.repeat, even.segments))] * 2,
            ],
        ),
        "a cell of rectified units": Region(
            torch.rnn_relu_cell, [(3, 5), (3, m), (m, 5), (m, m)], [None, None, *[RowLayout(0, even)] * 2]
        ),
        "norms of channels": Region(
            _normed_channels, [(3, n, 4), (n,), (n,)], [RowLayout(1, cut), draw.choice([None, RowLayout(0, cut)]), None]
        ),
        "a quotient written into a buffer": Region(lambda x: _with_buffer(x, n), [(2, n, 4)], [RowLayout(1, cut)]),
        "einsum of three": Region(
            lambda x, y, z: torch.einsum("bn,n,bn->bn", x, y, z),
            [(2, n), (n,), (2, n)],
            [RowLayout(1, cut), None, None],
        ),
        "embedding of heads": Region(
            lambda w: functional.embedding(torch.tensor([[1, 0], [2, 2]]), w).permute(2, 0, 1),
            [(3, n)],
            [RowLayout(1, cut)],
        ),
        "written": Region(_written, [(2, n, 4), (n, 1)], [RowLayout(1, cut), draw.choice([None, RowLayout(0, cut)])]),
        "a kernel of elements": Region(
            local_map(_gated, "elements"),
            [(2, n, 4), (n, 1)],
            [RowLayout(1, cut), draw.choice([None, RowLayout(0, cut)])],
        ),
        "a kernel of rows": Region(local_map(_normed, "rows"), [(2, n, 4), (4,)], [RowLayout(1, cut), None]),
        "a kernel of heads": Region(
            local_map(_turned, (1, 1, None), out=1),
            [(2, m, 3, 4), (2, m, 3, 4), (2, 1, 3, 4)],
            [RowLayout(1, even), RowLayout(1, even), None],
        ),
        "a kernel of groups": Region(
            local_map(_scanned, (2, -2, 0)),
            [(2, 3, 8, 4), (2, 3, 2, 4), (8,)],
            [RowLayout(2, RowCut(1, ((8, size),))), draw.choice([None, RowLayout(2, RowCut(1, ((2, 2),)))]), None],
        ),
        "sums": Region(lambda x: x.sum(-1) + x.mean(1), [(3, m)], [RowLayout(1, even)]),
        "spreads": Region(
            lambda x: x.var(-1) + x.std(1, keepdim=True) + x.var(dim=(0, 1), correction=0),
            [(3, m)],
            [RowLayout(1, even)],
        ),
        "spreads by place": Region(
            lambda x: x.var(1, False) + x.std(-1, True, True).squeeze(1) + x.var(1, correction=None),
            [(3, m)],
            [RowLayout(1, even)],
        ),
        "spreads of other dimensions, by place": Region(
            lambda x: x.std(0, True) + x.var(0, False), [(3, 2, 7)], [RowLayout(2, unequal)]
        ),
        "gradients at 0": Region(
            lambda x: (x * 0).norm(dim=1) + (x * 0).norm(1, 1) + (x * 0).std(1), [(3, 7)], [RowLayout(1, unequal)]
        ),
        "gradients at 0, of full rows": Region(
            lambda x: (x * 0).norm(dim=0) + functional.normalize(x * 0, dim=0).sum(0), [(3, 7)], [RowLayout(1, unequal)]
        ),
        "norms of large half floats": Region(
            lambda x: (x * 0 + 300).half().norm(dim=1).double(), [(3, 7)], [RowLayout(1, unequal)]
        ),
        "first of equal ones": Region(
            lambda x: (*(x.sign() + 0 * x).max(1), (x.sign() + 0 * x).min(1).indices),
            [(3, m + 8)],
            [RowLayout(1, RowCut(1, ((8, size), (m, -size))))],
        ),
        "the greatest of all": Region(lambda x: x.max(), [(m,)], [RowLayout(0, even)]),
        "means of no rows": Region(lambda x: x.mean(1) + x.mean(), [(3, 5)], [RowLayout(1, few)]),
        "no rows": Region(
            lambda x, w, y: functional.linear(x * y, w), [(3, 5), (2, 5), (5,)], [RowLayout(1, few), None, None]
        ),
        "views of an empty batch": Region(
            lambda x, w: functional.linear(x[:0].view(0, 2, m, 4).flatten(1), w.reshape(3, -1)),
            [(3, 2, m, 4), (3, 8 * m)],
            [RowLayout(2, even), None],
        ),
        "greatest and least": Region(
            lambda x: (x.max(1).values * x.min(-1, keepdim=True)[0], x.max(1).indices), [(3, m)], [RowLayout(1, even)]
        ),
        "equal extremes share a gradient": Region(
            lambda x: (
                (y := x.detach().round() + x - x.detach()).amax(1, keepdim=True) * y.abs().amin((0, -1)) + y.amax()
            ),
            [(3, m)],
            [RowLayout(1, even)],
        ),
        "norms of rows": Region(lambda x: x / x.norm(dim=1, keepdim=True), [(3, m)], [RowLayout(1, even)]),
        "tensordot": Region(
            lambda x, w: torch.tensordot(x, w, dims=([1, 2], [0, 1])),
            [(3, m, 2), (m, 2, 5)],
            [RowLayout(1, even), RowLayout(0, even)],
        ),
        "tensordot of one": Region(
            lambda x, w: torch.tensordot(x, w, 1), [(2, 3, 5), (5, n)], [None, RowLayout(1, cut)]
        ),
        "addmm to empty memory": Region(
            lambda x, w: torch.addmm(torch.full((3, n), float("nan"), dtype=x.dtype), x, w, beta=0, alpha=0.5),
            [(3, 5), (5, n)],
            [None, RowLayout(1, cut)],
        ),
        "baddbmm to empty memory": Region(
            lambda x, w: torch.baddbmm(torch.full((n, 2, 4), float("nan"), dtype=x.dtype), x, w, beta=0),
            [(n, 2, 3), (n, 3, 4)],
            [RowLayout(0, cut), None],
        ),
        "a table by rows, and a head": Region(
            lambda w: functional.linear(functional.embedding(torch.tensor([[6, 0, 3], [2, 3, 5]]), w, -2), w),
            [(7, 5)],
            [RowLayout(0, unequal)],
        ),
        "a table by features": Region(
            lambda w: functional.embedding_bag(torch.tensor([[6, 0], [3, 3]]), w), [(7, n)], [RowLayout(1, cut)]
        ),
        "weighted bags of rows": Region(
            lambda w, by: functional.embedding_bag(_BAG, w, _STARTS, mode="sum", per_sample_weights=by, padding_idx=3),
            [(7, 5), (6,)],
            [RowLayout(0, unequal), None],
        ),
        "means of rows": Region(
            lambda w: functional.embedding_bag(_BAG, w, _STARTS, padding_idx=-4), [(7, 5)], [RowLayout(0, unequal)]
        ),
        "means of bags of one length": Region(
            lambda w: functional.embedding_bag(_BAG.view(2, 3), w), [(7, 5)], [RowLayout(0, unequal)]
        ),
        "bags with and without the first row of a rank, which is infinite": Region(
            lambda w: functional.embedding_bag(_BAG, w + _INFINITE, _STARTS, mode="sum"),
            [(7, 5)],
            [RowLayout(0, unequal)],
        ),
        "weighted bags with and without the first row of a rank, which is infinite": Region(
            lambda w, by: functional.embedding_bag(_BAG, w + _INFINITE, _STARTS, mode="sum", per_sample_weights=by),
            [(7, 5), (6,)],
            [RowLayout(0, unequal), None],
        ),
        "torch.embedding of rows": Region(
            lambda w: torch.embedding(w, torch.tensor([[6, 0, 3], [2, 3, 5]]), padding_idx=3),
            [(7, 5)],
            [RowLayout(0, unequal)],
        ),
        "torch.embedding of features": Region(
            lambda w: torch.embedding(w, indices=torch.tensor([[6, 0], [3, 3]])), [(7, n)], [RowLayout(1, cut)]
        ),
        "maxima of rows": Region(
            lambda w: functional.embedding_bag(_BAG.view(2, 3), w, mode="max"), [(7, 5)], [RowLayout(0, unequal)]
        ),
        "losses of elements": Region(
            lambda x, y: (
                functional.mse_loss(x, y)
                + functional.kl_div(x, y.exp(), reduction="batchmean")
                + functional.binary_cross_entropy_with_logits(x, y.sigmoid(), None, reduction="sum")
                + functional.cosine_similarity(x, y, -1).sum()
                + functional.cosine_similarity(x, y, -1, eps=100.0).sum()
                + functional.mse_loss(x, y, reduction="sum", weight=y.exp())
                + functional.l1_loss(x, y)
                + functional.kl_div(x[:1], y.exp(), reduction="batchmean")
            ),
            [(3, m), (3, m)],
            [RowLayout(1, even), draw.choice([None, RowLayout(1, even)])],
        ),
        "a mean by weights": Region(
            lambda x, y: functional.mse_loss(x, y, weight=y.exp()), [(3, m), (3, m)], [RowLayout(1, even), None]
        ),
        "a loss whose weight torch leaves out": Region(
            lambda x, y: functional.l1_loss(x, y, weight=y.exp()), [(3, m), (3, m)], [RowLayout(1, even), None]
        ),
        "a loss by its number": Region(lambda x: torch.kl_div(x, x.exp()), [(3, m)], [RowLayout(1, even)]),
        "a loss of classes": Region(
            lambda x, w: functional.cross_entropy(
                torch.matmul(x, w), torch.tensor([3, 0, 2]), ignore_index=0, label_smoothing=0.1, reduction="none"
            ),
            [(3, 5), (5, m)],
            [None, RowLayout(1, even)],
        ),
        "a loss of divided samples": Region(
            lambda x: functional.cross_entropy(x, torch.arange(n) % 5), [(n, 5)], [RowLayout(0, cut)]
        ),
        "convolution across rows": Region(
            lambda x, w, b: functional.conv1d(x, w, b), [(2, 3, n), (5, 3, 1), (5,)], [RowLayout(2, cut), None, None]
        ),
        "a channel each, of any cut": Region(
            lambda x, w, b: functional.conv1d(x, w, b, groups=n, padding=1),
            [(2, n, 3), (n, 1, 3), (n,)],
            [RowLayout(1, cut), None, None],
        ),
        "one slope": Region(functional.prelu, [(3, 7), (1,)], [RowLayout(1, unequal), None]),
        "slopes of channels": Region(functional.prelu, [(3, 7, 2), (7,)], [RowLayout(1, unequal), None]),
        "sums of unequal rows": Region(
            lambda x: x.sum(-1) + x.mean(1) + x.norm(dim=1) + x.norm(1, -1), [(3, 7)], [RowLayout(1, unequal)]
        ),
        "norm of rows": Region(lambda x: torch.linalg.norm(x, dim=1), [(3, m)], [RowLayout(1, even)]),
        "norm of vectors": Region(lambda x: torch.linalg.vector_norm(x, dim=-1), [(3, m)], [RowLayout(1, even)]),
        "RMS norm over all heads": Region(
            lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w,
            [(3, m), (m,)],
            [RowLayout(1, even), None],
        ),
        "layer_norm over all heads": Region(
            lambda x, w, b: functional.layer_norm(x, [m], w, b), [(3, m), (m,), (m,)], [RowLayout(1, even), None, None]
        ),
        "rms_norm over all heads": Region(
            lambda x, w: functional.rms_norm(x, [m], w), [(3, m), (m,)], [RowLayout(1, even), None]
        ),
        "norm of a head": Region(
            lambda x, w: functional.rms_norm(x, [5], w), [(2, n, 5), (5,)], [RowLayout(1, cut), None]
        ),
        "normalized vectors": Region(
            lambda x, y: functional.normalize(x, dim=-1) * functional.normalize(y, dim=1),
            [(3, 4, m), (3, 4, m)],
            [RowLayout(2, even), None],
        ),
        "group_norm": Region(
            lambda x, w, b: functional.group_norm(x, 4, w, b),
            [(2, 8, 3), (8,), (8,)],
            [RowLayout(1, RowCut(1, ((8, size),))), None, None],
        ),
        "norm of divided groups": Region(
            lambda x, w, b: functional.group_norm(x, 2, w, b, eps=0.1),
            [(2, 4 * size, 3, 2), (4 * size,), (4 * size,)],
            [RowLayout(1, RowCut(2, ((2 * size, size),))), None, None],
        ),
        "norm of groups of no image": Region(
            lambda x: functional.group_norm(x * 2.0, 1),
            [(0, 2 * size, 3)],
            [RowLayout(1, RowCut(1, ((2 * size, size),)))],
        ),
        "bilinear outputs": Region(
            lambda x, y, w, b: functional.bilinear(x, y, w, b),
            [(2, 3, 4), (2, 3, 5), (2 * size, 4, 5), (2 * size,)],
            [None, None, RowLayout(0, RowCut(1, ((2 * size, size),))), RowLayout(0, RowCut(1, ((2 * size, size),)))],
        ),
        "bilinear features": Region(
            lambda x, y, w, b: functional.bilinear(x, y, w, b),
            [(2, 2 * size), (2, 5), (3, 2 * size, 5), (3,)],
            [RowLayout(1, RowCut(1, ((2 * size, size),))), None, RowLayout(1, RowCut(1, ((2 * size, size),))), None],
        ),
        "batch_norm": Region(
            _batch_normed,
            [(3, 2 * size, 5), (2 * size,), (2 * size,)],
            [RowLayout(1, RowCut(1, ((2 * size, size),))), None, None],
        ),
        "batch_norm of packed channels": Region(
            lambda x: _batch_normed(x, None, None),
            [(3, 4 * size)],
            [RowLayout(1, RowCut(2, ((2 * size, size),)))],
        ),
        "batch_norm of running statistics": Region(
            lambda x: functional.batch_norm(x, *(low + torch.arange(4 * size, dtype=x.dtype) for low in (0, 1))),
            [(3, 4 * size, 2)],
            [RowLayout(1, RowCut(2, ((2 * size, size),)))],
        ),
        "torch.batch_norm": Region(
            lambda x, w: torch.batch_norm(x, w, None, None, None, True, 0.1, 1e-3, False),
            [(3, 2 * size, 5), (2 * size,)],
            [RowLayout(1, RowCut(1, ((2 * size, size),))), None],
        ),
        "instance_norm": Region(
            lambda x, w, b: functional.instance_norm(x, weight=w, bias=b),
            [(3, 2 * size, 5), (2 * size,), (2 * size,)],
            [RowLayout(1, RowCut(1, ((2 * size, size),))), None, None],
        ),
        "instance_norm of running statistics": Region(
            _instance_normed,
            [(3, 2 * size, 5)],
            [RowLayout(1, RowCut(1, ((2 * size, size),)))],
        ),
        "norm of one group": Region(lambda x: functional.group_norm(x * 2.0, 1), [(3, 7)], [RowLayout(1, unequal)]),
        "outputs of divided features": Region(
            lambda x, w, b, v: functional.linear(x, w, b) + x @ v.t(),
            [(2, 3, n), (m, n), (m,), (m, n)],
            [RowLayout(2, cut), RowLayout(0, even), None, RowLayout(0, even)],
        ),
        "outputs of divided features, by an equation": Region(
            lambda x, w: torch.einsum("bnd,hde->bhne", x, w),
            [(2, 3, 7), (m, 7, 2)],
            [RowLayout(2, unequal), RowLayout(0, even)],
        ),
        "a convolution of divided channels by outputs": Region(
            lambda x, w, b: functional.conv1d(x, w, b),
            [(2, n, 4), (m, n, 2), (m,)],
            [RowLayout(1, cut), RowLayout(0, even), None],
        ),
        "gates of halves": Region(
            lambda x: functional.glu(x, 1), [(2, 2 * n, 3)], [RowLayout(1, RowCut(2 * cut.repeat, cut.segments))]
        ),
        "attention": Region(
            _attention,
            [(2, n, 3, 4), (2, n, 3, 4), (2, n, 3, 4), (draw.choice([1, n]), 3, 3)],
            [RowLayout(1, cut), RowLayout(1, cut), draw.choice([None, RowLayout(1, cut)]), None],
        ),
        "attention of groups": Region(
            lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            [(2, 12, 3, 4), *[(2, draw_keys, 3, 4) for draw_keys in [draw.choice([1, 2, 4, 6])] for _ in range(2)]],
            [RowLayout(1, RowCut(1, ((12, size),))), None, None],
        ),
        "attention of unequal numbers of heads": Region(
            lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            [(2, 6, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4)],
            [RowLayout(1, RowCut(1, ((6, size),))), None, None],
        ),
        "attention of groups that layouts cut": Region(
            lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            [(2, 2 * n, 3, 4), (2, n, 3, 4), (2, n, 3, 4)],
            [RowLayout(1, scaled(cut, 2)), draw.choice([None, RowLayout(1, cut)]), RowLayout(1, cut)],
        ),
        "multi-head attention": Region(
            _multi_head,
            [(3, 2, 8), (24, 8), (24,), (8, 8), (8,)],
            [None, *[RowLayout(0, RowCut(3, ((8, size),)))] * 2, RowLayout(1, RowCut(1, ((8, size),))), None],
        ),
        "convolutions": Region(
            lambda x, up, each, down, b: functional.conv1d(
                functional.conv1d(functional.conv1d(x, up, b), each, groups=m, padding=1), down
            ),
            [(2, 3, 6), (m, 3, 1), (m, 1, 3), (3, m, 1), (m,)],
            [None, RowLayout(0, even), None, RowLayout(1, even), None],
        ),
        "groups of a full image": Region(
            lambda x, w, b: functional.conv1d(x, w, b, groups=2 * size, padding=1),
            [(2, 4 * size, 3), (8 * size, 2, 3), (8 * size,)],
            [None, *[RowLayout(0, RowCut(1, ((8 * size, size),)))] * 2],
        ),
        "transposed convolution": Region(
            functional.conv_transpose1d, [(2, m, 6), (m, 3, 2), (3,)], [None, RowLayout(0, even), None]
        ),
        "weight norm": Region(
            lambda x, v, g: functional.linear(x, torch._weight_norm(v, g, 0)),
            [(2, 5), (m, 5), (m, 1)],
            [None, RowLayout(0, even), None],
        ),
        "biases of heads": Region(
            lambda x, slopes, table: (x + slopes.view(-1, 1, 1) * table).softmax(-1).transpose(1, 2).flatten(2),
            [(2, n, 3, 3), (n,), (3, 3)],
            [RowLayout(1, cut), None, None],
        ),
        "shared tensors": Region(
            lambda x, w: torch.cat([x * w, w.expand_as(x)], 0) * w, [(n, 3), (3,)], [RowLayout(0, cut), None]
        ),
        "heads": Region(
            lambda x, w, o: functional.linear(
                functional.linear(x, w).view(3, 4, -1).transpose(0, 1).contiguous().transpose(0, 1).reshape(3, -1), o
            ),
            [(3, 5), (8, 5), (5, 8)],
            [None, RowLayout(0, RowCut(1, ((8, size),))), RowLayout(1, RowCut(1, ((8, size),)))],
        ),
        "a whole tensor that changes": Region(
            lambda x, w: (lambda h: x + h + h.mul_(2.0) * x)(w * 1.0), [(3, n), (3, n)], [RowLayout(1, cut), None]
        ),
        "two parts": Region(torch.matmul, [(n, 5), (5, n)], [RowLayout(0, cut), RowLayout(1, cut)]),
        "a leaf of groups": Region(
            lambda x: x.view(4, 3, -1)[:, 0] * 2.0, [(12, 5)], [RowLayout(0, RowCut(1, ((12, heads.segments[0][1]),)))]
        ),
    }


def _normed_channels(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Norms with running statistics, which the last one takes."""
    first, second = ([torch.full((x.shape[1],), each, dtype=torch.float64) for each in (0.5, 2.0)] for _ in range(2))
    made = functional.batch_norm(x, *first, weight, bias, training=True)
    made = functional.instance_norm(made, *second, weight, use_input_stats=True)
    return functional.batch_norm(made, *second) * first[0].unsqueeze(-1)


def _with_buffer(x: Tensor, length: int) -> Tensor:
    buffer = torch.zeros(2, length, 1, dtype=torch.float64)
    with torch.no_grad():
        _ = functional.normalize(x[..., :1].detach(), dim=-1, eps=100.0, out=buffer)
    return x * buffer


REGIONS = sorted(regions(random.Random(0), 2))


REFUSED_REGIONS = (
    "two parts",
    "the greatest of all",
    "maxima of rows",
    "a loss of divided samples",
    "a loss whose weight torch leaves out",
    "a loss by its number",
)


def _scored(outputs: Any) -> Tensor:
    draw = torch.Generator().manual_seed(7)
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(  # type: ignore[return-value]
        (each * torch.randn(each.shape, generator=draw, dtype=torch.float64)).sum() for each in tensors
    )


def whole_or_refused(region: Region, size: int) -> bool:
    """Check that ranks which divide the tensors give whole outputs and gradients; return whether they can."""
    draw = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in region.shapes]
    leaves = [each.clone().requires_grad_() for each in values]
    want = region.function(*leaves)
    _scored(want).backward()  # type: ignore[no-untyped-call]

    def work(group: ThreadGroup) -> tuple[Any, list[Tensor]]:
        ranks = Ranks(group)
        mine = [each.clone().requires_grad_() for each in values]
        pairs = zip(mine, region.layouts, strict=True)
        given = [each if layout is None else make(own(each, layout, ranks), layout, ranks) for each, layout in pairs]
        got = region.function(*given)
        got = tuple(map(leave, got)) if isinstance(got, tuple) else leave(got)
        _scored(got).backward()  # type: ignore[no-untyped-call]
        return got, [each.grad if each.grad is not None else torch.zeros_like(each) for each in mine]

    try:
        runs = run_in_threads(size, work)
    except NoRuleError:
        return False
    for got, _ in runs:
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    for at, layout in enumerate(region.layouts):
        own_grads = [grads[at] for _, grads in runs]
        # gradients of plain tensors are complete on each rank; of parts they are summands
        for each in own_grads if layout is None else [torch.stack(own_grads).sum(0)]:
            torch.testing.assert_close(each, leaves[at].grad, rtol=1e-10, atol=1e-10)
    return True


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", REGIONS)
def test_a_region_gives_whole_outputs_and_gradients(name: str, size: int) -> None:
    found = [whole_or_refused(regions(random.Random(seed), size)[name], size) for seed in range(2)]
    assert any(found) == (name not in REFUSED_REGIONS)


@given(RANDOM, st.sampled_from([2, 4]), st.sampled_from(REGIONS), st.data())
def test_any_layouts_give_whole_outputs_and_gradients_or_raise(
    draw: random.Random, size: int, name: str, data: st.DataObject
) -> None:
    region = regions(draw, size)[name]
    layouts: list[RowLayout | None] = []
    for shape in region.shapes:
        dim = data.draw(st.sampled_from([None, *range(len(shape))]))
        lengths = [] if dim is None else [each for each in (1, 2, 3) if shape[dim] % (each * size) == 0]
        packs = data.draw(st.sampled_from(lengths or [0]))
        layouts.append(
            RowLayout(cast(int, dim), RowCut(packs, ((shape[cast(int, dim)] // packs, size),))) if packs else None
        )
    with suppress(RuntimeError):  # torch's own, of shapes that do not fit
        _ = whole_or_refused(region._replace(layouts=layouts), size)


LIST = Path(__file__).parent / "parts_functions.txt"


def functions() -> dict[str, str]:
    """Whether each function of torch that a tensor can override has a rule, by name."""
    found: dict[str, str] = {}
    for each in torch.overrides.get_testing_overrides():
        name = torch.overrides.resolve_name(each)
        if name:
            found[name] = "rule" if find_rule(each) else "refused"
    return found


def record() -> None:
    lines = sorted(f"{name} {kind}\n" for name, kind in functions().items())
    _ = LIST.write_text("".join(lines))


@pytest.mark.filterwarnings("ignore")  # of deprecated functions of torch
def test_functions_with_a_rule_are_those_of_the_list() -> None:
    listed = dict(line.rsplit(" ", 1) for line in LIST.read_text().splitlines())
    found = functions()
    changed = {name: kind for name, kind in found.items() if listed.get(name, "refused") != kind}
    assert not changed, "python tests/parallel/test_parts.py records them anew"
    kept = {name for name, kind in found.items() if kind == "rule" and not name.endswith("__")}
    words = {name.rpartition(".")[2] for name in kept}
    assert {"linear", "matmul", "view", "split", "scaled_dot_product_attention", "einsum", "size"} <= words


def a_part(shape: tuple[int, ...], dim: int) -> PartTensor:
    layout = RowLayout(dim, RowCut(1, ((shape[dim], 2),)))
    return make(own(torch.ones(shape), layout, alone(0, 2)), layout, alone(0, 2))


REFUSED: Mapping[str, tuple[str, Callable[[PartTensor], Any]]] = {
    "no rule": ("cdist", lambda t: torch.cdist(t, t)),
    "a spectrum of heads": ("fft_fft", lambda t: torch.fft.fft(t, dim=1)),
    "kernels of several rows": ("conv1d", lambda t: functional.conv1d(t.mT, torch.ones(3, 4, 3), padding=1)),
    "softmax over heads": ("softmax", lambda t: t.softmax(1)),
    "some heads": ("index_select", lambda t: t.index_select(1, torch.tensor([0, 2]))),
    "one head": ("__getitem__", lambda t: t[:, 1]),
    "a half of two heads": ("view", lambda t: t.view(2, 3, 2, 4).transpose(1, 2).reshape(2, 24)),
    "the memory of a kernel": ("data_ptr", lambda t: t.data_ptr()),
    "a value": ("item", lambda t: t[:1, :, :1].flatten().item()),
    "a product over heads": ("prod", lambda t: t.prod(1)),
    "a spread of complex numbers": ("var", lambda t: torch.complex(t, t).var(1)),
    "other rows beside": ("add", lambda t: t + torch.ones(5, 4)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_an_error_that_names_it(name: str) -> None:
    word, function = REFUSED[name]
    with pytest.raises(PrepareError) as caught:
        function(a_part((2, 6, 4), 1))
    assert word in caught.value.got
    assert "tensor_plan" in caught.value.fix
    assert caught.value.expected
    assert caught.value.where


def test_a_part_reports_the_whole_shape() -> None:
    part = a_part((2, 6, 4), 1)
    assert part.shape == part.size() == (2, 6, 4)
    assert (part.size(-2), part.shape[1], len(part), part.numel(), part.dim()) == (6, 6, 2, 48, 3)
    assert plain_of(part).shape == (2, 3, 4)
    assert "[2, 6, 4]" in repr(part)
    with torch._C.DisableTorchFunctionSubclass():
        assert part.shape == (2, 3, 4)


def test_a_copy_of_a_part_is_known_by_the_part_alone() -> None:
    """Plain rows that a copy makes on the way have the number of an object that another may have next."""
    part = make(torch.ones(2, 2), RowLayout(1, RowCut(1, ((4, 2),))), alone(1, 2))
    memo: dict[int, Any] = {}
    copied = copy.deepcopy([part, part], memo)
    assert copied[0] is copied[1] is memo[id(part)]
    assert copied[0].shape == (2, 4)
    assert not any(isinstance(each, Tensor) for number, each in memo.items() if number != id(part))


@pytest.mark.parametrize(
    "cut", [RowCut(2, ((5, 2),)), RowCut(2, ((5, -2),)), RowCut(5, ((2, 2),)), RowCut(2, ((4, 2), (1, 1)))]
)
def test_rows_of_repeated_segments_leave_in_order(cut: RowCut) -> None:
    whole = torch.arange(10.0)

    def work(group: ThreadGroup) -> Tensor:
        ranks = Ranks(group)
        return leave(make(whole[list(rows_of(cut, ranks.rank, 2))], RowLayout(0, cut), ranks))

    for found in run_in_threads(2, work):
        torch.testing.assert_close(found, whole)


def test_a_plain_tensor_enters_once_for_all_who_take_it() -> None:
    def work(group: ThreadGroup) -> tuple[int, Tensor | None]:
        ranks = Ranks(group)
        part = make(torch.ones(2, 3, dtype=torch.float64), RowLayout(1, RowCut(1, ((6, 2),))), ranks)
        x = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
        one, other = part * x, part + x
        first = ranks.enter(x)
        _ = ranks.begin()
        again = ranks.enter(x)
        leave(one + other).sum().backward()
        return int(first is again), x.grad

    for same, grad in run_in_threads(2, work):
        assert not same
        torch.testing.assert_close(grad, torch.full((2, 6), 2.0, dtype=torch.float64))


if __name__ == "__main__":
    record()
