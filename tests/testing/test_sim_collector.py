# SPDX-License-Identifier: Apache-2.0
"""python's garbage collector around simulations: as rare for each rank as in a process of its own, then as before."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import accel
from accel.testing import Simulator, simulate


@pytest.fixture(autouse=True)
def thresholds():
    """Thresholds that nobody else sets, which each test leaves as it found them."""
    before = gc.get_threshold()
    gc.set_threshold(600, 11, 12)
    yield
    assert gc.get_threshold() == (600, 11, 12)
    gc.set_threshold(*before)


def test_each_rank_has_the_threshold_of_a_process():
    assert simulate(lambda ctx: gc.get_threshold(), 5) == [(3000, 11, 12)] * 5


def test_simulations_inside_of_each_other_add_up():
    assert simulate(lambda ctx: simulate(lambda inner: gc.get_threshold()[0], 2)[0], 3) == [3000] * 3


def test_overlapping_simulations_leave_the_thresholds_whichever_ends_first():
    inside, go_on = threading.Event(), threading.Event()

    def outer() -> None:
        simulate(lambda ctx: inside.set() or go_on.wait(10), 2)

    thread = threading.Thread(target=outer)
    thread.start()
    assert inside.wait(10)
    assert simulate(lambda ctx: (go_on.set(), thread.join(10), gc.get_threshold()[0])[-1], 1) == [600]


def test_the_thresholds_come_back_after_an_error():
    def fails(ctx: accel.DistContext) -> None:
        raise ValueError("asked for")

    with pytest.raises(ValueError, match="asked for"):
        simulate(fails, 4)


def test_thresholds_that_a_rank_sets_stay():
    simulate(lambda ctx: gc.set_threshold(500, 5, 5), 2)
    assert gc.get_threshold() == (500, 5, 5)
    gc.set_threshold(600, 11, 12)


def test_a_collector_that_is_off_stays_off_and_large_thresholds_do_not_overflow():
    gc.set_threshold(0, 11, 12)
    assert simulate(lambda ctx: gc.get_threshold()[0], 2) == [0, 0]
    gc.set_threshold(2**31 - 1, 11, 12)
    assert simulate(lambda ctx: gc.get_threshold()[0], 2) == [2**31 - 1] * 2
    gc.set_threshold(600, 11, 12)


def test_a_run_leaves_nothing_for_the_collector():
    with Simulator() as simulator:
        simulator.run(lambda ctx: accel.gather(ctx, torch.ones(2)), 4)
        _ = gc.collect()
        gc.disable()
        try:
            simulator.run(lambda ctx: accel.gather(ctx, torch.ones(2)), 4)
            assert gc.collect() == 0
        finally:
            gc.enable()
