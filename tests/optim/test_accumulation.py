# SPDX-License-Identifier: Apache-2.0
"""The accumulation window: where it ends, what it counts, and the calls it refuses."""

from __future__ import annotations

import msgspec
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

from accel import Accumulation
from accel.errors import ConfigError, StepError

relaxed = settings(deadline=None, max_examples=share(1.2))


def _epoch(accum: Accumulation, micros: int) -> tuple[Accumulation, list[int]]:
    """Walk an epoch of micro-batches as the training loop does; the sizes of its windows."""
    windows, size = [], 0
    for micro in range(micros):
        accum = accum.next(last=micro == micros - 1)
        size += 1
        assert accum.micro == size
        if accum.sync:
            windows.append(size)
            accum, size = accum.close(stepped=True), 0
    return accum, windows


@relaxed
@given(steps=st.integers(1, 9), epochs=st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_windows_are_full_save_for_the_last_of_an_epoch(steps, epochs):
    accum, updates = Accumulation(steps=steps), 0
    for micros in epochs:
        accum, windows = _epoch(accum, micros)
        assert sum(windows) == micros
        assert windows[:-1] == [steps] * (len(windows) - 1)
        assert 1 <= windows[-1] <= steps
        updates += len(windows)
        assert accum == Accumulation(steps=steps, updates=updates)  # nothing is carried into the next epoch


@relaxed
@given(
    weights=st.lists(st.floats(0, 100), min_size=1, max_size=6),
    known=st.lists(st.booleans(), min_size=6, max_size=6),
    read=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_weights_add_up_whether_the_world_knows_them_or_only_this_rank(weights, known, read):
    accum = Accumulation(steps=len(weights))
    for weight, world, number in zip(weights, known, read, strict=False):
        own = None if world else weight if number else torch.tensor(weight, dtype=torch.float64)
        accum = accum.next().add(scale=4.0, unit=1.0, world=weight if world else 0.0, local=own)
    mine = 0.0 if accum.own_weight is None else float(accum.own_weight)
    assert accum.world_weight + mine == pytest.approx(sum(weights))
    assert (accum.own_weight is None) == all(known[: len(weights)])
    shared = accum.share(torch.tensor(mine, dtype=torch.float64))
    assert shared.world_weight.item() == pytest.approx(sum(weights))
    assert shared.own_weight is None
    assert accum.scale == 4.0
    assert accum.sync


def test_records_are_new_and_the_old_stay():
    start = Accumulation(steps=2)
    begun = start.next()
    begun.add(scale=1.0, unit=1.0, world=5.0)
    assert start == Accumulation(steps=2)
    assert (begun.micro, begun.world_weight) == (1, 0.0)
    with pytest.raises(AttributeError):
        start.micro = 1


@relaxed
@given(steps=st.integers(1, 9), updates=st.integers(0, 99), stepped=st.booleans(), finite=st.booleans())
def test_closing_counts_what_happened_and_forgets_the_window(steps, updates, stepped, finite):
    accum = Accumulation(steps=steps, updates=updates, skipped=3).next(last=True).add(scale=2.0, unit=1.0, world=1.0)
    after = accum.close(stepped=stepped, finite=finite)
    assert after == Accumulation(steps=steps, updates=updates + stepped, skipped=3 + (not finite))
    after.check_saveable()
    assert msgspec.structs.replace(accum, sync_each_batch=True).close(stepped=stepped).sync_each_batch
    assert msgspec.json.decode(msgspec.json.encode(after), type=Accumulation) == after


def test_a_window_that_has_ended_wants_its_step():
    with assert_raises(StepError, got="micro-batch 2 of 2", expected="optimizer_step"):
        Accumulation(steps=2).next().next().next()


def test_a_backward_belongs_into_a_window_of_one_scale():
    with assert_raises(StepError, expected=r"accum.next\(last=batch.is_last\)"):
        Accumulation().add(scale=1.0, unit=1.0, world=1.0)
    begun = Accumulation(steps=2).next().add(scale=2.0, unit=1.0, world=1.0)
    with assert_raises(StepError, problem="loss scale changed", expected="2.0", got="4.0"):
        begun.next().add(scale=4.0, unit=1.0, world=1.0)


def test_an_unfinished_window_cannot_be_saved():
    with assert_raises(ConfigError, got="micro-batch 1 of 4", fix="Save after optimizer_step"):
        Accumulation(steps=4).next().check_saveable()
    Accumulation(steps=4).check_saveable()


@pytest.mark.parametrize("steps", [0, -1])
def test_a_step_has_micro_batches(steps):
    with assert_raises(ConfigError, expected="an integer from 1", got=f"^{steps}$"):
        Accumulation(steps=steps)
