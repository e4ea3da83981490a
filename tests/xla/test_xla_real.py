# SPDX-License-Identifier: Apache-2.0
"""torch_xla itself, on its CPU device, which serves one process; where it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import patience

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PJRT_DEVICE": "CPU"}
    done = subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True, timeout=patience(280))
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.multiprocess
def test_a_training_on_xla_is_the_one_on_the_cpu(tmp_path: Path) -> None:
    found = [run(str(HERE / "trains.py"), device, str(tmp_path / device)).stdout.split() for device in ("cpu", "xla")]
    assert [device for device, _ in found] == ["cpu", "xla:0"]
    cpu, xla = (float(total) for _, total in found)
    assert xla == pytest.approx(cpu, rel=1e-5)


def test_a_process_that_has_begun_to_use_xla_says_so() -> None:
    code = "import sys, torch, torch_xla; from accel.xla import has_begun as h; print(h(sys.modules));"
    code += "torch.ones(1, device=torch_xla.device()); print(h(sys.modules))"
    assert run("-c", code).stdout.split() == ["False", "True"]


@pytest.mark.multiprocess
def test_processes_on_xlas_cpu_are_told_that_it_does_not_connect_them(tmp_path: Path) -> None:
    launch = ["-m", "accel.cli", "launch", "--nproc-per-node", "2", "--device", "xla"]
    words = [sys.executable, *launch, str(HERE / "trains.py"), "xla", str(tmp_path)]
    environ = {**os.environ, "PJRT_DEVICE": "CPU"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=patience(280))
    assert done.returncode != 0
    assert "XLA does not connect the job's processes, one device each" in done.stderr
