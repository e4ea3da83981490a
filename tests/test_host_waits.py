# SPDX-License-Identifier: Apache-2.0
"""What a training step makes the host wait for on a device that is not the CPU, whose values are read freely."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import script_ranks

PAGE = Path(__file__).parent.parent / "docs" / "host-waits.md"
SCRIPT = Path(__file__).parent / "helpers" / "counted_steps.py"
CASES = (
    "raise", "raise, clipped", "raise, accumulated", "skip", "ignore", "ignore, clipped", "raise in bf16",
    "ignore in bf16", "raise in fp16", "ignore in fp16", "raise on 2 replicas", "ignore on 2 replicas",
    "raise along tp", "ignore along tp", "defer", "defer, accumulated", "defer in bf16", "defer on 2 replicas",
    "defer along tp", "raise on shards", "skip on shards, accumulated", "ignore on shards", "defer on shards",
    "raise along pp", "ignore along pp", "defer along pp",
)  # fmt: skip


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each step of each case waited for; a device type stays registered, so a process of its own finds out."""
    with script_ranks(SCRIPT, [{"OMP_NUM_THREADS": "1"}], folder=tmp_path_factory.mktemp("counts")) as (process,):
        assert process.wait(120) == 0, process.said()[-4000:]
        return json.loads(process.said().splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_a_step_waits_once_for_a_decision_and_never_without_one(counts: dict[str, Any], case: str) -> None:
    if case.startswith("defer"):  # for the outcome of the step before, which is the first thing that a step does
        first = ["an event"] if case.endswith(("tp", "pp")) else []  # their first step is left out
        assert counts["steps"][case] == [first, ["an event"], ["an event"]]
        return
    # the scale of fp16 decides over each step, whatever the policy
    once = not case.startswith("ignore") or case.endswith("fp16")
    assert counts["steps"][case] == [["copy to the host"] if once else []] * 3


def test_every_case_is_looked_at(counts: dict[str, Any]) -> None:
    assert set(CASES) == counts["steps"].keys()


def test_the_page_has_the_waits_of_each_verb(counts: dict[str, Any]) -> None:
    found = [
        f"{_row(verb)} {alone} | {counts['together'][verb]} | {counts['sharded'][verb]} |"
        for verb, alone in counts["alone"].items()
    ]
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert shown == found


def _row(verb: str) -> str:
    name, _, kind = verb.partition(", ")
    return f"| `{name}`, {kind} |" if kind else f"| `{name}` |"
