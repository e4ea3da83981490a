# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written by four simulated ranks are read by any number: torch's of sharded models, accel's of DDP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import accel
from accel.testing import simulate, simulate_groups

SIZES = [1, 2, 3, 8]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()


def _rows(count: int) -> torch.Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _numbers(model: nn.Module) -> list[list[float]]:
    found = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.state_dict().values()]
    return [each.flatten().tolist() for each in found]


def _sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _alone() -> list[list[float]]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        _step(model, optimizer, _rows(24))
    return _numbers(model)


def assert_near(got: list[list[float]], expected: list[list[float]]) -> None:
    for mine, other in zip(got, expected, strict=True):
        assert mine == pytest.approx(other, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("seed", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_torchs_sharded_checkpoint(tmp_path, seed):
    def save(group):
        model, optimizer = _sharded()
        for _ in range(2):
            _step(model, optimizer, _rows(24)[group.rank() :: group.size()])
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "saved")

    def load(group):
        model, optimizer = _sharded()
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=tmp_path / "saved")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        _step(model, optimizer, _rows(24)[group.rank() :: group.size()])
        return _numbers(model)

    simulate_groups(save, 4, seed=seed, default_group=True)
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 4
    expected = _alone()
    for size in SIZES:
        for got in simulate_groups(load, size, seed=seed, default_group=True):
            assert_near(got, expected)


@pytest.mark.parametrize("default_group", [False, True])
@pytest.mark.parametrize("seed", [None, 1])
def test_accels_checkpoint_of_ddp(tmp_path, seed, default_group):
    def wrapped(ctx):
        model = accel.prepare_model(ctx, _model())
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def save(ctx):
        model, optimizer = wrapped(ctx)
        for _ in range(2):
            _step(model, optimizer, _rows(24)[ctx.rank :: ctx.world_size])
        return accel.save_state(ctx, tmp_path, {"model": model, "optimizer": optimizer}, step=2)

    def load(ctx):
        model, optimizer = wrapped(ctx)
        accel.load_state(ctx, accel.latest_checkpoint(tmp_path), {"model": model, "optimizer": optimizer})
        _step(model, optimizer, _rows(24)[ctx.rank :: ctx.world_size])
        return _numbers(accel.unwrap_model(model))

    simulate(save, 4, seed=seed, default_group=default_group)
    expected = _alone()
    for size in SIZES:
        for got in simulate(load, size, seed=seed, default_group=default_group):
            assert_near(got, expected)
