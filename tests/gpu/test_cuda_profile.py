# SPDX-License-Identifier: Apache-2.0
"""Profiles on a CUDA device: work is the device's, and each trace has a snapshot of memory: `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import schedule

import accel
from accel.report.traces import find_waits, rank_times, read_traces

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_kernels_are_the_work_and_memory_is_beside_the_trace(tmp_path: Path) -> None:
    ctx = accel.single("cuda")
    left = torch.rand(1024, 1024, device="cuda")
    plan = schedule(wait=0, warmup=1, active=2, repeat=1)
    with accel.profile(ctx, out=tmp_path, schedule=plan, memory=True) as profile:
        for _ in range(4):
            left = (left @ left).relu()
            torch.cuda.synchronize()
            profile.step()
    assert [file.name for file in profile.files] == ["rank-00000.json.gz", "memory-00000.pickle"]
    (trace,) = read_traces(tmp_path / "profile")
    assert trace.on_gpu
    assert list(trace.steps) == [1, 2]
    assert rank_times(trace, find_waits([trace])).computing > 0
    assert (tmp_path / "profile" / "memory-00000.pickle").stat().st_size > 0
