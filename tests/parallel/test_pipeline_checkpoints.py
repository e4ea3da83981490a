# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that models call themselves, along pp: around one block or several, with code inside and outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import accel
from accel.errors import StageError
from accel.parallel import Plan
from accel.testing import Simulator

WIDTH, SAMPLES = 6, 8
Way = Callable[["Net", Tensor, bool], Tensor]


class Net(nn.Module):
    """Blocks and norms between two layers, run in a way that is passed."""

    def __init__(self, way: Way, reentrant: bool) -> None:
        super().__init__()
        self.way, self.reentrant = way, reentrant
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.way(self, self.first(x), self.reentrant))


def _each(inside: Callable[[Any, Any, Tensor], Tensor], outside: Callable[[Tensor, Tensor], Tensor]) -> Way:
    def way(net: Net, x: Tensor, reentrant: bool) -> Tensor:
        for block, norm in zip(net.blocks, net.norms, strict=True):
            x = outside(x, checkpoint(inside, block, norm, x, use_reentrant=reentrant))  # type: ignore[arg-type]
        return x

    return way


def _chain(blocks: Sequence[nn.Module], x: Tensor, *, residual: bool) -> Tensor:
    for block in blocks:
        x = x + block(x) if residual else block(x)
    return x


def _halves(net: Net, x: Tensor, reentrant: bool) -> Tensor:
    for begin in (0, 2):
        part = list(net.blocks)[begin : begin + 2]
        x = checkpoint(lambda x, part=part: _chain(part, x, residual=True), x, use_reentrant=reentrant)  # type: ignore
    return x


def _all(net: Net, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(lambda x: _chain(list(net.blocks), x, residual=True), x, use_reentrant=reentrant)  # type: ignore


def _three(net: Net, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint_sequential(net.blocks, 3, x, use_reentrant=reentrant)  # type: ignore[no-any-return]


WAYS: dict[str, Way] = {
    "x + checkpoint(block, x)": _each(lambda block, _, x: block(x), torch.add),
    "x + checkpoint(block, norm(x))": _each(lambda block, norm, x: block(norm(x)), torch.add),
    "checkpoint(x + block(2 x))": _each(lambda block, _, x: x + block(2 * x), lambda _, out: out),
    "two blocks": _halves,
    "all blocks": _all,
    "three segments": _three,
}
# what a reentrant checkpoint makes inside has no gradient, so stages cannot send it
REFUSED = {("checkpoint(x + block(2 x))", 1), ("all blocks", 1), ("two blocks", 2)}
CASES = [
    pytest.param(way, reentrant, stages, id=f"{way}, {reentrant}, {stages}", marks=marks)
    for way in WAYS
    for reentrant in (False, True)
    for stages in (1, 2)
    for marks in [() if stages == 1 and way != "three segments" else pytest.mark.slow]
]


def _gradients(ctx: accel.DistContext, way: str, reentrant: bool, plan: Plan | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net, x = Net(WAYS[way], reentrant).double(), torch.randn(SAMPLES, WIDTH, dtype=torch.float64)
    model = accel.prepare_model(ctx, net, example=x[:4], plan=plan)
    state = accel.train_state(ctx).next()
    _ = accel.forward_backward(ctx, model, state, x, loss_fn=lambda out: out.square().sum(), weight=1)
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # a look at shapes
@pytest.mark.parametrize(("way", "reentrant", "stages"), CASES)
def test_gradients_through_checkpoints_equal_one_process(
    ranks: Simulator, way: str, reentrant: bool, stages: int
) -> None:
    plan = Plan(micro_batches=2, schedule="1F1B" if stages == 1 else "Interleaved1F1B", stages_per_rank=stages)

    def rank(ctx: accel.DistContext) -> dict[str, Tensor]:
        return _gradients(accel.replace(ctx, mesh="pp=2"), way, reentrant, plan)

    if reentrant and any(way == name and stages >= least for name, least in REFUSED):
        with assert_raises(StageError, problem="within a reentrant checkpoint", fix="use_reentrant=False"):
            _ = ranks.run(rank, 2, default_group=True)
        return
    alone = _gradients(accel.single(), way, reentrant, None)
    first, second = ranks.run(rank, 2, default_group=True)
    torch.testing.assert_close(first | second, alone, rtol=0, atol=1e-12)
