# SPDX-License-Identifier: Apache-2.0
"""Stop requests: remembered by a handler, agreed on by all ranks, and gone with their block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from processes import patience
from profiles import share

import accel
from accel import preempt
from accel.errors import ConfigError
from accel.testing import Fault, InjectedFault, Simulator

BOTH = (signal.SIGTERM, signal.SIGUSR1)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in BOTH]


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_is_remembered_and_ends_the_script_when_raised(number: signal.Signals) -> None:
    ctx, before = accel.single(), handlers()
    with accel.preempt.stop_requests(ctx) as requests:
        assert accel.preempt.stop_agreed(ctx, requests) is None
        signal.raise_signal(number)
        stop = accel.preempt.stop_agreed(ctx, requests)
    assert stop is not None
    assert (stop.signal, stop.rank, stop.code) == (number, 0, 128 + number)
    assert str(stop) == f"stopped by {number.name}, which reached rank 0"
    assert isinstance(stop, SystemExit)
    assert handlers() == before


def test_only_the_chosen_signals_are_taken_over() -> None:
    before = handlers()
    with accel.preempt.stop_requests(accel.single(), [signal.SIGUSR1, signal.SIGUSR1]):
        assert signal.getsignal(signal.SIGTERM) == before[0]
        assert signal.getsignal(signal.SIGUSR1) != before[1]
    assert handlers() == before


def test_handlers_come_back_after_an_error_too() -> None:
    before = handlers()
    with pytest.raises(KeyError), accel.preempt.stop_requests(accel.single()):
        raise KeyError
    assert handlers() == before


def test_a_signal_sent_twice_at_once_is_one_request_and_a_later_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler may signal the launcher, which hands the signal on, and the ranks as well."""
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: ended.append(number))
    try:
        with accel.preempt.stop_requests(accel.single()) as requests:
            monkeypatch.setattr(preempt, "SAME_REQUEST_S", 60.0)
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGUSR1)
            assert (requests.received, ended) == (signal.SIGTERM, [])
            monkeypatch.setattr(preempt, "SAME_REQUEST_S", 0.0)
            signal.raise_signal(signal.SIGTERM)
            assert ended == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


FORKING = """
import os, signal, time
import accel
ready, begun = os.pipe()
with accel.preempt.stop_requests(accel.single()) as requests:
    if (child := os.fork()) == 0:
        os.write(begun, b".")  # python forgets signals that come while it forks
        for _ in range(600):  # and sees one that comes just before a sleep after it
            time.sleep(0.1)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert requests.received == 0
    signal.raise_signal(signal.SIGUSR1)
    time.sleep(0.4)
    signal.raise_signal(signal.SIGUSR1)
"""


def test_a_second_signal_kills_and_a_forked_process_ends_at_the_first() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING], timeout=patience(60), check=False, env=os.environ
    )
    assert done.returncode == -signal.SIGUSR1


@pytest.mark.parametrize("signals", [(), (0,), (signal.SIGKILL,), (signal.SIGTERM, 999), signal.SIGTERM])
def test_signals_that_cannot_be_asked_for_are_refused(signals: Any) -> None:
    before = handlers()
    with (
        assert_raises(ConfigError, expected="neither SIGKILL nor SIGSTOP"),
        accel.preempt.stop_requests(accel.single(), signals),
    ):
        pass
    assert handlers() == before


def test_another_thread_is_told_where_to_open_it() -> None:
    caught: list[BaseException] = []

    def open_it() -> None:
        try:
            with accel.preempt.stop_requests(accel.single()):
                pass
        except ConfigError as error:
            caught.append(error)

    thread = threading.Thread(target=open_it)
    thread.start()
    thread.join()
    assert "Open it on the main thread" in str(caught[0])


def steps_until_stop(ctx: accel.DistContext, most: int) -> tuple[int, int, int]:
    """Steps taken, and who was reached by which signal; every step makes two calls."""
    taken = 0
    with accel.preempt.stop_requests(ctx) as requests:
        for _ in range(most):
            assert int(accel.reduce(ctx, torch.tensor(1))) == ctx.world_size
            taken += 1
            if stop := accel.preempt.stop_agreed(ctx, requests):
                return taken, stop.rank, stop.signal
    return taken, -1, 0


@settings(max_examples=share(0.6), deadline=None)
@given(data=st.data(), world_size=st.integers(1, 4), seed=st.integers(0, 9), number=st.sampled_from(BOTH))
def test_a_signal_on_any_rank_stops_all_at_the_same_step(
    data: st.DataObject, world_size: int, seed: int, number: signal.Signals
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    call = data.draw(st.integers(1, 10)) if world_size > 1 else 0
    with Simulator() as simulator:
        if world_size == 1:
            assert simulator.run(lambda ctx: steps_until_stop(ctx, 3), 1) == [(3, -1, 0)]
            return
        fault = Fault(rank=rank, call=call, action="terminate", signal=number)
        ranks = simulator.run(lambda ctx: steps_until_stop(ctx, 8), world_size, seed=seed, faults=[fault])
    # Calls: 0 opens, 1 and 2 are the first step's. A signal just before a rank says its part is said one step later.
    assert len(set(ranks)) == 1
    taken, reached, told = ranks[0]
    assert (reached, told) == (rank, number)
    assert taken in ((call + 1) // 2, (call + 1) // 2 + 1)


def test_the_lowest_rank_of_several_is_named() -> None:
    def rank(ctx: accel.DistContext) -> str:
        with accel.preempt.stop_requests(ctx) as requests:
            if ctx.rank > 0:
                signal.raise_signal(signal.SIGTERM if ctx.rank == 1 else signal.SIGUSR1)
            stop = accel.preempt.stop_agreed(ctx, requests)
        return str(stop)

    with Simulator() as simulator:
        assert simulator.run(rank, 3) == ["stopped by SIGTERM, which reached rank 1"] * 3


def test_a_refusal_on_one_rank_is_every_ranks() -> None:
    def rank(ctx: accel.DistContext) -> None:
        before = handlers()
        with (
            assert_raises(ConfigError, problem="rank 1: the signals cannot request a stop"),
            accel.preempt.stop_requests(ctx, [signal.SIGTERM] if ctx.rank != 1 else []),
        ):
            pass
        assert handlers() == before

    with Simulator() as simulator:
        simulator.run(rank, 3)


def test_a_rank_that_fails_within_waits_for_nobody() -> None:
    def rank(ctx: accel.DistContext) -> None:
        with accel.preempt.stop_requests(ctx):
            if ctx.rank == 1:
                raise InjectedFault("on purpose")

    with pytest.raises(InjectedFault), Simulator() as simulator:
        simulator.run(rank, 2)
