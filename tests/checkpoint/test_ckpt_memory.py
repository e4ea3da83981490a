# SPDX-License-Identifier: Apache-2.0
"""What a save and a load hold beside the tensors of the run: less than the largest shard of one of them."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ranks import Live
from steps import ByState
from torch import nn

import accel
from accel.tensors import local_part
from accel.testing import Simulator

WIDTH, LAYERS = 512, 6


class Allocated(Live):
    """Counts memory that torch allocates, and not that of mapped files."""

    def _note(self, tensor: torch.Tensor) -> None:
        if not tensor.is_meta and local_part(tensor).untyped_storage().resizable():
            super()._note(tensor)


def _held(ctx: accel.DistContext, out: Path) -> dict[str, tuple[int, int, int]]:
    """For each verb the most bytes of tensors, and of objects on a rank alone, beside those of before; a shard's."""
    model = accel.prepare_model(ctx, nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))))
    optimizer, run = torch.optim.AdamW(model.parameters()), ByState(ctx)
    run.begin()
    run.backward(model(torch.ones(1, WIDTH)).sum())
    run.step(optimizer)
    items: dict[str, Any] = {"model": model, "optimizer": optimizer}
    moments = [each for own in optimizer.state.values() for each in own.values() if isinstance(each, torch.Tensor)]
    own = list(map(local_part, [*model.parameters(), *moments]))
    verbs = {
        "save": lambda: accel.save_state(ctx, out, items, step=1),
        "load": lambda: accel.load_state(ctx, out / "step-00000001", items),
    }
    found = dict[str, tuple[int, int, int]]()
    with Allocated(own) as live:
        for _ in range(2):  # the first imports modules
            for name, verb in verbs.items():
                _ = gc.collect()
                live.restart()
                before = live.peak
                tracemalloc.start()
                _ = verb()
                objects = tracemalloc.get_traced_memory()[1] if ctx.world_size == 1 else 0
                tracemalloc.stop()
                found[name] = live.peak - before, objects, max(each.nbytes for each in own)
    return found


@pytest.mark.parametrize("strategy", ["", "ddp", "fsdp"])
def test_a_save_and_a_load_hold_less_than_a_shard(ranks: Simulator, tmp_path: Path, strategy: Any) -> None:
    def rank(ctx: accel.DistContext) -> dict[str, tuple[int, int, int]]:
        return _held(accel.replace(ctx, strategy=strategy) if strategy else ctx, tmp_path / "run")

    for found in ranks.run(rank, 2 if strategy else 1, default_group=True):
        assert found.keys() == {"save", "load"}
        for tensors, objects, shard in found.values():
            assert tensors + objects < shard
