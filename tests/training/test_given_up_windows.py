# SPDX-License-Identifier: Apache-2.0
"""Gradients of a window that was given up never reach a step unnoticed: each way in is refused, and has a way out."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import ByState, begin_batch, both_ways
from torch import nn
from torch.optim import SGD

import accel
from accel.errors import StepError

LAYOUTS = ["alone", "ddp", "fsdp"]
LEFT = "gradients from before its window"
BIG = 100.0


def _model(*sizes: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(*itertools.starmap(nn.Linear, itertools.pairwise(sizes))).double()


def _prepared(ctx: accel.DistContext, *sizes: int, **options: Any) -> tuple[nn.Module, SGD]:
    model = accel.prepare_model(ctx, _model(*(sizes or (3, 4, 2))), **options)
    return model, SGD(model.parameters(), lr=0.1)


def _whole(model: nn.Module) -> torch.Tensor:
    tensors = [each.detach() for each in model.parameters()]
    return torch.cat([(each.full_tensor() if hasattr(each, "full_tensor") else each).flatten() for each in tensors])


def _inputs(ctx: accel.DistContext, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3) * (1 + ctx.rank)


def _begin(
    ctx: accel.DistContext, model: nn.Module, steps: int = 1, *, micros: int = 1, scale: float = 1.0, **weight: Any
) -> ByState:
    """The first micro-batches of a window."""
    run = ByState(ctx, steps)
    for _ in range(micros):
        run.begin()
        with run.accumulate(model):
            loss = model(_inputs(ctx, scale)).square().mean()
            run.backward(loss, **weight)
    return run


def _step(optimizer: Any, run: ByState) -> ByState:
    run.step(optimizer)
    return run


def _on(ranks: Any, layout: str, fn: Callable[[accel.DistContext], Any]) -> list[Any]:
    """Run it on one rank, or on two under a strategy."""

    def rank(ctx: accel.DistContext) -> Any:
        return fn(ctx if layout == "alone" else accel.replace(ctx, strategy=layout))

    return ranks.run(rank, 1 if layout == "alone" else 2, default_group=True)


def assert_refused(ctx: accel.DistContext, optimizer: Any, model: nn.Module) -> None:
    """A next window is refused, and changes nothing."""
    before = _whole(model)
    with assert_raises(StepError, problem=LEFT):
        _step(optimizer, _begin(ctx, model))
    assert torch.equal(_whole(model), before)


def _expected(ctx: accel.DistContext) -> torch.Tensor:
    """The parameters after one window of a new model."""
    model, optimizer = _prepared(ctx)
    _step(optimizer, _begin(ctx, model))
    return _whole(model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("steps", "micros"), [(4, 1), (4, 3), (1, 1)])
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "tokens"])
def test_a_window_left_before_its_step_is_refused_until_its_gradients_are_dropped(
    ranks, layout, steps, micros, weighted
):
    weight = {"weight": 2.0} if weighted else {}

    def rank(ctx):
        model, optimizer = _prepared(ctx)
        _begin(ctx, model, steps, micros=micros, scale=BIG, **weight)
        assert_refused(ctx, optimizer, model)
        accel.training.clear_gradients(model)
        _step(optimizer, _begin(ctx, model, **weight))
        torch.testing.assert_close(_whole(model), _expected(ctx), rtol=0, atol=1e-12)
        return True

    assert all(_on(ranks, layout, rank))


def test_zero_grad_does_not_reach_what_fully_shard_holds(ranks):
    def rank(ctx):
        model, optimizer = _prepared(ctx)
        _begin(ctx, model, 4, scale=BIG)
        optimizer.zero_grad()
        assert_refused(ctx, optimizer, model)
        return True

    assert all(_on(ranks, "fsdp", rank))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_grad_before_the_first_backward_of_a_window_is_early_enough(ranks, layout):
    def rank(ctx):
        model, optimizer = _prepared(ctx)
        _begin(ctx, model, scale=BIG)
        run = ByState(ctx)
        run.begin()
        with run.accumulate(model):
            loss = model(_inputs(ctx)).square().mean()
            optimizer.zero_grad()
            run.backward(loss)
        _step(optimizer, run)
        torch.testing.assert_close(_whole(model), _expected(ctx), rtol=0, atol=1e-12)
        _step(optimizer, _begin(ctx, model))
        return True

    assert all(_on(ranks, layout, rank))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_was_not_finite_is_not_stepped_with_later(ranks, layout):
    def rank(ctx):
        model, optimizer = _prepared(ctx)
        with pytest.raises(accel.errors.NonFiniteError):
            _step(optimizer, _begin(ctx, model, scale=float("nan") if ctx.rank == 0 else 1.0))
        assert_refused(ctx, optimizer, model)
        return True

    assert all(_on(ranks, layout, rank))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("micros", [1, 2])
def test_loading_inside_a_window_drops_its_gradients(ranks, layout, micros, tmp_path):
    def rank(ctx):
        model, optimizer = _prepared(ctx)
        items = {"model": model, "optimizer": optimizer, "state": accel.train_state(ctx)}
        path = accel.save_state(ctx, tmp_path / f"{layout}-{micros}", items, step=0)
        _begin(ctx, model, 2, micros=micros, scale=BIG)
        accel.load_state(ctx, path, items)
        _step(optimizer, _begin(ctx, model))
        torch.testing.assert_close(_whole(model), _expected(ctx), rtol=0, atol=1e-12)
        return True

    assert all(_on(ranks, layout, rank))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_gradients_that_are_not_finite_the_last_checkpoint_is_a_way_on(ranks, layout, tmp_path):
    def rank(ctx):
        model, optimizer = _prepared(ctx)
        items = {"model": model, "optimizer": optimizer}
        path = accel.save_state(ctx, tmp_path / layout, items, step=0)
        with pytest.raises(accel.errors.NonFiniteError):
            _step(optimizer, _begin(ctx, model, scale=float("nan")))
        accel.load_state(ctx, path, items)
        return _step(optimizer, _begin(ctx, model)).stepped

    assert all(_on(ranks, layout, rank))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_pass_of_a_generator_leaves_no_gradients_in_the_critic(ranks, layout):
    def rank(ctx):
        generator, optimizer_g = _prepared(ctx, 3, 2)
        critic, optimizer_c = _prepared(ctx, 2, 1)
        noise = _inputs(ctx)

        def generate() -> None:
            run = ByState(ctx)
            run.begin()
            with run.accumulate(generator, critic):
                run.backward(critic(generator(noise)).mean())
            _step(optimizer_g, run)

        def criticise() -> Any:
            run = ByState(ctx)
            run.begin()
            with run.accumulate(critic):
                loss = critic(generator(noise).detach()).square().mean()
                run.backward(loss)
            return _step(optimizer_c, run)

        generate()
        with assert_raises(StepError, problem=LEFT):
            criticise()
        generate()  # the generator's own are its window's
        accel.training.clear_gradients(critic)
        return criticise().stepped

    assert all(_on(ranks, layout, rank))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_of_every_other_window_needs_its_gradients_dropped_between(ranks, layout):
    def train(ctx: accel.DistContext, *, drops: bool) -> torch.Tensor:
        model, _ = _prepared(ctx)
        each, other = (SGD(part.parameters(), lr=0.1) for part in accel.unwrap_model(model))
        for update in range(4):
            _step([each, other] if update % 2 else each, _begin(ctx, model))
            if drops:
                other.zero_grad()
        return _whole(model)

    def rank(ctx):
        with assert_raises(StepError, problem=LEFT):
            train(ctx, drops=False)
        return train(ctx, drops=True)

    [first, *others] = _on(ranks, layout, rank)
    assert all(torch.equal(first, each) for each in others)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_that_no_optimizer_has_may_keep_their_gradients(ranks, layout):
    """As those of a body whose head alone is trained."""

    def rank(ctx):
        model, _ = _prepared(ctx, 3, 4, 2)
        head = SGD(accel.unwrap_model(model)[1].parameters(), lr=0.1)
        stepped = [_step(head, _begin(ctx, model)).stepped for _ in range(3)]
        body = next(iter(accel.unwrap_model(model)[0].parameters()))
        assert body.grad is not None
        return stepped

    assert all(all(stepped) for stepped in _on(ranks, layout, rank))


class KeepsZeros(SGD):
    """An optimizer whose gradients are filled with zeros instead of freed."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zeros_are_no_gradients(ranks, layout):
    def rank(ctx):
        model, _ = _prepared(ctx)
        twin, plain = _prepared(ctx)
        zeros = KeepsZeros(model.parameters(), lr=0.1)
        for _ in range(3):
            _step(zeros, _begin(ctx, model, 2, micros=2))
            _step(plain, _begin(ctx, twin, 2, micros=2))
        return torch.equal(_whole(model), _whole(twin))

    assert all(_on(ranks, layout, rank))


