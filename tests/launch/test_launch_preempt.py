# SPDX-License-Identifier: Apache-2.0
"""A training run that is asked to stop: what it leaves, and with which status it ends."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launching import HERE, REST, Workspace, alive
from processes import patience, wait_for

import accel

pytestmark = pytest.mark.multiprocess

HELPERS = Path(__file__).parent.parent / "helpers"
TRAINING = f"""{HERE}
sys.path.append({str(HELPERS)!r})
import torch
import accel
from steps import begin_batch

torch.set_num_threads(1)
with accel.session(device="cpu") as ctx, accel.preempt.stop_requests(ctx) as requests:
    torch.manual_seed(0)
    model = accel.prepare_model(ctx, torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    state = accel.train_state(ctx, accumulation=2)
    while True:
        state = begin_batch(ctx, state)
        with accel.accumulate(ctx, state, model):
            loss = model(torch.randn(8, 64)).square().mean()
            state = accel.backward(ctx, loss, state)
        if state.sync:
            state = accel.optimizer_step(ctx, optimizer, state)
            with open(f"steps-{{rank}}", "a") as file:  # of which the size is the number of steps
                file.write(".")
            if state.updates == 3:
                here()
            if stop := accel.preempt.stop_agreed(ctx, requests):
                items = {{"model": model, "optimizer": optimizer, "state": state}}
                accel.save_state(ctx, "runs", items, step=state.updates)
                raise stop
"""
STOPPED = "raise stop"


def steps(workspace: Workspace) -> list[int]:
    return [path.stat().st_size for path in sorted(workspace.folder.glob("steps-*"))]


def saved_step(folder: Path) -> int:
    found = accel.latest_checkpoint(folder / "runs")
    assert found is not None
    return int(found.name.removeprefix("step-"))


def training(workspace: Workspace, n: int, script: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a run and wait until it trains."""
    launcher = workspace.start("launch", "--nproc-per-node", str(n), script)
    wait_for(lambda: len(list(workspace.folder.glob("pid-*"))) == n, seconds=60)
    return launcher, workspace.pids(n)


def stop_at(
    workspace: Workspace, n: int, number: int, after_s: float, *, one_rank: bool = False, most_s: float = 20
) -> None:
    """Stop a run some time after it has begun to train, and see what it leaves."""
    script = workspace.write(TRAINING)
    launcher, pids = training(workspace, n, script)
    time.sleep(after_s)
    if one_rank:
        os.kill(pids[-1], number)
    else:
        launcher.send_signal(number)
    _, err = launcher.communicate(timeout=patience(most_s))
    assert launcher.returncode == 128 + number
    line = 1 + TRAINING[: TRAINING.index(STOPPED)].count("\n")
    places = ", ".join(f"rank {rank} was at {script}:{line}" for rank in range(n))
    told, _, last = err.partition("\n")
    name = signal.Signals(number).name
    assert told == f"accel: stopped by {name}; {places}"
    ending = (
        rf"accel: stopped by {name} after 0:\d\d:\d\d, exit status {128 + number}; newest checkpoint runs/step-\d+\n"
    )
    assert re.fullmatch(ending, last) if n > 1 else last == ""
    assert steps(workspace) == [saved_step(workspace.folder)] * n
    assert not any(map(alive, pids))


@pytest.mark.slow
def test_a_stopped_run_leaves_a_checkpoint_of_its_last_step(workspace: Workspace) -> None:
    stop_at(workspace, 2, signal.SIGUSR1, 0.1, one_rank=True)


@pytest.mark.nightly
@pytest.mark.parametrize(("n", "trial"), [(1, 0), (2, 2), (2, 3)])
def test_at_any_moment(workspace: Workspace, n: int, trial: int) -> None:
    """Within 5 s and the milliseconds that a save takes here."""
    stop_at(workspace, n, signal.SIGTERM, random.Random(trial).uniform(0, 1), one_rank=trial == 3, most_s=6)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(workspace: Workspace) -> None:
    """The ranks would take 60 s to the end of their step."""
    script = workspace.write(TRAINING.replace("here()\n", f"here()\n                {REST}\n"))
    launcher, _ = training(workspace, 2, script)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=patience(5))
    assert launcher.returncode == 143
    assert "killed because still running: rank 0, 1" in err


@pytest.mark.nightly
def test_a_second_signal_at_a_rank_ends_it_without_the_launchers_help(workspace: Workspace) -> None:
    script = workspace.write(TRAINING.replace("here()\n", f"here()\n                {REST}\n"))
    launcher, (pid,) = training(workspace, 1, script)
    for _ in range(2):
        os.kill(pid, signal.SIGTERM)
        time.sleep(2)
    _, err = launcher.communicate(timeout=patience(5))
    assert launcher.returncode == 143
    assert err == "accel: rank 0 was killed by SIGTERM\n"
