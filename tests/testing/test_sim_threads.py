# SPDX-License-Identifier: Apache-2.0
"""Threads and the process around simulations: forks, ranks that outlive their run, threads that do not start."""

from __future__ import annotations

import os
import signal
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises

import accel
from accel.testing import SimulationError, Simulator, _process, _world, simulate, simulate_groups

REAL = (signal.signal, signal.getsignal, signal.raise_signal)


@pytest.fixture(autouse=True)
def two_torch_threads():
    """The process is set to another number of threads than simulations use, and is found as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == _number_of_a_new_thread() == 2
    assert (signal.signal, signal.getsignal, signal.raise_signal) == REAL
    torch.set_num_threads(before)


def _number_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_overlapping_simulations_leave_torch_s_number_of_threads(first_ends_first):
    """The first's thread starts before any simulation, the second's while the first runs; either may end first."""
    running, go_on = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]
    found: dict[int, list[int]] = {}

    def overlap(which: int) -> None:
        def rank(group) -> int:
            running[which].set()
            assert go_on[which].wait(10)
            return torch.get_num_threads()

        found[which] = [*simulate_groups(rank, 2), torch.get_num_threads()]

    threads = [threading.Thread(target=overlap, args=(which,)) for which in (0, 1)]
    for which, thread in enumerate(threads):
        thread.start()
        assert running[which].wait(10)
    for which in (0, 1) if first_ends_first else (1, 0):
        go_on[which].set()
        threads[which].join()
    assert found == {0: [1, 1, 2], 1: [1, 1, 2]}


def test_a_simulation_inside_of_a_rank_leaves_the_rank_one_thread():
    def rank(ctx) -> tuple[list[int], int]:
        return simulate(lambda inner: torch.get_num_threads(), 2), torch.get_num_threads()

    assert simulate(rank, 2) == [([1, 1], 1)] * 2


def test_a_rank_finds_its_kept_thread_as_if_it_were_new():
    def leaves_settings(ctx) -> None:
        torch.set_default_device("meta")
        torch.set_autocast_enabled("cpu", True)
        torch.set_num_threads(2)
        torch.set_grad_enabled(False)

    def settings(ctx) -> tuple[str, bool, int, bool]:
        device = str(torch.empty(1).device)
        return device, torch.is_autocast_enabled("cpu"), torch.get_num_threads(), torch.is_grad_enabled()

    with Simulator() as simulator:
        simulator.run(leaves_settings, 2)
        assert simulator.run(settings, 2) == [("cpu", False, 1, True)] * 2


@pytest.mark.parametrize("kept", [True, False])
def test_a_rank_that_outlives_its_run_changes_nothing_any_more(monkeypatch, kept):
    """It waits where nothing can interrupt it; when it goes on, it and the ranks after it only end."""
    monkeypatch.setattr(_world, "_INTERRUPT_S", 0.05)
    hangs, ended = threading.Event(), [threading.Event() for _ in range(3)]

    def rank(group) -> None:
        try:
            torch.manual_seed(group.rank())
            if group.rank() == 1:
                hangs.wait()
            dist.barrier(group=group)
        finally:
            ended[group.rank()].set()

    torch.manual_seed(99)
    before = torch.get_rng_state()
    with Simulator() as simulator, assert_raises(SimulationError, problem="rank 1 is running"):
        (simulator.run_groups if kept else simulate_groups)(rank, 3, timeout_s=1)
    assert torch.equal(torch.get_rng_state(), before)
    hangs.set()
    assert ended[0].wait(10)
    assert ended[1].wait(10)
    assert torch.equal(torch.get_rng_state(), before)
    assert not ended[2].is_set()  # it never began


def test_a_rank_that_will_not_stop_does_not_hide_the_deadlock(monkeypatch):
    monkeypatch.setattr(_world, "_UNWIND_S", 0.05)
    monkeypatch.setattr(_world, "_INTERRUPT_S", 0.05)
    end = threading.Event()

    def rank(group) -> None:
        while group.rank() == 1 and not end.is_set():
            try:
                dist.barrier(group=group)
            except BaseException:
                continue

    with assert_raises(SimulationError, problem="deadlock"):
        simulate_groups(rank, 2, timeout_s=60)
    end.set()


@pytest.mark.parametrize("kept", [True, False])
def test_a_thread_that_does_not_start_is_an_error_at_once_and_leaves_none_behind(monkeypatch, kept):
    start, started = threading.Thread.start, []

    def fails_at_the_third(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    before = set(threading.enumerate())
    with Simulator() as simulator:
        run = simulator.run_groups if kept else simulate_groups
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fails_at_the_third)
            with assert_raises(SimulationError, problem="no thread for rank 2 of 4", got="can't start new thread"):
                run(lambda group: dist.barrier(group=group), 4)
        assert run(lambda group: group.rank(), 4) == [0, 1, 2, 3]
    assert set(threading.enumerate()) <= before


def _in_a_fork(body) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = body()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_collective_in_a_process_that_a_rank_forked_is_refused():
    def rank(group) -> int:
        def child() -> int:
            with assert_raises(SimulationError, problem="a process that simulated rank 0 has forked"):
                dist.barrier(group=group)
            return 7

        code = _in_a_fork(child)
        dist.barrier(group=group)
        return code

    assert simulate_groups(rank, 1) == [7]


def test_a_simulator_goes_on_in_a_forked_process():
    with Simulator() as simulator:
        assert simulator.run(lambda ctx: ctx.rank, 3) == [0, 1, 2]
        assert _in_a_fork(lambda: 7 if simulator.run(lambda ctx: ctx.rank, 3) == [0, 1, 2] else 1) == 7
        assert simulator.run(lambda ctx: ctx.rank, 3) == [0, 1, 2]


def test_a_simulator_serves_several_threads():
    found: dict[int, list[list[int]]] = {}

    with Simulator() as simulator:

        def serve(size: int) -> None:
            found[size] = [simulator.run(lambda ctx: len(accel.gather_object(ctx, None)), size) for _ in range(50)]

        threads = [threading.Thread(target=serve, args=(size,)) for size in (1, 2, 3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {size: [[size] * size] * 50 for size in (1, 2, 3, 4)}


def test_the_process_is_as_it_was_when_a_run_fails_at_its_start(monkeypatch):
    monkeypatch.delattr("torch.distributed.device_mesh.get_backend")
    with pytest.raises(SimulationError):
        simulate(lambda ctx: ctx.rank, 2, default_group=True)
    assert not isinstance(signal.signal, _process._Routed)
