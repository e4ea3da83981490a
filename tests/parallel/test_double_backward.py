# SPDX-License-Identifier: Apache-2.0
"""Gradients of gradients on shards and on parts: penalties, forces within a forward, graphs that nobody uses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.parallel import Plan
from accel.tensors import full_tensor
from accel.testing import Simulator

WIDTH, SAMPLES, STEPS = 6, 12, 3


class Energy(nn.Module):
    """Energies of positions: blocks with a residual between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(3))
        self.last = nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)


class Pair(nn.Module):
    """Two layers that ranks along tp divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Divided(Energy):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(2))


class Forces(nn.Module):
    """Forces and energies, as a model of atoms returns them; a layer of the model itself comes after the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.scale = Energy(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x)
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training, retain_graph=True)
        return energy, self.scale(-slope)


def _penalty(model: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return outputs.square().mean() + (slope.norm(dim=1) - 1).square().mean()


def _second_derivative(model: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return second.square().mean() + model(x * 2).square().mean()


def _forces(model: Any, x: Tensor) -> Tensor:
    energy, forces = model(x)
    return energy.square().mean() + (forces - x).square().mean()


def _forces_alone(model: Any, x: Tensor) -> Tensor:
    return (model(x)[1] - x).square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "penalty": (Energy, _penalty),
    "second derivative": (Energy, _second_derivative),
    "forces": (Forces, _forces),
    "forces alone": (Forces, _forces_alone),
    "penalty of parts": (Divided, _penalty),
    "second derivative of parts": (Divided, _second_derivative),
}
ON_SHARDS = [name for name in CASES if "parts" not in name]


def _samples() -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name][0]().double()


@functools.cache
def _alone(name: str) -> dict[str, Tensor]:
    model = _made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        CASES[name][1](model, _samples()).backward()
        optimizer.step()
    return model.state_dict()


def _train(ctx: accel.DistContext, name: str, accumulation: int, between: str) -> dict[str, Tensor]:
    model = accel.prepare_model(ctx, _made(name), find_unused_parameters=name == "forces alone")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(_samples())
    loader = accel.prepare_loader(ctx, DataLoader(samples, batch_size=SAMPLES), global_batch=SAMPLES // accumulation)
    state = accel.train_state(ctx, accumulation=accumulation)
    while state.epoch < STEPS:
        for batch in accel.batches(ctx, loader, state):
            state, (x,) = state.next(batch), batch.data
            if between == "a graph that nobody uses":
                _ = CASES[name][1](model, x)
            elif between == "evaluation with forces":
                _ = model.eval()(x)
                _ = model.train()
            loss = CASES[name][1](model, x)  # outside of the block, which looks at the parameters
            if between == "a forward before the backward":
                with torch.no_grad():
                    _ = model(x)
            with accel.accumulate(ctx, state, model):
                state = accel.backward(ctx, loss, state)
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state)
    if name in ON_SHARDS:
        assert len([each for each in model.modules() if isinstance(each, FSDPModule)]) >= 4
        assert not any(type(each) is nn.Parameter for each in model.parameters())  # shards again
    return accel.get_state_dict(ctx, model, dst=None)


BETWEEN = ("", "a graph that nobody uses", "a forward before the backward")
WAYS = [
    *((name, *way) for name in ON_SHARDS for way in [("", 2, None), *((each, 1, True) for each in BETWEEN)]),
    *((name, "evaluation with forces", 1, True) for name in ON_SHARDS if name.startswith("forces")),
]


@pytest.mark.parametrize(("name", "between", "accumulation", "reshard"), WAYS)
def test_training_with_gradients_of_gradients_equals_one_process(
    ranks: Simulator, name: str, between: str, accumulation: int, reshard: bool | None
) -> None:
    plan = Plan(reshard_after_forward=reshard)

    def rank(ctx: accel.DistContext) -> dict[str, Tensor]:
        return _train(accel.replace(ctx, strategy="fsdp", plan=plan), name, accumulation, between)

    for found in ranks.run(rank, 3 - (accumulation - 1), default_group=True):
        torch.testing.assert_close(found, _alone(name), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ON_SHARDS])
@pytest.mark.parametrize(("mesh", "world_size"), [("tp=2", 2), ("dp=2,tp=2", 4)])
def test_ranks_that_divide_layers_equal_one_process(ranks: Simulator, name: str, mesh: str, world_size: int) -> None:
    plan = Plan(tensor={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})

    def rank(ctx: accel.DistContext) -> dict[str, Tensor]:
        strategy = "fsdp" if world_size == 4 else "ddp"
        return _train(accel.replace(ctx, mesh=mesh, strategy=strategy, plan=plan), name, 1, "")

    for found in ranks.run(rank, world_size, default_group=True):
        torch.testing.assert_close(found, _alone(name), rtol=0, atol=1e-12)


def test_a_step_after_an_unused_graph_is_seen_by_the_next_forward(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, strategy="fsdp")
        model = accel.prepare_model(ctx, _made("penalty"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = _samples()
        before = model(x)
        before.sum().backward()
        _ = _penalty(model, x)
        optimizer.step()  # changes the shards of parameters that are gathered
        assert not torch.equal(model(x), before)

    _ = ranks.run(rank, 2, default_group=True)


class Failing(Energy):
    """Raises behind a block where it is told to."""

    def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
        hidden = self.blocks[0](torch.tanh(self.first(x)))
        if fails:
            raise ValueError("a sample that nobody can read")
        return self.last(self.blocks[1](hidden))


def test_a_forward_that_raised_leaves_the_gradients_of_one_before_it(ranks: Simulator) -> None:
    def gradients(ctx: accel.DistContext, *, fails: bool) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        model = accel.prepare_model(accel.replace(ctx, strategy="fsdp"), Failing().double())
        loss = model(_samples()).square().sum()
        if fails:
            with pytest.raises(ValueError, match="nobody can read"):
                model(_samples(), fails=True)
        loss.backward()
        return {name: None if each.grad is None else full_tensor(each.grad) for name, each in model.named_parameters()}

    want = gradients(accel.single(), fails=False)
    for found in ranks.run(lambda ctx: gradients(ctx, fails=True), 2, default_group=True):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_backward_that_makes_a_graph_sums_the_gradients(ranks: Simulator, accumulation: int) -> None:
    def rank(ctx: accel.DistContext) -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = accel.prepare_model(accel.replace(ctx, strategy="fsdp"), Energy().double())
        for number in range(accumulation):
            if ctx.world_size > 1:
                model.set_requires_gradient_sync(number == accumulation - 1)
            model(_samples() + number).square().sum().backward(create_graph=True)
        return [full_tensor(each.grad).detach() for each in model.parameters()]

    want = rank(accel.single())
    for found in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
