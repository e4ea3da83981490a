# SPDX-License-Identifier: Apache-2.0
"""Stop requests: each simulated rank has signal handlers of its own, and the process keeps its."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises

from accel.testing import Deadlock, Fault, SimulationError, simulate_groups

REAL = (signal.signal, signal.getsignal, signal.raise_signal)


def train_until_stopped(group) -> int:
    """Six steps of one barrier each, left early when any rank was asked to stop; returns the steps taken."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    for step in range(6):
        dist.barrier(group=group)
        if asked:
            return step + 1
    return 6


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_request_calls_the_rank_s_own_handler_on_its_thread(ranks, seed, number):
    def rank(group):
        got = []

        def handler(signum, frame):
            got.append((signum, threading.get_ident() == me, frame is not None))

        me = threading.get_ident()
        assert signal.signal(number, handler) == signal.SIG_DFL
        assert signal.getsignal(number) is handler
        dist.barrier(group=group)
        return got

    stop = Fault(1, 0, "terminate", signal=number)
    assert ranks.run_groups(rank, 3, seed=seed, faults=[stop]) == [[], [(number, True, True)], []]


def test_a_loop_that_does_not_agree_on_stopping_is_caught(ranks):
    with assert_raises(Deadlock, got="rank 1: returned"):
        ranks.run_groups(train_until_stopped, 2, faults=[Fault(1, 2, "terminate")])
    both = [Fault(rank, 2, "terminate") for rank in (0, 1)]
    assert ranks.run_groups(train_until_stopped, 2, faults=both) == [3, 3]


def test_a_rank_without_a_handler_ends(ranks):
    with assert_raises(Deadlock, got="rank 1: was killed by SIGTERM"):
        ranks.run_groups(lambda group: dist.barrier(group=group), 2, faults=[Fault(1, 0, "terminate")])

    def send(group):
        if group.rank() == 0:
            dist.isend(torch.zeros(1), group_dst=1, group=group)

    with assert_raises(SimulationError, problem="rank 0 was killed by SIGUSR1"):
        ranks.run_groups(send, 2, faults=[Fault(0, 0, "terminate", signal=signal.SIGUSR1)])


def test_an_ignored_request_changes_nothing(ranks):
    def rank(group):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.barrier(group=group)
        return signal.getsignal(signal.SIGTERM)

    assert ranks.run_groups(rank, 2, faults=[Fault(0, 0, "terminate")]) == [signal.SIG_IGN] * 2


def test_what_a_handler_raises_is_raised_at_the_call(ranks):
    def rank(group):
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        dist.barrier(group=group)

    with pytest.raises(SystemExit) as caught:
        ranks.run_groups(rank, 2, faults=[Fault(0, 0, "terminate")])
    assert caught.value.code == 143
    assert "rank 1: waiting in barrier()" in caught.value.__notes__[0]
    with pytest.raises(KeyboardInterrupt):
        ranks.run_groups(
            lambda group: dist.barrier(group=group), 2, faults=[Fault(0, 0, "terminate", signal=signal.SIGINT)]
        )


def test_a_rank_can_end_itself_by_the_signal_that_it_caught(ranks):
    def rank(group):
        def handler(number, frame):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

        signal.signal(signal.SIGTERM, handler)
        dist.barrier(group=group)

    with assert_raises(Deadlock, got="rank 0: was killed by SIGTERM"):
        ranks.run_groups(rank, 2, faults=[Fault(0, 0, "terminate")])


def test_wrong_arguments_meet_python_s_own_errors(ranks):
    attempts = [
        lambda: signal.signal(signal.SIGTERM, "stop"),
        lambda: signal.signal(signal.SIGKILL, signal.SIG_IGN),
        lambda: signal.signal(1000, signal.SIG_IGN),
        lambda: signal.getsignal(1000),
    ]

    def errors_of(_) -> list[type[Exception]]:
        found = []
        for attempt in attempts:
            with pytest.raises((TypeError, ValueError, OSError)) as caught:
                attempt()
            found.append(caught.type)
        return found

    assert ranks.run_groups(errors_of, 2) == [errors_of(None)] * 2


def test_the_process_keeps_its_handlers_and_functions(ranks):
    mine = signal.getsignal(signal.SIGUSR1)

    def rank(group):
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        dist.barrier(group=group)
        if group.rank() == 1:
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        ranks.run_groups(rank, 2)
    assert (signal.signal, signal.getsignal, signal.raise_signal) == REAL
    assert signal.getsignal(signal.SIGUSR1) is mine


def test_simulations_inside_a_rank_have_ranks_of_their_own():
    def inner(group):
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.barrier(group=group)
        return signal.getsignal(signal.SIGTERM)

    def outer(group):
        def handler(number, frame):
            pass

        signal.signal(signal.SIGTERM, handler)
        dist.barrier(group=group)
        assert simulate_groups(inner, 2) == [signal.SIG_IGN] * 2
        assert signal.getsignal(signal.SIGTERM) is handler

    simulate_groups(outer, 2)
    assert (signal.signal, signal.getsignal, signal.raise_signal) == REAL


def test_overlapping_simulations_leave_the_functions_as_they_were():
    first_runs, second_runs = threading.Event(), threading.Event()

    def first(group):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        first_runs.set()
        assert second_runs.wait(10)
        return signal.getsignal(signal.SIGTERM)

    def second(group):
        assert first_runs.wait(10)
        second_runs.set()
        thread.join(10)
        return signal.getsignal(signal.SIGTERM)

    results = []
    thread = threading.Thread(target=lambda: results.append(simulate_groups(first, 1)))
    thread.start()
    assert simulate_groups(second, 1) == [signal.SIG_DFL]
    assert results == [[signal.SIG_IGN]]
    assert (signal.signal, signal.getsignal, signal.raise_signal) == REAL


def test_a_process_forked_by_a_rank_has_real_signals(ranks):
    def rank(group):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
            child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert ranks.run_groups(rank, 1) == [7]


def test_other_threads_of_a_rank_meet_python_s_refusal(ranks):
    caught = []

    def elsewhere() -> None:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        except ValueError as error:
            caught.append(error)

    def rank(group):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    ranks.run_groups(rank, 1)
    assert len(caught) == 1


def test_functions_are_restored_after_a_time_out(ranks):
    def endless(group):
        while True:
            pass

    with assert_raises(SimulationError, problem="did not end"):
        ranks.run_groups(endless, 1, timeout_s=0.1)
    assert (signal.signal, signal.getsignal, signal.raise_signal) == REAL
