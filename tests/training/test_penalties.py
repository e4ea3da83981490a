# SPDX-License-Identifier: Apache-2.0
"""Penalties on parameters: in a module's forward or as weight decay they are right on any mesh; elsewhere an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import begin_batch
from torch import Tensor, nn
from torch.optim import SGD

import accel
from accel.errors import PrepareError, StepError
from accel.tensors import is_dtensor
from accel.testing import Simulator

FACTOR = 0.1
X = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4).sin()


class Block(nn.Module):
    """Returns a penalty on its weights with its output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.down(self.up(x).relu()), self.up.weight.square().sum() + self.down.weight.square().sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        penalties: list[Tensor] = []
        for each in self.blocks:
            x, penalty = each(x)
            penalties.append(penalty)
        return x.square().mean(), torch.stack(penalties).sum()


class ByAttributes(Net):
    """Reads weights of its blocks in its own forward."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss, _ = super().forward(x)
        return loss, sum((each.up.weight.square().sum() for each in self.blocks), loss * 0)


class ByParameters(Net):
    """Iterates over its parameters in its forward, and adds to a tensor of several elements."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss, _ = super().forward(x)
        return loss, (x.new_zeros(2) + sum(each.square().sum() for each in self.parameters())).mean()


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def _returned(_model: nn.Module, loss: Tensor, penalty: Tensor) -> Tensor:
    return loss + FACTOR * penalty


def _decayed(_model: nn.Module, loss: Tensor, _penalty: Tensor) -> Tensor:
    return loss


def _of_parameters(model: nn.Module, loss: Tensor, _penalty: Tensor) -> Tensor:
    return loss + FACTOR * sum(each.square().sum() for each in model.parameters())


def _of_full_sums(model: nn.Module, loss: Tensor, _penalty: Tensor) -> Tensor:
    sums: list[Any] = [each.square().sum() for each in model.parameters()]
    return loss + FACTOR * sum(each.full_tensor() if is_dtensor(each) else each for each in sums)


def _trained(
    ctx: accel.DistContext, mesh: str, strategy: Any, loss_of: Loss, kind: type[Net] = Net
) -> dict[str, Tensor]:
    """Train for two steps on samples that ranks divide unevenly; return the parameters of rank 0."""
    torch.manual_seed(0)
    ctx = accel.replace(ctx, mesh=mesh, strategy=strategy) if mesh else ctx
    net = kind().double()
    decay = 2 * FACTOR if loss_of is _decayed else 0.0
    tensor = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"} if "tp" in mesh else "model"
    plan = accel.parallel.Plan(tensor=tensor)
    model, optimizer = accel.prepare(ctx, net, SGD(net.parameters(), lr=0.1, weight_decay=decay), plan=plan)
    index, count = ctx.data_parallel
    own = X.split([8] if count == 1 else [5, 3])[index]
    state = accel.train_state(ctx)
    for _ in range(2):
        state = begin_batch(ctx, state)
        loss = loss_of(model, *model(own))
        state = accel.optimizer_step(ctx, optimizer, accel.backward(ctx, loss, state, weight=len(own)))
    return accel.get_state_dict(ctx, model) or {}


MESHES = [
    ("dp=2", "ddp", 2),
    ("dp=2", "fsdp", 2),
    ("tp=2", "ddp", 2),
    pytest.param("dp=2,tp=2", "ddp", 4, marks=pytest.mark.slow),
    ("dp=2,tp=2", "fsdp", 4),
]


@pytest.mark.parametrize(("mesh", "strategy", "size"), MESHES)
@pytest.mark.parametrize("loss_of", [_returned, _decayed])
def test_a_penalty_is_the_penalty_of_one_process(
    ranks: Simulator, mesh: str, strategy: str, size: int, loss_of: Loss
) -> None:
    expected = _trained(accel.single(), "", "ddp", _of_parameters)
    found = ranks.run(lambda ctx: _trained(ctx, mesh, strategy, loss_of), size, default_group=True)[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("mesh", "strategy", "loss_of", "kind"),
    [
        ("dp=2", "fsdp", _of_parameters, Net),
        ("dp=2", "fsdp", _of_full_sums, Net),  # was weighted by the samples of each rank
        ("dp=2", "fsdp", _returned, ByAttributes),
        ("tp=2", "ddp", _of_parameters, Net),
    ],
)
def test_a_loss_that_computes_with_dtensors_is_an_error(
    ranks: Simulator, mesh: str, strategy: str, loss_of: Loss, kind: type[Net]
) -> None:
    def refused(ctx: accel.DistContext) -> bool:
        with assert_raises(StepError, problem="the loss computes with parameters as ranks", fix="weight_decay=2"):
            _ = _trained(ctx, mesh, strategy, loss_of, kind)
        return True

    assert all(ranks.run(refused, 2, default_group=True))


