# SPDX-License-Identifier: Apache-2.0
"""Models that fully_shard or tensor parallelism has spread: adopted as they are, stepped and clipped as one model."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from catching import assert_raises
from steps import ByState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import accel
from accel.errors import NonFiniteError, PrepareError, StepError
from accel.testing import Simulator

TOLERANCE = {"rtol": 0, "atol": 1e-10}
WORLD = 4
LAYOUTS = ["ddp", "fsdp", "hsdp", "tensor", "fsdp and tensor"]
NORMS = [1.0, 2.0, math.inf]


def _model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), nn.Tanh()).double()


def _spread(layout: str) -> tuple[nn.Module, int]:
    """A model spread over four ranks, and how many of them see the same data."""
    model = _model()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (WORLD,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "tensor":
        parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)
        return model, WORLD
    elif layout == "fsdp and tensor":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["data"])
        return model, 2
    return model, 1


def _seeing(ctx: accel.DistContext, model: nn.Module, same: int) -> accel.DistContext:
    """The context that says how many ranks see the same data."""
    if same == 1:
        return ctx
    mesh = cast(Any, model)[0].weight.device_mesh
    return accel.replace(ctx, mesh=mesh, data_dims=() if same == WORLD else ("data",))


def _full(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach().clone() for each in tensors]


def _inputs(share: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * share + micro)
    return torch.randn(share + micro + 1, 5, dtype=torch.float64, generator=generator)


def _run(ranks: Any, fn: Any, layout: str) -> list[Any]:
    return ranks.run(fn, WORLD, default_group=layout != "ddp")


def _window(ctx: accel.DistContext, model: nn.Module, same: int, scale: float = 1.0) -> ByState:
    """Two micro-batches, of other sizes on every rank that has data of its own."""
    run = ByState(ctx, 2, scaler=accel.LossScale(scale=scale))
    for micro in range(2):
        run.begin()
        inputs = _inputs(ctx.rank // same, micro)
        with run.accumulate(model):
            run.backward(model(inputs).square().mean(), weight=len(inputs))
    return run


def _by_hand(shares: int) -> nn.Module:
    model = _model()
    inputs = torch.cat([_inputs(share, micro) for share in range(shares) for micro in range(2)])
    model(inputs).square().mean().backward()
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("norm_type", NORMS)
def test_the_norm_counts_every_element_once_wherever_it_lies(ranks, layout, norm_type):
    def rank(ctx):
        model, same = _spread(layout)
        ctx = _seeing(ctx, model, same)
        prepared = accel.prepare_model(ctx, model)
        assert layout == "ddp" or prepared is model
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        run = _window(ctx, prepared, same, 64.0)
        run.step(optimizer, max_norm=0.01, norm_type=norm_type)
        assert run.stepped
        return same, run.grad_norm, _full(list(model.parameters()))

    outcomes = _run(ranks, rank, layout)
    expected = _by_hand(WORLD // outcomes[0][0])
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.01, norm_type)
    torch.optim.SGD(expected.parameters(), lr=1.0).step()
    for _, got, parameters in outcomes:
        torch.testing.assert_close(got, norm, **TOLERANCE)
        torch.testing.assert_close(parameters, _full(list(expected.parameters())), **TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("entered", ["accumulate", "trigger_sync_in_backward"])
def test_a_forward_without_a_backward_leaves_the_model_trainable(ranks, layout, entered):
    """`fully_shard` does not put the outermost module's parameters apart again until the backward."""

    def rank(ctx):
        model, same = _spread(layout)
        ctx = _seeing(ctx, model, same)
        prepared, run = accel.prepare_model(ctx, model), ByState(ctx)
        optimizer, inputs = torch.optim.SGD(model.parameters(), lr=1.0), _inputs(ctx.rank // same, 0)
        with torch.no_grad():
            prepared(inputs)
        run.begin()
        if entered == "accumulate":
            with run.accumulate(prepared):
                run.backward(prepared(inputs).square().mean(), weight=len(inputs))
        else:
            with accel.no_sync(ctx, prepared):
                loss = prepared(inputs).square().mean()
            with accel.trigger_sync_in_backward(ctx, prepared):
                run.backward(loss, weight=len(inputs))
        run.step(optimizer)
        assert accel.prepare_model(ctx, prepared) is prepared
        return same, _full(list(model.parameters()))

    outcomes, expected = _run(ranks, rank, layout), _model()
    inputs = torch.cat([_inputs(share, 0) for share in range(WORLD // outcomes[0][0])])
    expected(inputs).square().mean().backward()
    torch.optim.SGD(expected.parameters(), lr=1.0).step()
    for _, parameters in outcomes:
        torch.testing.assert_close(parameters, _full(list(expected.parameters())), **TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipping_knows_no_model_only_parameters(ranks, layout):
    """A subset, two models, any order, a generator: the norm is over all ranks, never over this rank's share."""

    def rank(ctx):
        first, same = _spread(layout)
        second, _ = _spread(layout)
        ctx = _seeing(ctx, first, same)
        models = [accel.prepare_model(ctx, model) for model in (first, second)]
        run, norms = _window(ctx, models[0], same), []
        _window(ctx, models[1], same)
        chosen = [list(first.parameters())[1:3], [*second.parameters(), *first.parameters()]]
        for parameters in chosen:
            generator = (each for each in reversed(parameters))
            norms.append(run.clip_norm(generator, 1e-3))
        clipped = run.clip_norm(chosen[1], 1.0)
        run.clip_value(chosen[1], 1e-5)
        run.unscale(torch.optim.SGD(chosen[1]))
        return same, norms, clipped, _full([each.grad for each in chosen[1]])

    outcomes = _run(ranks, rank, layout)
    first, second = (_by_hand(WORLD // outcomes[0][0]) for _ in range(2))
    every = [*second.parameters(), *first.parameters()]
    expected = [nn.utils.clip_grad_norm_(some, 1e-3) for some in (list(first.parameters())[1:3], every)]
    nn.utils.clip_grad_value_(every, 1e-5)
    for _, norms, clipped, grads in outcomes:
        torch.testing.assert_close(norms, expected, **TOLERANCE)
        assert clipped.item() == pytest.approx(1e-3, rel=1e-2)
        torch.testing.assert_close(grads, [each.grad for each in every], **TOLERANCE)


@pytest.mark.parametrize(("layout", "spoils"), [("ddp", "loss"), ("fsdp", "loss"), ("hsdp", "loss"), ("fsdp", "shard")])
@pytest.mark.parametrize("spoilt", [0, 3])
def test_an_overflow_on_one_rank_is_skipped_by_all_and_moves_nothing_else(ranks, layout, spoils, spoilt):
    def rank(ctx):
        model, _ = _spread(layout)
        prepared = accel.prepare_model(ctx, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        run = ByState(ctx, scaler=accel.LossScale(scale=8.0, dynamic=True))
        seen = []
        for at in range(3):
            run.begin()
            mine = at == 1 and ctx.rank == spoilt
            with run.accumulate(prepared):
                loss = prepared(_inputs(ctx.rank, at)).square().mean()
                loss = loss * (math.inf if mine and spoils == "loss" else 1.0)
                run.backward(loss, weight=1)
            if mine and spoils == "shard":
                model[0].weight.grad.to_local().view(-1)[0] = math.inf
            before = _full(list(model.parameters()))
            run.step(optimizer, scheduler=scheduler, max_norm=1.0)
            moved = not torch.equal(before[0], _full(list(model.parameters()))[0])
            counts = {int(state["step"]) for state in optimizer.state.values()}
            seen.append((run.stepped, moved, run.scaler.scale, *scheduler.get_last_lr(), counts, run.skipped))
            assert all(each.grad is None for each in model.parameters())
        return seen

    for seen in _run(ranks, rank, layout):
        assert seen == [
            (True, True, 8.0, 0.05, {1}, 0),
            (False, False, 4.0, 0.05, {1}, 1),
            (True, True, 4.0, 0.025, {2}, 1),
        ]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_spoilt_shard_of_one_rank_is_named_by_all(ranks, value, norm_type):
    def rank(ctx):
        model, same = _spread("fsdp")
        run = _window(ctx, accel.prepare_model(ctx, model), same)
        if ctx.rank == 2:
            model[2].weight.grad.to_local().view(-1)[0] = value
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with assert_raises(NonFiniteError, problem="step 0", where=r"2\.weight, shape \[3, 8\]"):
            run.step(optimizer, max_norm=1.0, norm_type=norm_type)
        return _full(list(model.parameters()))

    for parameters in _run(ranks, rank, "fsdp"):
        torch.testing.assert_close(parameters, _full(list(_model().parameters())), rtol=0, atol=0)


def test_gradients_are_held_back_within_a_window_or_exchanged_in_each_micro_batch(ranks):
    def rank(ctx, each):
        model, _ = _spread("fsdp")
        run = ByState(ctx, 2, sync_each_batch=each)
        run.begin()
        with run.accumulate(model):
            run.backward(model(_inputs(ctx.rank, 0)).square().mean(), weight=ctx.rank + 1)
        held = [parameter.grad is None for parameter in model.parameters()]
        run.begin()
        with run.accumulate(model):
            run.backward(model(_inputs(ctx.rank, 1)).square().mean(), weight=ctx.rank + 2)
        run.unscale(torch.optim.SGD(model.parameters()))
        return held, _full([parameter.grad for parameter in model.parameters()])

    expected = [each.grad for each in _by_hand(WORLD).parameters()]
    for each in (False, True):
        for held, grads in _run(ranks, lambda ctx, each=each: rank(ctx, each), "fsdp"):
            assert held == [not each] * 4
            torch.testing.assert_close(grads, expected, **TOLERANCE)


def test_a_gradient_that_would_not_reach_every_rank_is_refused(ranks):
    def rank(ctx):
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        part = fully_shard(_model(), mesh=whole["inner"])
        beside = _model()
        fully_shard(beside[0], mesh=init_device_mesh("cpu", (WORLD,)))
        with assert_raises(PrepareError, expected="mesh of all 4 ranks", got="a mesh of 2", where=r"0\.weight"):
            accel.prepare_model(ctx, part)
        with assert_raises(PrepareError, got="a plain parameter next to sharded ones", where=r"2\.weight"):
            accel.prepare_model(ctx, beside)
        with assert_raises(PrepareError, fix="fully_shard on the full model"):
            accel.no_sync(ctx, beside)
        beside[2].requires_grad_(False)
        assert accel.prepare_model(ctx, beside) is beside
        return True

    assert _run(ranks, rank, "fsdp") == [True] * WORLD


def test_a_module_that_is_added_to_a_sharded_model_is_refused_with_the_order(ranks):
    def rank(ctx):
        ctx = accel.replace(ctx, strategy="fsdp")
        adapted = nn.Sequential(accel.prepare_model(ctx, _model()), nn.Linear(1, 1, dtype=torch.float64))
        with assert_raises(PrepareError, where=r"1\.weight", fix="make the model of peft first, and prepare that"):
            accel.prepare_model(ctx, adapted)
        return True

    assert _run(ranks, rank, "fsdp") == [True] * WORLD


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    _ = parameter.grad.mul_(0.5)


def _halved(ctx: accel.DistContext, strategy: Any, *, after_sum: bool, own: bool = False) -> list[torch.Tensor]:
    """Train with hooks that halve gradients."""
    ctx = accel.replace(ctx, strategy=strategy)
    model = accel.prepare_model(ctx, fully_shard(_model()) if own else _model())
    for each in model.parameters():
        if after_sum:
            _ = each.register_post_accumulate_grad_hook(_halve)
        else:
            _ = each.register_hook(lambda grad: grad * 0.5)
    run = ByState(ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.begin()
    with run.accumulate(model):
        run.backward(model(_inputs(0, 0)).square().mean())
    assert run.step(optimizer)
    return _full([*model.parameters()])


def test_hooks_on_gradients_run_or_are_refused(ranks: Simulator) -> None:
    expected = ranks.run(lambda ctx: _halved(ctx, "ddp", after_sum=False), 1, default_group=True)[0]
    for strategy in ("ddp", "fsdp"):
        found = ranks.run(lambda ctx, own=strategy: _halved(ctx, own, after_sum=own == "fsdp"), 2, default_group=True)
        torch.testing.assert_close(found[1], expected, **TOLERANCE)
    for own in (False, True):
        with assert_raises(StepError, problem="hooks on gradients", got="for 0.weight, 0.bias", fix="post_accumulate"):
            _ = ranks.run(lambda ctx, own=own: _halved(ctx, "fsdp", after_sum=False, own=own), 2, default_group=True)


def test_a_pipeline_of_shards_is_adopted_by_a_second_prepare(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> bool:
        ctx = accel.replace(ctx, mesh="dp=2,pp=2", strategy="fsdp")
        model = accel.prepare_model(ctx, nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))))
        return accel.prepare_model(ctx, model) is model

    assert ranks.run(rank, 4, default_group=True) == [True] * 4
