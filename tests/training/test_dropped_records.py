# SPDX-License-Identifier: Apache-2.0
"""Loops by the parts: a cursor or a loss scale that was dropped is an error, and what only looks like it is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from catching import assert_raises
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import accel
from accel.testing import simulate


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def _loader(ctx: accel.DistContext, *, stream: bool) -> accel.Loader | accel.data.StreamLoader:
    if stream:
        return accel.prepare_loader(ctx, DataLoader(Stream(), batch_size=2), stream="dispatch")
    return accel.prepare_loader(ctx, DataLoader(TensorDataset(torch.arange(12)), batch_size=2, shuffle=True))


def _read(ctx: accel.DistContext, loader: accel.Loader | accel.data.StreamLoader, *cursor: accel.Cursor) -> int:
    return sum(batch.valid.world for batch in accel.batches(ctx, loader, *cursor))


@pytest.mark.parametrize("stream", [False, True])
def test_a_cursor_that_is_never_replaced_ends_the_second_pass_on_every_rank(stream: bool) -> None:
    def train(ctx: accel.DistContext) -> None:
        loader, cursor = _loader(ctx, stream=stream), accel.Cursor(seed=0)
        assert _read(ctx, loader, cursor) == 12
        with assert_raises(accel.errors.DataError, problem="would repeat the epoch", fix="cursor = batch.next"):
            _read(ctx, loader, cursor)

    simulate(train, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_passes_that_may_begin_at_one_cursor_again(stream: bool) -> None:
    def train(ctx: accel.DistContext) -> None:
        loader, cursor = _loader(ctx, stream=stream), accel.Cursor(seed=0)
        for _ in accel.batches(ctx, loader, cursor):
            break
        assert _read(ctx, loader, cursor) == 12  # the pass before was left
        with torch.no_grad():
            assert _read(ctx, loader, cursor) == 12
            assert _read(ctx, loader, cursor) == 12
        assert _read(ctx, loader, accel.Cursor(seed=0)) == 12  # an equal cursor is a wish to start again
        assert _read(ctx, loader) == _read(ctx, loader) == 12

    simulate(train, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_evaluation_between_two_passes_does_not_hide_a_dropped_cursor(stream: bool) -> None:
    def train(ctx: accel.DistContext) -> None:
        loader, cursor = _loader(ctx, stream=stream), accel.Cursor(seed=0)
        assert _read(ctx, loader, cursor) == _read(ctx, loader) == 12
        with torch.no_grad():
            assert _read(ctx, loader) == 12
        with assert_raises(accel.errors.DataError, problem="would repeat the epoch", fix="another train_state"):
            _read(ctx, loader, cursor)

    simulate(train, 2)


def _window(
    ctx: accel.DistContext, accum: accel.Accumulation, scaler: accel.LossScale, parameter: torch.nn.Parameter
) -> accel.training.parts.StepResult:
    accum = accel.training.parts.backward(ctx, parameter.sum(), scaler, accum.next())
    return accel.training.parts.optimizer_step(ctx, torch.optim.SGD([parameter], lr=0.1), scaler, accum)


def test_a_dropped_loss_scale_is_an_error_in_the_next_window() -> None:
    ctx, parameter = accel.single(), torch.nn.Parameter(torch.ones(2))
    scaler = accel.LossScale(scale=8.0, dynamic=True)
    step = _window(ctx, accel.Accumulation(), scaler, parameter)
    with assert_raises(accel.errors.StepError, fix="accum, scaler = step.accum, step.scaler"):
        _window(ctx, step.accum, scaler, parameter)
    with assert_raises(accel.errors.StepError, problem="the previous window"):
        accel.training.parts.backward(ctx, parameter.sum(), scaler, step.accum.reset().next())
    assert _window(ctx, step.accum, step.scaler, parameter).stepped


def test_one_loss_scale_that_windows_share_in_turn_is_none() -> None:
    ctx = accel.single()
    scaler = accel.LossScale(scale=8.0, dynamic=True)
    accums = [accel.Accumulation(), accel.Accumulation()]
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in accums]
    for turn in range(6):
        step = _window(ctx, accums[turn % 2], scaler, parameters[turn % 2])
        accums[turn % 2], scaler = step.accum, step.scaler
    assert [accum.updates for accum in accums] == [3, 3]


def test_a_fixed_loss_scale_is_one_record_for_ever() -> None:
    ctx, parameter = accel.single(), torch.nn.Parameter(torch.ones(2))
    scaler, accum = accel.loss_scale(ctx), accel.Accumulation()
    for _ in range(3):
        accum = _window(ctx, accum, scaler, parameter).accum
    assert accum.updates == 3
