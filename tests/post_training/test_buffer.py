# SPDX-License-Identifier: Apache-2.0
"""Whatever the order of answers, lost servers, discards, saves and kills: each prompt is used or discarded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

import accel
from accel.errors import DataError
from accel.post_training import (
    RolloutBuffer,
    RolloutGroup,
    SampleRow,
    Samples,
    Version,
    group_advantages,
    group_samples,
)
from accel.testing import simulate

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["start", "put", "put", "put", "take", "take", "requeue", "discard", "save", "kill"]),
        st.integers(0, 7),
    ),
    max_size=100,
)


def group(prompt: int) -> RolloutGroup:
    """Samples that show which prompt they are of."""
    rows = [SampleRow([prompt, prompt + at], 1, logprobs=[-0.5], prompt=prompt, sample=at) for at in range(2)]
    return RolloutGroup(Samples.of(rows, version=Version("a", prompt)), torch.tensor([1.0, 0.0]))


def assert_sound(buffer: RolloutBuffer, used: list[int], discarded: list[int]) -> None:
    listed = [*buffer.queue, *(each.prompt for each in buffer.flight), *(each.prompt for each in buffer.finished)]
    gone = used + discarded
    assert sorted(listed + gone) == list(range(buffer.next))
    assert (buffer.used, sum(buffer.discarded.values())) == (len(used), len(discarded))
    assert {buffer.status(each) for each in gone} <= {"used or discarded"}


class History:
    """A run by events, in which a kill goes back to the last save."""

    def __init__(self, buffer: RolloutBuffer) -> None:
        self.buffer, self.update = buffer, 0
        self.used, self.discarded = list[int](), list[int]()
        self.saved = (self.buffer, 0, list[int](), list[int]())

    def take(self) -> None:
        ready = self.buffer.is_ready(self.update)
        self.buffer, groups = self.buffer.take(self.update)
        assert bool(groups) == ready
        assert len(groups) in (0, self.buffer.batch)
        assert all(0 <= self.update - each.update <= self.buffer.max_staleness for each in groups)
        assert all(each.group.samples.prompts == (each.prompt, each.prompt) for each in groups)
        self.used += [each.prompt for each in groups]
        self.update += bool(groups)

    def run(self, event: str, at: int) -> None:
        flight = self.buffer.flight
        prompt = flight[at % len(flight)].prompt if flight else None
        if event == "start":
            self.buffer, _ = self.buffer.start(self.update, None if at == 7 else at)
        elif event == "take":
            self.take()
        elif event == "save":
            self.saved = (self.buffer, self.update, [*self.used], [*self.discarded])
        elif event == "kill":
            buffer, self.update, used, discarded = self.saved
            self.buffer, self.used, self.discarded = buffer.resumed(), [*used], [*discarded]
        elif prompt is not None and event == "put":
            self.buffer = self.buffer.put({prompt: group(prompt)})
        elif prompt is not None and event == "requeue":
            self.buffer = self.buffer.requeue(prompt)
        elif prompt is not None:
            self.buffer = self.buffer.discard(prompt, "equal" if at % 2 else "long")
            self.discarded.append(prompt)
        assert_sound(self.buffer, self.used, self.discarded)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_samples_are_grouped_by_prompt_in_any_order(order: list[int]) -> None:
    rows = [SampleRow([7, each], 1, logprobs=[-0.5], prompt=each % 2, sample=each // 2) for each in order]
    rewards = torch.tensor([float(each) for each in order])
    groups = group_samples(Samples.of(rows), rewards)
    assert {*groups} == {0, 1}
    for prompt, each in groups.items():
        assert each.samples.prompts == (prompt, prompt)
        assert each.rewards is not None
        assert torch.equal(each.samples.ids[:, 1].float(), each.rewards)
    assert all(each.rewards is None for each in group_samples(Samples.of(rows)).values())
    assert group_samples(Samples.of(rows).rows([]), torch.zeros(0)) == {}  # a rank without prompts
    for wrong in (rewards[:3], rewards[:, None]):
        with assert_raises(DataError, expected="one for each row"):
            group_samples(Samples.of(rows), wrong)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 3])
def test_rewards_that_are_not_finite_are_refused_before_they_wait(bad: float, at: int) -> None:
    rows = Samples.of([SampleRow([7, each], 1, prompt=each // 2, sample=each % 2) for each in range(4)])
    rewards = torch.arange(4.0)
    rewards[at] = bad
    calls: tuple[Any, ...] = (
        lambda given: group_samples(rows, given),
        lambda given: group_advantages(accel.single("cpu"), given, 2),
    )
    for call in calls:
        with assert_raises(DataError, got=f"in row {at}") as caught:
            call(rewards)
        fixed = {"torch": torch, "rewards": rewards}
        exec(str(caught.value.fix).split(", or correct")[0], fixed)
        _ = call(fixed["rewards"])


@settings(max_examples=share(4))
@given(EVENTS, st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_each_prompt_is_used_or_discarded_once(
    events: list[tuple[str, int]], batch: int, staleness: int, in_order: bool
) -> None:
    history = History(RolloutBuffer(batch, staleness, in_order))
    for event, at in events:
        history.run(event, at)
    target = history.buffer.next
    for _ in range(2 * len(events) + 4):  # what was begun can be finished
        for event in ("start", *["put"] * batch * (staleness + 1), "take"):
            history.run(event, 7)
    assert history.buffer.next > target or not events
    assert not [each for each in range(target) if history.buffer.status(each) != "used or discarded"]
    if in_order:
        assert history.used == sorted(history.used)


@settings(max_examples=share(1))
@given(
    st.lists(st.integers(0, 7), min_size=30, max_size=30),
    st.lists(st.integers(0, 7), min_size=30, max_size=30),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_in_order_a_run_does_not_depend_on_which_ended_first(
    one: list[int], other: list[int], batch: int, staleness: int
) -> None:
    def run(order: list[int]) -> list[list[tuple[int, int]]]:
        buffer, seen = RolloutBuffer(batch, staleness), list[list[tuple[int, int]]]()
        for update, at in enumerate(order):
            buffer, _ = buffer.start(update)
            while not buffer.is_ready(update):
                prompt = buffer.flight[at % len(buffer.flight)].prompt
                buffer = buffer.put({prompt: group(prompt)})
            buffer, groups = buffer.take(update)
            seen.append([(each.prompt, each.update) for each in groups])
        return seen

    assert [[prompt for prompt, _ in step] for step in run(one)] == [
        [prompt for prompt, _ in step] for step in run(other)
    ]


def test_a_run_killed_with_finished_groups_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def rank(ctx: accel.DistContext, steps: int) -> list[Any]:
        state: Any = {"buffer": RolloutBuffer(2, max_staleness=1), "seen": [], "update": 0}
        if accel.latest_checkpoint(tmp_path) is not None:
            state = accel.load_state(ctx, tmp_path, state)
            state["buffer"] = state["buffer"].resumed()
        while state["update"] < steps:
            buffer, prompts = state["buffer"].start(state["update"])
            buffer = buffer.put({each: group(each) for each in prompts})
            buffer, groups = buffer.take(state["update"])
            seen = [[each.prompt, each.update, each.group.samples.ids.tolist()] for each in groups]
            state = {"buffer": buffer, "seen": [*state["seen"], seen], "update": state["update"] + 1}
            assert all(each.group.samples.version == Version("a", each.prompt) for each in groups)
            if state["update"] == 2:
                accel.save_state(ctx, tmp_path, state, step=2)
        return state["seen"]

    whole = simulate(lambda ctx: rank(ctx, 5), 2)
    assert simulate(lambda ctx: rank(ctx, 5), 3) == whole[:1] * 3  # from the save in step 2, on other ranks


def test_slips_are_told_with_the_state_of_the_prompt() -> None:
    buffer, prompts = RolloutBuffer(2).start(0)
    later = buffer.put({prompts[0]: group(0)})
    slips: list[tuple[str, Any]] = [
        ("prompt 0 is finished", lambda: later.put({0: group(0)})),
        ("prompt 9 is waiting", lambda: later.put({9: group(9)})),
        ("prompt 0 is finished", lambda: later.requeue(0)),
        ("prompt 5 is waiting", lambda: later.discard(5, "long")),
        ("update=-1, and prompts [0] of later ones", lambda: later.take(-1)),
    ]
    for said, call in slips:
        with pytest.raises(DataError) as caught:
            call()
        assert caught.value.got == said
    for wrong in ({1: group(1).samples}, [group(1)]):
        with assert_raises(accel.errors.ConfigError, fix="group_samples"):
            later.put(wrong)  # type: ignore[arg-type]
    assert later.put({1: group(1)}).is_ready(0)  # the line of the fix carries the record
    with assert_raises(accel.errors.ConfigError, where="start"):
        buffer.start(0, -1)
    assert buffer.requeue(1, 1).start(0, 4)[1] == (1,)  # queued once
    with assert_raises(accel.errors.ConfigError, where="batch"):
        RolloutBuffer(batch=0)
    with assert_raises(DataError, where="max_staleness"):
        RolloutBuffer(batch=1, max_staleness=-1)


def test_a_record_encodes_and_decodes() -> None:
    buffer, _ = RolloutBuffer(2, 1).start(3)
    buffer = buffer.discard(0, "long").requeue(1)
    again = msgspec.json.decode(
        msgspec.json.encode(msgspec.structs.asdict(buffer) | {"finished": []}), type=RolloutBuffer
    )
    assert (again.queue, again.flight, again.discarded) == (buffer.queue, buffer.flight, {"long": 1})
