# SPDX-License-Identifier: Apache-2.0
"""Models that call `context_attention` themselves compute along cp what one process computes, whatever else they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch
from catching import assert_raises
from language_models import WIDTH as ENOUGH, Attention, Mixture
from steps import begin_batch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import accel
from accel.errors import ConfigError
from accel.parallel import Plan
from accel.parallel.axes.context import all_positions
from accel.testing import Simulator

ROWS, LENGTH, WIDTH = 4, 16, 8
X = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NUMBERS = torch.tensor([[0] * 5 + [1] * 8 + [2] * 3]).expand(ROWS, -1)
BATCH = {"x": X, "documents": NUMBERS, "padding": torch.arange(LENGTH).expand(ROWS, -1) >= LENGTH - 3}


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(2, (2, -1)).transpose(1, 2)


class Mix(nn.Module):
    """A residual block with a function of positions."""

    def __init__(self, mix: Callable[..., Tensor]) -> None:
        super().__init__()
        self.mix, self.linear = mix, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, given: dict[str, Tensor]) -> Tensor:
        return x + self.mix(self, self.linear(x), **given)


class Stack(nn.Module):
    """Blocks, the first of which attends by `context_attention`."""

    def __init__(self, *mixes: Callable[..., Tensor], recomputed: bool = False) -> None:
        super().__init__()
        self.blocks, self.recomputed = nn.ModuleList(map(Mix, mixes)), recomputed

    def forward(self, x: Tensor, documents: Tensor, padding: Tensor, position_ids: Tensor) -> Tensor:
        given = {"documents": documents, "padding": padding, "position_ids": position_ids}
        for block in self.blocks:
            x = checkpoint(block, x, given, use_reentrant=False) if self.recomputed else block(x, given)
        return x


def by_torch(_: Any, x: Tensor, **_given: Tensor) -> Tensor:
    q = heads_of(x)
    return functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def along(module: Any, x: Tensor, **_given: Tensor) -> Tensor:
    weight = module.linear.weight[..., None].expand(-1, -1, 3)
    return functional.conv1d(x.transpose(1, 2), weight, padding=1).transpose(1, 2)


def summed(_: Any, x: Tensor, **_given: Tensor) -> Tensor:
    return x.cumsum(1)


def mean(_: Any, x: Tensor, **_given: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def counted(_: Any, x: Tensor, **_given: Tensor) -> Tensor:
    return x * torch.arange(x.shape[1])[:, None].cos()


def placed(_: Any, x: Tensor, *, position_ids: Tensor, **_given: Tensor) -> Tensor:
    return x * position_ids[..., None].cos()


Maker = Callable[[accel.DistContext], nn.Module]


def attending(ctx: accel.DistContext, **options: Any) -> Callable[..., Tensor]:
    """A function of a block that attends, by options of `context_attention`, some of which name inputs of the model."""

    def attend(_: Any, x: Tensor, **given: Tensor) -> Tensor:
        q = heads_of(x)
        named: dict[str, Any] = {name: given.get(cast(Any, each), each) for name, each in options.items()}
        return accel.parallel.context_attention(ctx, q, q, q, **named).transpose(1, 2).flatten(2)

    return attend


def beside(*mixes: Callable[..., Tensor], recomputed: bool = False, **options: Any) -> Maker:
    return lambda ctx: Stack(attending(ctx, **options), *mixes, recomputed=recomputed)


def trained(ctx: accel.DistContext, make: Maker, mesh: str, plan: Plan | None = None) -> dict[str, Tensor]:
    """Parameters after a step on the sum of squares of all outputs."""
    ctx = accel.replace(ctx, mesh=mesh)
    with accel.seeding.seeded(ctx, 0):
        model: Any = make(ctx).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    example = {**BATCH, "position_ids": torch.arange(LENGTH).expand(ROWS, -1)}
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=example)
    part = accel.parallel.split_sequence(ctx, BATCH)
    _, state = accel.forward_backward(
        ctx, model, begin_batch(ctx), part, targets=part["x"], weight=ROWS / ctx.axis("cp").size,
        loss_fn=lambda out, _known: out.square().sum(),
    )  # fmt: skip
    _ = accel.optimizer_step(ctx, optimizer, state)
    return accel.get_state_dict(ctx, model, dst=None)


class Case(NamedTuple):
    make: Maker
    mesh: str = "cp=2"
    plan: Plan | None = None


CASES = {
    "torch's attention": Case(beside(by_torch)),
    "convolution": Case(beside(along)),
    "cumsum": Case(beside(summed)),
    "mean": Case(beside(mean)),
    "own numbers": Case(beside(counted)),
    "numbers of the part": Case(beside(placed)),
    "recomputed": Case(beside(by_torch, recomputed=True, method="ring")),
    "padding": Case(beside(along, causal=False, key_padding_mask="padding", method="ring")),
    "documents": Case(beside(mean, documents="documents", window=4, method="ring")),
    "ring": Case(beside(by_torch), plan=Plan(context="ring")),
    "heads": Case(beside(summed, method="heads")),
    "stages": Case(beside(by_torch, placed, along), "pp=2,cp=2", Plan(micro_batches=2)),
    "tp": Case(beside(by_torch, placed), "cp=2,tp=2"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each in ("stages", "tp") else each for each in CASES]
)
def test_a_step_is_as_in_one_process(ranks: Simulator, name: str) -> None:
    case = CASES[name]
    expected = trained(accel.single(), case.make, "")
    size = 4 if "," in case.mesh else 2
    for found in ranks.run(lambda ctx: trained(ctx, case.make, case.mesh, case.plan), size, default_group=True):
        for each, want in expected.items():
            torch.testing.assert_close(found[each], want, rtol=0, atol=1e-10)


class Looked(nn.Module):
    """Looks its tokens up in a table without a second dimension, and attends to all earlier ones."""

    def __init__(self, ctx: accel.DistContext) -> None:
        super().__init__()
        self.ctx, self.table = ctx, nn.Parameter(torch.linspace(-1, 1, LENGTH, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        q = self.table[ids][:, None, :, None]
        return accel.parallel.context_attention(self.ctx, q, q, q)[:, 0, :, 0]


def test_numbers_index_a_table_by_own_positions(ranks: Simulator) -> None:
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 5 - 2
    expected = Looked(accel.single())(ids).detach()

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        part = accel.parallel.split_sequence(ctx, {"ids": ids, "out": expected})
        torch.testing.assert_close(accel.prepare_model(ctx, Looked(ctx))(part["ids"]).detach(), part["out"])

    _ = ranks.run(rank, 2, default_group=True)


def test_a_block_that_only_calls_the_function_may_be_called_alone(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        with accel.seeding.seeded(ctx, 0):
            model: Any = beside(by_torch)(ctx).double()
        with all_positions(ctx):
            expected = model.blocks[0](X, {}).detach()
        model = accel.unwrap_model(accel.prepare_model(ctx, model))
        part = accel.parallel.split_sequence(ctx, {**BATCH, "out": expected})
        want = part.pop("out")
        with assert_raises(ConfigError, problem="called alone"):  # before the first call is proved
            model.blocks[0](part["x"], {})
        _ = model(**part)
        torch.testing.assert_close(model.blocks[0](part["x"], {}).detach(), want)
        with assert_raises(ConfigError, problem="called alone"):
            model.blocks[1](part["x"], {})

    _ = ranks.run(rank, 2, default_group=True)


class Experts(nn.Module):
    """Attends, and computes by experts in a list, or by stacked ones."""

    def __init__(self, ctx: accel.DistContext, *, listed: bool) -> None:
        super().__init__()
        self.attention = Attention(ctx, 4, 4)
        self.mixture = None if listed else Mixture(4)
        if listed:
            self.router = nn.Linear(ENOUGH, 4)
            self.experts = nn.ModuleList(nn.Linear(ENOUGH, ENOUGH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        if self.mixture is not None:
            return x + self.mixture(x)
        tokens = x.reshape(-1, ENOUGH)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, at = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, at][:, None])
        return x + out.view_as(x)


@pytest.mark.parametrize("listed", [True, False])
def test_tokens_of_experts_are_counted_once(ranks: Simulator, *, listed: bool) -> None:
    whole = torch.randn(2, LENGTH, ENOUGH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def counted_tokens(ctx: accel.DistContext, mesh: str) -> Tensor:
        ctx = accel.replace(ctx, mesh=mesh)
        with accel.seeding.seeded(ctx, 0):
            model: nn.Module = Experts(ctx, listed=listed).double()
        path = "experts" if listed else "mixture.experts"
        load = accel.training.ExpertLoad(model, experts={path: 4})
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accel.prepare(ctx, model, optimizer)
        state = accel.train_state(ctx).next()
        part = accel.parallel.split_sequence(ctx, {"x": whole})["x"]
        with accel.accumulate(ctx, state, model), load.counting(state):
            state = accel.backward(ctx, model(part).square().mean(), state, weight=part.numel())
        return load.update_(ctx, accel.optimizer_step(ctx, optimizer, state)).layers[path]

    expected = counted_tokens(accel.single(), "")
    assert int(expected.sum()) == 2 * 2 * LENGTH
    for found in ranks.run(lambda ctx: counted_tokens(ctx, "cp=2"), 2, default_group=True):
        torch.testing.assert_close(found, expected)
