# SPDX-License-Identifier: Apache-2.0
"""What goes wrong is said at once, with the rank, the call and the line."""

from __future__ import annotations

import inspect
import threading
import time

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises
from hypothesis import Phase, find, settings, strategies as st
from processes import patience

from accel.errors import AccelError, CollectiveMismatch, ConfigError
from accel.testing import Deadlock, Fault, InjectedFault, SimulationError, Simulator, simulate, simulate_groups
from accel.testing._scheduler import Allowance

ALL_GATHER_SINGLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _line(fn, text: str) -> str:
    """The "file:line in function" of the line of `fn` that contains `text`."""
    lines, first = inspect.getsourcelines(fn)
    number = next(first + i for i, line in enumerate(lines) if text in line and "_line" not in line)
    return f"test_sim_failures.py:{number} in {fn.__name__}"


def _all_reduce(group) -> None:
    dist.all_reduce(torch.zeros(2, 3), group=group)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_rank_that_returns_early_is_a_deadlock(seed):
    def rank(group):
        if group.rank() != 1:
            dist.all_reduce(torch.zeros(2, 3), group=group)

    started = time.perf_counter()
    with pytest.raises(Deadlock) as caught:
        simulate_groups(rank, 3, seed=seed)
    assert time.perf_counter() - started < patience(10)
    text = str(caught.value)
    assert f"rank 0: waiting in all_reduce(SUM, float32[2, 3]) at {_line(rank, 'all_reduce')}" in text
    assert "joined by ranks 0, 2 of 3" in text
    assert "rank 1: returned" in text
    assert isinstance(caught.value, AccelError)


def test_two_receives_wait_for_each_other():
    with pytest.raises(Deadlock) as caught:
        simulate_groups(lambda group: dist.irecv(torch.zeros(1), group_src=1 - group.rank(), group=group).wait(), 2)
    assert "rank 0: waiting in recv(float32[1]) from rank 1, tag 0" in str(caught.value)
    assert "rank 1: waiting in recv(float32[1]) from rank 0, tag 0" in str(caught.value)


def test_two_blocking_sends_wait_for_each_other():
    def rank(group):
        dist.send(torch.zeros(1), group_dst=1 - group.rank(), group=group)
        dist.irecv(torch.zeros(1), group_src=1 - group.rank(), group=group).wait()

    with assert_raises(Deadlock, got="waiting in send"):
        simulate_groups(rank, 2)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_different_collectives_name_both_ranks_and_lines(seed):
    def rank(group):
        if group.rank() == 0:
            dist.barrier(group=group)
        else:
            dist.all_reduce(torch.zeros(3), group=group)

    with pytest.raises(CollectiveMismatch) as caught:
        simulate_groups(rank, 2, seed=seed)
    text = str(caught.value)
    assert "barrier()" in text
    assert "all_reduce(SUM, float32[3])" in text
    assert _line(rank, "dist.barrier") in text
    assert _line(rank, "dist.all_reduce") in text


@pytest.mark.parametrize(
    "call",
    [
        lambda group: dist.all_reduce(torch.zeros(group.rank() + 1), group=group),
        lambda group: dist.all_reduce(torch.zeros(1, dtype=(torch.int32, torch.int64)[group.rank()]), group=group),
        lambda group: dist.broadcast(torch.zeros(1), group_src=group.rank(), group=group),
        lambda group: dist.all_reduce(
            torch.zeros(1), op=(dist.ReduceOp.MAX, dist.ReduceOp.SUM)[group.rank()], group=group
        ),
    ],
)
def test_calls_whose_tensors_do_not_fit(call):
    with assert_raises(CollectiveMismatch, expected="rank 0", got="rank 1"):
        simulate_groups(call, 2)


def test_buffers_that_do_not_fit_the_messages():
    def call(group):
        dist.all_to_all([torch.zeros(2)] * 2, [torch.zeros(2 + group.rank()), torch.zeros(2)], group=group)

    with assert_raises(CollectiveMismatch, problem="a buffer does not fit the message", where="rank 0.*rank 1"):
        simulate_groups(call, 2)


def test_a_message_of_another_length():
    with assert_raises(CollectiveMismatch, expected=r"float32\[3\]", got=r"float32\[2\]"):
        simulate_groups(_send_three_receive_two, 2)


def _send_three_receive_two(group) -> None:
    if group.rank() == 0:
        dist.send(torch.zeros(3), group_dst=1, group=group)
    else:
        dist.irecv(torch.zeros(2), group_src=0, group=group).wait()


