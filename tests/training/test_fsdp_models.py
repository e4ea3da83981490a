# SPDX-License-Identifier: Apache-2.0
"""What the strategy fsdp does with models, meshes and options that are not the plain case, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import ByState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import accel
from accel.errors import CollectiveMismatch, ConfigError, PrepareError, StepError
from accel.testing import Simulator

TOLERANCE = {"rtol": 0, "atol": 1e-10}


class Block(nn.Module):
    """Two layers, of which the second takes part only when it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, *, both: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.second(hidden) if both else hidden


def _model(*more: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 4), Block(), *more, Block(), nn.Linear(4, 4)).double()


def _inputs(ctx: accel.DistContext, rows: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(ctx.data_parallel[0])
    return torch.randn(rows, 4, dtype=torch.float64, generator=generator)


def _whole(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach().clone() for each in tensors]


def _step(ctx: accel.DistContext, model: nn.Module, optimizer: Any, **options: Any) -> torch.Tensor | None:
    """One step: the norm of the gradient."""
    run = ByState(ctx)
    run.begin()
    with run.accumulate(model):
        with accel.autocast(ctx):
            loss = model(_inputs(ctx).to(next(model.parameters()).dtype), **options).square().mean()
        run.backward(loss)
    run.step(optimizer, max_norm=1.0)
    return run.grad_norm


def _under(
    ranks: Simulator, fn: Any, world_size: int = 2, *, mesh: str = "", strategy: Any = "fsdp", **more: Any
) -> Any:
    def rank(ctx: accel.DistContext) -> Any:
        return fn(accel.replace(ctx, strategy=strategy, mesh=mesh, **more))

    return ranks.run(rank, world_size, default_group=True)


def test_blocks_and_the_rest_are_sharded_in_place(ranks):
    def rank(ctx):
        model = _model()
        assert accel.prepare_model(ctx, model) is model
        assert [name for name, each in model.named_modules() if isinstance(each, FSDPModule)] == ["", "1", "2"]
        assert all(each.placements == (Shard(0),) for each in model.parameters())
        assert accel.unwrap_model(model) is model
        assert accel.prepare(ctx, model) is model
        assert list(model.state_dict()) == list(_model().state_dict())

    _under(ranks, rank)


def test_slices_of_sharded_containers_are_containers_of_the_same_layers(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model = _model(nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Tanh()).double())
        spread = accel.prepare_model(ctx, copy.deepcopy(model))
        inputs = _inputs(ctx)
        _ = spread(inputs)
        for sliced, same in ((spread[1:3], model[1:3]), (spread[2][:1], model[2][:1])):
            assert type(sliced) is nn.Sequential
            torch.testing.assert_close(sliced(inputs), same(inputs), **TOLERANCE)
        assert spread[1:3][0] is spread[1]

    _under(ranks, rank)


def test_one_rank_keeps_the_model_as_it_is():
    ctx = accel.single(strategy="fsdp")
    model = _model()
    prepared, optimizer = accel.prepare(ctx, model, SGD(model.parameters(), lr=0.1))
    assert prepared is model
    assert not any(isinstance(each, DTensor) for each in model.parameters())
    assert _step(ctx, prepared, optimizer) is not None


MESHES = {
    "dp=4": (Shard(0),),
    "dp_replicate=2,dp_shard=2": (Replicate(), Shard(0)),
    "fsdp=2,dp_replicate=2": (Replicate(), Shard(0)),
    "dp=2,data=2": (Shard(0),),
    "cp=4": (Shard(0),),
    "dp=2,cp=2": (Shard(0),),
    "dp_replicate=2,cp=2": (Replicate(), Shard(0)),
}


def _on(ctx: accel.DistContext, mesh: str) -> accel.DistContext:
    """The context on a mesh that another framework made."""
    sizes = dict(part.split("=") for part in mesh.split(","))
    return accel.replace(ctx, mesh=init_device_mesh("cpu", tuple(map(int, sizes.values())), mesh_dim_names=(*sizes,)))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_plain_model_is_laid_out_as_the_mesh_says(ranks, mesh):
    def rank(ctx):
        ctx = _on(ctx, mesh)
        model = accel.prepare_model(ctx, _model())
        if ctx.strategy == "fsdp":
            assert {each.placements for each in model.parameters()} == {MESHES[mesh]}
            assert {each.device_mesh.size() for each in model.parameters()} == {4}
        norm = _step(ctx, model, SGD(model.parameters(), lr=0.1))
        return norm, _whole(model.parameters())

    expected, got = (_under(ranks, rank, 4, strategy=strategy) for strategy in ("ddp", "fsdp"))
    torch.testing.assert_close(got, expected, **TOLERANCE)


PLAN = {"0": ColwiseParallel(), "1": RowwiseParallel()}


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", pytest.param("dp_replicate=2,dp_shard=2,tp=2", marks=pytest.mark.slow)])
def test_what_tensor_parallelism_leaves_is_sharded(ranks, mesh):
    def rank(ctx):
        if ctx.strategy == "ddp":  # replicas along an axis that nothing spreads a model along
            names = tuple("sp" if name == "tp" else name for name in ctx.mesh.mesh_dim_names)
            ctx = accel.replace(ctx, mesh=init_device_mesh("cpu", tuple(ctx.mesh.shape), mesh_dim_names=names))
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Tanh()).double()
        with torch.no_grad():
            for each in model.parameters():
                each.fill_(0.1 + ctx.data_parallel[0])  # all begin with the first one's
        if ctx.strategy == "fsdp":
            parallelize_module(model, ctx.mesh["tp"], PLAN)
        optimizer = SGD(model.parameters(), lr=0.1)
        model, optimizer = accel.prepare(ctx, model, optimizer)
        norm = _step(ctx, model, optimizer)
        assert ctx.strategy == "ddp" or all(each.device_mesh.size() == ctx.world_size for each in model.parameters())
        return norm, _whole(model.parameters())

    size = 8 if mesh.count("=") == 3 else 4
    expected, got = (_under(ranks, rank, size, mesh=mesh, strategy=strategy) for strategy in ("ddp", "fsdp"))
    torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize("unused", [(1,), (0, 1)])