def test_a_penalty_on_a_layer_that_is_trained_later_is_an_error(ranks: Simulator) -> None:
    def refused(ctx: accel.DistContext) -> bool:
        net = Net().double()
        up = net.blocks[0].up.requires_grad_(False)
        model = accel.prepare_model(accel.replace(ctx, strategy="fsdp"), net)
        assert not up.weight.requires_grad
        _ = up.requires_grad_()
        loss, penalty = model(X)
        with assert_raises(StepError, problem="the loss computes with parameters as ranks", got="blocks.0.up.weight"):
            _ = accel.backward(ctx, _of_full_sums(up, loss, penalty), begin_batch(ctx))
        return True

    assert all(ranks.run(refused, 2, default_group=True))


@pytest.mark.parametrize(("mesh", "strategy"), [("dp=2", "fsdp"), ("tp=2", "ddp")])
def test_a_forward_that_computes_with_dtensors_is_an_error(ranks: Simulator, mesh: str, strategy: str) -> None:
    def refused(ctx: accel.DistContext) -> bool:
        with assert_raises(PrepareError, problem="the forward computes with a parameter", fix="self.block.weight"):
            _ = _trained(ctx, mesh, strategy, _returned, ByParameters)
        return True

    assert all(ranks.run(refused, 2, default_group=True))


@pytest.mark.parametrize(
    ("mesh", "strategy", "loss_of"), [("dp=2", "ddp", _of_parameters), ("tp=2", "ddp", _of_full_sums)]
)
def test_whole_gradients_may_have_such_a_term(ranks: Simulator, mesh: str, strategy: str, loss_of: Loss) -> None:
    expected = _trained(accel.single(), "", "ddp", _of_parameters)
    found = ranks.run(lambda ctx: _trained(ctx, mesh, strategy, loss_of), 2, default_group=True)[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


class Weighted(nn.Module):
    """Has a learnt factor for each of two losses, and returns them if asked."""

    def __init__(self, *, returns: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.factors = nn.Parameter(torch.zeros(2))
        self.returns = returns

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.layers(x), self.factors if self.returns else None


def _weighted(ctx: accel.DistContext, mesh: str, strategy: Any, *, returns: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    ctx = accel.replace(ctx, mesh=mesh, strategy=strategy) if mesh else ctx
    net = Weighted(returns=returns).double()
    model, optimizer = accel.prepare(ctx, net, SGD(net.parameters(), lr=0.1), example=(X,))
    index, count = ctx.data_parallel
    own = X.split([8] if count == 1 else [5, 3])[index]
    state = begin_batch(ctx, accel.train_state(ctx))
    kept = accel.unwrap_model(model).factors
    with accel.accumulate(ctx, state, model):
        output, returned = model(own)
        losses = torch.stack([output.square().mean(), output.abs().mean()])
        factors = kept if returned is None else returned
        state = accel.backward(ctx, ((-factors).exp() * losses + factors).sum(), state, weight=len(own))
    _ = accel.optimizer_step(ctx, optimizer, state)
    return accel.get_state_dict(ctx, model) or {}


@pytest.mark.parametrize(("mesh", "strategy"), [("dp=2", "fsdp"), ("tp=2", "ddp")])
def test_learnt_factors_of_losses_come_from_the_forward(ranks: Simulator, mesh: str, strategy: str) -> None:
    def refused(ctx: accel.DistContext) -> None:
        with assert_raises(StepError, problem="a line computes with a parameter", got="exp", fix="factors of losses"):
            _ = _weighted(ctx, mesh, strategy, returns=False)

    ranks.run(refused, 2, default_group=True)
    found = ranks.run(lambda ctx: _weighted(ctx, mesh, strategy, returns=True), 2, default_group=True)[0]
    expected = _weighted(accel.single(), "", "ddp", returns=False)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
