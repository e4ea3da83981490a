# SPDX-License-Identifier: Apache-2.0
"""accel's own collectives on generated trees, worlds, schedules and faults."""

from __future__ import annotations

import itertools
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings, strategies as st
from leaves import form_of, tensors_of
from profiles import share

import accel
from accel.testing import Deadlock, Fault, FaultNotReached, InjectedFault, strategies as sim

relaxed = settings(deadline=None, max_examples=share(2))

FLOATS = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
REDUCTIONS = {
    "sum": FLOATS + INTEGERS + COMPLEX,
    "mean": (torch.float32, torch.float64, *COMPLEX),
    "max": (*FLOATS, *INTEGERS, torch.bool),
    "min": (*FLOATS, *INTEGERS, torch.bool),
    "product": (torch.float32, torch.float64, torch.int64, torch.int32),
}
COMBINE = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "mean": lambda stacked: stacked.sum(0) / len(stacked),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "product": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    raw = [tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*raw)


def columns(trees: list[Any]) -> list[list[torch.Tensor]]:
    """The tensors of all ranks at each place of the trees."""
    return [list(column) for column in zip(*map(tensors_of, trees), strict=True)]


@relaxed
@given(trees=sim.rank_trees(special=True), seed=sim.schedules())
def test_gather_joins_rows_bit_by_bit(ranks, trees, seed):
    everyone = ranks.run(lambda ctx: accel.gather(ctx, trees[ctx.rank]), len(trees), seed=seed)
    expected = [
        torch.cat([leaf.reshape(1) if leaf.ndim == 0 else leaf for leaf in column]) for column in columns(trees)
    ]
    for gathered in everyone:
        assert form_of(gathered) == form_of(trees[0])
        assert all(map(same_bits, tensors_of(gathered), expected))


@relaxed
@given(data=st.data(), op=st.sampled_from(sorted(REDUCTIONS)), seed=sim.schedules())
def test_reduce_combines_element_by_element(ranks, data, op, seed):
    trees = data.draw(sim.rank_trees(ragged=False, dtypes=REDUCTIONS[op]))
    everyone = ranks.run(lambda ctx: accel.reduce(ctx, trees[ctx.rank], op), len(trees), seed=seed)
    expected = [COMBINE[op](torch.stack(column)) for column in columns(trees)]
    for reduced in everyone:
        assert form_of(reduced) == form_of(trees[0])
        for got, wanted in zip(tensors_of(reduced), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6 if op == "mean" else 0, atol=0)


@relaxed
@given(trees=sim.rank_trees(), seed=sim.schedules())
def test_collectives_leave_what_they_were_given_alone(ranks, trees, seed):
    before = [leaf.clone() for tree in trees for leaf in tensors_of(tree)]
    ranks.run(lambda ctx: accel.gather(ctx, trees[ctx.rank]), len(trees), seed=seed)
    assert all(map(same_bits, before, [leaf for tree in trees for leaf in tensors_of(tree)]))


def train(ctx: accel.DistContext) -> list[int]:
    """Three calls on each rank."""
    total = accel.reduce(ctx, torch.tensor([ctx.rank]))
    accel.wait_for_everyone(ctx)
    return accel.gather(ctx, total).tolist()


@relaxed
@given(data=st.data(), world=sim.worlds(min_size=2, max_size=5))
def test_a_fault_ends_in_its_own_error_or_changes_nothing(ranks, data, world):
    fault: Fault = data.draw(sim.faults(world.size, calls=3))
    straight = ranks.run(train, world.size, seed=world.seed)
    expected = {"raise": InjectedFault, "vanish": Deadlock, "terminate": Deadlock}
    if fault.action == "delay":
        assert ranks.run(train, world.size, seed=world.seed, faults=[fault]) == straight
    else:
        with pytest.raises(expected[fault.action]) as caught:
            ranks.run(train, world.size, seed=world.seed, faults=[fault])
        assert f"rank {fault.rank}" in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("action", get_args(get_type_hints(Fault)["action"]))
def test_a_save_that_fails_anywhere_leaves_the_former_checkpoint_or_the_new_one(ranks, tmp_path, action, rank):
    def save(ctx: accel.DistContext, step: int) -> None:
        accel.save_state(ctx, tmp_path, {"step": step}, step=step, keep=2)

    def load(ctx: accel.DistContext) -> object:
        found = accel.latest_checkpoint(tmp_path)
        assert found is not None
        return accel.load_state(ctx, found, {"step": 0})["step"]

    ranks.run(lambda ctx: save(ctx, 1), 2)
    former, ends = 1, set()
    for call in itertools.count():
        new = call + 2
        try:
            ranks.run(lambda ctx, new=new: save(ctx, new), 2, faults=[Fault(rank, call, action)])
            ends.add("saved")
        except (InjectedFault, Deadlock):
            ends.add("failed")
        except FaultNotReached:
            break
        [found, same] = ranks.run(load, 2)
        assert found == same
        assert found == new if "saved" in ends else found in (former, new)
        former = found
    assert ends == ({"saved"} if action == "delay" else {"failed"})
    assert ranks.run(load, 2) == [new, new]
