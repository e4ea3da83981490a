# SPDX-License-Identifier: Apache-2.0
"""Devices of other vendors are found and used by one table; code that says cuda means CUDA."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
import torch
from processes import patience

from accel import devices

ROOT = Path(__file__).parent.parent
CUDA = {  # what of CUDA each of these uses, that other accelerators have not or have under other names
    "cli/_setup.py": "versions of CUDA, cuDNN and NCCL",
    "comm/_streams.py": "copies of pinned memory while the host goes on",
    "config/_settings.py": "--gpu-ids, which is CUDA_VISIBLE_DEVICES; the name of a choice",
    "context/_make.py": "the word GPU in an error",
    "launching/hosts/_slurm.py": "GPUs of a job's nodes; the name of a choice",
    "launching/local/_launch_plan.py": "--gpu-ids, which is CUDA_VISIBLE_DEVICES",
    "metrics/_flops.py": "streams of CUDA",
    "trackers/_profile.py": "CUPTI's activity, snapshots of CUDA's allocator",
    "parallel/axes/context/_kernels.py": "conditions of CUDA's attention kernels",
    "precision/_amp.py": "tf32",
    "precision/_fp8.py": "compute capability",
    "testing/selfcheck/_checks.py": "a GPU's UUID",
}


KINDS = {"mps", "xpu", "npu", "hpu"}


def words(path: Path) -> set[str]:
    """The names and short texts of a source, without comments and docstrings; none where no kind of device is named."""
    found: set[str] = set()
    text = path.read_text()
    if not any(kind in text for kind in KINDS | {"cuda"}):
        return found
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            found.add(token.string)
        elif token.type == tokenize.STRING and len(token.string) < 12:
            found.add(token.string.strip("\"'").partition(":")[0])
    return found


def test_only_what_is_cudas_own_says_cuda() -> None:
    sources = {path.relative_to(ROOT / "accel").as_posix(): words(path) for path in (ROOT / "accel").rglob("*.py")}
    core = {name: said for name, said in sources.items() if not name.startswith(("engines/", "report/", "estimate/"))}
    assert {name for name, said in core.items() if "cuda" in said} - CUDA.keys() == set(), "ask accel.devices instead"
    assert {name for name in CUDA if "cuda" not in sources[name]} == set(), "no longer needed here"
    others = {name for name, said in core.items() if said & KINDS}
    assert others <= {"devices.py"}, "differences of devices belong into accel.devices"


@pytest.mark.parametrize(
    ("device", "dtype", "backend"),
    [
        ("cpu", torch.float64, "gloo"),
        ("mps", torch.float32, "gloo"),
        ("xla", torch.float32, "xla"),
        ("cuda", torch.float64, "nccl"),
        ("xpu", torch.float64, "xccl"),
    ],
)
def test_the_table_knows_each_kind(device: str, dtype: torch.dtype, backend: str) -> None:
    place = torch.device(device)
    assert (devices.wide_dtype(place), devices.backend_of(place)) == (dtype, backend)


def test_a_machine_without_accelerator_computes_on_the_cpu() -> None:
    if not torch.accelerator.is_available():
        assert devices.find_accelerator() == "cpu"
    cpu = torch.device("cpu")
    devices.select_device(cpu)
    devices.wait_for_device(cpu)
    assert (devices.name_of_device(cpu), devices.peak_memory(cpu)) == ("cpu", 0)
    assert devices.count_devices("no_such_kind") == 0


@pytest.mark.slow
def test_a_registered_device_is_found_with_backend_memory_streams_and_autocast() -> None:
    script = Path(__file__).parent / "helpers" / "standin_device.py"
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=patience(120)
    )
    found = json.loads(ran.stdout)
    assert "expected standin device 2 for local rank 2, got 2 visible standin devices" in found.pop("third")
    assert "got fp16 on standin:1" in found.pop("fp16")
    assert found == {
        "auto": "standin:1",
        "selected": 1,
        "count": 2,
        "backend": "standccl",
        "name": "Standin 1",
        "wide": "torch.float64",
        "peak": 0,
        "stream": [1, 1, 1, 1],
        "bf16": "",
    }


@pytest.mark.slow
def test_a_loop_trains_on_a_device_that_a_package_registers_as_on_the_cpu() -> None:
    script = Path(__file__).parent / "helpers" / "standin_trains.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=patience(120), check=False
    )
    assert done.stdout.split() == ["trained"], done.stderr[-3000:]


@pytest.mark.parametrize(
    ("version", "is_untried"),
    [("2.12.1", False), ("2.13.0+cpu", False), (devices.NEWEST_TORCH, False), ("99.0", True), ("99.1.0a0+git1", True)],
)
def test_a_torch_newer_than_those_tried_gets_a_remark(version: str, is_untried: bool) -> None:
    remark = devices.untried_torch(version)
    assert bool(remark) == is_untried
    assert (devices.NEWEST_TORCH in remark) == is_untried


def test_the_page_lists_the_newest_torch_tried() -> None:
    page = (ROOT / "docs/torch-versions.md").read_text()
    tried = re.findall(r"^\| (\d+\.\d+\.\d+) \|.*\| declared", page, re.MULTILINE)
    assert tried[0] == devices.NEWEST_TORCH
