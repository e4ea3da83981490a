# SPDX-License-Identifier: Apache-2.0
"""Profiles of a loop: traces of chosen ranks, waits for data, cycles, refusals; a straggler that two processes name."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from processes import job, patience, script_ranks
from torch.profiler import schedule

import accel
from accel.cli import main
from accel.errors import ConfigError
from accel.report.traces import find_waits, rank_times, read_traces, slowest
from accel.testing import simulate
from accel.trackers._profile import recording, write_snapshot

SHORT = schedule(wait=0, warmup=1, active=2, repeat=1)


def batches(count: int, seconds: float = 0.0) -> Iterator[torch.Tensor]:
    for _ in range(count):
        time.sleep(seconds)
        yield torch.ones(64, 64)


def loop(ctx: accel.DistContext, out: Path, *, steps: int = 4, seconds: float = 0.0, **options: Any) -> list[Path]:
    options = {"schedule": SHORT} | options
    with accel.profile(ctx, out=out, **options) as profile:
        for batch in profile.data(batches(steps, seconds)):
            _ = accel.reduce(ctx, (batch @ batch).sum())
            profile.step()
    return profile.files


def test_the_trace_of_a_rank_has_its_steps_and_its_waits_for_data(tmp_path: Path) -> None:
    ctx = accel.single("cpu")
    (tmp_path / "profile" / "cycle-2").mkdir(parents=True)
    old = tmp_path / "profile" / "cycle-2" / "rank-00000.json.gz"
    old.write_bytes(b"")
    assert loop(ctx, tmp_path, seconds=0.02) == [tmp_path / "profile" / "rank-00000.json.gz"]
    assert not old.exists()
    (trace,) = read_traces(tmp_path / "profile")
    assert (trace.rank, trace.world_size, list(trace.steps)) == (0, 1, [1, 2])
    assert "aten::mm" in trace.operators
    times = rank_times(trace, find_waits([trace]))
    assert times.data > 0.019 * 1e6 * 1  # one step at least waits in its own window
    assert times.total == pytest.approx(times.computing + times.waiting + times.exposed + times.data + times.idle)
    assert main(["profile", str(tmp_path)]) == 0


def test_ranks_that_are_not_chosen_just_loop(tmp_path: Path) -> None:
    assert simulate(lambda ctx: loop(ctx, tmp_path, ranks=[]), 2) == [[], []]
    assert list(tmp_path.iterdir()) == []
    files = simulate(lambda ctx: loop(ctx, tmp_path, ranks=[1]), 2)
    assert files == [[], [tmp_path / "profile" / "rank-00001.json.gz"]]
    (trace,) = read_traces(tmp_path / "profile")
    assert (trace.rank, trace.world_size) == (1, 2)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch's own, at each cycle
def test_later_cycles_have_folders_of_their_own(tmp_path: Path) -> None:
    files = loop(accel.single("cpu"), tmp_path, steps=8, schedule=schedule(wait=1, warmup=1, active=1, repeat=2))
    assert [str(file.relative_to(tmp_path)) for file in files] == [
        "profile/rank-00000.json.gz",
        "profile/cycle-2/rank-00000.json.gz",
    ]
    assert [list(read_traces(file.parent)[0].steps) for file in files] == [[2], [5]]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_the_block_yields_sums_of_operators_and_calls_back_after_each_trace(tmp_path: Path) -> None:
    ctx, ready = accel.single("cpu"), list[int]()
    options: dict[str, Any] = {"with_flops": True, "with_modules": True, "profile_memory": True, "record_shapes": True}
    with accel.profile(
        ctx,
        out=tmp_path,
        schedule=schedule(wait=1, warmup=1, active=1, repeat=2),
        activities=[torch.profiler.ProfilerActivity.CPU],
        on_trace_ready=lambda ended: ready.append(len(ended.key_averages())),
        **options,
    ) as profile:
        with assert_raises(accel.errors.StepError, problem="no trace yet"):
            profile.key_averages()
        for step, batch in enumerate(profile.data(batches(7))):
            _ = batch @ batch
            profile.step()
            if step >= 2:
                (product,) = [each for each in profile.key_averages() if each.key == "aten::mm"]
                assert (product.count, product.flops) == (1, 2 * 64**3)
                assert product.cpu_memory_usage == 64 * 64 * 4
    assert len(ready) == 2
    assert all(ready)
    assert len(profile.files) == 2  # each callback came after its trace
    assert "aten::mm" in profile.key_averages(group_by_input_shape=True).table(sort_by="cpu_time_total")
    with accel.profile(ctx, out=tmp_path, ranks=[]) as nothing:
        pass
    assert len(nothing.key_averages()) == 0


def test_a_loop_that_is_too_short_for_its_schedule_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "accel.trackers"):
        assert loop(accel.single("cpu"), tmp_path, schedule=None, steps=2) == []
    assert "the schedule's steps were not reached" in caplog.text


def test_a_trace_that_cannot_be_written_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("a file")
    assert loop(accel.single("cpu"), tmp_path) == []
    assert "the profile of rank 0 is not written" in caplog.text


def test_an_error_of_the_loop_comes_through(tmp_path: Path) -> None:
    given: list[accel.trackers.Profile] = []

    def fail() -> None:
        with accel.profile(accel.single("cpu"), out=tmp_path, schedule=SHORT) as profile:
            given.append(profile)
            for _ in profile.data(batches(4)):
                profile.step()
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    given[0].step()  # which does nothing behind the block


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ranks": [2]}, "there is no such rank"),
        ({"ranks": 0}, "the ranks are not valid"),
        ({"ranks": ["0"]}, "the ranks are not valid"),
        ({"schedule": 5}, "the schedule is not valid"),
        ({"activities": [], "ranks": [0]}, "the activities are not valid"),
        ({"activities": ["cpu"], "ranks": [0]}, "the activities are not valid"),
        ({"memory": True}, "memory snapshots need CUDA's allocator"),
        ({}, "simulated ranks share one profiler"),
        ({"out": "s3://bucket/run", "ranks": [0]}, "traces are written to local folders"),
    ],
)
def test_what_cannot_be_profiled_is_refused_on_every_rank(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    def refused(ctx: accel.DistContext) -> None:
        with assert_raises(ConfigError, problem=told), accel.profile(ctx, **({"out": tmp_path} | options)):
            pass

    _ = simulate(refused, 2)
    assert list(tmp_path.iterdir()) == []


def test_memory_is_recorded_in_the_block_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    with recording():
        write_snapshot(tmp_path / "memory.pickle")
    assert calls == [{"max_entries": 100_000}, str(tmp_path / "memory.pickle"), {"enabled": None}]


STRAGGLER = """
import sys, time, torch, accel
from torch import nn

