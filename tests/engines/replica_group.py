# SPDX-License-Identifier: Apache-2.0
"""The example of replica groups with a ledger, and with a death in mid-step: `replica_group.py LEDGER FLAGS...`."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch

import accel
from accel.engines import torchft

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from replica_groups import Dealt, parse, train

DIES_AFTER = 5  # steps of two groups, after which group b ends itself in the middle of the next
JOINS_AFTER = {5: "b", 25: "c"}  # steps of group a, after which another group joins it


def waiting(lighthouse: str) -> int:
    """Return the number of groups that wait at the lighthouse for a step, by its page of status."""
    with urllib.request.urlopen(f"{lighthouse}/status", timeout=10) as page:
        found = re.search(r"(\d+)/\d+ participants healthy", page.read().decode())
    assert found, "the lighthouse's page of status has changed"
    return int(found[1])


def main(ledger: Path) -> None:
    def note(**line: object) -> None:
        with ledger.open("a") as file:
            file.write(json.dumps(line) + "\n")

    together: list[int] = []
    awaited: list[str] = []

    def watch(event: Dealt | torchft.StepReport) -> None:
        if isinstance(event, Dealt):
            note(step=event.turn.step, groups=event.turn.groups, samples=event.samples)
            together.extend([event.turn.step] * (event.turn.groups == 2))
            if ledger.name == "b" and len(together) > DIES_AFTER:
                os._exit(9)
            return
        facts = {name: getattr(event, name) for name in ("step", "committed", "groups", "healed", "weight", "seconds")}
        note(**facts, reason=event.reason, at=time.time())
        if ledger.name == "a" and event.committed and event.step in JOINS_AFTER:
            awaited.append(JOINS_AFTER[event.step])

    def meet(lighthouse: str) -> None:
        """Wait so that another group is in the very next step of group a, however slow the machine is.

        A lighthouse lets a group that is alone go on at once, unless another one is alive. So the other one begins its
        life once group a has come to the step, and group a waits until the other one waits at the lighthouse.
        """
        while awaited:
            ledger.with_name(f"join-{awaited[0]}").touch()
            if waiting(lighthouse):
                awaited.clear()
            time.sleep(0.02)

    with accel.session() as ctx:
        flags = parse(sys.argv[2:])
        begin_step = torchft.begin_step
        while ledger.name != "a" and not ledger.with_name(f"join-{ledger.name}").exists():
            time.sleep(0.02)

        def announce(*args: Any) -> torchft.Turn:
            meet(flags.lighthouse)
            return begin_step(*args)

        torchft.begin_step = announce
        model, state = train(ctx, flags, watch)
        flat = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
        note(end=state.updates, epoch=state.cursor.epoch, consumed=state.cursor.consumed, parameters=flat.tolist())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
