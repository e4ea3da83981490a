# SPDX-License-Identifier: Apache-2.0
"""`batches(repeat=True)` is the loop over epochs that ends itself by `break`: sample for sample, from any position."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch.utils.data import DataLoader, IterableDataset

import accel
from accel.errors import ConfigError, StepError
from accel.testing import Simulator


class Case(NamedTuple):
    """A generated run.

    Attributes:
        samples, size, world, accumulation: of data and ranks.
        streamed: whether the loader reads a stream.
        skipped: windows, counted over the run, whose gradients are not finite.
        early: micro-batches, counted over the run, that end their window before it is full.
        stop, steps: optimizer steps of the first part of the run, and of the whole.
    """

    samples: int
    size: int
    world: int
    accumulation: int
    streamed: bool
    skipped: frozenset[int]
    early: frozenset[int]
    stop: int
    steps: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    steps = draw(st.integers(0, 7))
    return Case(
        samples=draw(st.integers(1, 11)),
        size=draw(st.integers(1, 4)),
        world=draw(st.integers(1, 3)),
        accumulation=draw(st.integers(1, 3)),
        streamed=draw(st.booleans()),
        skipped=draw(st.frozensets(st.integers(0, 6), max_size=3)),
        early=draw(st.frozensets(st.integers(0, 9), max_size=3)),
        stop=draw(st.integers(0, steps)),
        steps=steps,
    )


class Numbers(IterableDataset[int]):
    """The samples as a stream."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Run:
    """One rank's run, which lists the samples of every batch."""

    def __init__(self, ctx: accel.DistContext, case: Case) -> None:
        self.ctx, self.case = ctx, case
        if case.streamed:
            plain = DataLoader(Numbers(case.samples), batch_size=case.size)
            self.loader: Any = accel.prepare_loader(ctx, plain, stream="elements")
        else:
            self.loader = accel.prepare_loader(ctx, DataLoader(range(case.samples), case.size, shuffle=True))
        net = torch.nn.Linear(1, 1, dtype=torch.float64)
        torch.nn.init.ones_(net.weight)
        torch.nn.init.zeros_(net.bias)
        self.model = accel.prepare_model(ctx, net)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        self.taken: list[tuple[int, list[int]]] = []
        self.windows = 0

    def batch(self, state: accel.TrainState, batch: accel.Batch) -> accel.TrainState:
        """The body of the loop."""
        state = state.next(batch, last=len(self.taken) in self.case.early)
        self.taken.append((state.updates, batch.data[: batch.valid].tolist()))
        with accel.accumulate(self.ctx, state, self.model):
            factor = float("nan") if self.windows in self.case.skipped else 1.0
            state = accel.backward(self.ctx, self.model(batch.data.double()[:, None]).mean() * factor, state)
        if state.sync:
            self.windows += 1
            state = accel.optimizer_step(self.ctx, self.optimizer, state, nonfinite="skip")
        return state

    def nested(self, state: accel.TrainState, steps: int) -> accel.TrainState:
        """Train by two loops and a `break`."""
        while state.updates < steps:
            for batch in accel.batches(self.ctx, self.loader, state):
                state = self.batch(state, batch)
                if state.updates == steps:
                    break
        return state

    def repeated(self, state: accel.TrainState, steps: int) -> accel.TrainState:
        """Train by one loop."""
        batches = accel.batches(self.ctx, self.loader, state, repeat=True)
        while state.updates < steps:
            state = self.batch(state, next(batches))
        return state


def assert_law(ctx: accel.DistContext, case: Case) -> None:
    ways = []
    for way in (Run.nested, Run.repeated):
        run = Run(ctx, case)
        start = accel.train_state(ctx, seed=3, accumulation=case.accumulation)
        middle = way(run, start, case.stop)
        ways.append((way(run, middle, case.steps), run.taken, run.windows, accel.get_state_dict(ctx, run.model)))
    assert str(ways[0]) == str(ways[1])  # NaN is like itself, and records print all of their fields
    assert ways[1][0].updates == case.steps


@settings(deadline=None, max_examples=share(0.4))
@given(case=cases())
def test_it_is_the_nested_loop_sample_for_sample_also_where_windows_are_skipped(case: Case) -> None:
    logging.getLogger("accel.data").disabled = True  # the nested loop's remark on its `break`
    try:
        with Simulator() as ranks:
            ranks.run(lambda ctx: assert_law(ctx, case), world_size=case.world)
    finally:
        logging.getLogger("accel.data").disabled = False


def _run() -> Run:
    case = Case(5, 2, 1, 1, streamed=False, skipped=frozenset(), early=frozenset(), stop=0, steps=0)
    return Run(accel.single(), case)


def test_a_pass_that_goes_on_behind_it_is_meant_so_and_one_behind_a_break_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = _run()
    with caplog.at_level(logging.WARNING, "accel.data"):
        state = run.repeated(run.repeated(accel.train_state(run.ctx, seed=0), 1), 4)
        state = run.nested(state, 6)
        assert not caplog.records
        _ = run.nested(run.nested(state, 8), 9)
    [record] = caplog.records
    assert "`break`" in record.getMessage()


def test_a_dropped_state_is_an_error_at_the_second_batch() -> None:
    run = _run()
    state = accel.train_state(run.ctx, seed=0)
    batches = accel.batches(run.ctx, run.loader, state, repeat=True)
    _ = run.batch(state, next(batches))
    with assert_raises(StepError, problem="does not begin at the state's position"):
        run.batch(state, next(batches))


def test_a_cursor_goes_on_over_epochs_too() -> None:
    run, cursor = _run(), accel.Cursor(seed=1, epoch=2)
    batches = accel.batches(run.ctx, run.loader, cursor, repeat=True)
    while cursor.epoch < 4:
        cursor = next(batches).next
    assert cursor == accel.Cursor(seed=1, epoch=4)


def test_a_missing_state_is_refused_with_the_line() -> None:
    run = _run()
    with assert_raises(ConfigError, fix=r"Pass the state: accel.batches\(ctx, loader, state, repeat=True\)"):
        next(accel.batches(run.ctx, run.loader, repeat=True))