torch.set_num_threads(1)
with accel.session(device="cpu") as ctx:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
    model, optimizer = accel.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))

    def batches():
        for _ in range(14):
            time.sleep(SLOW_S if ctx.rank == 1 else 0.002)
            yield torch.rand(32, 256)

    state = accel.train_state(ctx, seed=0)
    with accel.profile(ctx, out=OUT) as profile:
        for batch in profile.data(batches()):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            profile.step()
"""


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_processes_name_the_rank_whose_data_is_slow(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STRAGGLER.replace("OUT", repr(str(tmp_path))).replace("SLOW_S", str(patience(0.1))))
    with script_ranks(script, job(2), folder=tmp_path) as ranks:
        assert [rank.wait(patience(120)) for rank in ranks] == [0, 0]
    traces = read_traces(tmp_path / "profile")
    waits = find_waits(traces)
    fast, slow = (rank_times(trace, waits) for trace in traces)
    assert [(trace.rank, list(trace.steps)) for trace in traces] == [(rank, [5, 6, 7, 8, 9]) for rank in range(2)]
    assert waits.compared > waits.skipped == 0
    assert fast.waiting > 0.4 * fast.total > slow.waiting
    assert slow.data > 0.5 * slow.total
    found = slowest([fast, slow])
    assert found is not None
    assert (found.rank, found.part) == (1, "data")
