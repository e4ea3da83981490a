# SPDX-License-Identifier: Apache-2.0
"""What a training step makes the host wait for on a device that is not the CPU, whose values are read freely."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import patience

SCRIPT = Path(__file__).parent / "helpers" / "standin_steps.py"
CASES = (
    "raise", "raise, clipped", "raise, accumulated", "skip", "ignore", "ignore, clipped", "raise in bf16",
    "ignore in bf16", "raise in fp16", "ignore in fp16", "raise on 2 replicas", "ignore on 2 replicas",
    "raise along tp", "ignore along tp",
)  # fmt: skip


@pytest.fixture(scope="module")
def waits() -> dict[str, list[list[str]]]:
    """What each step of each case waited for; a device type stays registered, so a process of its own finds out."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120), check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_a_step_waits_once_for_a_decision_and_never_without_one(waits: dict[str, list[list[str]]], case: str) -> None:
    # the scale of fp16 decides over each step, whatever the policy
    once = not case.startswith("ignore") or case.endswith("fp16")
    assert waits[case] == [["copy to the host"] if once else []] * 3


def test_every_case_is_looked_at(waits: dict[str, list[list[str]]]) -> None:
    assert set(CASES) == waits.keys()
