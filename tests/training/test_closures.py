# SPDX-License-Identifier: Apache-2.0
"""Optimizers that evaluate the loss: each evaluation is a window, and steps are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import begin_batch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.errors import AccelError, ConfigError, NonFiniteError, StepError
from accel.testing import Simulator

ROWS, STEPS = 12, 3
LBFGS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.1, "max_iter": 5},
    "strong_wolfe": {"max_iter": 6, "line_search_fn": "strong_wolfe"},
}


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def data() -> TensorDataset:
    inputs = torch.linspace(-2, 2, ROWS * 3, dtype=torch.float64).sin().view(ROWS, 3)
    return TensorDataset(inputs, inputs.prod(1, keepdim=True).cos())


def whole(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in accel.unwrap_model(model).parameters()])


class Twice(torch.optim.SGD):
    """SAM: a step up the gradient, an evaluation there, and a step of SGD from where it began."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        params = [each for group in self.param_groups for each in group["params"]]
        norm = torch.cat([each.grad.flatten() for each in params]).norm()
        moves = [0.05 * each.grad / norm for each in params]
        with torch.no_grad():
            for each, move in zip(params, moves, strict=True):
                each.add_(move)
        closure()
        with torch.no_grad():
            for each, move in zip(params, moves, strict=True):
                each.sub_(move)
        super().step()
        return loss


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{name: partial(torch.optim.LBFGS, **options) for name, options in LBFGS.items()},
    "SAM": partial(Twice, lr=0.5),
}


def expected(kind: str, batch: int) -> tuple[torch.Tensor, list[int]]:
    """Steps of torch alone, on whole batches."""
    model, calls = make_model(), []
    optimizer = KINDS[kind](model.parameters())
    inputs, targets = data().tensors
    for at in range(STEPS):
        rows = slice(at * batch % ROWS, at * batch % ROWS + batch)

        def closure(rows: slice = rows) -> torch.Tensor:
            calls.append(1)
            optimizer.zero_grad()
            loss = mse_loss(model(inputs[rows]), targets[rows])
            loss.backward()
            return loss

        optimizer.step(closure)
    return whole(model), calls


def train(ctx: accel.DistContext, kind: str, batch: int, weighted: str) -> tuple[torch.Tensor, int, int, list[float]]:
    """The same by the loop of accel; the parameters, evaluations, updates and rates."""
    model = make_model()
    optimizer = KINDS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=1.0)
    model, optimizer, scheduler = accel.prepare(ctx, model, optimizer, scheduler)
    loader = accel.prepare_loader(ctx, DataLoader(data(), batch_size=batch), global_batch=batch)
    state, calls = accel.train_state(ctx), []
    while state.updates < STEPS:
        for given in accel.batches(ctx, loader, state):
            inputs, targets = given.data
            state = state.next(given)

            def closure(inputs: Any = inputs, targets: Any = targets, valid: int = int(given.valid)) -> Any:
                calls.append(1)
                with accel.autocast(ctx):
                    loss = mse_loss(model(inputs), targets)
                return loss if weighted == "samples" else (loss, torch.tensor(7.0 * valid))

            state = accel.optimizer_step(ctx, optimizer, state, closure=closure, scheduler=scheduler)
            assert state.stepped
            assert state.grad_norm is not None
            if state.updates == STEPS:
                break
    assert all(each.grad is None for each in model.parameters())
    return whole(model), len(calls), scheduler.last_epoch, [state.updates]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("weighted", ["samples", "tokens"])
def test_steps_are_those_of_one_process(ranks: Simulator, kind: str, world: int, weighted: str) -> None:
    parameters, evaluations = expected(kind, ROWS)
    found = ranks.run(partial(train, kind=kind, batch=ROWS, weighted=weighted), world, default_group=True)
    for mine, calls, scheduled, [updates] in found:
        torch.testing.assert_close(mine, parameters, rtol=0, atol=1e-10)
        assert torch.equal(mine, found[0][0])
        assert calls == len(evaluations)
        assert scheduled == updates == STEPS


