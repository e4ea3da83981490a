# SPDX-License-Identifier: Apache-2.0
"""What a training step makes the host wait for on a device that is not the CPU, whose values are read freely."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from processes import script_ranks

import accel

PAGE = Path(__file__).parent.parent / "docs" / "host-waits.md"
SCRIPT = Path(__file__).parent / "helpers" / "counted_steps.py"
CASES = (
    "raise", "raise, clipped", "raise, accumulated", "skip", "ignore", "ignore, clipped", "raise in bf16",
    "ignore in bf16", "raise in fp16", "ignore in fp16", "raise on 2 replicas", "ignore on 2 replicas",
    "raise along tp", "ignore along tp", "defer", "defer, accumulated", "defer in bf16", "defer on 2 replicas",
    "defer along tp", "raise on shards", "skip on shards, accumulated", "ignore on shards", "defer on shards",
    "raise along pp", "ignore along pp", "defer along pp", "raise along cp", "ignore along cp", "defer along cp",
    "raise along ep", "ignore along ep", "skip along tp", "skip along pp", "raise on replicated shards",
    "raise on shards along tp", "raise under a scale on shards", "raise under a scale along tp",
    "ignore along pp under a scale",
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
        first = ["an event"] if case.endswith(("tp", "pp", "cp")) else []  # their first step is left out
        assert counts["steps"][case] == [first, ["an event"]]
        return
    # the scale of fp16 decides over each step, whatever the policy
    once = not case.startswith("ignore") or case.endswith(("fp16", "scale"))
    experts = case.endswith("ep")  # whose layer waits for the number of its tokens
    first = int(experts)  # whose first call is proved
    assert counts["steps"][case][first:] == [["copy to the host"] * (once + experts)] * (2 - first)


def test_every_case_is_looked_at(counts: dict[str, Any]) -> None:
    assert set(CASES) == counts["steps"].keys()


def test_the_page_has_the_waits_of_each_verb(counts: dict[str, Any]) -> None:
    found = [
        f"{_row(verb)} {alone} | {counts['together'][verb]} | {counts['sharded'][verb]} |"
        for verb, alone in counts["alone"].items()
    ]
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert shown == found


# These ask nothing of a device: blocks, choices of ranks, the context itself, trackers; or call what the user passes.
ASK_NOTHING = {
    "close", "end_trackers", "find_executable_batch_size", "group_of", "init_trackers", "join_uneven_inputs",
    "local_main_process_first", "loss_scale", "main_process_first", "no_sync", "on_last_process",
    "on_local_main_process", "on_local_process", "on_main_process", "on_process", "print", "profile", "replace",
    "tracking", "trigger_sync_in_backward",
}  # fmt: skip
# `prepare` is those of its objects; a page of its own has the other
OF_OTHERS = {"prepare", "load_checkpoint_and_dispatch"}


def test_every_verb_is_in_the_list_or_asks_nothing_of_a_device(counts: dict[str, Any]) -> None:
    listed = {verb.partition(",")[0] for verb in counts["alone"]}
    functions = {name: getattr(accel, name) for name in dir(accel) if not name.startswith("_")}
    verbs = {
        name
        for name, each in functions.items()
        if inspect.isfunction(each) and next(iter(inspect.signature(each).parameters), "") == "ctx"
    }
    assert verbs == (listed & verbs) | ASK_NOTHING | OF_OTHERS
    assert not listed & ASK_NOTHING


def _row(verb: str) -> str:
    name, _, kind = verb.partition(", ")
    return f"| `{name}`, {kind} |" if kind else f"| `{name}` |"
