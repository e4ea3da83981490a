# SPDX-License-Identifier: Apache-2.0
"""A training run that is asked to stop: what it leaves, and with which status it ends."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from launching import HERE, Workspace, alive, wait_for

import accel

pytestmark = pytest.mark.multiprocess

TRAINING = f"""{HERE}
import torch
import accel

torch.set_num_threads(1)
with accel.session(device="cpu") as ctx, accel.stop_requests(ctx) as requests:
    torch.manual_seed(0)
    model = accel.prepare_model(ctx, torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    accum, scaler = accel.Accumulation(steps=2), accel.loss_scale(ctx)
    while True:
        accum = accum.next()
        with accel.accumulate(ctx, accum, model):
            loss = model(torch.randn(8, 64)).square().mean()
            accum = accel.backward(ctx, loss, scaler, accum)
        if accum.sync:
            accum = accel.optimizer_step(ctx, optimizer, scaler, accum).accum
            with open(f"steps-{{rank}}", "a") as file:  # of which the size is the number of steps
                file.write(".")
            if accum.updates == 3:
                here()
            if stop := accel.stop_agreed(ctx, requests):
                items = {{"model": model, "optimizer": optimizer, "accum": accum}}
                accel.save_state(ctx, "runs", items, step=accum.updates)
                raise stop
"""
STOPPED = "raise stop"


def steps(workspace: Workspace) -> list[int]:
    return [path.stat().st_size for path in sorted(workspace.folder.glob("steps-*"))]


def saved_step(folder: Path) -> int:
    found = accel.latest_checkpoint(folder / "runs")
    assert found is not None
    return int(found.name.removeprefix("step-"))


def stop_at(workspace: Workspace, n: int, number: int, after_s: float, *, one_rank: bool = False) -> None:
    """Start a run, stop it once it trains, and see what it leaves."""
    script = workspace.write(TRAINING)
    launcher = workspace.start("launch", "--nproc-per-node", str(n), script)
    pids = workspace.pids(n)
    time.sleep(after_s)
    if one_rank:
        os.kill(pids[-1], number)
    else:
        launcher.send_signal(number)
    _, err = launcher.communicate(timeout=6)  # a save of some milliseconds, and 5 s
    assert launcher.returncode == 128 + number
    line = 1 + TRAINING[: TRAINING.index(STOPPED)].count("\n")
    places = ", ".join(f"rank {rank} was at {script}:{line}" for rank in range(n))
    assert err == f"accel: stopped by {signal.Signals(number).name}; {places}\n"
    assert steps(workspace) == [saved_step(workspace.folder)] * n
    assert not any(map(alive, pids))


@pytest.mark.parametrize(
    ("n", "number", "one_rank"),
    [(1, signal.SIGTERM, False), (2, signal.SIGTERM, False), (2, signal.SIGTERM, True), (2, signal.SIGUSR1, False)],
)
def test_a_stopped_run_leaves_a_checkpoint_of_its_last_step(
    workspace: Workspace, n: int, number: int, one_rank: bool
) -> None:
    stop_at(workspace, n, number, 0.1, one_rank=one_rank)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("trial", range(20))
def test_at_any_moment(workspace: Workspace, n: int, trial: int) -> None:
    stop_at(workspace, n, signal.SIGTERM, random.Random(trial).uniform(0, 1), one_rank=trial % 4 == 3)


@pytest.mark.parametrize("n", [1, 2])
def test_a_second_signal_ends_at_once(workspace: Workspace, n: int) -> None:
    """The ranks would take 60 s to their next step."""
    script = workspace.write(
        TRAINING.replace("            if stop :=", "            time.sleep(60)\n            if stop :=")
    )
    launcher = workspace.start("launch", "--nproc-per-node", str(n), script)
    wait_for(lambda: steps(workspace) == [1] * n, seconds=30)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=2)
    assert launcher.returncode == 143
    assert "killed because still running" in err


def test_a_second_signal_at_a_rank_ends_it_without_the_launchers_help(workspace: Workspace) -> None:
    script = workspace.write(TRAINING.replace("here()\n", "here()\n                time.sleep(60)\n"))
    launcher = workspace.start("launch", "--nproc-per-node", "1", script)
    pid = workspace.pids(1)[0]
    for _ in range(2):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.5)
    _, err = launcher.communicate(timeout=2)
    assert launcher.returncode == 143
    assert err == "accel: rank 0 was killed by SIGTERM\n"
