# SPDX-License-Identifier: Apache-2.0
"""The optimizer in the backward: the same parameters as step after backward, with one gradient at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR
from torch.utils.checkpoint import checkpoint

import accel
from accel.errors import ConfigError, NonFiniteError, StepError
from accel.testing import Simulator


class Tied(nn.Module):
    """An embedding that is the last layer's weight too, around equal blocks."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed = nn.Embedding(11, 6)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(depth))
            self.last = nn.Linear(6, 11)
        self.last.weight = self.embed.weight
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "Adam of lists": lambda groups: torch.optim.Adam(groups, lr=0.01, foreach=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
}


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(step))
    return cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def grouped(model: Tied) -> list[dict[str, Any]]:
    last = [model.last.bias]
    return [{"params": [each for each in model.parameters() if each is not last[0]]}, {"params": last, "lr": 0.05}]


@settings(max_examples=share(0.24), deadline=None)
@given(name=st.sampled_from(sorted(OPTIMIZERS)), depth=st.integers(1, 3), recomputed=st.booleans())
def test_parameters_and_state_are_those_of_a_step_after_backward(name: str, depth: int, recomputed: bool) -> None:
    ctx, plain, fused = accel.single(), Tied(depth), Tied(depth)
    if recomputed and depth > 1:
        accel.checkpoint_activations(fused)
    optimizers = [OPTIMIZERS[name](grouped(model)) for model in (plain, fused)]
    schedulers = [LinearLR(optimizer, total_iters=5) for optimizer in optimizers]
    for step in range(4):
        optimizers[0].zero_grad()
        loss_of(plain, step).backward()
        optimizers[0].step()
        accel.training.fused_step(ctx, loss_of(fused, step), optimizers[1])
        for scheduler in schedulers:
            scheduler.step()
    for mine, expected in zip(fused.parameters(), plain.parameters(), strict=True):
        assert mine.grad is None
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(optimizers[1].state_dict(), optimizers[0].state_dict(), rtol=0, atol=1e-12)