def test_a_leftover_in_the_shard_of_one_rank_is_refused_by_all(ranks):
    """Where one rank's part of a gradient is zero and the other's is not."""

    def rank(ctx):
        model, optimizer = _prepared(ctx)
        for each in model.parameters():
            each.grad = torch.full_like(each, 1.0 if ctx.rank else 0.0)
        with assert_raises(StepError, problem=f"rank 1: .*{LEFT}"):
            _step(optimizer, _begin(ctx, model))
        return True

    assert all(_on(ranks, "fsdp", rank))


def test_a_whole_gradient_that_one_rank_left_is_refused_there(ranks):
    """As a picture that one rank draws leaves it; the other rank does not wait for an answer."""

    def rank(ctx):
        model, optimizer = _prepared(ctx)
        if ctx.rank == 0:
            accel.unwrap_model(model)(_inputs(ctx)).sum().backward()
            with assert_raises(StepError, problem=LEFT):
                _step(optimizer, _begin(ctx, model))
            return True
        return _step(optimizer, _begin(ctx, model)).stepped

    assert all(_on(ranks, "ddp", rank))


@pytest.mark.parametrize("layout", LAYOUTS)
@both_ways
def test_windows_over_different_models_may_overlap(ranks, layout, way):
    def rank(ctx):
        pairs = [_prepared(ctx), _prepared(ctx)]
        runs = [way(ctx, 2), way(ctx, 3)]
        stepped = 0
        for _ in range(6):
            for run, (model, optimizer) in zip(runs, pairs, strict=True):
                run.begin()
                with run.accumulate(model):
                    run.backward(model(_inputs(ctx)).square().mean())
                if run.sync:
                    stepped += run.step(optimizer)
        return stepped

    assert set(_on(ranks, layout, rank)) == {5}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_first_micro_batch_may_have_several_blocks(ranks, layout):
    def rank(ctx):
        model, optimizer = _prepared(ctx)
        run = ByState(ctx)
        run.begin()
        for at in range(2):
            with run.accumulate(model):
                loss = model(_inputs(ctx)).square().mean()
                run.backward(loss, weight=2, same_units=at == 1)
        return _step(optimizer, run).stepped

    assert all(_on(ranks, "alone" if layout == "ddp" else layout, rank))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharpness_aware_minimisation_takes_two_windows_of_which_one_is_stepped(ranks, layout):
    """Foret et al. 2021: the gradient where the loss is worst, nearby."""

    def rank(ctx):
        model, optimizer = _prepared(ctx)
        _begin(ctx, model)
        before = [each.detach().clone() for each in model.parameters()]
        with torch.no_grad():
            for each in model.parameters():
                each.add_(each.grad, alpha=0.05)
        optimizer.zero_grad()
        run = _begin(ctx, model)
        with torch.no_grad():
            for each, old in zip(model.parameters(), before, strict=True):
                each.copy_(old)
        return _step(optimizer, run).stepped

    assert all(_on(ranks, layout, rank))


