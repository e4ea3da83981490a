# SPDX-License-Identifier: Apache-2.0
"""Meshes that models are sharded over: gradients are those of one process, whatever the axes and the strategy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises
from planned_parts import ModelView
from steps import ByState, begin_batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import accel
from accel.errors import PrepareError
from accel.parallel import Plan
from accel.parallel.axes.shard import SHARD
from accel.parallel.axes.shard._options import ShardOptions
from accel.testing import Simulator

EXACT = {"rtol": 0, "atol": 1e-13}
TOKENS, WIDTH, WORDS = 8, 4, 7


class Words(nn.Module):
    """Predicts a word from each word: what ranks that share a sequence compute without each other's part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.embed(ids)))


def _model(seed: int = 3) -> Words:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Words().double()


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight sequences, with ever fewer valid labels."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(WORDS, (8, TOKENS), generator=generator)
    labels = torch.randint(WORDS, (8, TOKENS), generator=generator)
    for row in range(8):
        labels[row, TOKENS - row :] = -100
    return ids, labels


def _train(ctx: accel.DistContext, model: nn.Module, optimizer: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """Two clipped steps of two micro-batches: their norms, and the parameters."""
    run = ByState(ctx, 2)
    norms = []
    share, count = ctx.data_parallel
    place, parts = ctx.axis("cp")
    for micro in range(4):
        run.begin()
        ids, labels = (each.chunk(count)[share].chunk(parts, 1)[place] for each in _batch(micro))
        tokens = (labels != -100).sum()
        with run.accumulate(model):
            total = cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
            run.backward(total / tokens.clamp(min=1), weight=tokens)
        if run.sync:
            run.step(optimizer, max_norm=0.05)
            norms.append(run.grad_norm)
    return norms, _whole(model.parameters())


def _whole(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach().clone() for each in tensors]


def _alone() -> Any:
    model = _model()
    return _train(accel.single(), model, SGD(model.parameters(), lr=0.5))


MESHES = [
    ("dp=2,cp=2", "fsdp"),
    ("dp=2,cp=2", "ddp"),
    ("cp=2", "fsdp"),
    ("dp_replicate=2,cp=2", "fsdp"),
    pytest.param("dp_replicate=2,dp_shard=2,cp=2", "fsdp", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "strategy"), MESHES)
def test_ranks_that_share_sequences_share_parameters_too(ranks: Simulator, mesh: str, strategy: Any) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
        ctx = accel.replace(ctx, mesh=ctx.mesh)  # cut by hand
        model = _model(seed=ctx.rank + 3)
        model, optimizer = accel.prepare(ctx, model, SGD(model.parameters(), lr=0.5))
        if strategy == "fsdp":
            over = ctx.axes.cp * max(ctx.axes.dp, ctx.axes.dp_shard)
            assert {each.device_mesh.shape[-1] for each in model.parameters()} == {over}
        return _train(ctx, model, optimizer)

    size = 8 if mesh.count("=") == 3 else 2 if mesh == "cp=2" else 4
    for got in ranks.run(rank, size, default_group=True):
        torch.testing.assert_close(got, _alone(), **EXACT)


class Pair(nn.Module):
    """Two products, of which each rank along tp may have a part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(inputs))))


def _pair(seed: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Pair().double()


def _train_pair(ctx: accel.DistContext, model: nn.Module, optimizer: Any) -> tuple[list[Any], list[torch.Tensor]]:
    run = ByState(ctx)
    norms = []
    share, count = ctx.data_parallel
    rows = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).chunk(count)[share]
    for _ in range(2):
        run.begin()
        with run.accumulate(model):
            run.backward(model(rows).square().mean(), weight=len(rows))
        run.step(optimizer, max_norm=0.05)
        norms.append(run.grad_norm)
    return norms, _whole(model.parameters())


TENSOR_MESHES = [
    ("dp=2,tp=2", "ddp"),
    pytest.param("dp_replicate=2,tp=2", "fsdp", marks=pytest.mark.slow),
    ("tp=2", "ddp"),
    ("tp=2", "fsdp"),
    pytest.param("dp_replicate=2,dp_shard=2,tp=2", "ddp", marks=pytest.mark.slow),
    pytest.param("dp_shard=2,cp=2,tp=2", "fsdp", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "strategy"), TENSOR_MESHES)
def test_replicas_of_what_tensor_parallelism_has_spread(ranks: Simulator, mesh: str, strategy: Any) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
        ctx = accel.replace(ctx, mesh=ctx.mesh)  # its ranks compute the same along cp
        assert ctx.mesh is not None
        model = parallelize_module(_pair(), ctx.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model, optimizer = accel.prepare(ctx, model, SGD(model.parameters(), lr=0.5, foreach=True))
        assert isinstance(model, FSDPModule) == (mesh != "tp=2")
        return _train_pair(ctx, model, optimizer)

    model = _pair()
    alone = _train_pair(accel.single(), model, SGD(model.parameters(), lr=0.5))
    size = {1: 2, 2: 4, 3: 8}[mesh.count("=")]
    for got in ranks.run(rank, size, default_group=True):
        torch.testing.assert_close(got, alone, **EXACT)


def test_a_stage_is_sharded_over_its_own_ranks(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="pp=2,dp=2", strategy="fsdp")
        stage = ctx.axis("pp").rank
        model = nn.Linear(4, 3 + stage).double()
        with torch.no_grad():
            for each in model.parameters():
                each.fill_(1.0 + ctx.rank)
        model.register_buffer("seen", torch.full((1,), float(ctx.rank)))
        model = SHARD.spread(ctx, ModelView(model), ShardOptions(), is_empty=False)
        with torch.no_grad():
            model.seen += ctx.rank
        rows = torch.full((1, 4), 1.0 + ctx.rank, dtype=torch.float64)
        with accel.accumulate(ctx, begin_batch(ctx), model):
            model(rows).sum().backward()
        mesh = model.weight.device_mesh
        return sorted(mesh.mesh.tolist()), _whole([model.weight, model.weight.grad]), float(model.seen)

    for at, (members, (weight, grad), seen) in enumerate(ranks.run(rank, 4, default_group=True)):
        first = at // 2 * 2
        assert members == [first, first + 1]
        assert weight.eq(1.0 + first).all()
        assert grad.eq(1.5 + first).all()  # the mean over the stage's two ranks
        assert seen == 2 * first


def test_ranks_that_were_left_out_are_noticed_on_any_mesh(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> str:
        ctx = accel.replace(ctx, mesh="dp=2,tp=2")
        assert ctx.mesh is not None
        model = parallelize_module(_pair(), ctx.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        with assert_raises(PrepareError, problem="would not reach every rank") as caught:
            accel.no_sync(ctx, model)
        return f"{caught.value.expected}; {caught.value.got}"

    assert set(ranks.run(rank, 4, default_group=True)) == {
        "a mesh of all 2 ranks with the same parameters; a mesh of 2"
    }


def test_axes_that_torch_cannot_combine_are_refused_before_the_model_changes(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> str:
        mesh = init_device_mesh("cpu", (1, 2, 2, 2), mesh_dim_names=("pp", "dp", "tp", "cp"))
        ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp")
        model = _pair()
        with assert_raises(PrepareError, problem="cannot combine") as caught:
            accel.prepare_model(ctx, model, plan=Plan(tensor={"up": "colwise", "down": "rowwise"}))
        assert not any(isinstance(each, DTensor) for each in model.parameters())
        return caught.value.got

    assert set(ranks.run(rank, 8, default_group=True)) == {"(pp, dp, tp, cp), to merge dp, cp"}


def test_groups_of_merged_axes_end_with_the_context(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> int:
        ctx = accel.replace(accel.from_group(dist.group.WORLD, device="cpu"), mesh="dp_shard=2,cp=2", strategy="fsdp")
        model = accel.prepare_model(ctx, _model())
        beside = accel.replace(ctx, mesh="dp=2,tp=2", strategy="ddp")
        replica = accel.prepare_model(beside, _pair(), plan=Plan(tensor={}))
        meshes = [next(each.parameters()).device_mesh for each in (model, replica)]
        groups = [group for mesh in meshes for group in mesh.get_all_groups() if group is not dist.group.WORLD]
        accel.close(ctx)
        for group in groups:
            with pytest.raises(KeyError):
                dist.get_process_group_ranks(group)
        return len(groups)

    assert set(ranks.run(rank, 4, default_group=True)) == {3}  # dp, this rank alone, tp


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("mesh", ["", "dp=4", "dp=2,cp=2", "dp_replicate=2,dp_shard=2"])
def test_the_strategy_says_which_axis_dp_is(ranks: Simulator, mesh: str, strategy: Any) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
        sizes = [ctx.axis(name).size for name in ("dp", "dp_replicate", "dp_shard")]
        groups = [accel.group_of(ctx, name) for name in ("dp", "dp_replicate", "dp_shard")]
        assert [1 if group is None else group.size() for group in groups] == sizes
        return sizes

    dp = 2 if "cp" in mesh else 4
    expected = [4, 2, 2] if "shard" in mesh else [dp, dp, 1] if strategy == "ddp" else [dp, 1, dp]
    assert ranks.run(rank, 4, default_group=True) == [expected] * 4
