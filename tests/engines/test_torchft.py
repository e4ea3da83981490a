# SPDX-License-Identifier: Apache-2.0
"""Replica groups that come and go: one is killed in mid-step, another goes on, a replacement joins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from processes import end, patience
from services import tried_again

import accel
from accel.engines import torchft

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchft") is None, reason="needs accel-torch[engine-tests]"),
]
ROOT = Path(__file__).parents[2]

STEPS, SAMPLES = 60, 1797


def start(folder: Path, address: str, name: str, ledger: str) -> subprocess.Popen[bytes]:
    """Start one replica group of one rank by `accel launch`."""
    script = [str(ROOT / "tests/engines/replica_group.py"), str(folder / ledger)]
    flags = ["--lighthouse", address, "--name", name, "--steps", str(STEPS)]
    with (folder / f"{ledger}.out").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "accel.cli", "launch", "--cpu", *script, *flags],
            stdout=out,
            stderr=out,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.filterwarnings("default")
@tried_again
def test_a_killed_group_costs_a_step_and_no_sample(tmp_path: Path) -> None:
    with torchft.lighthouse(join_timeout_s=patience(60), heartbeat_timeout_s=patience(4)) as address:
        first = start(tmp_path, address, "a", "a")
        second = start(tmp_path, address, "b", "b")
        third = None
        try:
            assert second.wait(patience(90)) == 9, (tmp_path / "b.out").read_text()
            died = time.time()
            third = start(tmp_path, address, "b", "c")
            for process, name in ((first, "a"), (third, "c")):
                assert process.wait(patience(120)) == 0, (tmp_path / f"{name}.out").read_text()
        finally:
            for process in (first, second, third):
                if process is not None:
                    end(process)
    assert_ledgers(tmp_path, died)


def assert_ledgers(folder: Path, died: float) -> None:
    """Check both ends, and that each sample is in exactly one step that counts, in each epoch."""
    a, b, c = (read(folder / name) for name in "abc")
    assert a[-1]["end"] == c[-1]["end"] == STEPS
    assert a[-1] == c[-1]  # parameters and position, bit for bit

    reports = [line for line in a if "committed" in line]
    lost = [line for line in reports if not line["committed"]]
    assert 1 <= len(lost) <= 3
    assert all(line["reason"] for line in lost)
    healed = next(line for line in c if line.get("healed"))
    assert healed["committed"]
    together = [line["step"] for line in reports if line["groups"] == 2]
    assert together == [*range(6, 12), *range(26, STEPS)]  # b is in six steps, the last of which is given up; then c

    counted = {line["step"]: line for line in reports if line["committed"]}
    assert sorted(counted) == list(range(STEPS))
    seen: list[int] = []
    steps: list[list[int]] = []
    for step, report in counted.items():
        tries = [
            [line["samples"] for line in each if line.get("step") == step and "samples" in line] for each in (a, b, c)
        ]
        final = [ids[-1] for ids in tries if ids][: report["groups"]] if report["groups"] > 1 else [tries[0][-1]]
        step_ids = [number for ids in final for number in ids]
        assert len(step_ids) == report["weight"]  # the division was by the samples of live groups
        seen += step_ids
        steps.append(step_ids)
    epochs, part = divmod(len(seen), SAMPLES)
    assert (a[-1]["epoch"], a[-1]["consumed"]) == (epochs, part)
    for epoch in range(epochs):
        assert Counter(seen[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == Counter(range(SAMPLES))
    assert len(set(seen[epochs * SAMPLES :])) == part

    replayed = replay(steps)
    torch.testing.assert_close(torch.tensor(a[-1]["parameters"]), replayed, rtol=1e-3, atol=1e-4)

    resumed = next(line for line in reports if line["committed"] and line["step"] == lost[-1]["step"])
    print(
        f"\nsteps given up: {len(lost)}; samples lost: 0; {resumed['at'] - died:.1f} s from the kill to the next step;"
    )
    print(f"the replacement healed in a step of {healed['seconds']:.1f} s, {healed['at'] - died:.1f} s after the kill")


def replay(steps: list[list[int]]) -> torch.Tensor:
    """Train by plain torch on the samples that counted, all of a step in one batch; the parameters at the end."""
    sys.path.insert(0, str(ROOT / "examples"))
    from replica_groups import digits  # which imports more than a collection needs

    inputs, labels, _ = digits().tensors
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    for step in steps:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[step]), labels[step]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


@pytest.mark.filterwarnings("default")
def test_no_lighthouse_is_an_error_at_once() -> None:
    with (
        accel.session({}, device="cpu") as ctx,
        assert_raises(accel.errors.LaunchError, problem="the lighthouse does not answer"),
        torchft.replica(ctx, lighthouse="http://127.0.0.1:9", name="a"),
    ):
        pass


def test_arguments_outside_their_range_are_one_error() -> None:
    with (
        accel.session({}, device="cpu") as ctx,
        assert_raises(accel.errors.ConfigError, got="lighthouse='host:1'.*name='a:b'.*min_replicas=0"),
        torchft.replica(ctx, lighthouse="host:1", name="a:b", min_replicas=0),
    ):
        pass
