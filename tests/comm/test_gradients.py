# SPDX-License-Identifier: Apache-2.0
"""Collectives with gradients against autograd through the whole tensors in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import Tensor

import accel
from accel.comm import copied, exchanged, gathered, gathered_summed, own_part, scattered, start_shift, summed
from accel.testing import Simulator, simulate

Inputs = Sequence[Tensor]
Outputs = Sequence[Tensor]


def _draws(seed: int, size: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for _ in range(size)]


def _whole(function: Callable[[Inputs], Outputs], inputs: Inputs, weights: Inputs) -> tuple[Outputs, Outputs]:
    """Outputs and gradients of all ranks, by autograd through the function of all ranks' inputs."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    outputs = function(leaves)
    torch.autograd.backward(sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True)))
    return [out.detach() for out in outputs], [each.grad if each.grad is not None else each * 0 for each in leaves]


def _spread(ranks: Simulator, call: Callable[..., Tensor], inputs: Inputs, weights: Inputs) -> tuple[Outputs, Outputs]:
    def rank(ctx: accel.DistContext) -> tuple[Tensor, Tensor]:
        leaf = inputs[ctx.rank].clone().requires_grad_()
        out = call(leaf, accel.group_of(ctx, "dp"))
        (out * weights[ctx.rank]).sum().backward()
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    outputs, grads = zip(*ranks.run(rank, len(inputs)), strict=True)
    return outputs, grads


def assert_near(first: tuple[Outputs, Outputs], second: tuple[Outputs, Outputs]) -> None:
    torch.testing.assert_close(list(first[0]), list(second[0]), rtol=0, atol=1e-13)
    torch.testing.assert_close(list(first[1]), list(second[1]), rtol=0, atol=1e-13)


sizes = st.integers(2, 4)
dims = st.integers(0, 2)


@given(size=sizes, dim=dims, seed=st.integers(0, 99))
@settings(max_examples=share(0.24))
def test_what_ranks_use_each_in_its_own_way(ranks, size, dim, seed):
    shape = [2, 3, 2]
    parts = _draws(seed, size, *shape)
    long = list(shape)
    long[dim] *= size
    weights = _draws(seed + 1, size, *long)
    both = _whole(lambda each: [torch.cat(list(each), dim)] * size, parts, weights)
    assert_near(_spread(ranks, lambda x, group: gathered_summed(x, dim, group), parts, weights), both)
    wide = _draws(seed + 2, size, *long)
    both = _whole(lambda each: torch.stack(list(each)).sum(0).chunk(size, dim), wide, parts)
    assert_near(_spread(ranks, lambda x, group: scattered(x, dim, group), wide, parts), both)


@given(size=sizes, dim=dims, seed=st.integers(0, 99))
@settings(max_examples=share(0.24))
def test_what_is_alike_on_all_ranks(ranks, size, dim, seed):
    """Consumers that are alike run once in one process, and on every rank here: gradients are those of one run."""
    shape = [2, 3, 2]
    parts = _draws(seed, size, *shape)
    long = list(shape)
    long[dim] *= size
    alike = _draws(seed + 1, 1, *long) * size
    once = [alike[0]] + [alike[0] * 0] * (size - 1)
    both = _whole(lambda each: [torch.cat(list(each), dim)] * size, parts, once)
    assert_near(_spread(ranks, lambda x, group: gathered(x, dim, group), parts, alike), both)
    summands = _draws(seed + 2, size, *long)
    both = _whole(lambda each: [torch.stack(list(each)).sum(0)] * size, summands, once)
    assert_near(_spread(ranks, summed, summands, alike), both)


@given(size=sizes, dim=dims, seed=st.integers(0, 99))
@settings(max_examples=share(0.24))
def test_gradients_of_a_tensor_that_is_alike_are_summed(ranks, size, dim, seed):
    shape = [2, 3, 2]
    shape[dim] *= size
    alike = _draws(seed, 1, *shape)
    weights = _draws(seed + 1, size, *shape)
    outputs, [grad] = _whole(lambda each: [each[0]] * size, alike, weights)
    assert_near(_spread(ranks, copied, alike * size, weights), (outputs, [grad] * size))
    chunks = [each.chunk(size, dim)[0] for each in weights]
    outputs, [grad] = _whole(lambda each: each[0].chunk(size, dim), alike, chunks)
    assert_near(
        _spread(ranks, lambda x, group: own_part(x, dim, group), alike * size, chunks), (outputs, [grad] * size)
    )


