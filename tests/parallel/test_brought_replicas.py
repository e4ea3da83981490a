# SPDX-License-Identifier: Apache-2.0
"""Models that their users wrapped in DDP: taken where DDP has the ranks with the same parameters, and else refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from catching import assert_raises
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import accel
from accel.errors import PrepareError
from accel.testing import Simulator


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _half(ctx: accel.DistContext) -> Any:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return halves[ctx.rank // 2]


def _mesh(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def _over_half(ctx: accel.DistContext) -> Any:
    return ctx, DistributedDataParallel(_net(), process_group=_half(ctx))


def _over_all_in_half(ctx: accel.DistContext) -> Any:
    return accel.from_group(_half(ctx)), DistributedDataParallel(_net())


def _over_all_along_tp(ctx: accel.DistContext) -> Any:
    return accel.replace(ctx, mesh="dp=2,tp=2"), DistributedDataParallel(_net())


def _over_all_of_a_users_tp(ctx: accel.DistContext) -> Any:
    return accel.replace(ctx, mesh=_mesh("dp", "tp")), DistributedDataParallel(_net())


def _along_dp_alone_beside_cp(ctx: accel.DistContext) -> Any:
    mesh = _mesh("dp", "cp")
    return accel.replace(ctx, mesh=mesh), DistributedDataParallel(_net(), process_group=mesh.get_group("dp"))


def _along_the_other_axis(ctx: accel.DistContext) -> Any:
    mesh = _mesh("dp", "tp")
    return accel.replace(ctx, mesh=mesh), DistributedDataParallel(_net(), process_group=mesh.get_group("tp"))


def _sharded_over_other_ranks(ctx: accel.DistContext) -> Any:
    mesh = _mesh("outer", "inner")
    return accel.from_group(_half(ctx)), fully_shard(_net(), mesh=mesh["outer"])


REFUSED = {
    _over_half: (4, 2),
    _over_all_in_half: (2, 4),
    _over_all_along_tp: (2, 4),
    _over_all_of_a_users_tp: (2, 4),
    _along_dp_alone_beside_cp: (4, 2),
    _along_the_other_axis: (2, 2),
    _sharded_over_other_ranks: (2, 2),
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda each: each.__name__.strip("_"))
def test_other_ranks_than_those_with_the_same_parameters_are_refused(ranks: Simulator, make: Any):
    needed, got = REFUSED[make]

    def rank(given: accel.DistContext) -> None:
        ctx, model = make(given)
        fields = {"expected": f"a mesh of all {needed} ranks", "got": f"^a mesh of {got}", "where": r" 0\.weight"}
        before = [type(each) for each in model.modules()]
        with assert_raises(PrepareError, problem="would not reach every rank", **fields):
            accel.prepare_model(ctx, model)
        assert [type(each) for each in model.modules()] == before
        if isinstance(model, DistributedDataParallel):
            with assert_raises(PrepareError, problem="would not reach every rank", **fields):
                accel.no_sync(ctx, model)

    _ = ranks.run(rank, 4, default_group=True)


def _over_all(ctx: accel.DistContext) -> Any:
    return ctx, DistributedDataParallel(_net())


def _over_the_same_ranks_by_another_group(ctx: accel.DistContext) -> Any:
    return ctx, DistributedDataParallel(_net(), process_group=dist.new_group([0, 1, 2, 3]))


def _over_half_in_half(ctx: accel.DistContext) -> Any:
    half = _half(ctx)
    return accel.from_group(half), DistributedDataParallel(_net(), process_group=half)


def _beside_the_users_tensor_parallelism(ctx: accel.DistContext) -> Any:
    mesh = _mesh("dp", "tp")
    net = parallelize_module(_net(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return accel.replace(ctx, mesh=mesh), DistributedDataParallel(net, device_mesh=mesh["dp"])


def _replicas_that_share_samples(ctx: accel.DistContext) -> Any:
    return accel.replace(ctx, mesh=_mesh("dp", "sp")), DistributedDataParallel(_net())


def _along_an_axis_of_the_users_own(ctx: accel.DistContext, *, whole: bool) -> Any:
    mesh = _mesh("dp", "towers")
    group = None if whole else mesh.get_group("dp")
    return accel.replace(ctx, mesh=mesh, data_dims=("dp",)), DistributedDataParallel(_net(), process_group=group)


def _towers_with_their_own_parameters(ctx: accel.DistContext) -> Any:
    return _along_an_axis_of_the_users_own(ctx, whole=False)


def _towers_with_the_same_parameters(ctx: accel.DistContext) -> Any:
    return _along_an_axis_of_the_users_own(ctx, whole=True)


def _whole_shards(ctx: accel.DistContext) -> Any:
    return ctx, fully_shard(_net(), mesh=init_device_mesh("cpu", (4,)))


TAKEN = [
    _over_all,
    _over_the_same_ranks_by_another_group,
    _over_half_in_half,
    _beside_the_users_tensor_parallelism,
    _replicas_that_share_samples,
    _towers_with_their_own_parameters,
    _towers_with_the_same_parameters,
    _whole_shards,
]


@pytest.mark.parametrize("make", TAKEN, ids=lambda each: each.__name__.strip("_"))
def test_the_ranks_with_the_same_parameters_are_taken(ranks: Simulator, make: Any):
    def rank(given: accel.DistContext) -> None:
        ctx, model = make(given)
        assert accel.prepare_model(ctx, model) is model
        with accel.no_sync(ctx, model):
            pass

    _ = ranks.run(rank, 4, default_group=True)


def test_a_group_that_torch_has_not_opened_is_taken(ranks: Simulator):
    """As a manager's of replicas is, whose ranks come and go."""

    def rank(ctx: accel.DistContext) -> None:
        model = DistributedDataParallel(_net(), process_group=ctx.comm.group)
        assert accel.prepare_model(accel.single(), model) is model

    _ = ranks.run(rank, 2)