def test_ranks_with_batches_of_different_sizes_and_without_samples(ranks: Simulator) -> None:
    """The last batch of 12 samples by 5 has two: of three ranks, one has none."""
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), **LBFGS["strong_wolfe"])
    inputs, targets = data().tensors
    for rows in (slice(0, 5), slice(5, 10), slice(10, 12)):

        def closure(rows: slice = rows) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(inputs[rows]), targets[rows])
            loss.backward()
            return loss

        optimizer.step(closure)

    def rank(ctx: accel.DistContext) -> torch.Tensor:
        net = make_model()
        net, lbfgs = accel.prepare(ctx, net, torch.optim.LBFGS(net.parameters(), **LBFGS["strong_wolfe"]))
        loader = accel.prepare_loader(ctx, DataLoader(data(), batch_size=5), global_batch=5)
        state = accel.train_state(ctx)
        for batch in accel.batches(ctx, loader, state):
            x, y = batch.data
            state = state.next(batch)
            state = accel.optimizer_step(ctx, lbfgs, state, closure=lambda x=x, y=y: mse_loss(net(x), y))
        return whole(net)

    for found in ranks.run(rank, 3, default_group=True):
        torch.testing.assert_close(found, whole(model), rtol=0, atol=1e-10)


def begun(
    ctx: accel.DistContext, **options: Any
) -> tuple[nn.Module, Any, accel.TrainState, Callable[[], torch.Tensor]]:
    model = make_model()
    optimizer: Any
    model, optimizer = accel.prepare(ctx, model, torch.optim.LBFGS(model.parameters(), max_iter=3))
    loader = accel.prepare_loader(ctx, DataLoader(data(), batch_size=6))
    state = accel.train_state(ctx, **options)
    batch = next(accel.batches(ctx, loader, state))
    inputs, targets = batch.data
    return model, optimizer, state.next(batch), lambda: mse_loss(model(inputs), targets)


