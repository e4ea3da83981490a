# SPDX-License-Identifier: Apache-2.0
"""Messages of the step, the session and the trackers that tell a line to write: each of these lines is run here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import begin_batch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.errors import AccelError, ConfigError, PrepareError, StepError
from accel.testing import Simulator
from accel.trackers import Tracker
from accel.trackers._by_name import TRACKERS
from accel.training._backward import _raise_marked_twice

INPUTS, TARGETS = torch.ones(4, 2), torch.zeros(4, 1)


def ended(ctx: accel.DistContext) -> tuple[nn.Module, Any, accel.TrainState]:
    """A model, its optimizer and a state that waits for the step."""
    net = nn.Linear(2, 1)
    model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1))
    loader = accel.prepare_loader(ctx, DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=4))
    state = accel.train_state(ctx)
    batch = next(accel.batches(ctx, loader, state))
    state = state.next(batch)
    return model, optimizer, accel.backward(ctx, mse_loss(model(batch.data[0]), batch.data[1]), state)


def error_of(call: Callable[[], object]) -> AccelError:
    with pytest.raises(AccelError) as error:
        call()
    return error.value


CALLS: dict[str, Callable[[accel.DistContext, Any, Any], object]] = {
    "accel.clip_grad_norm_(ctx, parameters, max_norm, state)": lambda ctx, parameters, _: accel.clip_grad_norm_(
        ctx, parameters, 1.0
    ),
    "accel.clip_grad_value_(ctx, parameters, clip_value, state)": lambda ctx, parameters, _: accel.clip_grad_value_(
        ctx, parameters, 1.0
    ),
    "accel.unscale_gradients(ctx, optimizer, state)": lambda ctx, _, optimizer: accel.unscale_gradients(ctx, optimizer),
    "accel.optimizer_step(ctx, optimizer, state)": lambda ctx, _, optimizer: accel.optimizer_step(ctx, optimizer),
}


@pytest.mark.parametrize("line", CALLS)
def test_a_call_without_the_state_gets_the_line_with_it(line: str) -> None:
    ctx = accel.single()
    model, optimizer, state = ended(ctx)
    error = error_of(lambda: CALLS[line](ctx, model.parameters(), optimizer))
    assert isinstance(error, TypeError)  # as Python calls it
    assert error.fix == line
    scope = {"accel": accel, "ctx": ctx, "optimizer": optimizer, "state": state}
    scope |= {"parameters": list(model.parameters()), "max_norm": 1.0, "clip_value": 0.1}
    assert exec(error.fix, scope) is None
    assert all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())


@pytest.mark.parametrize(
    "call", [lambda ctx: accel.log(ctx, {"loss": 1.0}, step=1), lambda ctx: accel.log(ctx, step=1)]
)
def test_a_log_without_trackers_gets_the_block_and_the_call(
    call: Callable[[Any], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ctx = accel.single()
    line, _, block = error_of(lambda: call(ctx)).fix.partition(", in the block ")
    scope = {"accel": accel, "ctx": ctx, "values": {"loss": 0.5}, "step": 1}
    exec(f"{block}\n    {line}", scope)
    assert "loss" in (tmp_path / "runs/demo/metrics.jsonl").read_text()


def test_values_in_the_place_of_trackers_get_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ctx = accel.single()
    error = error_of(lambda: accel.log(ctx, None, {"loss": 1.0}, step=1))  # type: ignore[arg-type]
    scope = {"accel": accel, "ctx": ctx}
    exec(f"{error.fix}\n    accel.log(ctx, trackers, {{'loss': 0.5}}, step=1)", scope)
    assert "loss" in (tmp_path / "runs/demo/metrics.jsonl").read_text()


@pytest.mark.parametrize("given", ["jsonl", "csv", "wandb", "tensorboard", "all"])
@pytest.mark.parametrize("way", ["a text", "a list", "a function"])
def test_a_tracker_by_its_name_gets_the_call_of_its_function(given: str, way: str, tmp_path: Path) -> None:
    ctx = accel.single()
    to: Any = {"a text": given, "a list": [given], "a function": getattr(accel.trackers, given, accel.trackers.jsonl)}[
        way
    ]
    error = error_of(lambda: accel.tracking(ctx, "demo", to=to, dir=tmp_path).__enter__())
    assert isinstance(error, ConfigError)
    line = error.fix.rpartition(": ")[2]
    assert line == f"to=[accel.trackers.{'jsonl' if given == 'all' else given}()]"
    made = eval(f"dict({line})", {"accel": accel})["to"]
    assert [type(each) for each in made] == [Tracker]


def test_every_tracker_is_known_by_its_name() -> None:
    found = [name for name in accel.trackers.__all__ if name.islower() and str(_returned(name)).endswith("Tracker")]
    assert sorted(found) == sorted(TRACKERS)


def _returned(name: str) -> object:
    return getattr(getattr(accel.trackers, name), "__annotations__", {}).get("return")


def test_a_session_without_its_block_gets_the_block() -> None:
    error = error_of(lambda: accel.prepare(accel.session({}), nn.Linear(2, 1)))  # type: ignore[call-overload]
    assert error.got == "a session that was not entered"
    block = re.search(r"with .*:$", error.fix)
    assert block is not None
    scope: dict[str, Any] = {"accel": accel, "nn": nn}
    exec(f"{block[0]}\n    model = accel.prepare(ctx, nn.Linear(2, 1))", scope)
    assert isinstance(scope["model"], nn.Linear)


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return (output * self.scale).square().mean()


@pytest.mark.parametrize("world", [1, 2])
def test_a_criterion_with_parameters_is_prepared_along(ranks: Simulator, world: int) -> None:
    def rank(ctx: accel.DistContext) -> torch.Tensor:
        net, criterion = nn.Linear(2, 1), Criterion()
        optimizer = torch.optim.SGD([*net.parameters(), *criterion.parameters()], lr=0.1)
        error = error_of(lambda: accel.prepare(ctx, net, optimizer))
        assert isinstance(error, PrepareError)
        line = error.fix.partition("If a criterion holds them: ")[2].partition(". A lone")[0]
        scope: dict[str, Any] = {
            "accel": accel,
            "ctx": ctx,
            "model": net,
            "criterion": criterion,
            "optimizer": optimizer,
        }
        exec(line, scope)
        loss = scope["criterion"](scope["model"](INPUTS + ctx.rank))
        state = accel.backward(ctx, loss, begin_batch(ctx))
        assert accel.optimizer_step(ctx, optimizer, state).stepped
        return criterion.scale.detach()

    found = ranks.run(rank, world, default_group=True)
    assert len(set(map(float, found))) == 1
    assert float(found[0]) != 1.0


@pytest.mark.parametrize("world", [1, 2])
def test_a_lone_parameter_goes_into_a_module(ranks: Simulator, world: int) -> None:
    def rank(ctx: accel.DistContext) -> float:
        model, parameter = nn.Linear(2, 1), nn.Parameter(torch.ones(()))
        error = error_of(lambda: accel.prepare(ctx, model, parameter))  # type: ignore[call-overload]
        scope: dict[str, Any] = {"model": model, "parameter": parameter}
        exec(error.fix.partition("before prepare: ")[2], scope)
        prepared, optimizer = accel.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = (prepared(INPUTS + ctx.rank) * model.scale).square().mean()
        state = accel.backward(ctx, loss, begin_batch(ctx))
        assert accel.optimizer_step(ctx, optimizer, state).stepped
        return float(model.scale.detach())

    assert len(set(ranks.run(rank, world, default_group=True))) == 1


def test_a_parameter_that_only_the_optimizer_has_is_told_the_same_at_the_step(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> str:
        model, parameter = accel.prepare_model(ctx, nn.Linear(2, 1)), nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([*model.parameters(), parameter], lr=0.1)
        state = accel.backward(ctx, (model(INPUTS) * parameter).sum(), begin_batch(ctx))
        return error_of(lambda: accel.optimizer_step(ctx, optimizer, state)).fix

    for fix in ranks.run(rank, 2, default_group=True):
        assert 'model.register_parameter("scale", parameter)' in fix
        assert "model = accel.prepare_model(ctx, model)" in fix


class Shared(nn.Module):
    """A block that runs twice, each time recomputed in backward."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.block, self.call = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.block, self.call(self.block, self.first(x)))


def test_reentrant_checkpoints_of_a_shared_block_are_told_the_other_kind(ranks: Simulator) -> None:
    told = RuntimeError("Expected to mark a variable ready only once. This error is caused by ...")

    def recomputed(block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, hidden, use_reentrant=True)  # type: ignore[no-any-return]

    loss = Shared(recomputed)(INPUTS).sum()
    error = error_of(lambda: _raise_marked_twice(told, loss))
    assert isinstance(error, StepError)
    with assert_raises(StepError, fix="Add the losses and call backward once"):  # of two losses
        _raise_marked_twice(told, Shared(lambda block, hidden: block(hidden))(INPUTS).sum())

    def written(block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        scope = {"torch": torch, "block": block, "hidden": hidden}
        exec(error.fix, scope)
        return scope["hidden"]  # type: ignore[return-value]

    def rank(ctx: accel.DistContext) -> torch.Tensor:
        model = accel.prepare_model(ctx, Shared(written))
        accel.backward(ctx, model(INPUTS + ctx.rank).square().mean(), begin_batch(ctx))
        return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])

    first, second = ranks.run(rank, 2, default_group=True)
    assert torch.equal(first, second)
    assert first.any()
