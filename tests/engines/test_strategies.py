# SPDX-License-Identifier: Apache-2.0
"""One script under every strategy, on real processes: the same losses and weights, and checkpoints of each for each."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import patience

from accel.parallel._engines import ENGINES

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "strategies.py"
LOSSES, WEIGHTS = 1e-5, 1e-3  # relative; AdamW divides tiny gradients, and their rounding, by their own size


def found(folder: Path, strategies: str) -> dict[str, Any]:
    """Run the strategies for a few steps on two processes, and return the figures."""
    launch = [sys.executable, "-m", "accel.cli", "launch", "--cpu", "--nproc-per-node", "2", str(SCRIPT)]
    words = ["--strategies", strategies, "--steps", "4", "--further", "1", "--ring", "--json", "found.json"]
    done = subprocess.run(
        [*launch, *words], cwd=folder, capture_output=True, text=True, timeout=patience(200), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text())


def assert_law(figures: dict[str, Any], strategies: str) -> None:
    names = strategies.split(",")
    first = names[0]
    assert list(figures["losses"]) == names
    for name, curve in figures["losses"].items():
        assert curve == pytest.approx(figures["losses"][first], rel=LOSSES), name
        assert figures["weights"][name] < WEIGHTS, name
    for pair, curve in figures["after"].items():
        assert curve == pytest.approx(figures["after"][f"{first} {first}"], rel=LOSSES), pair


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.multiprocess
def test_strategies_train_alike_and_load_each_others_checkpoints(tmp_path: Path) -> None:
    has_deepspeed = "deepspeed" in ENGINES and importlib.util.find_spec("deepspeed") is not None
    strategies = "ddp,fsdp,zero1,zero2,zero3" if has_deepspeed else "ddp,fsdp"
    assert_law(found(tmp_path, strategies), strategies)