REFUSED: dict[str, tuple[type[AccelError], str, Callable[..., Any]]] = {
    "clipping": (ConfigError, {"got": "clipping"}, lambda step, **_: step(max_norm=1.0)),
    "clipping to a value": (ConfigError, {"got": "clipping"}, lambda step, **_: step(max_value=1.0)),
    "skip": (ConfigError, {"got": "may leave the step out"}, lambda step, **_: step(nonfinite="skip")),
    "no loss": (StepError, {"problem": "must be a tensor"}, lambda step, **_: step(closure=lambda: None)),
    "no gradient": (
        StepError,
        {"problem": "no gradient"},
        lambda step, loss_of, **_: step(closure=lambda: loss_of().detach()),
    ),
    "loss.backward": (
        StepError,
        {"fix": "Leave backward and zero_grad out"},
        lambda step, loss_of, **_: step(closure=lambda: (loss := loss_of(), loss.backward(retain_graph=True))[0]),
    ),
    "accel.backward": (
        StepError,
        {"fix": "Leave backward and zero_grad out"},
        lambda step, ctx, state, loss_of, **_: step(
            closure=lambda: (loss := loss_of(), accel.backward(ctx, loss, state))[0]
        ),
    ),
    "an optimizer of its own step": (
        StepError,
        {"problem": "has not called the closure"},
        lambda ctx, state, loss_of, model, **_: accel.optimizer_step(
            ctx, type("Deaf", (torch.optim.SGD,), {"step": lambda *_: None})(model.parameters()), state, closure=loss_of
        ),
    ),
    "two optimizers": (
        ConfigError,
        {"got": "2 optimizers"},
        lambda ctx, optimizer, state, loss_of, model, **_: accel.optimizer_step(
            ctx, [optimizer, torch.optim.SGD(model.parameters(), lr=0.1)], state, closure=loss_of
        ),
    ),
    "the parts": (
        ConfigError,
        {"problem": "needs the full state"},
        lambda ctx, optimizer, loss_of, **_: accel.optimizer_step(
            ctx, optimizer, accel.LossScale(), accel.Accumulation(), closure=loss_of
        ),
    ),
    "after a backward": (
        StepError,
        {"got": "1 backward passes"},
        lambda ctx, optimizer, state, loss_of, **_: accel.optimizer_step(
            ctx, optimizer, accel.backward(ctx, loss_of(), state), closure=loss_of
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_closure_cannot_have_is_refused(name: str) -> None:
    kind, fields, call = REFUSED[name]
    ctx = accel.single()
    model, optimizer, state, loss_of = begun(ctx)
    before = whole(model)

    def step(closure: Any = loss_of, **options: Any) -> accel.TrainState:
        return accel.optimizer_step(ctx, optimizer, state, closure=closure, **options)

    with assert_raises(kind, **fields):
        call(step=step, ctx=ctx, optimizer=optimizer, state=state, loss_of=loss_of, model=model)
    assert torch.equal(whole(model), before)
    clear = accel.training.clear_gradients
    clear(model)
    assert accel.optimizer_step(ctx, optimizer, state, closure=loss_of).updates == 1  # the right call still works


@pytest.mark.parametrize(
    ("strategy", "precision", "world"), [("fsdp", "fp32", 2), ("ddp", "fp16", 2), ("ddp", "fp16", 1), ("ddp", "tp", 2)]
)
def test_shards_and_loss_scales_are_refused(ranks: Simulator, strategy: Any, precision: Any, world: int) -> None:
    def rank(ctx: accel.DistContext) -> str:
        if precision == "tp":
            ctx = accel.replace(ctx, mesh="tp=2")
        else:
            ctx = accel.replace(ctx, strategy=strategy, precision=precision)
        model: Any = make_model()
        plan = accel.parallel.Plan(tensor={"0": "colwise", "2": "rowwise"}) if precision == "tp" else None
        optimizer: Any = torch.optim.LBFGS(model.parameters())
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan)
        state = accel.train_state(ctx)
        batch = next(accel.batches(ctx, accel.prepare_loader(ctx, DataLoader(data(), batch_size=6)), state))
        with assert_raises(ConfigError, problem="one optimizer of parameters that each rank holds in full") as error:
            accel.optimizer_step(ctx, optimizer, state.next(batch), closure=lambda: model(batch.data[0]).mean())
        scope = {"accel": accel, "ctx": ctx}
        exec(error.value.fix.removeprefix("Before prepare: "), scope)
        _, optimizer, state, loss_of = begun(scope["ctx"])
        assert accel.optimizer_step(scope["ctx"], optimizer, state, closure=loss_of).updates == 1
        return error.value.got

    got = ranks.run(rank, world, default_group=True)[0]
    assert got == ("a loss scale, as with fp16" if precision == "fp16" else "parameters that ranks divide")


def test_a_window_of_several_batches_is_refused() -> None:
    ctx = accel.single()
    _, optimizer, state, loss_of = begun(ctx, accumulation=2)
    with assert_raises(StepError, problem="a full window") as error:
        accel.optimizer_step(ctx, optimizer, state, closure=loss_of)
    line = error.value.fix.partition(";")[0]
    scope = {"accel": accel, "ctx": ctx}
    exec(line, scope)
    assert scope["state"].accum.steps == 1


def _raw(ctx: accel.DistContext, optimizer: Any, state: accel.TrainState, loss_of: Any) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        accel.backward(ctx, loss, state)
        return loss

    optimizer.step(closure)


def _with_keyword(ctx: accel.DistContext, optimizer: Any, state: accel.TrainState, loss_of: Any) -> None:
    optimizer.step(closure=lambda: accel.backward(ctx, loss_of(), state, weight=7.0))


def _scaled(ctx: accel.DistContext, optimizer: Any, _state: accel.TrainState, loss_of: Any) -> None:
    optimizer.step(
        lambda: accel.backward(
            ctx, loss_of(), begin_batch(ctx, accel.train_state(ctx, scaler=accel.LossScale(scale=8.0)))
        )
    )


def _without_closure(ctx: accel.DistContext, optimizer: Any, state: accel.TrainState, loss_of: Any) -> None:
    accel.optimizer_step(ctx, optimizer, accel.backward(ctx, loss_of(), state))


def _without_backward(ctx: accel.DistContext, optimizer: Any, state: accel.TrainState, _loss_of: Any) -> None:
    accel.optimizer_step(ctx, optimizer, state)


@pytest.mark.parametrize("way", [_raw, _with_keyword, _scaled, _without_closure, _without_backward])
def test_each_wrong_way_leads_to_the_closure(way: Callable[..., None]) -> None:
    ctx = accel.single()
    model, optimizer, state, loss_of = begun(ctx)
    before = whole(model)
    with pytest.raises(AccelError) as error:
        way(ctx, optimizer, state, loss_of)
    line = error.value.fix
    assert line == "state = accel.optimizer_step(ctx, optimizer, state, closure=closure)"
    accel.training.clear_gradients(model)
    scope = {"accel": accel, "ctx": ctx, "optimizer": optimizer, "state": state, "closure": loss_of}
    exec(line, scope)
    assert scope["state"].updates == 1
    assert not torch.equal(whole(model), before)


def test_a_batch_whose_backward_an_unprepared_lbfgs_dropped_leads_to_the_closure() -> None:
    ctx = accel.single()
    model, _, state, loss_of = begun(ctx)
    _raw(ctx, torch.optim.LBFGS(model.parameters(), max_iter=1), state, loss_of)
    with assert_raises(StepError, fix="as LBFGS does: state = accel.optimizer_step.*closure=closure"):
        state.check_pass()


def test_lbfgs_that_would_decide_by_one_ranks_loss_is_refused(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> str:
        _, optimizer, _, loss_of = begun(ctx)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            return loss

        with assert_raises(ConfigError, problem="the loss of one rank") as error:
            optimizer.step(closure)
        return error.value.fix

    assert set(ranks.run(rank, 2, default_group=True)) == {
        "state = accel.optimizer_step(ctx, optimizer, state, closure=closure)"
    }


def test_a_dropped_state_is_reported_with_the_line() -> None:
    ctx = accel.single()
    _, optimizer, state, loss_of = begun(ctx)
    _ = accel.optimizer_step(ctx, optimizer, state, closure=loss_of)
    for again in (
        lambda: accel.optimizer_step(ctx, optimizer, state, closure=loss_of),
        lambda: state.next(None),  # type: ignore[arg-type]
    ):
        with assert_raises(StepError, fix="closure=closure"):
            again()


@pytest.mark.parametrize("world", [1, 2])
def test_two_plain_passes_and_closures_without_weights_stay_accepted(ranks: Simulator, world: int) -> None:
    """SAM by two windows, SGD with a closure of plain backward passes, and LBFGS of one rank."""

    def rank(ctx: accel.DistContext) -> int:
        model = make_model()
        optimizer: Any
        model, optimizer = accel.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))
        inputs, targets = data().tensors
        state = accel.train_state(ctx)
        for _ in range(2):
            state = accel.backward(ctx, mse_loss(model(inputs), targets), begin_batch(ctx, state))
            state = accel.optimizer_step(ctx, optimizer, state)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            accel.training.parts.backward(ctx, loss, accel.LossScale())
            return loss

        optimizer.step(closure)
        if ctx.world_size == 1:
            optimizer = accel.prepare_optimizer(ctx, torch.optim.LBFGS(model.parameters(), max_iter=2))
            optimizer.step(closure)
        return state.updates

    assert set(ranks.run(rank, world, default_group=True)) == {2}


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_that_are_not_finite_are_refused_on_all_ranks(ranks: Simulator, world: int) -> None:
    def rank(ctx: accel.DistContext) -> bool:
        model, optimizer, state, loss_of = begun(ctx)
        factor = float("nan") if ctx.rank == 0 else 1.0
        before = whole(model)
        with assert_raises(NonFiniteError, problem="not finite"):
            accel.optimizer_step(ctx, optimizer, state, closure=lambda: factor * loss_of())
        return torch.equal(whole(model), before) and all(each.grad is None for each in model.parameters())

    assert all(ranks.run(rank, world, default_group=True))
