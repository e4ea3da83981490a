# SPDX-License-Identifier: Apache-2.0
"""Ranks that share samples, as those of a tensor-parallel group do, weigh no more than one rank would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from steps import WAYS, ByState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import accel
from accel.testing import Simulator

TOLERANCE = {"rtol": 0, "atol": 1e-10}


def _model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), nn.Tanh()).double()


def _loader(samples: int, batch_size: int) -> DataLoader[Any]:
    rows = torch.randn(samples, 5, generator=torch.Generator().manual_seed(samples), dtype=torch.float64)
    return DataLoader(TensorDataset(rows), batch_size=batch_size, shuffle=True)


def _train(
    ctx: accel.DistContext, model: nn.Module, loader: Any, steps: int, how: str, way: type[ByState] = ByState
) -> Any:
    """Two epochs of clipped steps: the norms of gradients, and the mean loss as metrics count it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    run, norms = way(ctx, steps, seed=4), []
    mean = accel.metrics.running_metrics(loss="mean")
    while run.cursor.epoch < 2:
        for batch in run.batches(loader):
            weight = {"count": batch.valid, "number": int(batch.valid), "tensor": torch.tensor(int(batch.valid))}[how]
            with run.accumulate(model):
                loss = model(batch.data[0]).square().mean()
                run.backward(loss, weight=weight)
            mean = mean.add(batch.weight, loss=loss)
            if run.sync:
                run.step(optimizer, max_norm=0.05)
                norms.append(run.grad_norm)
    return norms, mean.read(ctx)[0]["loss"]


def _told(ctx: accel.DistContext, layout: str) -> tuple[accel.DistContext, nn.Module]:
    """The context with its mesh, and a model spread over it."""
    model, plan = _model(), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    shared = "tp" if layout == "sharded" else "sp"  # along which nothing spreads a whole model
    names = ("dp", shared) if ctx.world_size == 4 else ("dp_replicate", "dp_shard", shared)
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    if layout == "sharded":
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh[names[:-1]])
    return accel.replace(ctx, mesh=mesh), model


def _whole(model: nn.Module) -> list[torch.Tensor]:
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach().clone() for each in model.parameters()]


def _alone(samples: int, per_step: int, steps: int) -> Any:
    alone, model = accel.single(), _model()
    loader = accel.prepare_loader(alone, _loader(samples, per_step))
    return _train(alone, model, loader, steps, "count"), _whole(model)


windows = {
    "samples": st.integers(5, 12),
    "per_step": st.sampled_from([4, 8]),
    "steps": st.integers(1, 3),
    "how": st.sampled_from(["count", "number", "tensor"]),
    "way": st.sampled_from(WAYS),
}


@settings(deadline=None, max_examples=share(0.24))
@given(share=st.sampled_from([1, 2, 4]), **windows)
def test_replicas_that_share_samples_step_as_one_process(ranks, share, samples, per_step, steps, how, way):
    def rank(ctx):
        model = accel.prepare_model(ctx, _model())
        place = (ctx.rank // share, ctx.world_size // share)
        raw = _loader(samples, per_step * share // ctx.world_size)
        loader = accel.prepare_loader(ctx, raw, data_parallel=place)
        return _train(ctx, model, loader, steps, how, way), _whole(model)

    for got in ranks.run(rank, 4):
        torch.testing.assert_close(got, _alone(samples, per_step, steps), **TOLERANCE)


def assert_trains_as_one_process(
    ranks: Simulator,
    layout: str,
    world_size: int,
    *,
    samples: int,
    per_step: int,
    steps: int,
    how: str,
    way: type[ByState] = ByState,
) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        ctx, model = _told(ctx, layout)
        model, loader = accel.prepare(ctx, model, _loader(samples, per_step * 2 // world_size))
        return _train(ctx, model, loader, steps, how, way), _whole(model)

    for got in ranks.run(rank, world_size, default_group=True):
        torch.testing.assert_close(got, _alone(samples, per_step, steps), **TOLERANCE)


@pytest.mark.parametrize("layout", ["whole", "sharded"])
@settings(deadline=None, max_examples=share(0.04))
@given(**windows)
def test_a_mesh_alone_says_who_shares_samples(ranks, layout, samples, per_step, steps, how, way):
    assert_trains_as_one_process(ranks, layout, 4, samples=samples, per_step=per_step, steps=steps, how=how, way=way)


@pytest.mark.parametrize("how", ["count", pytest.param("number", marks=pytest.mark.slow)])
def test_eight_ranks_of_hybrid_sharding_and_tensor_parallelism(ranks, how):
    assert_trains_as_one_process(ranks, "sharded", 8, samples=11, per_step=4, steps=2, how=how)


class Rows(IterableDataset[int]):
    def __iter__(self):
        return iter(range(9))


@pytest.mark.parametrize("mode", [None, "elements", "dispatch"])
def test_metrics_count_each_sample_once_and_weights_know_the_copies(ranks, mode):
    def rank(ctx):
        ctx, _ = _told(ctx, "whole")
        raw = DataLoader(range(9) if mode is None else Rows(), batch_size=2)
        loader, found = accel.prepare_loader(ctx, raw, **({"stream": mode} if mode else {})), []
        for batch in accel.batches(ctx, loader, accel.Cursor()):
            found += accel.gather_for_metrics(ctx, batch.data, batch).tolist()
            assert (batch.valid.copies, batch.duplicate) == (2, ctx.rank % 2 == 1)
        return found, loader.rank, loader.world_size

    assert ranks.run(rank, 4, default_group=True) == [(list(range(9)), at // 2, 2) for at in range(4)]


@pytest.mark.parametrize("mode", [None, "dispatch"])
def test_a_loader_from_before_the_mesh_is_refused(ranks, mode):
    """It would read for other places than those that random streams follow."""

    def rank(ctx):
        raw = DataLoader(range(9) if mode is None else Rows(), batch_size=2)
        loader = accel.prepare_loader(ctx, raw, **({"stream": mode} if mode else {}))
        told, _ = _told(ctx, "whole")
        fields = {"expected": r" place \(0, 2\) ", "got": r"^rank 0 of 4, place \(0, 4\)"}
        with assert_raises(accel.errors.DataError, problem="prepared for another rank", **fields):
            next(accel.batches(told, loader, accel.Cursor()))
        return True

    assert all(ranks.run(rank, 4, default_group=True))
