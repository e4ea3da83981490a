# SPDX-License-Identifier: Apache-2.0
"""Pipelines of real processes: every schedule trains, and a stage that fails is told by all ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import replayed_models
import torch
from pipelines import Words, by_hand, differences, train
from processes import job, patience, run_ranks, script_ranks
from test_pipelines import SCHEDULES

import accel

SCRIPT = """
import os, sys
import torch, accel
from torch import nn
from pipelines import Words, batch_of, loss_sum
from steps import begin_batch

class Failing(nn.Module):
    def forward(self, hidden):
        if torch.is_grad_enabled() and os.path.exists("fail"):
            if sys.argv[1] == "dies":
                os._exit(9)
            raise ValueError("no such thing")
        return hidden

torch.set_num_threads(1)
with accel.session(device="cpu", mesh="pp=-1", timeout_s=60) as ctx:
    whole = Words()
    whole.blocks[int(sys.argv[2])] = Failing()
    model = accel.prepare_model(ctx, whole, plan=accel.parallel.Plan(micro_batches=4))
    ids, targets = batch_of(0, 8)
    state = accel.train_state(ctx)
    for step in range(4):
        if step == 2 and ctx.rank == 1:
            open("fail", "w").close()
        try:
            given = (ctx, model, begin_batch(ctx, state), ids)
            _ = accel.forward_backward(*given, targets=targets, loss_fn=loss_sum, weight=20)
        except accel.AccelError as error:
            print("told:", step, type(error).__name__, str(error).replace(chr(10), " "), flush=True)
            os._exit(3)
"""


def assert_trains(rank: int, environs: list[dict[str, str]]) -> None:
    torch.set_num_threads(1)
    with accel.session(environs[rank], device="cpu") as ctx:
        for tied in (False, True):
            expected = by_hand(lambda tied=tied: Words(tied=tied))
            for schedule, per, micro in SCHEDULES:
                plan = accel.parallel.Plan(schedule=_schedule(schedule), stages_per_rank=per, micro_batches=micro)
                found = train(ctx, lambda tied=tied: Words(tied=tied), plan, mesh="pp=2")
                names = found.parameters.keys()
                own = expected._replace(parameters={name: expected.parameters[name] for name in names})
                parameters, figures = differences([found], own)
                assert parameters < 1e-10
                assert figures < 1e-12


def _schedule(name: str) -> Any:
    return name


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_schedule_trains_in_two_processes() -> None:
    run_ranks(assert_trains, job(2))


def _written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    script = folder / "fails.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})" + SCRIPT)
    return script


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_stage_that_fails_ends_both_ranks_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = _written(tmp_path, monkeypatch)
    began = time.monotonic()
    with script_ranks(script, job(2), "raises", 6, folder=tmp_path) as ranks:
        assert [rank.wait(60) for rank in ranks] == [3, 3], [rank.said() for rank in ranks]
        first, second = (rank.said() for rank in ranks)
    assert time.monotonic() - began < patience(40)
    assert "told: 2 StageError a pipeline stage failed: ValueError: no such thing" in second
    assert "stage 1 of 2, micro-batch 1 of 4, rank 1" in second
    assert "told: 2 PeerError" in first
    assert "which exchanges with rank 1" in first


@pytest.mark.slow
@pytest.mark.multiprocess
def test_others_are_told_of_a_rank_that_dies_inside_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = _written(tmp_path, monkeypatch)
    began = time.monotonic()
    with script_ranks(script, job(3), "dies", 4, folder=tmp_path) as ranks:  # a block of the stage between
        assert [rank.wait(60) for rank in ranks] == [3, 9, 3], [rank.said() for rank in ranks]
        for rank in (ranks[0], ranks[2]):
            assert "told: 2 PeerError" in rank.said()
            assert "which exchanges with rank 1. Another rank has left or hangs" in rank.said()
    assert time.monotonic() - began < patience(40)  # and not the 60 s of the time-out


def assert_traces(rank: int, environs: list[dict[str, str]], folder: str) -> None:
    torch.set_num_threads(1)
    with accel.session(environs[rank], device="cpu") as ctx, pytest.MonkeyPatch.context() as patch:
        replayed_models.widen(patch, "bert")
        expected = replayed_models.by_hand("bert", rows=(4, 4, 3, 4))
        first = replayed_models.train(ctx, "bert", mesh="pp=2", rows=(4, 4), save=folder)
        second = replayed_models.train(ctx, "bert", mesh="pp=2", rows=(3, 4), resume=folder, begin=2)
        found = second._replace(figures=first.figures + second.figures)
        own = expected._replace(parameters={name: expected.parameters[name] for name in found.parameters})
        parameters, figures = differences([found], own)
        assert parameters < 1e-10
        assert figures < 1e-10


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_traced_model_trains_and_resumes_in_two_processes(tmp_path: Path) -> None:
    run_ranks(assert_traces, job(2), str(tmp_path / "saved"))