def test_parameters_that_were_announced_may_stay_out(ranks, unused):
    def rank(ctx):
        model = accel.prepare_model(ctx, Block().double().requires_grad_(), find_unused_parameters=True)
        with torch.no_grad():
            for each in model.parameters():
                each.fill_(0.1)
        _step(ctx, model, SGD(model.parameters(), lr=0.1), both=ctx.rank not in unused)
        return _whole(model.parameters())

    expected, got = (_under(ranks, rank, strategy=strategy) for strategy in ("ddp", "fsdp"))
    torch.testing.assert_close(got, expected, **TOLERANCE)


def test_parameters_without_a_part_in_the_loss_are_named(ranks):
    def rank(ctx):
        model = accel.prepare_model(ctx, Block().double())
        model = accel.prepare(ctx, model)  # which changes nothing
        with assert_raises(
            StepError, got=r"no gradient for second\.weight, second\.bias", fix="find_unused_parameters"
        ):
            _step(ctx, model, SGD(model.parameters(), lr=0.1), both=False)

    _under(ranks, rank)


@pytest.mark.parametrize("follow", [True, False])
def test_buffers_are_rank_0s_before_each_forward_unless_told_otherwise(ranks, follow):
    def rank(ctx):
        model = _model(nn.BatchNorm1d(4))
        model[2].running_mean.fill_(ctx.rank)
        model = accel.prepare_model(ctx, model, broadcast_buffers=follow)
        assert not model[2].running_mean.any()
        model[2].running_mean.fill_(ctx.rank)
        model.eval()
        with torch.no_grad():
            model(_inputs(ctx))
        return model[2].running_mean.tolist(), int(model[2].num_batches_tracked)

    other = [0.0 if follow else 1.0] * 4
    assert _under(ranks, rank) == [([0.0] * 4, 0), (other, 0)]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "pure-bf16"])
def test_formats_are_those_of_ddp(ranks, precision):
    def rank(ctx):
        model = _model(nn.BatchNorm1d(4)).float()  # whose parameters stay fp32
        model, optimizer = accel.prepare(ctx, model, SGD(model.parameters(), lr=0.1))
        run = ByState(ctx)
        run.begin()
        with run.accumulate(model):
            with accel.autocast(ctx):
                loss = model(_inputs(ctx).to(next(model.parameters()).dtype)).float().square().mean()
            run.backward(loss)
        run.step(optimizer)
        return [each.dtype for each in model.parameters()], _whole(model.parameters())

    expected, got = (_under(ranks, rank, strategy=strategy, precision=precision)[0] for strategy in ("ddp", "fsdp"))
    assert got[0] == expected[0]
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=2e-2 if precision == "pure-bf16" else 1e-3)


