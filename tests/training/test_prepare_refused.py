# SPDX-License-Identifier: Apache-2.0
"""`prepare` gives None back, and takes no model in which another wrapper exchanges gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import accel
from accel.errors import PrepareError


def test_none_is_given_back_in_its_place(ranks):
    def rank(ctx: accel.DistContext) -> None:
        model = nn.Linear(1, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        prepared, same, scheduler = accel.prepare(ctx, model, optimizer, None)
        assert accel.unwrap_model(prepared) is model
        assert same is optimizer
        assert scheduler is None
        assert accel.prepare(ctx, None) is None

    ranks.run(rank, 2)


class FabricModule(nn.Module):
    """A wrapper of another library around torch's, as Fabric's is."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self._forward_module = wrapped


class Elsewhere:
    """A library with a class of torch's name."""

    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module


def _wrapped(ctx: accel.DistContext) -> dict[str, nn.Module]:
    def ddp() -> nn.Module:
        return DistributedDataParallel(nn.Linear(1, 1), process_group=ctx.comm.group)

    return {
        "_forward_module": FabricModule(ddp()),
        "the model": Elsewhere.DistributedDataParallel(nn.Linear(1, 1)),
        "1.body": nn.Sequential(nn.Linear(1, 1), nn.ModuleDict({"body": ddp()})),
        "0": nn.Sequential(accel.prepare_model(ctx, nn.Linear(1, 1))),
        "2": nn.Sequential(nn.Linear(1, 1), nn.Tanh(), replicate(nn.Linear(1, 1), process_group=ctx.comm.group)),
    }


@pytest.mark.parametrize("place", ["_forward_module", "the model", "1.body", "0", "2"])
def test_a_model_that_holds_a_wrapped_module_is_refused_on_every_rank(ranks, place):
    def rank(ctx: accel.DistContext) -> bool:
        model: Any = _wrapped(ctx)[place]
        for prepare in (accel.prepare, accel.prepare_model):
            with assert_raises(PrepareError, problem="exchanged twice") as caught:
                prepare(ctx, model)
            assert caught.value.where.endswith(f"prepare_model, {place}")
            assert any(each in caught.value.got for each in ("DistributedDataParallel", "Replica", "DDPLinear"))
        return True

    assert ranks.run(rank, 2) == [True, True]


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize(("mesh", "strategy"), [("dp=2", "ddp"), ("dp=2", "fsdp"), ("tp=2", "ddp"), ("pp=2", "ddp")])
def test_a_model_without_shapes_is_refused_on_every_rank(ranks, mesh, strategy):
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
        with assert_raises(PrepareError, problem="without a shape yet", got=r"1\.weight, 1\.bias"):
            accel.prepare_model(ctx, nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)))

    ranks.run(rank, 2, default_group=True)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("mesh", ["tp=2", "cp=2", "pp=2"])
def test_a_module_of_torch_jit_is_refused_on_every_rank(ranks, mesh):
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))

    def rank(ctx: accel.DistContext) -> None:
        with assert_raises(PrepareError, problem="torch.jit has compiled", where="prepare_model, 1"):
            accel.prepare_model(accel.replace(ctx, mesh=mesh), model)

    ranks.run(rank, 2, default_group=True)
    assert accel.prepare_model(accel.single(), model) is model


def test_a_model_in_torchs_ddp_is_taken_as_it_is(ranks):
    def rank(ctx: accel.DistContext) -> bool:
        model = DistributedDataParallel(nn.Linear(1, 1), process_group=ctx.comm.group)
        return accel.prepare(ctx, model) is model

    assert ranks.run(rank, 2) == [True, True]