@given(data=st.data(), size=sizes, seed=st.integers(0, 99))
@settings(max_examples=share(0.24))
def test_rows_travel_in_any_numbers(ranks, data, size, seed):
    counts = data.draw(
        st.lists(st.lists(st.integers(0, 3), min_size=size, max_size=size), min_size=size, max_size=size)
    )
    rows = [_draws(seed + at, 1, sum(row), 2)[0] for at, row in enumerate(counts)]
    back = [list(column) for column in zip(*counts, strict=True)]
    weights = [_draws(seed + 50 + at, 1, sum(row), 2)[0] for at, row in enumerate(back)]

    def whole(each: Inputs) -> Outputs:
        split = [x.split(row) for x, row in zip(each, counts, strict=True)]
        return [torch.cat(list(column)) for column in zip(*split, strict=True)]

    def call(x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        return exchanged(x, counts[group.rank()], back[group.rank()], group)

    assert_near(_spread(ranks, call, rows, weights), _whole(whole, rows, weights))


@pytest.mark.parametrize("call", [gathered, gathered_summed, scattered])
@pytest.mark.parametrize("shape", [(1, 2, 4), (2, 1, 2), (2, 2, 1), (2,)])
def test_what_comes_of_a_collective_can_be_changed_in_place(ranks, call, shape):
    """With one row the parts lie in memory one behind the other, so nothing is copied."""
    parts = _draws(3, 2, *shape)
    for dim in (at for at, length in enumerate(shape) if call is not scattered or length % 2 == 0):
        weights = [torch.ones(())] * 2
        before = _spread(ranks, lambda x, group, at=dim: call(x, at, group) * 2, parts, weights)
        assert_near(_spread(ranks, lambda x, group, at=dim: call(x, at, group).mul_(2), parts, weights), before)


@given(size=sizes, seed=st.integers(0, 99))
@settings(max_examples=share(0.12))
def test_gradients_of_gradients_are_those_of_one_process(ranks, size, seed):
    """All but `exchanged` in a row, with layers of each rank's own between them."""
    [x] = _draws(seed, 1, 2 * size, 3)
    weights = _draws(seed + 1, size, 3, 3)

    def slope_squared(out: Tensor, x: Tensor) -> None:
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        slope.square().sum().backward()

    def rank(ctx: accel.DistContext) -> tuple[Tensor | None, Tensor | None]:
        group, own = accel.group_of(ctx, "dp"), x.clone().requires_grad_()
        weight = weights[ctx.rank].clone().requires_grad_()
        wide = gathered_summed(own_part(own, 0, group).tanh(), 0, group)
        narrow = gathered(scattered((wide @ weight).tanh(), 0, group).tanh(), 0, group)
        slope_squared(summed((copied(narrow, group) @ weight).tanh(), group), own)
        return own.grad, weight.grad

    whole, leaves = x.clone().requires_grad_(), [each.clone().requires_grad_() for each in weights]
    middle = torch.stack([(whole.tanh() @ each).tanh() for each in leaves]).sum(0).tanh()
    slope_squared(torch.stack([(middle @ each).tanh() for each in leaves]).sum(0), whole)
    for found, leaf in zip(ranks.run(rank, size), leaves, strict=True):
        torch.testing.assert_close(found, (whole.grad, leaf.grad), rtol=0, atol=1e-11)


def test_tensors_go_round_the_ring():
    def rank(ctx):
        group = accel.group_of(ctx, "dp")
        own = torch.full((2, 3), float(ctx.rank)), torch.full((4,), -float(ctx.rank))
        return [[each.unique().item() for each in start_shift(own, by, group)()] for by in (1, -1, 2)]

    for rank_, found in enumerate(simulate(rank, 4, default_group=True)):
        sources = [(rank_ - 1) % 4, (rank_ + 1) % 4, (rank_ - 2) % 4]
        assert found == [[source, -source] for source in sources]
