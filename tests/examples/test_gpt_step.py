# SPDX-License-Identifier: Apache-2.0
"""The step of examples/gpt.py beside the same loop by hand: operators, host waits, graph breaks and losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import patience

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpt.py"
BLOCKS, WHOLE, ACCEL = "by hand, blocks compiled", "by hand, model compiled", "accel"
MICRO_BATCHES = 2
# Of a micro-batch, whatever the model's depth: targets, their number and the loss by chunks, of which there is one.
MOST_OPERATORS, MOST_KERNELS = 100, 76

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def output(*words: str) -> str:
    """Return what the script prints."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120), check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def counts() -> dict[str, Any]:
    return json.loads(output("--counts"))


def test_a_block_has_the_operators_of_one_by_hand_and_the_rest_a_fixed_number(counts: dict[str, Any]) -> None:
    hand, ours = counts["work"][BLOCKS], counts["work"][ACCEL]
    assert ours["by_block"] == hand["by_block"] > 50
    assert ours["operators"] - hand["operators"] <= MOST_OPERATORS * MICRO_BATCHES
    assert ours["kernels"] - hand["kernels"] <= MOST_KERNELS * MICRO_BATCHES


def test_the_host_waits_once_in_a_step(counts: dict[str, Any]) -> None:
    assert counts["work"][BLOCKS]["waits"] == []
    # batches are not pinned on this device; on CUDA they are, and their copies do not wait
    waits = [each for each in counts["work"][ACCEL]["waits"] if each != "copy from the host"]
    assert waits == ["copy to the host"]


def test_compiled_blocks_are_one_graph_and_train_as_by_hand(counts: dict[str, Any]) -> None:
    assert [(each["graphs"], each["breaks"]) for each in counts["graphs"].values()] == [(1, 0)] * 3
    hand, ours = counts["graphs"][BLOCKS]["losses"], counts["graphs"][ACCEL]["losses"]
    assert len(hand) == 3 * MICRO_BATCHES
    assert ours == pytest.approx(hand, rel=1e-6)
    assert counts["graphs"][WHOLE]["losses"] == pytest.approx(hand, rel=1e-6)


@pytest.mark.nightly
def test_the_program_for_a_gpu_runs_at_a_tiny_size() -> None:
    lines = output("--tiny", "--rounds", "1", "--steps", "1").splitlines()
    assert lines[0] == "tiny: throughput"
    assert [line.split("  ")[1] for line in lines[1:4]] == [BLOCKS, WHOLE, ACCEL]
    assert all("tok/s" in line and "of the loops by hand" in line for line in lines[1:4])
    titles, rows = lines[4::2], lines[5::2]
    assert len(titles) == len(rows) == 8
    assert all("tok/s" in row for row in rows)
    assert all(row.strip().startswith(title.removeprefix("tiny: ")) for title, row in zip(titles, rows, strict=True))


def test_parts_that_would_begin_too_late_are_named() -> None:
    lines = output("--tiny", "--limit-s", "-1").splitlines()
    assert len(lines) == 9
    assert all("left out" in line for line in lines)
