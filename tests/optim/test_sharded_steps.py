# SPDX-License-Identifier: Apache-2.0
"""Optimizers on shards: state that exists before the first step, and those that torch cannot run on DTensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, Rprop

import accel
from accel.errors import PrepareError, StepError
from accel.testing import Simulator

Make = Callable[[nn.Module], Optimizer]


def _train(ctx: accel.DistContext, make: Make, before: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    optimizer = make(net)
    for _ in range(before):
        net(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()
    model, optimizer = accel.prepare(ctx, net, optimizer)
    state = accel.train_state(ctx)
    data = torch.linspace(-1, 1, 36, dtype=torch.float64).view(12, 3)
    loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(data, batch_size=4), global_batch=4)
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        with accel.accumulate(ctx, state, model):
            state = accel.backward(ctx, model(batch.data).square().mean(), state)
        state = accel.optimizer_step(ctx, optimizer, state)
    return accel.get_state_dict(ctx, model, dst=None)


HOW: list[dict[str, Any]] = [{"strategy": "fsdp"}, {"mesh": "tp=2"}]
ADAGRADS: dict[str, Make] = {
    "plain": lambda net: Adagrad(net.parameters(), lr=0.1),
    "another first value": lambda net: Adagrad(net.parameters(), lr=0.1, initial_accumulator_value=0.5),
    "groups": lambda net: Adagrad([{"params": [each]} for each in net.parameters()], lr=0.1),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ADAGRADS)
def test_state_from_before_the_first_step_follows_the_shards(ranks: Simulator, name: str, how: dict[str, Any]) -> None:
    alone = _train(accel.single(), ADAGRADS[name])
    found = ranks.run(lambda ctx: _train(accel.replace(ctx, **how), ADAGRADS[name]), 2, default_group=True)
    for each in found:
        torch.testing.assert_close(each, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [*ADAGRADS.values(), lambda net: AdamW(net.parameters())])
def test_state_of_a_step_is_refused(ranks: Simulator, make: Make) -> None:
    with assert_raises(PrepareError, problem="does not fit the shards"):
        ranks.run(lambda ctx: _train(accel.replace(ctx, strategy="fsdp"), make, before=1), 2, default_group=True)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [Rprop])
def test_an_optimizer_that_cannot_step_shards_names_itself_and_another(
    ranks: Simulator, kind: Any, how: dict[str, Any]
) -> None:
    with assert_raises(StepError, got=f"^{kind.__name__}: ") as caught:
        ranks.run(
            lambda ctx: _train(accel.replace(ctx, **how), lambda net: kind(net.parameters())), 2, default_group=True
        )
    line = re.search(r"torch\.optim\.AdamW\(model\.parameters\(\)\)", caught.value.fix)
    assert line is not None
    ranks.run(
        lambda ctx: _train(accel.replace(ctx, **how), lambda net: eval(line[0], {"torch": torch, "model": net})),
        2,
        default_group=True,
    )


class TrustRatio(SGD):
    """It reads norms as numbers, as optimizers of users do, and computes in a function that torch compiles."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net.parameters(), lr=0.1)
        self.graphs = 0
        self.scaled = torch.compile(lambda grad, rate: grad * rate, backend=self.count)

    def count(self, graph: Any, _: object) -> Any:
        self.graphs += 1
        return graph.forward

    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            ratio = float(each.detach().norm()) / each.grad.pow(2).sum().item() ** 0.5
            with torch.inference_mode():
                largest = each.grad.abs().max()
                ratio *= largest.item() if largest > 1e-3 else 1.0
            with torch.no_grad():
                each.sub_(each.grad * 0.1 * ratio)
        _ = self.scaled(torch.ones(3), 0.1)


@pytest.mark.parametrize("how", HOW)
def test_numbers_that_an_optimizer_reads_of_shards_are_the_whole_tensors(ranks: Simulator, how: dict[str, Any]) -> None:
    made = list[TrustRatio]()

    def make(net: nn.Module) -> Optimizer:
        made.append(TrustRatio(net))
        return made[-1]

    alone = _train(accel.single(), make)
    made.clear()
    torch.compiler.reset()
    found = ranks.run(lambda ctx: _train(accel.replace(ctx, **how), make), 2, default_group=True)
    for each in found:
        torch.testing.assert_close(each, alone, rtol=0, atol=1e-12)
    assert sum(each.graphs for each in made) > 0  # torch's compiler has not skipped the function


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_adafactor_of_torch_steps_shards_of_vectors(ranks: Simulator, how: dict[str, Any], foreach: bool) -> None:
    """It reads norms of parameters and of updates; it is refused for matrices only."""

    def make(net: nn.Module) -> Optimizer:
        vectors = [each for each in net.parameters() if each.ndim == 1]
        return torch.optim.Adafactor(vectors, lr=0.1, foreach=foreach)

    alone = _train(accel.single(), make)
    for each in ranks.run(lambda ctx: _train(accel.replace(ctx, **how), make), 2, default_group=True):
        torch.testing.assert_close(each, alone, rtol=0, atol=1e-12)


class Failing(SGD):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("a placement that is the user's own")


def test_errors_of_a_step_on_plain_parameters_stay_as_they_are(ranks: Simulator) -> None:
    with pytest.raises(RuntimeError, match="the user's own") as caught:
        ranks.run(lambda ctx: _train(ctx, lambda net: Failing(net.parameters(), lr=0.1)), 2, default_group=True)
    assert not isinstance(caught.value, StepError)
