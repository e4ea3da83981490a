# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments and wrong functions are refused in words, by `simulate` and by a simulator alike."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises

import accel
from accel.errors import ConfigError
from accel.testing import Deadlock, Fault, SimulationError, Simulator, simulate, simulate_groups


def rank_of(ctx: accel.DistContext) -> int:
    return ctx.rank


@pytest.mark.parametrize(
    ("fn", "world_size", "options", "where", "text"),
    [
        (4, rank_of, {}, "fn=", "a function of one argument, got 4"),
        (None, 2, {}, "fn=", "got None"),
        (rank_of, 0, {}, "world_size=", "1 rank or more, got 0"),
        (rank_of, -3, {}, "world_size=", "got -3"),
        (rank_of, 2.0, {}, "world_size=", "got 2.0"),
        (rank_of, "2", {}, "world_size=", "got '2'"),
        (rank_of, True, {}, "world_size=", "got True"),
        (rank_of, 2, {"seed": "one"}, "seed=", "an int or None, got 'one'"),
        (rank_of, 2, {"seed": 1.5}, "seed=", "got 1.5"),
        (rank_of, 2, {"timeout_s": 0}, "timeout_s=", "above 0 and finite, got 0"),
        (rank_of, 2, {"timeout_s": -1.0}, "timeout_s=", "got -1.0"),
        (rank_of, 2, {"timeout_s": float("nan")}, "timeout_s=", "got nan"),
        (rank_of, 2, {"timeout_s": float("inf")}, "timeout_s=", "got inf"),
        (rank_of, 2, {"timeout_s": "60"}, "timeout_s=", "got '60'"),
        (rank_of, 2, {"faults": Fault(0, 0)}, "faults=", "expected [Fault(rank=0, call=0)]"),
        (rank_of, 2, {"network": "glo"}, "network=", "Did you mean `gloo`?"),
    ],
)
def test_arguments_out_of_range(ranks, fn, world_size, options, where, text):
    for run in (ranks.run, ranks.run_groups, simulate, simulate_groups):
        with pytest.raises(ConfigError) as caught:
            run(fn, world_size, **options)
        assert caught.value.where == where
        assert text in str(caught.value)


async def later(ctx: accel.DistContext) -> int:
    return ctx.rank


def piecewise(ctx: accel.DistContext):
    yield ctx.rank


@pytest.mark.parametrize(("fn", "kind"), [(later, "coroutine later"), (piecewise, "generator piecewise")])
def test_a_function_that_does_not_run_when_called_is_no_success(ranks, fn, kind):
    with assert_raises(SimulationError, problem="the function has not run", got=kind):
        ranks.run(fn, 2)


@pytest.mark.parametrize("rank", [-1, 2, 7])
@pytest.mark.parametrize(
    "call",
    [
        lambda group, rank: dist.broadcast(torch.ones(1), group=group, group_src=rank),
        lambda group, rank: dist.reduce(torch.ones(1), group=group, group_dst=rank),
        lambda group, rank: dist.isend(torch.ones(1), group=group, group_dst=rank).wait(),
        lambda group, rank: dist.irecv(torch.ones(1), group=group, group_src=rank).wait(),
    ],
)
def test_a_rank_that_the_group_does_not_have_is_refused(ranks, call, rank):
    with assert_raises(SimulationError, problem="no such rank in the group", expected="^0 to 1$", got=f"^{rank}$"):
        ranks.run_groups(lambda group: call(group, rank), 2)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_loop_that_asks_whether_a_call_is_complete_lets_the_others_run(ranks, seed):
    def rank(group) -> list[int]:
        total = torch.tensor([group.rank()])
        work = dist.all_reduce(total, group=group, async_op=True)
        while not work.is_completed():
            time.sleep(0)
        return total.tolist()

    assert ranks.run_groups(rank, 3, seed=seed) == [[3]] * 3
    assert ranks.run_groups(rank, 3, seed=seed, faults=[Fault(1, 0, "delay")]) == [[3]] * 3


def test_a_loop_that_asks_in_vain_names_its_line_at_the_time_out(ranks):
    def rank(group) -> None:
        if group.rank():
            work = dist.barrier(group=group, async_op=True)
            while not work.is_completed():
                time.sleep(0)

    with assert_raises(SimulationError, problem="did not end within timeout_s=0.2") as caught:
        ranks.run_groups(rank, 2, timeout_s=0.2)
    assert "rank 0: returned" in str(caught.value)
    shown = str(caught.value)
    assert "while not work.is_completed()" in shown or "time.sleep(0)" in shown
    assert "_world.py" not in shown  # the simulator's own frames are not what the user looks for


def test_reports_of_many_ranks_name_those_alike_together():
    def rank(ctx: accel.DistContext) -> None:
        if ctx.rank not in (3, 40):
            accel.wait_for_everyone(ctx)

    with pytest.raises(Deadlock) as caught:
        simulate(rank, 64)
    first, *lines, fix = str(caught.value).splitlines()
    assert first == "deadlock, no rank of 64 can go on:"
    assert [line.split(":")[0].strip() for line in lines] == [
        "ranks 0-2",
        "rank 3",
        "ranks 4-39",
        "rank 40",
        "ranks 41-63",
    ]
    assert lines[1] == "  rank 3: returned"
    assert "waiting in accel.wait_for_everyone at test_sim_bad_input.py" in lines[0]
    assert lines[0].endswith("joined by ranks 0-2, 4-39, 41-63 of 64")
    assert fix.startswith("Let every rank")


@pytest.mark.parametrize(
    ("fn", "site"),
    [
        (
            lambda ctx: accel.wait_for_everyone(ctx) if ctx.rank else None,
            "accel.wait_for_everyone at test_sim_bad_input",
        ),
        (lambda ctx: dist.barrier(group=ctx.comm.group) if ctx.rank else None, "barrier() at test_sim_bad_input.py:"),
        (lambda ctx: _first(ctx) if ctx.rank else None, "accel.main_process_first at test_sim_bad_input.py:"),
    ],
)
def test_a_site_is_the_user_s_line_and_what_it_called(ranks, fn, site):
    with pytest.raises(Deadlock) as caught:
        ranks.run(fn, 2)
    assert f"rank 1: waiting in {site}" in str(caught.value)


def _first(ctx: accel.DistContext) -> None:
    with accel.main_process_first(ctx):
        pass


def test_simulators_print_as_themselves():
    simulator = Simulator()
    assert repr(simulator) == "Simulator()"
    simulator.close()
    assert repr(simulator) == "Simulator(closed)"