@pytest.mark.parametrize("layout", ["alone", "ddp"])
def test_a_penalty_on_gradients_of_inputs_leaves_no_gradients(ranks, layout):
    def rank(ctx):
        model, optimizer = _prepared(ctx)
        run = ByState(ctx, 2)
        for _ in range(4):
            run.begin()
            inputs = _inputs(ctx).requires_grad_()
            with run.accumulate(model):
                outputs = model(inputs).square().mean()
                [slope] = torch.autograd.grad(outputs, inputs, create_graph=True)
                run.backward(outputs + slope.square().sum())
            if run.sync:
                run.step(optimizer)
        return run.updates

    assert set(_on(ranks, layout, rank)) == {2}


def test_without_accumulate_nothing_is_looked_for():
    ctx = accel.single()
    model, optimizer = _prepared(ctx)
    for _ in range(2):  # the second adds to the first, as torch's own loop would
        state = accel.backward(ctx, model(_inputs(ctx)).square().mean(), begin_batch(ctx))
    assert accel.optimizer_step(ctx, optimizer, state).stepped


def test_lbfgs_calls_backward_within_its_step():
    ctx = accel.single()
    model = accel.prepare_model(ctx, _model(3, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(_inputs(ctx)).square().mean()
        accel.backward(ctx, loss, begin_batch(ctx))
        return loss.item()

    first = closure()
    for _ in range(3):
        optimizer.step(closure)
    assert closure() < first


def test_a_model_with_notes_is_copied_and_saved_as_any_other(tmp_path):
    ctx = accel.single()
    model, optimizer = _prepared(ctx)
    _begin(ctx, model)
    _begin(ctx, model)  # finds the gradients of the first
    torch.save(model, tmp_path / "model.pt")
    for twin in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(_whole(twin), _whole(model))
    with assert_raises(StepError, problem=LEFT):
        _step(optimizer, _begin(ctx, model))


def test_the_error_names_parameters_and_the_line_to_write():
    ctx = accel.single()
    model, optimizer = _prepared(ctx, 3, 4, 4, 2)
    _begin(ctx, model)
    with pytest.raises(StepError) as caught:
        _step(optimizer, _begin(ctx, model))
    assert caught.value.got == "gradients of 0.weight, 0.bias, 1.weight and 3 more"
    assert "accel.training.clear_gradients(model)" in caught.value.fix


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_note_ends_with_the_gradients_that_it_is_of(ranks, layout):
    """A phase that trains the last layer leaves the gradients of the others; the next phase clears them by itself."""

    def train(ctx: accel.DistContext) -> bool:
        model, _ = _prepared(ctx)
        *body, weight, bias = model.parameters()
        for _ in range(2):
            _step(SGD([weight, bias], lr=0.1), _begin(ctx, model))
        everything = SGD([*body, weight, bias], lr=0.1)
        everything.zero_grad()
        loss = model(_inputs(ctx)).square().mean()
        run = ByState(ctx)
        run.begin()
        run.backward(loss)  # without `accumulate`
        return _step(everything, run).stepped

    assert all(_on(ranks, layout, train))


def test_a_gradient_that_is_gone_at_the_step_is_none():
    ctx = accel.single()
    model = _model(3, 3, 3)
    optimizer, first = SGD(model.parameters(), lr=0.1), model.get_submodule("0")
    _begin(ctx, model, steps=2)
    run = ByState(ctx)
    run.begin()
    with run.accumulate(model):
        optimizer.zero_grad()
        run.backward(first(_inputs(ctx)).square().mean())
    assert _step(optimizer, run).stepped


@pytest.mark.parametrize("layout", ["alone", "ddp"])
def test_a_window_whose_gradients_were_cleared_does_not_go_on(ranks, layout):
    """Accelerate's `zero_grad` does nothing within a window, torch's clears what the window has added up."""

    def train(ctx: accel.DistContext) -> None:
        model, optimizer = _prepared(ctx)
        run = _begin(ctx, model, steps=2)
        optimizer.zero_grad()
        run.begin()
        with assert_raises(StepError, problem="first micro-batch are gone", fix=r"zero_grad\(\) out of the loop"):
            run.accumulate(model)

    _on(ranks, layout, train)


def test_windows_over_models_without_gradients_by_design_go_on():
    ctx, frozen = accel.single(), _model(3, 3, 3).requires_grad_(False)
    run = ByState(ctx, 2, sync_each_batch=True)
    for model in (_model(3, 2), _model(3, 2)):  # one model a micro-batch
        run.begin()
        with run.accumulate(model, frozen):
            run.backward(model(_inputs(ctx)).square().mean())
    run = _begin(ctx, _model(3, 2), steps=2)
    run.begin()
    run.accumulate(frozen)


def test_windows_leave_at_most_one_hook_on_a_parameter_that_no_backward_reaches():
    ctx, model = accel.single(), _model(3, 3, 3)
    first, second = model.get_submodule("0"), model.get_submodule("1")
    model(_inputs(ctx)).square().mean().backward()
    for _ in range(3):
        run = ByState(ctx)
        run.begin()
        with run.accumulate(model):
            run.backward(first(_inputs(ctx)).square().mean())
        first.zero_grad()
    assert all(len(each._backward_hooks or ()) <= 1 for each in second.parameters())