def test_the_first_exception_is_raised_as_itself_with_notes():
    def rank(group):
        if group.rank() == 2:
            raise KeyError("mine")
        dist.barrier(group=group)

    with pytest.raises(KeyError, match="mine") as caught:
        simulate_groups(rank, 3, seed=5)
    note = "\n".join(caught.value.__notes__)
    assert "raised on rank 2 of 3 with seed=5" in note
    assert f"ranks 0, 1: waiting in barrier() at {_line(rank, 'dist.barrier')}" in note
    assert "rank 2: raised KeyError('mine')" in note


def test_an_exception_that_nobody_waits_for_leaves_the_others_to_end():
    ended = []

    def rank(group):
        if group.rank() == 0:
            raise ValueError("alone")
        ended.append(group.rank())

    with pytest.raises(ValueError, match="alone") as caught:
        simulate_groups(rank, 3)
    assert caught.value.__notes__ == ["raised on rank 0 of 3"]
    assert ended == [1, 2]


def test_cleaning_up_and_broad_handlers_do_not_hide_the_cause():
    def rank(group):
        try:
            if group.rank():
                dist.barrier(group=group)
        except Exception:
            pytest.fail("a stopped rank must not be caught as an Exception")
        finally:
            if group.rank():
                dist.barrier(group=group)

    with assert_raises(Deadlock, got="rank 0: returned"):
        simulate_groups(rank, 3)


@pytest.mark.parametrize("seed", [None, 1])
def test_an_endless_loop_ends_at_the_time_out_and_names_its_line(seed):
    def rank(group):
        dist.barrier(group=group)
        while group.rank() == 1:
            sum(range(100))
        dist.barrier(group=group)

    before = set(threading.enumerate())
    started = time.perf_counter()
    with assert_raises(SimulationError, problem="did not end within") as caught:
        simulate_groups(rank, 3, seed=seed, timeout_s=0.2)
    assert time.perf_counter() - started < patience(5)
    assert "rank 1 is running" in str(caught.value)
    assert "in rank" in str(caught.value)
    assert _eventually(lambda: set(threading.enumerate()) <= before)


def test_a_long_run_whose_ranks_go_on_meeting_has_its_time_anew_at_each_meeting():
    def rank(group):
        for _ in range(8):
            began = time.thread_time()
            while time.thread_time() - began < 0.05:
                pass
            dist.barrier(group=group)

    simulate_groups(rank, 2, timeout_s=0.3)  # of 0.8 s in all


@pytest.mark.parametrize(
    ("wall_s", "cpu_s", "meets", "stretches"),
    [
        (1.0, 1.0, False, 60),  # a loop on a machine of its own
        (1.0, 3.0, False, 60),  # the same with threads of its own
        (1.0, 0.25, False, 240),  # on a machine that lets it run for a quarter of the time
        (1.0, 0.0, False, 60),  # a wait for something outside
        (1.0, 0.02, False, 600),  # a loop with pauses, or a machine that hardly lets it run
        (1.0, 1.0, True, 600),  # ranks that meet without an end
        (1.0, 0.25, True, 2400),
    ],
)
def test_what_counts_of_a_run_is_its_own_time(wall_s, cpu_s, meets, stretches):
    allowance = Allowance(60)
    spent = 0
    while allowance.left() > 1e-6:
        spent += 1
        allowance.spend(wall_s, cpu_s, spent if meets else 0)
    assert spent == stretches


def test_a_run_that_only_is_too_long_ends_without_an_interrupt():
    def rank(group):
        while True:
            dist.barrier(group=group)

    before = set(threading.enumerate())
    with assert_raises(SimulationError, problem="did not end within"):
        simulate_groups(rank, 2, timeout_s=0.02)
    assert set(threading.enumerate()) <= before


def test_a_simulator_goes_on_after_every_kind_of_failure():
    def loop(group):
        while True:
            pass

    def boom(group):
        raise ValueError("boom")

    with Simulator() as simulator:
        for fn, error in (
            (loop, SimulationError),
            (boom, ValueError),
            (lambda g: g.rank() or _all_reduce(g), Deadlock),
        ):
            with pytest.raises(error):
                simulator.run_groups(fn, 2, timeout_s=0.2 if fn is loop else 60)
            assert simulator.run_groups(lambda group: _all_reduce(group) or group.rank(), 3) == [0, 1, 2]
    with assert_raises(SimulationError, problem="closed"):
        simulator.run_groups(_all_reduce, 1)