def test_recomputed_and_compiled_blocks_are_sharded_before_or_after(ranks):
    def rank(ctx, order):
        model = _model()
        for do in order:
            model = do(ctx, model)
        _step(ctx, model, SGD(model.parameters(), lr=0.1))
        return _whole(model.parameters())

    def recompute(_ctx, model):
        return accel.checkpoint_activations(model)

    def traced(_ctx, model):
        return accel.compile_model(model, "repeated", backend="aot_eager")

    spread = lambda ctx, model: accel.prepare_model(ctx, model)  # noqa: E731
    expected = _under(ranks, lambda ctx: rank(ctx, [spread]), strategy="ddp")
    for order in ([recompute, spread], [spread, recompute], [spread, traced]):
        got = _under(ranks, lambda ctx, order=order: rank(ctx, order))
        torch.testing.assert_close(got, expected, **TOLERANCE)


def test_a_frozen_model_is_sharded_too_and_can_be_thawed(ranks):
    def rank(ctx):
        model = accel.prepare_model(ctx, _model().requires_grad_(False))
        if ctx.strategy == "fsdp":
            assert all(isinstance(each, DTensor) for each in model.parameters())
            with torch.no_grad():
                model(_inputs(ctx))
            model.requires_grad_(True)
        else:
            model = accel.prepare_model(ctx, model.requires_grad_(True))
        _step(ctx, model, SGD(model.parameters(), lr=0.1))
        return _whole(model.parameters())

    expected, got = (_under(ranks, rank, strategy=strategy) for strategy in ("ddp", "fsdp"))
    torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_before_the_first_step_and_after_it_changes_nothing(ranks, mode):
    def rank(ctx):
        model = _model()
        model, optimizer = accel.prepare(ctx, model, SGD(model.parameters(), lr=0.1))
        outputs = []
        for _ in range(2):
            with mode():
                outputs.append(model(_inputs(ctx)))
            assert ctx.strategy == "ddp" or all(isinstance(each, DTensor) for each in model.parameters())
            _step(ctx, model, optimizer)
        return [each.clone() for each in outputs], _whole(model.parameters())

    expected, got = (_under(ranks, rank, strategy=strategy) for strategy in ("ddp", "fsdp"))
    torch.testing.assert_close(got, expected, **TOLERANCE)


def test_what_somebody_has_spread_already_stays_as_it_is(ranks):
    def rank(ctx):
        own = fully_shard(_model())
        assert accel.prepare_model(ctx, own) is own
        assert not isinstance(own[1], FSDPModule)
        wrapped = DistributedDataParallel(_model())
        assert accel.prepare_model(ctx, wrapped) is wrapped
        with assert_raises(PrepareError, problem="spread already"):
            accel.prepare_model(ctx, own, broadcast_buffers=False)

    _under(ranks, rank)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "option", [{"static_graph": True}, {"bucket_cap_mb": 1}, {"gradient_as_bucket_view": False}, {"comm_hook": "bf16"}]
)
def test_options_of_ddp_are_refused(ranks, option, world_size):
    def rank(ctx):
        model = _model()
        with assert_raises(ConfigError, problem="no effect on a sharded model", got=f"^{next(iter(option))}$"):
            accel.prepare_model(ctx, model, **option)
        return accel.prepare_model(ctx, model) is model

    assert _under(ranks, rank, world_size) == [True] * world_size


def test_a_context_whose_group_torch_does_not_know_is_refused(ranks):
    def rank(ctx):
        ctx = accel.replace(ctx, strategy="fsdp")
        with assert_raises(ConfigError, fix="default_group=True"):
            accel.prepare(ctx, _model())
        return True

    assert ranks.run(rank, 2) == [True, True]


def test_a_mesh_of_replicas_alone_is_refused(ranks):
    def rank(ctx):
        model = _model()
        with assert_raises(PrepareError, got="dp_replicate=2"):
            accel.prepare(ctx, model)
        assert not any(isinstance(each, DTensor) for each in model.parameters())

    _under(ranks, rank, mesh="dp_replicate=2")


