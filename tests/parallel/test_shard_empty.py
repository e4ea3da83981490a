# SPDX-License-Identifier: Apache-2.0
"""Models built on the meta device are filled from rank 0 or by a load, and compute nothing before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import ByState
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW

import accel
from accel.errors import PrepareError
from accel.parallel import Plan
from accel.parallel._empty import allocate_empty
from accel.parallel.axes.shard import _fully_shard
from accel.testing import Simulator


class Net(nn.Module):
    """Blocks with a tied end, statistics and a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4)) for _ in range(2))
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return torch.tanh(self.last(hidden) * self.scale)


def _net(*, empty: bool = False, seed: int = 1) -> Net:
    with torch.random.fork_rng(), torch.device("meta" if empty else "cpu"):
        torch.manual_seed(seed)
        return Net()


def _empty_with_buffers() -> Net:
    model = _net(empty=True)
    model.scale = torch.full((4,), 2.0)
    return model


def _step(ctx: accel.DistContext, model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(ctx.rank))
    run = ByState(ctx)
    run.begin()
    with run.accumulate(model):
        run.backward(model(rows).square().mean(), weight=len(rows))
    run.step(optimizer, max_norm=1.0)
    return [each.full_tensor() if isinstance(each, DTensor) else each.clone() for each in model.parameters()]


def _prepared(
    ctx: accel.DistContext, model: nn.Module, kind: Any = SGD, **fields: Any
) -> tuple[accel.DistContext, nn.Module, Any]:
    ctx = accel.replace(ctx, strategy="fsdp")
    return ctx, *accel.prepare(ctx, model, kind(model.parameters(), lr=0.1), plan=Plan(**fields))


@pytest.mark.parametrize("fields", [{}, {"offload": True}, {"units": ("blocks.*",)}])
def test_ranks_without_values_get_those_of_rank_0(ranks: Simulator, fields: dict[str, Any]) -> None:
    def rank(ctx: accel.DistContext, *, empty: bool) -> Any:
        return _step(*_prepared(ctx, _net(empty=empty and ctx.rank > 0), **fields))

    expected = ranks.run(lambda ctx: rank(ctx, empty=False), 3, default_group=True)
    got = ranks.run(lambda ctx: rank(ctx, empty=True), 3, default_group=True)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("fields", [{}, {"offload": True}])
def test_a_load_fills_the_shards(ranks: Simulator, tmp_path: Path, fields: dict[str, Any]) -> None:
    def save(ctx: accel.DistContext) -> Any:
        ctx, model, optimizer = _prepared(ctx, _net(), AdamW)
        _step(ctx, model, optimizer)
        accel.save_state(ctx, tmp_path, {"model": model, "optimizer": optimizer}, step=1)
        return _step(ctx, model, optimizer)

    def load(ctx: accel.DistContext) -> Any:
        ctx, model, optimizer = _prepared(ctx, _empty_with_buffers(), AdamW, **fields)
        assert not any(each.is_meta for each in [*model.parameters(), *model.buffers()])
        assert isinstance(model.first.weight, DTensor)
        assert model.first.weight is model.last.weight
        accel.load_state(ctx, tmp_path / "step-00000001", {"model": model, "optimizer": optimizer})
        return _step(ctx, model, optimizer)

    expected = ranks.run(save, 2, default_group=True)
    torch.testing.assert_close(ranks.run(load, 2, default_group=True), expected, rtol=0, atol=0)


def test_of_an_empty_offloaded_model_the_shards_alone_are_on_the_host(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's device is the host here, so what is allocated on which is told by the calls."""

    def noting(model: nn.Module, device: torch.device, only: Any = None) -> None:
        empty = [name for name, each in [*model.named_parameters(), *model.named_buffers()] if each.is_meta]
        allocate_empty(model, device, only)
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        model.allocated = [*getattr(model, "allocated", ()), {each for each in empty if not tensors[each].is_meta}]

    def rank(ctx: accel.DistContext) -> Any:
        net = _net(empty=True)
        net.gain = nn.Parameter(torch.empty((), device="meta"))
        net.scale = torch.full((4,), 2.0)
        _ = [block[2].requires_grad_(False) for block in net.blocks]
        _, model, _ = _prepared(ctx, net, offload=True, ignored=("BatchNorm1d",))
        return model.allocated

    monkeypatch.setattr(_fully_shard, "allocate_empty", noting)
    for on_host, on_device in ranks.run(rank, 2, default_group=True):
        assert on_host == {
            f"{name}.{end}" for name in ("first", "blocks.0.0", "blocks.1.0") for end in ("weight", "bias")
        }
        assert {"gain", "blocks.0.2.weight", "blocks.0.2.running_mean"} < on_device


def test_a_forward_before_the_values_came_is_refused_on_every_rank(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> str:
        _, model, _ = _prepared(ctx, _empty_with_buffers())
        with assert_raises(PrepareError, problem="no values yet") as caught:
            model(torch.ones(2, 4))
        return str(caught.value)

    said = ranks.run(rank, 8, default_group=True)  # more ranks than rows, so that some have no shard
    assert all("first.weight" in each and "load_state" in each for each in said)


def test_what_could_never_be_filled_is_refused(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        sharded = accel.replace(ctx, strategy="fsdp")
        with assert_raises(PrepareError, problem="the rank that others take their values from"):
            accel.prepare_model(sharded, _net(empty=ctx.rank == 0))
        with assert_raises(
            PrepareError, problem="no checkpoint holds", got="scale on the meta device", fix="init_empty_weights"
        ):
            accel.prepare_model(sharded, _net(empty=True))

    ranks.run(rank, 2, default_group=True)


def test_one_rank_is_told_of_a_buffer_that_no_load_fills() -> None:
    ctx = accel.single()
    model = accel.prepare_model(ctx, _net(empty=True))
    with torch.no_grad():
        for each in [*model.parameters(), *(each for name, each in model.named_buffers() if name != "scale")]:
            each.zero_()
    with assert_raises(PrepareError, fix=r"No checkpoint holds scale.*Build the model by accel\.init_empty_weights"):
        model(torch.ones(2, 4))
