# SPDX-License-Identifier: Apache-2.0
"""`broadcast` gives all ranks one rank's tensors, and leaves what they had as it was."""

from __future__ import annotations

import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from leaves import form_of, tensors_of
from profiles import share

import accel
from accel.errors import CollectiveMismatch, ConfigError
from accel.testing.strategies import tensors as any_tensor, trees
from accel.tree import map_tensors

relaxed = settings(deadline=None, max_examples=share(1.2))


@relaxed
@given(size=st.integers(1, 6), tree=trees(any_tensor()), big=st.booleans(), data=st.data())
def test_all_get_the_tensors_of_the_source(ranks, size, tree, big, data):
    src = data.draw(st.integers(0, size - 1))
    tree = [tree, torch.arange(20_000 if big else 3)]
    inputs = [tree if rank == src else map_tensors(torch.zeros_like, tree) for rank in range(size)]
    before = map_tensors(torch.clone, inputs)
    for result in ranks.run(lambda ctx: accel.broadcast(ctx, inputs[ctx.rank], src=src), size):
        assert type(result) is list
        assert form_of(result) == form_of(tree)
        for one, other in zip(tensors_of(result), tensors_of(tree), strict=True):
            assert not one.requires_grad
            assert one.data_ptr() != other.data_ptr() or not one.numel()
            torch.testing.assert_close(one, other.detach(), rtol=0, atol=0, equal_nan=True)
    for one, other in zip(tensors_of(inputs), tensors_of(before), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_an_empty_tensor_of_any_strides_is_sent_beside_a_large_one(ranks):
    tree = [torch.ones(4, 2)[:0, 0], torch.arange(20_000)]
    for one, other in ranks.run(lambda ctx: accel.broadcast(ctx, tree), 2):
        assert one.shape == (0,)
        assert torch.equal(other, tree[1])


def test_a_source_without_a_rank_is_refused_on_every_rank(ranks):
    def rank(ctx):
        with assert_raises(
            ConfigError, problem="there is no such rank", expected="0 to 2", got="3", where="broadcast, src="
        ):
            accel.broadcast(ctx, torch.ones(1), src=3 if ctx.rank == 1 else 0)
        return True

    assert ranks.run(rank, 3) == [True] * 3


def test_ranks_without_the_structure_are_told_of(ranks):
    def rank(ctx):
        with assert_raises(
            CollectiveMismatch, expected=r"rank 0: broadcast.*\(\$: dict\)", got=r"rank 1: .*\(\$: NoneType\)"
        ):
            accel.broadcast(ctx, None if ctx.rank else {"a": torch.ones(1)})
        return True

    assert ranks.run(rank, 2) == [True] * 2