def test_a_collective_of_another_thread_is_refused():
    caught = []

    def elsewhere(group):
        try:
            dist.barrier(group=group)
        except SimulationError as error:
            caught.append(str(error))

    def rank(group):
        thread = threading.Thread(target=elsewhere, args=(group,), name="helper")
        thread.start()
        thread.join()

    simulate_groups(rank, 2)
    assert len(caught) == 2
    assert "not the simulated rank 0" in caught[0]
    assert "'helper'" in caught[0]


def test_a_group_of_another_rank_and_one_kept_after_the_end_are_refused():
    groups = simulate_groups(lambda group: group, 2)
    with assert_raises(SimulationError, problem="not the simulated rank 1"):
        dist.barrier(group=groups[1])

    shared = []

    def rank(group):
        shared.append(group)
        dist.barrier(group=shared[0])

    with assert_raises(SimulationError, problem="not the simulated rank 0"):
        simulate_groups(rank, 2)


def test_calls_that_nobody_joined_or_waited_for():
    def collective(group):
        if group.rank() == 1:
            dist.all_reduce(torch.zeros(3), group=group, async_op=True)

    with assert_raises(Deadlock, problem="never completed") as caught:
        simulate_groups(collective, 2)
    assert f"rank 1: all_reduce(SUM, float32[3]) at {_line(collective, 'dist.all_reduce')}" in str(caught.value)

    def message(group):
        if group.rank() == 0:
            dist.isend(torch.zeros(3), group_dst=1, group=group)

    with assert_raises(Deadlock, got="rank 0: send"):
        simulate_groups(message, 2)


def _gather_rows(group, rows):
    """Planted fault: a rank without rows skips the second collective."""
    lengths = torch.empty(group.size(), dtype=torch.int64)
    ALL_GATHER_SINGLE(lengths, torch.tensor([len(rows)]), group=group)
    if len(rows) == 0:
        return rows
    longest = int(lengths.max())
    padded = torch.zeros(longest)
    padded[: len(rows)] = rows
    everything = torch.empty(group.size() * longest)
    ALL_GATHER_SINGLE(everything, padded, group=group)
    return everything


def test_hypothesis_finds_and_shrinks_a_skipped_collective():
    with Simulator() as simulator:

        def hangs(case: tuple[list[int], int]) -> bool:
            sizes, seed = case
            try:
                simulator.run_groups(
                    lambda group: _gather_rows(group, torch.ones(sizes[group.rank()])), len(sizes), seed=seed
                )
            except Deadlock:
                return True
            return False

        cases = st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 2**16))
        exhaustive = settings(max_examples=500, deadline=None, database=None, phases=(Phase.generate, Phase.shrink))
        sizes, seed = find(cases, hangs, settings=exhaustive)
    assert (sizes, seed) == ([0, 1], 0)


@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_fault_raises_in_its_rank_at_its_call(call):
    def rank(group):
        done = 0
        for _ in range(3):
            dist.barrier(group=group)
            done += 1
        return done

    with assert_raises(InjectedFault, problem=f"rank 1 fails at its call #{call}") as caught:
        simulate_groups(rank, 2, faults=[Fault(rank=1, call=call)])
    assert (
        f"rank 0: waiting in barrier() at {_line(rank, 'dist.barrier')}: collective #{call}"
        in caught.value.__notes__[0]
    )


def test_a_rank_that_vanishes_leaves_the_others_waiting():
    with assert_raises(Deadlock, got="rank 1: vanished"):
        simulate_groups(_all_reduce, 2, faults=[Fault(rank=1, call=0, action="vanish")])


def test_a_rank_that_vanishes_unneeded_has_no_result():
    def rank(group):
        if group.rank() == 0:
            dist.isend(torch.zeros(1), group_dst=1, group=group)

    with assert_raises(SimulationError, problem="rank 0 vanished"):
        simulate_groups(rank, 2, faults=[Fault(rank=0, call=0, action="vanish")])


def test_arguments_out_of_range():
    for arguments in ({"world_size": 0}, {"world_size": 2, "timeout_s": 0}, {"world_size": 2, "faults": [Fault(2, 0)]}):
        with pytest.raises(ConfigError):
            simulate_groups(_all_reduce, **arguments)


def _eventually(condition) -> bool:
    deadline = time.perf_counter() + patience(5)
    while not condition() and time.perf_counter() < deadline:
        time.sleep(0.01)
    return condition()


def test_contexts():
    got = simulate(lambda ctx: (ctx.rank, ctx.world_size, ctx.device.type, ctx.backend, ctx.is_main_process), 3)
    assert got == [(rank, 3, "cpu", "simulated", rank == 0) for rank in range(3)]
