# SPDX-License-Identifier: Apache-2.0
"""Backward passes in other patterns than one to a micro-batch: gradients stay those of one process with one batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import ByParts, ByState, begin_batch, both_ways
from torch import nn

import accel
from accel.errors import ConfigError, PrepareError, StepError
from accel.testing import simulate

TOLERANCE = {"rtol": 0, "atol": 1e-10}
WORLD = 3


class Heads(nn.Module):
    """A trunk with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(inputs).tanh()
        return self.first(hidden), self.second(hidden)


def _heads() -> Heads:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Heads().double()


def _inputs(rank: int, micro: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + micro)
    return torch.randn(rank + 1, 4, dtype=torch.float64, generator=generator)


def _losses(model: nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = model(inputs)
    return (first * second).square().mean(), (first + second.cos()).mean()


def _gradient(model: nn.Module) -> list[torch.Tensor]:
    return [each.grad.clone() for each in model.parameters()]


def _expected(micros: int = 1, world: int = WORLD) -> list[torch.Tensor]:
    model = _heads()
    sum(
        _losses(model, torch.cat([_inputs(rank, micro) for rank in range(world) for micro in range(micros)]))
    ).backward()
    return _gradient(model)


def _divided(model: nn.Module, run: ByState) -> Any:
    run.unscale(torch.optim.SGD(model.parameters()))
    return _gradient(model)


def _one_graph_twice(ctx, model, run, weights):
    """Two losses of one forward: ranks exchange gradients in the first pass, and DDP knows nothing of the second."""
    with run.accumulate(model):
        first, second = _losses(model, _inputs(ctx.rank, run.accum.micro - 1))
        run.backward(first, retain_graph=True, **weights)
        run.backward(second, same_units=True, **weights)


def _two_forwards(ctx, model, run, weights):
    with run.accumulate(model):
        inputs = _inputs(ctx.rank, run.accum.micro - 1)
        run.backward(_losses(model, inputs)[0], **weights)
        run.backward(_losses(model, inputs)[1], same_units=True, **weights)


def _held_then_triggered(ctx, model, run, weights):
    with accel.no_sync(ctx, model):
        first, second = _losses(model, _inputs(ctx.rank, run.accum.micro - 1))
        if not run.sync:
            run.backward(first + second, **weights)
            return
        run.backward(first, **weights, retain_graph=True)
    with accel.trigger_sync_in_backward(ctx, model, second):
        run.backward(second, same_units=True, **weights)


def _without_a_block(ctx, model, run, weights):
    if not run.sync:
        with accel.no_sync(ctx, model):
            run.backward(sum(_losses(model, _inputs(ctx.rank, 0))), **weights)
        return
    first, second = _losses(model, _inputs(ctx.rank, run.accum.micro - 1))
    run.backward(first, **weights, retain_graph=True)
    run.backward(second, **weights, same_units=True)


@pytest.mark.parametrize("passes", [_one_graph_twice, _two_forwards, _held_then_triggered, _without_a_block])
@pytest.mark.parametrize(
    ("micros", "weighs", "find_unused_parameters"),
    [
        (1, "samples", True),
        (1, "tensor", False),
        (2, "samples", False),
        (2, "tensor", True),
    ],  # each pair of values once
)
@both_ways
def test_losses_of_several_passes_are_added(ranks, passes, micros, weighs, find_unused_parameters, way):
    def rank(ctx):
        model = accel.prepare_model(ctx, _heads(), find_unused_parameters=find_unused_parameters)
        run = way(ctx, micros, scaler=accel.LossScale(scale=32.0))
        for micro in range(micros):
            count = len(_inputs(ctx.rank, micro))
            weight = torch.tensor(count) if weighs == "tensor" else count
            run.begin()
            passes(ctx, model, run, {"weight": weight})
        return _divided(model, run)

    for gradient in ranks.run(rank, WORLD):
        torch.testing.assert_close(gradient, _expected(micros), **TOLERANCE)


def test_without_weights_a_micro_batch_counts_once_whatever_its_passes():
    model, run = _heads(), ByParts(accel.single(), 2)
    for micro in range(2):
        run.begin()
        first, second = _losses(model, _inputs(0))
        run.backward(first, retain_graph=micro == 1)
        run.backward(second if micro else _losses(model, _inputs(0))[1])
    torch.testing.assert_close(_divided(model, run), _expected(world=1), **TOLERANCE)


def test_several_passes_of_one_batch_are_added(ranks):
    def rank(ctx):
        model = accel.prepare_model(ctx, _heads())
        state = accel.backward(ctx, _losses(model, _inputs(0))[0], begin_batch(ctx))
        accel.backward(ctx, _losses(model, _inputs(0))[1], state, same_units=True)
        return _gradient(model)

    for gradient in ranks.run(rank, WORLD):
        torch.testing.assert_close(gradient, _expected(world=1), **TOLERANCE)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_gradients_are_exchanged_once_a_window_or_in_each_micro_batch(ranks, each, find_unused_parameters):
    def rank(ctx):
        model = accel.prepare_model(ctx, _heads(), find_unused_parameters=find_unused_parameters)
        run, same = ByState(ctx, 3, sync_each_batch=each), []
        for micro in range(3):
            run.begin()
            with run.accumulate(model):
                run.backward(sum(_losses(model, _inputs(ctx.rank, micro))), weight=ctx.rank + 1)
            ranks_grads = accel.gather(ctx, next(model.parameters()).grad.flatten()[None])
            same.append(bool((ranks_grads == ranks_grads[0]).all()))
        return same, _divided(model, run)

    for same, gradient in ranks.run(rank, WORLD):
        assert same == [each, each, True]
        torch.testing.assert_close(gradient, _expected(3), **TOLERANCE)


@pytest.mark.parametrize("weight", [None, 2, torch.tensor(2)])
def test_a_parameter_without_a_gradient_is_found_without_an_accumulate_block(ranks, weight):
    """DDP exchanges nothing then, so each rank would step by its own gradient."""

    def rank(ctx):
        model = accel.prepare_model(ctx, _heads())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loss = model(_inputs(ctx.rank))[0].mean()
        state = accel.backward(ctx, loss, begin_batch(ctx), weight=weight)
        with assert_raises(
            StepError, got=r"no gradient for second\.weight, second\.bias", fix="find_unused_parameters"
        ):
            state = accel.optimizer_step(ctx, optimizer, state)
        torch.testing.assert_close(list(accel.unwrap_model(model).parameters()), list(_heads().parameters()))
        return True

    assert ranks.run(rank, WORLD) == [True] * WORLD


def test_a_parameter_that_is_frozen_or_unused_on_purpose_is_none(ranks):
    def rank(ctx):
        plain = _heads()
        plain.first.requires_grad_(False)
        frozen = accel.prepare_model(ctx, plain)
        unused = accel.prepare_model(ctx, _heads(), find_unused_parameters=True)
        stepped = []
        for model, head in ((frozen, 1), (unused, 0)):
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            state = accel.backward(ctx, model(_inputs(ctx.rank))[head].mean(), begin_batch(ctx))
            stepped.append(accel.optimizer_step(ctx, optimizer, state).stepped)
        return stepped

    assert ranks.run(rank, WORLD) == [[True, True]] * WORLD


def test_passes_that_ddp_cannot_tell_apart_are_refused(ranks):
    def rank(ctx):
        model, run = accel.prepare_model(ctx, _heads()), ByState(ctx)
        first, second = model(_inputs(ctx.rank))
        run.begin()
        run.backward(first.mean(), retain_graph=True)
        with assert_raises(StepError, fix="Add the losses and call backward once"):
            run.backward(second.mean(), same_units=True)
        return True

    assert ranks.run(rank, WORLD) == [True] * WORLD


def test_a_second_pass_that_nothing_remembers_is_refused(ranks):
    def rank(ctx):
        model = accel.prepare_model(ctx, _heads())
        with assert_raises(ConfigError, expected="an Accumulation with .*retain_graph="):
            accel.training.parts.backward(ctx, _losses(model, _inputs(0))[0], accel.LossScale(), retain_graph=True)
        return True

    assert ranks.run(rank, WORLD) == [True] * WORLD
    model = _heads()  # alone there is nobody to drift from
    accel.training.parts.backward(accel.single(), _losses(model, _inputs(0))[0], accel.LossScale(), retain_graph=True)


@both_ways
def test_the_first_pass_has_units_of_its_own(way):
    model, run = _heads(), way(accel.single())
    run.begin()
    with assert_raises(StepError, expected="from its second backward on"):
        run.backward(_losses(model, _inputs(0))[0], weight=2, same_units=True)


def test_unused_parameters_are_found_by_the_loss_that_triggers(ranks):
    def rank(ctx):
        model = accel.prepare_model(ctx, _heads(), find_unused_parameters=True)
        with accel.no_sync(ctx, model):
            loss = model(_inputs(ctx.rank))[0].mean()
        with (
            assert_raises(PrepareError, expected=r"trigger_sync_in_backward\(ctx, model, loss\)"),
            accel.trigger_sync_in_backward(ctx, model),
        ):
            pytest.fail("the block was entered")
        with accel.trigger_sync_in_backward(ctx, model, loss):
            accel.backward(ctx, loss, begin_batch(ctx))
        assert accel.unwrap_model(model).second.weight.grad is None
        return accel.gather(ctx, accel.unwrap_model(model).first.weight.grad)

    for gathered in ranks.run(rank, WORLD):
        torch.testing.assert_close(gathered, gathered[:1].expand_as(gathered))


def test_buffers_are_synchronised_after_a_triggered_exchange_as_after_any(ranks):
    def rank(ctx):
        model = accel.prepare_model(ctx, nn.BatchNorm1d(2))
        with accel.no_sync(ctx, model):
            loss = model(torch.randn(4, 2) + ctx.rank).sum()
        with accel.trigger_sync_in_backward(ctx, model):
            accel.backward(ctx, loss, begin_batch(ctx))
        model.eval()(torch.zeros(1, 2))
        return accel.unwrap_model(model).running_mean

    first, *others = ranks.run(rank, WORLD)
    assert first.abs().sum() > 0
    assert all(torch.equal(first, other) for other in others)


def _exchanging(ctx: accel.DistContext, model: nn.Module) -> Any:
    return accel.accumulate(ctx, begin_batch(ctx), model)


@pytest.mark.parametrize("block", [accel.trigger_sync_in_backward, _exchanging])
def test_a_block_that_exchanges_checks_that_all_took_part(ranks, block):
    def rank(ctx):
        model = accel.prepare_model(ctx, _heads())
        with accel.no_sync(ctx, model):
            loss = model(_inputs(ctx.rank))[0].mean()
        with assert_raises(StepError, got=r"no gradient for second\.weight"), block(ctx, model):
            accel.backward(ctx, loss, begin_batch(ctx))
        return True

    assert ranks.run(rank, WORLD) == [True] * WORLD


def test_a_gradient_of_an_earlier_micro_batch_does_not_hide_an_exchange_that_never_was(ranks):
    def rank(ctx):
        model = accel.prepare_model(ctx, _heads())
        run = ByState(ctx, 2)
        run.begin()
        with run.accumulate(model):
            run.backward(sum(_losses(model, _inputs(ctx.rank))))
        run.begin()
        said = r"no gradient for second\.weight, second\.bias"
        with assert_raises(StepError, got=said), run.accumulate(model):
            run.backward(model(_inputs(ctx.rank))[0].mean())
        return True

    assert ranks.run(rank, WORLD) == [True] * WORLD


@pytest.mark.parametrize("world", [1, WORLD])
def test_gradients_go_to_the_inputs_alone(ranks, world):
    """On several ranks, to all parameters of a model or to none where they are exchanged."""

    def rank(ctx):
        model = accel.prepare_model(ctx, net := _heads())
        other = accel.prepare_model(ctx, still := nn.Linear(2, 1).double())
        run = ByState(ctx, 2)
        for leaves in (list(net.first.parameters()), list(net.parameters())):
            run.begin()
            with run.accumulate(model):
                loss = _losses(model, _inputs(ctx.rank))[0] + 0 * other(torch.ones(1, 2).double()).sum()
                run.backward(loss, weight=1.0, inputs=leaves)
            if not run.sync:
                assert net.trunk.weight.grad is None
        assert still.weight.grad is None
        _divided(model, run)
        return net.trunk.weight.grad, net.first.weight.grad

    def by_hand(at):
        net = _heads()
        _losses(net, _inputs(at))[0].backward()
        return net.trunk.weight.grad, net.first.weight.grad

    trunk, first = (sum(each) / world for each in zip(*map(by_hand, range(world)), strict=True))
    for got in ranks.run(rank, world):
        torch.testing.assert_close(got, (trunk / 2, first), **TOLERANCE)  # of one micro-batch, and of both


def test_a_part_of_a_models_parameters_is_not_stepped_unexchanged(ranks):
    def rank(ctx):
        model, optimizer = accel.prepare(ctx, net := _heads(), torch.optim.SGD(net.parameters(), lr=0.1))
        state = accel.train_state(ctx)
        state = accel.backward(
            ctx, _losses(model, _inputs(ctx.rank))[0], begin_batch(ctx, state), inputs=list(net.first.parameters())
        )
        with assert_raises(StepError, problem="gradients were not exchanged", got="trunk.weight"):
            state = accel.optimizer_step(ctx, optimizer, state)
        return True

    assert ranks.run(rank, 2) == [True] * 2


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_have_a_graph_of_their_own_on_one_rank():
    ctx = accel.single()
    model = _heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = ByState(ctx)
    run.begin()
    inputs = _inputs(0)
    run.backward(_losses(model, inputs)[0], weight=1.0, create_graph=True)
    penalty = sum(each.grad.square().sum() for each in model.parameters() if each.grad is not None)
    run.backward(penalty, weight=1.0, same_units=True)

    twin = _heads()
    loss = _losses(twin, inputs)[0]
    grads = torch.autograd.grad(loss, [*twin.parameters()], create_graph=True)
    (loss + sum(each.square().sum() for each in grads)).backward()
    for got, wanted in zip(_gradient(model), _gradient(twin), strict=True):
        torch.testing.assert_close(got, wanted, **TOLERANCE)
    before = [each.detach().clone() for each in model.parameters()]
    run.step(optimizer)
    for was, parameter, grad in zip(before, model.parameters(), _gradient(twin), strict=True):
        torch.testing.assert_close(parameter.detach(), was - 0.1 * grad, **TOLERANCE)


def test_a_graph_behind_exchanged_gradients_is_refused(ranks):
    def rank(ctx):
        model = accel.prepare_model(ctx, _heads())
        with assert_raises(
            ConfigError, problem="no graph behind them", got="strategy ddp on 2 ranks", fix="torch.autograd.grad"
        ):
            accel.backward(ctx, _losses(model, _inputs(ctx.rank))[0], begin_batch(ctx), create_graph=True)
        return True

    assert ranks.run(rank, 2) == [True] * 2


def test_sharded_parameters_are_no_inputs():
    def rank(ctx):
        ctx = accel.replace(ctx, strategy="fsdp")
        model = accel.prepare_model(ctx, _heads())
        leaves = list(model.parameters())
        loss = _losses(model, _inputs(ctx.rank))[0]
        with assert_raises(
            ConfigError, problem="no leaves of the graph", got="strategy fsdp", fix=r"requires_grad_\(False\)"
        ):
            accel.backward(ctx, loss, begin_batch(ctx), inputs=leaves)
        return True

    assert simulate(rank, world_size=2, default_group=True) == [True] * 2