def test_tensor_parallelism_that_would_leave_gradients_behind_is_refused(ranks):
    def rank(ctx):
        partly = parallelize_module(_model(), ctx.mesh["tp"], {"0": ColwiseParallel()})
        with assert_raises(PrepareError, where=r"1\.first\.weight", fix="plan of parallelize_module"):
            accel.prepare_model(ctx, partly)
        whole = parallelize_module(nn.Sequential(nn.Linear(4, 4)), ctx.mesh["tp"], {"0": ColwiseParallel()})
        line = r'accel.replace\(ctx, mesh=init_device_mesh\("cpu", \(2, 2\), mesh_dim_names=\("dp", "tp"\)\)\)'
        with assert_raises(PrepareError, fix=line):
            accel.prepare_model(accel.replace(ctx, mesh=""), whole)
        alike = distribute_module(nn.Sequential(nn.Linear(4, 4)), ctx.mesh["tp"])  # replicas, as DTensors
        with assert_raises(PrepareError, fix=r"accel.replace\(ctx, mesh=mesh\)"):
            accel.prepare_model(accel.replace(ctx, mesh=""), alike)

    _under(ranks, rank, 4, mesh="dp=2,tp=2")


def test_models_of_other_parameters_are_a_mismatch(ranks):
    def rank(ctx):
        with assert_raises(CollectiveMismatch, expected=r"0\.weight"):
            accel.prepare_model(ctx, nn.Sequential(nn.Linear(4, 4 + ctx.rank)))
        return True

    assert _under(ranks, rank) == [True, True]


def test_models_that_share_parameters_are_refused(ranks):
    def rank(ctx):
        first, second = _model(), _model()
        second[0].weight = first[0].weight
        with assert_raises(PrepareError, problem="two models share parameters"):
            accel.prepare(ctx, first, second)
        accel.prepare_model(ctx, first)
        with assert_raises(PrepareError, got="shares", where=r"0\.weight", fix="one module"):
            accel.prepare_model(ctx, second)

    _under(ranks, rank)


class Dropping(nn.Module):
    """Leaves out blocks in training, by torch's global stream."""

    def __init__(self, layerdrop: float) -> None:
        super().__init__()
        self.layerdrop = layerdrop
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.training or torch.rand(()) >= self.layerdrop:
                hidden = layer(hidden)
        return hidden


def test_blocks_that_each_rank_leaves_out_by_chance_are_refused_in_training(ranks: Simulator) -> None:
    torch.manual_seed(0)
    made = Dropping(0.5).double()

    def rank(ctx: accel.DistContext) -> None:
        inner = copy.deepcopy(made)
        model = accel.prepare_model(ctx, inner)
        with assert_raises(ConfigError, expected="layerdrop=0 in training", got=r"0\.5 in Dropping"):
            _ = _step(ctx, model, None)
        inputs = _inputs(ctx)
        torch.testing.assert_close(model.eval()(inputs), copy.deepcopy(made).eval()(inputs), **TOLERANCE)
        inner.layerdrop = 0.0
        optimizer = accel.prepare_optimizer(ctx, SGD(model.parameters(), lr=0.1))
        assert _step(ctx, model.train(), optimizer) is not None

    _ = _under(ranks, rank)


def test_replicas_leave_out_blocks_by_chance(ranks: Simulator) -> None:
    """Each draws apart, and the step is that of the mean of gradients, zero for a block that was left out."""
    torch.manual_seed(0)
    made = Dropping(0.5).double()

    def rank(ctx: accel.DistContext) -> None:
        inner = copy.deepcopy(made)
        model = accel.prepare_model(ctx, inner, find_unused_parameters=True)
        optimizer = accel.prepare_optimizer(ctx, SGD(model.parameters(), lr=0.1))
        alone = copy.deepcopy(made)
        torch.manual_seed(ctx.rank)
        alone(_inputs(ctx)).square().mean().backward()
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in alone.parameters()]
        means = [accel.reduce(ctx, each) / 2 for each in grads]
        norm = torch.stack([each.norm() for each in means]).norm()
        torch.manual_seed(ctx.rank)
        torch.testing.assert_close(_step(ctx, model, optimizer), norm, **TOLERANCE)

    _ = _under(ranks, rank, strategy="ddp")
