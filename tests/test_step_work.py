# SPDX-License-Identifier: Apache-2.0
"""Kernels, operators and messages of a step against loops by hand, and the order of collectives: a golden file.

`python tests/test_step_work.py` rewrites the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import patience

SCRIPT = Path(__file__).parent / "helpers" / "counted_work.py"
ORDERS = Path(__file__).parent / "collective_orders.txt"
# to the loop by hand: plain, with the same guarantees, with a GradScaler
MOST = {"ignores": 1.05, "looks": 1.0, "counts": 1.0, "scales": 1.07}
# All ranks of a pipeline get the loss; with the guarantees, by hand too.
LOSS_ALONG_PP = 1
# Along pp, of two micro-batches for each of a window's. Stages replay the model's forward: they compute on placeholders
# between modules of other stages, write what arrives into the arguments of their first module, and receive each batch
# in new memory.
REPLAYED = {"pp": {"operators": 6, "kernels": 2}, "pp last": {"operators": 14, "kernels": 4}}
# Along tp, of each micro-batch: views without a kernel, as tensors between divided layers change their class.
PARTS = {"tp": {"operators": 38}}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def count(*words: str) -> dict[str, Any]:
    """Return the work and the orders; a device type stays registered, so a process of its own finds out."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *words]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=patience(600), check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def shown(orders: dict[str, list[str]]) -> str:
    """Return the text of the golden file."""
    return "".join(
        f"{name}\n" + "".join(f"  {each.removeprefix('message: ')}\n" for each in orders[name]) for name in orders
    )


@pytest.fixture(scope="module")
def counts() -> dict[str, Any]:
    return count()


def test_a_step_does_no_more_than_the_loop_by_hand(counts: dict[str, Any]) -> None:
    assert_no_more_work(counts["work"], 36)


@pytest.mark.nightly
def test_a_step_of_any_options_does_no_more_than_the_loop_by_hand() -> None:
    assert_no_more_work(count("--all")["work"], 72)


def assert_no_more_work(work: dict[str, Any], cases: int) -> None:
    over = list[str]()
    for case, found in work.items():
        layout, kind, _, steps = case.split(", ")
        hand, ours = found["by_hand"], found["by_accel"]
        for what in ("kernels", "operators", "messages"):
            most = hand[what] * (1.0 if what == "messages" else MOST[kind])
            if layout in REPLAYED and what == "messages" and kind != "looks":
                most += LOSS_ALONG_PP
            most += (REPLAYED | PARTS).get(layout, {}).get(what, 0) * int(steps)
            if ours[what] > most:
                over.append(f"{case}: {ours[what]} {what}, by hand {hand[what]}")
    assert not over, "\n".join(over)
    assert len(work) == cases


def test_collectives_stand_in_the_order_that_lets_them_overlap(counts: dict[str, Any]) -> None:
    assert shown(counts["orders"]) == ORDERS.read_text(), f"python {Path(__file__).name} rewrites {ORDERS.name}"
    ddp, fsdp = counts["orders"]["ddp, 1"], counts["orders"]["fsdp, 1"]
    # a bucket's reduction before the backward of the layers in front of it
    first = ddp.index("backward")
    assert ddp[first:] == ["backward", "message: all_reduce 296"] * 4
    # FSDP2 gathers the next unit of the backward before it computes this one
    first = fsdp.index("backward")
    assert [each.split()[1] for each in fsdp[first - 2 : first]] == ["all_gather_single"] * 2


if __name__ == "__main__":
    _ = ORDERS.write_text(shown(count()["orders"]))
