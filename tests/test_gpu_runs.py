# SPDX-License-Identifier: Apache-2.0
"""The list of runs for a machine with GPUs: what each number of them holds, and where the figures go."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_runs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_run_names_files_that_are_there(gpu: Any) -> None:
    files = {word for run in gpu.RUNS for word in run.words if word.endswith(".py") or word.startswith("tests/")}
    assert len(files) > 10
    assert all((gpu.ROOT / each).exists() for each in files)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_a_machine_runs_what_its_gpus_can_hold(gpu: Any, gpus: int) -> None:
    runs = gpu.chosen(gpus, [])
    assert runs
    for run in runs:
        words = gpu.command(run, gpus)
        if "--nproc-per-node" in words:
            processes = int(words[words.index("--nproc-per-node") + 1])
            assert run.gpus <= processes <= gpus
    assert {run.name for run in gpu.chosen(1, [])} < {run.name for run in gpu.chosen(4, [])}
    assert [run.name for run in gpu.chosen(8, ["pipeline"])] == ["pipeline"]


def test_the_summary_takes_the_place_of_the_last_one(gpu: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{gpu.BEGIN}\n\nold\n\n{gpu.END}\n\n## Next\n")
    run = gpu.RUNS[1]
    gpu.write(gpu.summary("2 x GPU", [(run, "1.02x", 0), (run, "", 124), (run, "Error", 1)], 2), page)
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("# Page\n")
    assert text.endswith("## Next\n")
    assert "1.02x" in text
    assert "It took too long." in text
    assert "It failed with status 1." in text
    assert gpu.PAGE.read_text().count(gpu.BEGIN) == 1


def test_throughput_stands_beside_what_torchtitan_has_published(gpu: Any) -> None:
    gpt = next(run for run in gpu.RUNS if run.name == "GPT by fsdp in bf16")
    line = "[rank 0] step    60  loss  5.100  320k tok/s  41 % MFU"
    older = line.replace("320k", "1.5")
    (found,) = gpu.figures("H100", [(gpu.RUNS[1], "1.02x", 0), (gpt, f"{older}\n{line}\nall ranks end", 0)], 4)
    assert (found.gpus, found.tokens, found.mfu) == ("4 x H100", 80000, "41 %")
    assert gpu.figures("H100", [(gpt, line, 1)], 4) == []
    text = gpu.table([found, *gpu.PUBLISHED])
    assert "| GPT of 124 million | fsdp in bf16 | 4 x H100 | 80,000 | 41 % | this run |" in text
    page = gpu.PAGE.read_text()
    assert gpu.table(gpu.PUBLISHED) in page
    assert all(each.source for each in gpu.PUBLISHED)
