# SPDX-License-Identifier: Apache-2.0
"""Calls of torch that a user makes on a model whose parameters are parts: refused with the line to write."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import nn

import accel
from accel.errors import PrepareError
from accel.testing import Simulator

SPREADS: list[dict[str, Any]] = [{"strategy": "fsdp"}, {"mesh": "tp=2"}]


def _net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)))


def test_a_sharded_model_is_not_copied(ranks: Simulator):
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, strategy="fsdp")
        plain = _net()
        model = accel.prepare_model(ctx, copy.deepcopy(plain))
        for each in (model, model[0]):
            with assert_raises(PrepareError, problem="cannot be copied", fix="Copy before accel.prepare"):
                _ = copy.deepcopy(each)
        frozen = accel.prepare_model(ctx, copy.deepcopy(plain))
        _ = model(torch.ones(2, 8)), frozen(torch.ones(2, 8))

    _ = ranks.run(rank, 2, default_group=True)


@pytest.mark.parametrize("spread", SPREADS)
def test_plain_tensors_are_not_loaded_into_parts(ranks: Simulator, spread: dict[str, Any], tmp_path: Path):
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, **spread)
        plain = _net()
        values = {name: each + 1 for name, each in plain.state_dict().items()}
        model = accel.prepare_model(ctx, plain, plan=accel.parallel.Plan(tensor={"0.0": "colwise", "0.1": "rowwise"}))
        with assert_raises(PrepareError, problem="plain tensors", fix="load_checkpoint_in_model"):
            _ = model.load_state_dict(values)
        with pytest.raises(RuntimeError, match="Missing key"):  # whatever else torch refuses stays torch's
            _ = model.load_state_dict({})
        _ = model.load_state_dict({name: each + 1 for name, each in model.state_dict().items()})
        path = accel.save(ctx, values, tmp_path / "values.safetensors")
        _ = accel.bigmodel.load_checkpoint_in_model(ctx, model, path)
        found = accel.get_state_dict(ctx, model, dst=None)
        assert all(torch.equal(found[name], each) for name, each in values.items())

    _ = ranks.run(rank, 2, default_group=True)
