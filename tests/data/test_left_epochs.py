# SPDX-License-Identifier: Apache-2.0
"""A pass that goes on where a `break` left the epoch says so once; a resumed one and a new epoch are silent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import accel
from accel.testing import Simulator

LINE = "state = state.next_epoch()"


class Stream(IterableDataset[int]):
    """Ten samples."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def _loader(ctx: accel.DistContext, kind: str = "samples") -> Any:
    if kind == "stream":
        return accel.prepare_loader(ctx, DataLoader(Stream(), batch_size=2), stream="elements")
    return accel.prepare_loader(ctx, DataLoader(range(10), batch_size=2, num_workers=kind == "workers"))


def _pass(ctx: accel.DistContext, loader: Any, state: accel.TrainState, *, most: int = 2) -> accel.TrainState:
    """Batches of an epoch, as a script from elsewhere leaves it: by break."""
    for at, batch in enumerate(accel.batches(ctx, loader, state)):
        state = _step(ctx, state.next(batch))
        if at + 1 == most:
            break
    return state


def _step(ctx: accel.DistContext, state: accel.TrainState) -> accel.TrainState:
    weight = torch.nn.Parameter(torch.ones(()))
    with accel.accumulate(ctx, state):
        state = accel.backward(ctx, weight.square(), state)
    return accel.optimizer_step(ctx, torch.optim.SGD([weight], lr=0.1), state)


def _told(caplog: pytest.LogCaptureFixture, run: Callable[[], object]) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "accel.data"):
        run()
    return [each.getMessage() for each in caplog.records if LINE in each.getMessage()]


@pytest.mark.parametrize("kind", ["samples", "stream", "workers"])
def test_it_is_told_once_with_the_place_and_the_line(caplog: pytest.LogCaptureFixture, kind: str) -> None:
    ctx = accel.single()

    def run() -> None:
        loader, state = _loader(ctx, kind), accel.train_state(ctx, seed=0)
        for _ in range(4 if kind == "samples" else 2):
            state = _pass(ctx, loader, state)

    [text] = _told(caplog, run)
    assert "inside epoch 0, after 4 of its samples" in text


def _as_it_should(ctx: accel.DistContext, loader: Any, state: accel.TrainState) -> accel.TrainState:
    return _pass(ctx, loader, state).next_epoch()


def _resumed(ctx: accel.DistContext, loader: Any, state: accel.TrainState) -> accel.TrainState:
    state = _pass(ctx, loader, state)
    return msgspec.structs.replace(state, cursor=msgspec.convert(msgspec.to_builtins(state.cursor), accel.Cursor))


def _whole(ctx: accel.DistContext, loader: Any, state: accel.TrainState) -> accel.TrainState:
    return _pass(ctx, loader, state, most=99)


def _left_at_the_end(ctx: accel.DistContext, loader: Any, state: accel.TrainState) -> accel.TrainState:
    return _pass(ctx, loader, state, most=5)


def _evaluates(ctx: accel.DistContext, loader: Any, state: accel.TrainState) -> accel.TrainState:
    for _ in accel.batches(ctx, loader):
        break
    with torch.no_grad():
        for _ in accel.batches(ctx, loader, state):
            break
    return _pass(ctx, loader, state, most=99)


@pytest.mark.parametrize("epoch", [_as_it_should, _resumed, _whole, _left_at_the_end, _evaluates])
@pytest.mark.parametrize("kind", ["samples", "stream"])
def test_other_loops_are_silent(caplog: pytest.LogCaptureFixture, kind: str, epoch: Any) -> None:
    ctx = accel.single()

    def run() -> None:
        loader, state = _loader(ctx, kind), accel.train_state(ctx, seed=0)
        for _ in range(3):
            state = epoch(ctx, loader, state)

    assert _told(caplog, run) == []


def test_a_resume_from_a_checkpoint_in_the_same_process_is_silent(
    caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    ctx = accel.single()

    def run() -> None:
        loader, start = _loader(ctx), accel.train_state(ctx, seed=0)
        state = _pass(ctx, loader, start)
        accel.save_state(ctx, tmp_path, {"state": state}, step=1)
        state = accel.resume(ctx, tmp_path, {}, start)
        assert state.cursor.consumed == 4
        _pass(ctx, loader, state)

    assert _told(caplog, run) == []


def test_an_evaluation_between_hides_nothing_and_a_batch_that_was_not_taken_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ctx = accel.single()

    def run() -> None:
        loader, state = _loader(ctx), accel.train_state(ctx, seed=0)
        for at, batch in enumerate(accel.batches(ctx, loader, state)):
            if at == 3:
                break
            state = _step(ctx, state.next(batch))
        for _ in accel.batches(ctx, loader):
            break
        _pass(ctx, loader, state)

    [text] = _told(caplog, run)
    assert "after 6 of its samples" in text


def test_one_rank_tells_it(ranks: Simulator, caplog: pytest.LogCaptureFixture) -> None:
    def rank(ctx: accel.DistContext) -> None:
        loader, cursor = _loader(ctx), accel.Cursor()
        for _ in range(2):
            for batch in accel.batches(ctx, loader, cursor):
                cursor = batch.next
                break

    assert len(_told(caplog, lambda: ranks.run(rank, 2))) == 1
