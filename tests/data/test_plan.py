# SPDX-License-Identifier: Apache-2.0
"""Who gets which samples: every one once, as equally as can be, the same global batches on any number of ranks."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

from accel import Cursor
from accel.data import SampleCount
from accel.data._shards import EpochPlan, Shard, shard
from accel.errors import ConfigError, DataError

TAILS = ("ragged", "pad", "drop")
worlds = st.integers(1, 9)
relaxed = settings(deadline=None, max_examples=share(2))


@st.composite
def plans(draw):
    samples = draw(st.integers(1, 200))
    tail = draw(st.sampled_from(TAILS))
    most = samples if tail == "drop" else 300
    return EpochPlan(samples=samples, global_batch=draw(st.integers(1, most)), tail=tail)


def _epoch(plan: EpochPlan, world: int, cursor: Cursor | None = None) -> list[list[Shard]]:
    """The steps of the rest of an epoch; in each, the shards of all ranks."""
    cursor = cursor or Cursor()
    steps, epoch = [], cursor.epoch
    while cursor.epoch == epoch:
        steps.append([shard(plan, cursor, rank, world) for rank in range(world)])
        assert len({part.next for part in steps[-1]}) == 1  # ranks never part ways
        cursor = steps[-1][0].next
    return steps


def _positions(step: list[Shard]) -> list[int]:
    return [position for part in step for position in range(part.start, part.stop)]


@relaxed
@given(plan=plans(), world=worlds, seed=st.integers(0, 9), epoch=st.integers(0, 5))
def test_an_epoch_is_every_sample_once_in_as_many_steps_on_every_rank(plan, world, seed, epoch):
    steps = _epoch(plan, world, Cursor(seed=seed, epoch=epoch))
    taken = [position for step in steps for position in _positions(step)]
    assert taken == list(range(plan.end))
    assert plan.end == plan.samples or (plan.tail == "drop" and 0 <= plan.samples - plan.end < plan.global_batch)
    assert len(steps) == plan.steps
    assert [part.is_last for step in steps for part in step] == [
        at == len(steps) - 1 for at in range(len(steps)) for _ in range(world)
    ]
    assert steps[-1][0].next == Cursor(seed=seed, epoch=epoch + 1)


@relaxed
@given(plan=plans(), world=worlds)
def test_parts_of_a_step_differ_by_at_most_one(plan, world):
    for step in _epoch(plan, world):
        sizes = [part.stop - part.start for part in step]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == [part.valid for part in step]
        assert {part.valid.world for part in step} == {sum(sizes)}
        assert all(part.rows >= max(part.valid, 1) for part in step)
        if plan.tail == "pad":
            assert {part.rows for part in step} == {-(-plan.global_batch // world)}
        else:
            assert all(part.rows == max(part.valid, 1) for part in step)


@relaxed
@given(plan=plans(), worlds_=st.tuples(worlds, worlds))
def test_global_batches_are_the_same_on_any_number_of_ranks(plan, worlds_):
    one, other = ([_positions(step) for step in _epoch(plan, world)] for world in worlds_)
    assert one == other


@relaxed
@given(plan=plans(), first=worlds, second=worlds, data=st.data())
def test_a_run_that_stops_goes_on_as_if_it_had_not(plan, first, second, data):
    whole = _epoch(plan, first)
    k = data.draw(st.integers(0, len(whole) - 1))
    cursor = whole[k - 1][0].next if k else Cursor()
    cursor = msgspec.json.decode(msgspec.json.encode(cursor), type=Cursor)
    assert _epoch(plan, first, cursor) == whole[k:]
    assert [_positions(step) for step in _epoch(plan, second, cursor)] == [_positions(step) for step in whole[k:]]


@relaxed
@given(plan=plans(), world=worlds, beyond=st.integers(0, 100))
def test_a_cursor_beyond_the_end_is_refused(plan, world, beyond):
    at = plan.end + beyond
    with assert_raises(DataError, expected=f"fewer than {plan.end} ", got=f"{at} consumed", fix="another dataset"):
        shard(plan, Cursor(consumed=plan.end + beyond), 0, world)


@relaxed
@given(here=st.integers(0, 100), world=st.integers(0, 1000), copies=st.integers(1, 4))
def test_a_count_is_an_integer_that_remembers_the_world(here, world, copies):
    count = SampleCount(here, world, copies)
    assert count == here
    assert count + 1 == here + 1
    for again in (copy.copy(count), copy.deepcopy(count), pickle.loads(pickle.dumps(count))):
        assert (again, again.world, again.copies, type(again)) == (here, world, copies, SampleCount)


@pytest.mark.parametrize("value", [-1, 1.5, "0", None, True, 2**63])
@pytest.mark.parametrize("name", ["seed", "epoch", "consumed"])
def test_a_cursor_holds_counts(name, value):
    with assert_raises(ConfigError, where=rf"Cursor\.{name}"):
        Cursor(**{name: value})


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"samples": 0}, DataError, {"problem": "empty"}),
        ({"global_batch": 0}, ConfigError, {"expected": "an integer from 1"}),
        ({"global_batch": -4}, ConfigError, {"got": "^-4$"}),
        (
            {"global_batch": 11, "tail": "drop"},
            DataError,
            {"problem": "drops the full epoch", "expected": "at most 10"},
        ),
        ({"tail": "padd"}, ConfigError, {"expected": "ragged, pad, drop", "got": "'padd'", "fix": "`pad`"}),
        ({"tail": None}, ConfigError, {"expected": "ragged, pad, drop"}),
    ],
)
def test_a_plan_that_cannot_be_is_refused(fields, error, said):
    with assert_raises(error, **said):
        EpochPlan(**{"samples": 10, "global_batch": 4} | fields)
