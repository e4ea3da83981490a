# SPDX-License-Identifier: Apache-2.0
"""Schedules that split the backward give every parameter the gradient of a full backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from handwritten import Batch, Handwritten, named
from handwritten_runs import compare, piped, plain
from tables import in_turn
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from accel.parallel import Plan
from accel.parallel.axes.pipeline._schedule import can_split
from accel.testing import Simulator

Program = Callable[[Sequence[nn.Parameter], Tensor], Any]

OWN = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


def _shared_block(p: Sequence[nn.Parameter], x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(x @ p[0]) * p[2]
    return x


def _both(p: Sequence[nn.Parameter], x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.tanh(x @ p[0])
    return hidden, hidden @ p[1]


def _passed_on(p: Sequence[nn.Parameter], x: Tensor) -> tuple[Tensor, Tensor]:
    hidden, after = _both(p, x)
    return hidden.clone(), after


# Programs of a stage: parameters [4, 4], [4, 4], [4], [4]; a received tensor [3, 4]; one output or several.
SPLIT: dict[str, Program] = {
    "layers": lambda p, x: F.linear(torch.tanh(F.linear(x, p[0], p[2])), p[1], p[3]),
    "a loss": lambda p, x: F.linear(x, p[0], p[2]).square().sum(),
    "a second tower that joins": lambda p, x: (x @ p[0]) * torch.tanh(torch.tanh(OWN @ p[1]) + p[2]),
    "what was received is passed on": lambda p, x: (x.clone(), x @ p[0]),
    "a copy of what goes on": _passed_on,
    "two outputs": lambda p, x: (x @ p[0], torch.tanh(x @ p[1])),
    "both halves of an output": lambda p, x: tuple(each.clone() for each in (x @ p[0]).chunk(2, -1)),
    "changed in place": lambda p, x: (x @ p[0]).mul_(2) + p[2],
    "a checkpoint": lambda p, x: checkpoint(lambda y: torch.tanh(y @ p[0]), x, use_reentrant=False) @ p[1],
    "no parameters": lambda p, x: torch.tanh(x),
}
FULL: dict[str, Program] = {
    "no gradient": lambda p, x: x.detach() * 2,
    "a free parameter": lambda p, x: (x @ p[0], torch.tanh(p[2]) * 2),
    "a second tower": lambda p, x: (x @ p[0], torch.tanh(OWN @ p[1])),
    "one parameter in both towers": lambda p, x: (x @ p[0], torch.tanh(OWN @ p[0])),
    "what was received is detached": lambda p, x: x.detach() @ p[0] + p[2],
    "words are received": lambda p, x: F.embedding(x.argmax(-1), p[0]),
    "an output of an output": _both,
    "a shared block": _shared_block,
    "a shared weight": lambda p, x: F.linear(torch.tanh(F.linear(x, p[0], p[2])), p[0], p[3]),
    "a weight that is computed once": lambda p, x: (lambda w: x @ w + torch.tanh(x) @ w)(torch.tanh(p[0])),
    "a reentrant checkpoint": lambda p, x: checkpoint(lambda y: torch.tanh(y @ p[0]), x, use_reentrant=True),
}


def _made() -> tuple[list[nn.Parameter], Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 4), (4, 4), (4,), (4,))
    parameters = [nn.Parameter(torch.randn(*size, generator=generator, dtype=torch.float64)) for size in sizes]
    return parameters, torch.randn(3, 4, generator=generator, dtype=torch.float64).requires_grad_()


def _outputs(program: Program, parameters: Sequence[nn.Parameter], received: Tensor) -> tuple[Tensor, ...]:
    found = program(parameters, received)
    return found if isinstance(found, tuple) else (found,)


def _gradients(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.linspace(0.5, 1.5, each.numel(), dtype=each.dtype).view_as(each) for each in outputs]


@pytest.mark.parametrize("name", SPLIT)
def test_a_graph_that_can_be_split_gets_the_gradients_of_a_full_backward(name: str) -> None:
    parameters, received = _made()
    outputs = _outputs(SPLIT[name], parameters, received)
    tracked = [each for each in outputs if each.requires_grad]
    expected: Sequence[Any] = [None] * 5
    if tracked:
        expected = torch.autograd.grad(tracked, [*parameters, received], _gradients(tracked), allow_unused=True)
    parameters, received = _made()
    outputs = _outputs(SPLIT[name], parameters, received)
    assert can_split(outputs, (received,))
    _, groups = stage_backward_input(list(outputs), _gradients(outputs), [received], iter(parameters))
    _ = stage_backward_weight(iter(parameters), groups)
    for one, other in zip([*parameters, received], expected, strict=True):
        assert (one.grad is None) == (other is None)
        assert other is None or torch.allclose(one.grad, other, rtol=1e-12)


@pytest.mark.parametrize("name", FULL)
def test_a_graph_whose_split_would_lose_gradients_is_found(name: str) -> None:
    parameters, received = _made()
    assert not can_split(_outputs(FULL[name], parameters, received), (received,))


TWO = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "Interleaved1F1B", "LoopedBFS")
FREE = ("towers", "clip", "lambdas", "functional_head", "shared_block", "t5", "unet", "cells")
EVERY = [*((schedule, 2) for schedule in TWO), ("1F1B", 1), ("GPipe", 1)]


def assert_law(ranks: Simulator, each: Handwritten, schedule: Any, per_rank: int) -> None:
    plan = Plan(schedule=schedule, stages_per_rank=per_rank, micro_batches=4)
    found = ranks.run(lambda ctx: piped(ctx, each, "pp=2", plan), 2, default_group=True)
    assert compare(found, plain(each, 4), outputs="rows" not in each.tags) == []


class _Pair(nn.Module):
    """The second half depends on nothing of the first; a gain of the end is no module's."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.right = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.left:
            x = layer(x)
        for layer in self.right:
            y = layer(y)
        return x * y * self.gain


def _pairs(generator: torch.Generator, rows: int, _length: int) -> Batch:
    drawn = torch.randn(2, rows, 3, generator=generator, dtype=torch.float64)
    return Batch((drawn[0], drawn[1]), drawn[0, :, 0])


def _squares(output: Tensor, _targets: Tensor) -> Tensor:
    return output.square().sum()


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_two_towers_train_alike_where_the_backward_is_split(ranks: Simulator, schedule: str) -> None:
    assert_law(ranks, Handwritten("pair", _Pair, _pairs, _squares), schedule, 2)


@pytest.mark.nightly
@pytest.mark.parametrize(  # three schedules for a model: the number of models is no multiple of that of schedules
    ("name", "schedule", "per_rank"), [(name, *plan) for name, plan in in_turn(3 * FREE, *EVERY)]
)
def test_every_parameter_gets_its_gradient_under_every_schedule(
    ranks: Simulator, schedule: str, per_rank: int, name: str
) -> None:
    [each] = named(name)
    assert_law(ranks, each, schedule, per_rank)
