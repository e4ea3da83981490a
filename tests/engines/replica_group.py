# SPDX-License-Identifier: Apache-2.0
"""The example of replica groups with a ledger, and with a death in mid-step: `replica_group.py LEDGER FLAGS...`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import accel
from accel.engines import torchft

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from replica_groups import Dealt, parse, train

DIES_AFTER = 5  # steps of two groups, after which group b ends itself in the middle of the next
WAITS_FOR = {5: "b", 40: "c"}  # steps after which group a waits until another is about to join
ALONE_S = 0.4  # pause of group a after a step alone, in which another group can join


def main(ledger: Path) -> None:
    def note(**line: object) -> None:
        with ledger.open("a") as file:
            file.write(json.dumps(line) + "\n")

    together: list[int] = []

    def watch(event: Dealt | torchft.StepReport) -> None:
        if isinstance(event, Dealt):
            note(step=event.turn.step, groups=event.turn.groups, samples=event.samples)
            together.extend([event.turn.step] * (event.turn.groups == 2))
            if ledger.name == "b" and len(together) > DIES_AFTER:
                os._exit(9)
            return
        facts = {name: getattr(event, name) for name in ("step", "committed", "groups", "healed", "weight", "seconds")}
        note(**facts, reason=event.reason, at=time.time())
        awaited = WAITS_FOR.get(event.step) if ledger.name == "a" else None
        time.sleep(ALONE_S if awaited or (ledger.name == "a" and event.groups == 1 and event.step > 5) else 0.0)
        while awaited and not ledger.with_name(awaited).exists():
            time.sleep(0.05)

    with accel.session() as ctx:
        flags = parse(sys.argv[2:])
        begin_step = torchft.begin_step

        def announce(*args: Any) -> torchft.Turn:
            ledger.touch()  # this group is about to join
            return begin_step(*args)

        torchft.begin_step = announce
        model, state = train(ctx, flags, watch)
        flat = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
        note(end=state.updates, epoch=state.cursor.epoch, consumed=state.cursor.consumed, parameters=flat.tolist())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
