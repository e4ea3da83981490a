# SPDX-License-Identifier: Apache-2.0
"""A loop that steps a scheduler which `optimizer_step` steps too is warned once, and no other loop."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LRScheduler

import accel


def _chained(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """A scheduler without `last_epoch`."""
    return ChainedScheduler([ExponentialLR(optimizer, 0.5), ExponentialLR(optimizer, 0.9)], optimizer)


def _exponential(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ExponentialLR(optimizer, 0.5)


def _warnings(
    caplog: pytest.LogCaptureFixture,
    *,
    by_step: bool,
    by_loop: bool,
    loads: bool = False,
    make: Callable[[torch.optim.Optimizer], LRScheduler] = _exponential,
) -> list[str]:
    ctx, net = accel.single(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = make(optimizer)
    model, optimizer, scheduler = accel.prepare(ctx, net, optimizer, scheduler)
    state, first = accel.train_state(ctx), scheduler.state_dict()
    with caplog.at_level(logging.WARNING, "accel.training"):
        for _ in range(4):
            state = accel.backward(ctx, model(torch.ones(4, 2)).square().mean(), state.next(), weight=4)
            state = accel.optimizer_step(ctx, optimizer, state, scheduler=scheduler if by_step else None)
            if by_loop:
                scheduler.step()
            if loads:
                scheduler.load_state_dict(first)
    return [each.getMessage() for each in caplog.records if "runs ahead" in each.getMessage()]


def test_two_steps_of_a_scheduler_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = _warnings(caplog, by_step=True, by_loop=True)
    assert text.startswith("ExponentialLR took a step between two optimizer steps")


def test_a_chain_of_schedulers_is_stepped_and_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    assert not _warnings(caplog, by_step=True, by_loop=False, make=_chained)
    (text,) = _warnings(caplog, by_step=True, by_loop=True, make=_chained)
    assert text.startswith("ChainedScheduler took a step between two optimizer steps")


@pytest.mark.parametrize(
    ("by_step", "by_loop", "loads"), [(True, False, False), (False, True, False), (True, False, True)]
)
def test_other_loops_are_not(caplog: pytest.LogCaptureFixture, *, by_step: bool, by_loop: bool, loads: bool) -> None:
    assert not _warnings(caplog, by_step=by_step, by_loop=by_loop, loads=loads)