def test_no_two_gradients_are_alive_together() -> None:
    model, alive = Tied(4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def count(*_: Any) -> None:
        alive.append(sum(each.grad is not None for each in model.parameters()))

    optimizer.register_step_pre_hook(count)
    accel.training.fused_step(accel.single(), loss_of(model, 0), optimizer)
    assert alive == [1] * len(list(model.parameters()))


def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    def train(steps: range, out: str) -> list[torch.Tensor]:
        ctx, model = accel.single(), Tied(2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if found := accel.latest_checkpoint(tmp_path / out):
            accel.load_state(ctx, found, {"model": model, "optimizer": optimizer})
        for step in steps:
            accel.training.fused_step(ctx, loss_of(model, step), optimizer)
        accel.save_state(ctx, tmp_path / out, {"model": model, "optimizer": optimizer}, step=steps.stop)
        return [each.detach() for each in model.parameters()]

    train(range(3), "stopped")
    resumed, straight = train(range(3, 6), "stopped"), train(range(6), "straight")
    assert all(torch.equal(a, b) for a, b in zip(resumed, straight, strict=True))


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    model = Tied(1)
    before = [each.detach().clone() for each in model.parameters()]
    with assert_raises(NonFiniteError, problem="the loss is not finite", got="nan"):
        accel.training.fused_step(
            accel.single(), loss_of(model, 0) * math.nan, torch.optim.SGD(model.parameters(), lr=1.0)
        )
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


class Poison(torch.autograd.Function):
    """The identity, with a gradient of NaN."""

    @staticmethod
    def forward(_ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.nan


@pytest.mark.parametrize("nonfinite", ["raise", "ignore"])
def test_a_gradient_that_is_not_finite_is_named_before_its_parameter_moves(nonfinite: Any) -> None:
    ctx = accel.single()
    model = accel.prepare_model(ctx, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model[1](Poison.apply(model[0](torch.ones(1, 2)))).sum()  # type: ignore[index, operator]
    if nonfinite == "ignore":
        accel.training.fused_step(ctx, loss, optimizer, nonfinite="ignore")
        return
    with assert_raises(NonFiniteError, got="after 2 parameters had been stepped", where=r"0\."):
        accel.training.fused_step(ctx, loss, optimizer)
    assert all(bool(torch.isfinite(each).all()) for each in model.parameters())


def _sharded(ctx: accel.DistContext) -> nn.Module:
    model, mesh = Tied(2), init_device_mesh("cpu", (ctx.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return accel.prepare_model(ctx, fully_shard(model, mesh=mesh))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # of views, which nothing here changes in place
@pytest.mark.parametrize(("name", "nonfinite"), [("AdamW", "ignore"), *((name, "raise") for name in OPTIMIZERS)])
def test_sharded_models_are_stepped_by_the_mean_over_ranks(ranks: Simulator, name: str, nonfinite: Any) -> None:
    def rank(ctx: accel.DistContext) -> list[torch.Tensor]:
        model = _sharded(ctx)
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(3):
            accel.training.fused_step(ctx, loss_of(model, 2 * step + ctx.rank), optimizer, nonfinite=nonfinite)
            assert all(each.grad is None for each in model.parameters())
        return [each.full_tensor() for each in model.parameters()]  # type: ignore[attr-defined]

    twin = Tied(2)
    optimizer = OPTIMIZERS[name](twin.parameters())
    for step in range(3):
        optimizer.zero_grad()
        ((loss_of(twin, 2 * step) + loss_of(twin, 2 * step + 1)) / 2).backward()
        optimizer.step()
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, [each.detach() for each in twin.parameters()], rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("spoilt", ["loss", "gradient", "shard"])
def test_what_is_not_finite_on_one_rank_is_told_by_all(ranks: Simulator, spoilt: str) -> None:
    def rank(ctx: accel.DistContext) -> str:
        model = _sharded(ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mine = ctx.rank == 1
        if spoilt == "shard" and mine:
            _ = model.last.bias.register_post_accumulate_grad_hook(lambda each: each.grad.to_local().fill_(math.nan))
        loss = loss_of(model, 0)
        if spoilt == "gradient" and mine:
            loss = Poison.apply(loss)
        with pytest.raises(NonFiniteError) as caught:
            accel.training.fused_step(ctx, loss * math.inf if spoilt == "loss" and mine else loss, optimizer)
        assert all(each.to_local().isfinite().all() for each in optimizer.param_groups[0]["params"])
        return str(caught.value)

    first, other = ranks.run(rank, 2, default_group=True)
    assert first == other
    assert ("the loss is not finite" if spoilt == "loss" else "a gradient is not finite") in first
    assert spoilt != "shard" or "last.bias" in first


def _counting(parameters: Any) -> torch.optim.Optimizer:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
            return super().step(closure)

    return Counting(parameters, lr=0.1)


REFUSED: dict[str, tuple[Callable[[Tied], Any], type[Exception], str]] = {
    "more ranks": (
        lambda model: accel.training.fused_step(model.ctx, loss_of(model, 0), torch.optim.SGD(model.parameters())),
        ConfigError,
        {"problem": "nothing would be saved", "fix": "Use accel.backward"},
    ),
    "fp16": (
        lambda model: accel.training.fused_step(
            accel.replace(accel.single(), precision="fp16"), loss_of(model, 0), torch.optim.SGD(model.parameters())
        ),
        ConfigError,
        {"problem": "an overflow of fp16 must be seen"},
    ),
    "LBFGS": (
        lambda model: accel.training.fused_step(
            accel.single(), loss_of(model, 0), torch.optim.LBFGS(model.parameters())
        ),
        ConfigError,
        {"problem": "LBFGS evaluates the loss"},
    ),
    "an optimizer that counts": (
        lambda model: accel.training.fused_step(accel.single(), loss_of(model, 0), _counting(model.parameters())),
        ConfigError,
        {"got": "Counting, which changed k"},
    ),
    "a policy": (
        lambda model: accel.training.fused_step(
            accel.single(), loss_of(model, 0), torch.optim.SGD(model.parameters()), nonfinite="skip"
        ),
        ConfigError,
        {"expected": "one of raise, ignore", "got": "'skip'"},
    ),
    "another model's optimizer": (
        lambda model: accel.training.fused_step(
            accel.single(), loss_of(model, 0), torch.optim.SGD(Tied(1).parameters())
        ),
        StepError,
        {"problem": "took part in the loss"},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused_with_the_reason(ranks: Simulator, name: str) -> None:
    call, error, fields = REFUSED[name]

    def rank(ctx: accel.DistContext) -> None:
        model = Tied(1)
        object.__setattr__(model, "ctx", ctx)
        with assert_raises(error, **fields):
            call(model)

    ranks.run(rank, 2 if name == "more ranks" else 1)


def test_leftover_gradients_are_refused() -> None:
    model = Tied(1)
    loss_of(model, 0).backward()
    with assert_raises(StepError, problem="gradients of an earlier backward", fix="zero_grad"):
        accel.training.fused_step(accel.single(), loss_of(model, 1), torch.optim.SGD(model.parameters()))


def test_a_nested_backward_is_told() -> None:
    layer = nn.Linear(2, 2)
    inputs = torch.ones(1, 2, requires_grad=True)
    twice = checkpoint(layer, checkpoint(layer, inputs, use_reentrant=True), use_reentrant=True)
    with assert_raises(StepError, problem="gradients twice in one backward", fix="checkpoint_activations"):
        accel.training.fused_step(accel.single(), twice.sum(), torch.optim.SGD(layer.parameters()))
