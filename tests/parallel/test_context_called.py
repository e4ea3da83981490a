# SPDX-License-Identifier: Apache-2.0
"""Models that call `context_attention` themselves compute along cp what one process computes, whatever else they do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import torch
from catching import assert_raises
from language_models import WIDTH as ENOUGH, Attention, Mixture
from steps import begin_batch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import accel
from accel.errors import ConfigError, PrepareError
from accel.parallel import Plan
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


STYLES: Any = {"blocks.*.linear": "colwise_gather_output"}


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
    "tp in stages": Case(beside(by_torch, placed, mean), "pp=2,cp=2,tp=2", Plan(micro_batches=2, tensor=STYLES)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if "," in CASES[each].mesh else each for each in CASES]
)
def test_a_step_is_as_in_one_process(ranks: Simulator, name: str) -> None:
    case = CASES[name]
    expected = trained(accel.single(), case.make, "")
    size = 2 ** len(case.mesh.split(","))
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
    def made(ctx: accel.DistContext) -> Any:
        with accel.seeding.seeded(ctx, 0):
            return beside(by_torch, counted)(ctx).double()

    expected = made(accel.single()).blocks[0](X, {}).detach()

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.unwrap_model(accel.prepare_model(ctx, made(ctx)))
        part = accel.parallel.split_sequence(ctx, {**BATCH, "out": expected})
        want = part.pop("out")
        with assert_raises(ConfigError, problem="called alone"):  # before the first call is proved
            model.blocks[0](part["x"], {})
        _ = model(**part)
        torch.testing.assert_close(model.blocks[0](part["x"], {}).detach(), want)
        for block in model.blocks[1:]:  # the latter numbers its positions by their count
            with assert_raises(ConfigError, problem="called alone"):
                block(part["x"], {})

    _ = ranks.run(rank, 2, default_group=True)


def test_a_batch_that_was_not_cut_is_refused(ranks: Simulator) -> None:
    """Also of a length that was cut before into other parts; a call after the error computes."""

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        torch.manual_seed(0)
        net = beside(mean)(ctx).double()
        model = accel.prepare_model(ctx, net)
        whole = {**BATCH, "position_ids": torch.arange(LENGTH).expand(ROWS, -1)}
        own = accel.parallel.split_sequence(ctx, BATCH)
        with assert_raises(ConfigError, got="queries of 16 positions", fix="split_sequence"):
            model(**whole)
        assert model(**own).shape == (ROWS, LENGTH // 2, WIDTH)
        with assert_raises(ConfigError, got="queries of 16 positions", fix="split_sequence"):
            model(**whole)

    ranks.run(rank, 2, default_group=True)


class Cutting(nn.Module):
    """A model that cuts its sequences itself."""

    def __init__(self, ctx: accel.DistContext) -> None:
        super().__init__()
        self.ctx, self.inner = ctx, Mix(attending(ctx))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(accel.parallel.split_sequence(self.ctx, {"x": x})["x"], {})


def test_a_forward_may_cut_its_sequences(ranks: Simulator) -> None:
    torch.manual_seed(0)
    expected = Cutting(accel.single()).double()(X).detach()

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        torch.manual_seed(0)
        out = accel.prepare_model(ctx, Cutting(ctx).double())(X)
        torch.testing.assert_close(out, accel.parallel.split_sequence(ctx, {"out": expected}, shift=())["out"])

    ranks.run(rank, 2, default_group=True)


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


class LastWords(nn.Module):
    """Words of all positions, or of the last one."""

    def __init__(self, ctx: accel.DistContext, *, last: bool) -> None:
        super().__init__()
        self.last, self.words, self.head = last, nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 5)
        self.block = Mix(attending(ctx))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.block(self.words(ids), {})
        return self.head(x[:, -1:] if self.last else x)


@pytest.mark.parametrize("last", [False, True])
def test_deferred_logits_have_the_gradients_of_one_process(ranks: Simulator, *, last: bool) -> None:
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 5

    def step(ctx: accel.DistContext, mesh: str) -> dict[str, Tensor]:
        ctx = accel.replace(ctx, mesh=mesh)
        with accel.seeding.seeded(ctx, 0):
            model: Any = LastWords(ctx, last=last).double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=Plan(logits="deferred"))
        part = accel.parallel.split_sequence(ctx, {"ids": ids}, shift=())["ids"]
        state = accel.train_state(ctx).next()
        with accel.accumulate(ctx, state, model):
            logits = model(part)
            assert type(logits).__name__ == "DeferredLogits"
            targets = part[:, : logits.shape[1]] * (not last)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            state = accel.backward(ctx, loss, state, weight=targets.numel())
        _ = accel.optimizer_step(ctx, optimizer, state)
        return accel.get_state_dict(ctx, model, dst=None)

    expected = step(accel.single(), "")
    for found in ranks.run(lambda ctx: step(ctx, "cp=2"), 2, default_group=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


class OwnLoss(LastWords):
    """Computes its loss in the forward."""

    def __init__(self, ctx: accel.DistContext, reduction: str) -> None:
        super().__init__(ctx, last=False)
        self.reduction = reduction

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = super().forward(ids)
        reduction = "mean" if self.reduction == "mean" else "sum"
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
        return loss / (labels != -100).sum() if self.reduction == "divided" else loss


@pytest.mark.parametrize(("reduction", "mesh"), [("mean", "cp=2"), ("sum", "cp=2"), ("divided", "dp=2,cp=2")])
def test_a_loss_in_the_forward_is_of_all_positions(
    ranks: Simulator, reduction: str, mesh: str, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 5
    labels = ids.masked_fill(torch.arange(LENGTH) < torch.tensor([[5], [9]]), -100)

    def step(ctx: accel.DistContext, mesh: str) -> dict[str, Tensor]:
        ctx = accel.replace(ctx, mesh=mesh)
        with accel.seeding.seeded(ctx, 0):
            model: Any = OwnLoss(ctx, reduction).double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = accel.prepare(ctx, model, optimizer)
        share, shares = ctx.axis("dp")
        rows = slice(share, 2, shares)
        part = accel.parallel.split_sequence(ctx, {"ids": ids[rows], "labels": labels[rows]})
        own = (part["labels"] != -100).sum()
        state = accel.train_state(ctx).next()
        with accel.accumulate(ctx, state, model):
            loss = model(part["ids"], part["labels"])
            if reduction == "sum":
                loss = loss / accel.reduce(ctx, own)
            state = accel.backward(ctx, loss, state, weight=own)
        _ = accel.optimizer_step(ctx, optimizer, state)
        return accel.get_state_dict(ctx, model, dst=None)

    expected = step(accel.single(), "")
    with caplog.at_level("WARNING", "accel.parallel"):
        for found in ranks.run(lambda ctx: step(ctx, mesh), 4 if "dp" in mesh else 2, default_group=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    said = [each.getMessage() for each in caplog.records if "sums a loss" in each.getMessage()]
    assert len(said) == (reduction != "mean")


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weighted mean": lambda x, y: functional.mse_loss(x, y, weight=y.exp()),
    "weights of all positions": lambda x, y: functional.mse_loss(x, y, weight=torch.arange(x.numel()).view(x.shape)),
    "weighted errors": lambda x, y: functional.mse_loss(x, y, weight=y.exp(), reduction="none").square().mean(),
    "old sum": lambda x, y: nn.MSELoss(size_average=False)(x, y) / x.numel(),
    "old classes": lambda x, y: functional.cross_entropy(x.transpose(1, 2), y.argmax(2), reduce=False).square().mean(),
    "probabilities": lambda x, y: functional.cross_entropy(
        x.flatten(0, 1), y.softmax(2).flatten(0, 1), weight=y.new_tensor(range(1, 6)), label_smoothing=0.1
    ),
    "of channels": lambda x, y: functional.cross_entropy(x.mT, y.softmax(2).mT, reduction="none").square().mean(),
}


class Losses(LastWords):
    """Computes losses in the forward."""

    def __init__(self, ctx: accel.DistContext, losses: Mapping[str, Callable[[Tensor, Tensor], Tensor]]) -> None:
        super().__init__(ctx, last=False)
        self.losses = losses

    def forward(self, ids: Tensor, goal: Tensor) -> Tensor:
        logits = super().forward(ids)
        return torch.stack([each(logits, goal) for each in self.losses.values()])


def of_losses(ctx: accel.DistContext, mesh: str, losses: Mapping[str, Callable[[Tensor, Tensor], Tensor]]) -> Any:
    """Losses in a forward, and the gradients of all of them."""
    ctx = accel.replace(ctx, mesh=mesh)
    with accel.seeding.seeded(ctx, 0):
        model: Any = accel.prepare_model(ctx, Losses(ctx, losses).double())
    draws = torch.Generator().manual_seed(0)
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 5
    goal = torch.randn(2, LENGTH, 5, generator=draws, dtype=torch.float64)
    part = accel.parallel.split_sequence(ctx, {"ids": ids, "goal": goal}, shift=())
    found = model(part["ids"], part["goal"])
    (found.square().sum() / ctx.world_size).backward()
    return found.detach(), [accel.reduce(ctx, each.grad) for each in model.parameters()]


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_losses_in_the_forward_are_of_all_positions(ranks: Simulator) -> None:
    expected = of_losses(accel.single(), "", LOSSES)
    for found in ranks.run(lambda ctx: of_losses(ctx, "cp=2", LOSSES), 2, default_group=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-10)


def test_a_weight_that_torch_drops_is_refused_with_the_line_to_write(ranks: Simulator) -> None:
    line = "(torch.abs(x - y) * weight).sum() / weight.sum()"

    def rank(ctx: accel.DistContext) -> Any:
        for lost in (weighted, lambda x, y: weighted(x[:, 3], y[:, 3])):
            with assert_raises(PrepareError, got=f"l1_loss, with weight=.* the mean is {re.escape(line)}"):
                _ = of_losses(ctx, "cp=2", {"lost": lost})
        return of_losses(ctx, "cp=2", {"kept": kept})

    def weighted(x: Tensor, y: Tensor) -> Tensor:
        return functional.l1_loss(x, y, weight=y.exp())

    def kept(x: Tensor, y: Tensor) -> Tensor:
        return cast(Tensor, eval(line, {"torch": torch, "x": x, "y": y, "weight": y.exp()}))

    expected = of_losses(accel.single(), "", {"weighted": weighted})
    for found in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


class LinearLoss(LastWords):
    """Computes its loss without logits, by some options."""

    def __init__(self, ctx: accel.DistContext, **options: Any) -> None:
        super().__init__(ctx, last=False)
        self.ctx, self.options, self.head = ctx, options, nn.Linear(WIDTH, 5, bias=False)

    def forward(self, ids: Tensor, labels: Tensor, times: Tensor) -> Tensor:
        x = self.block(self.words(ids), {})
        given = {name: each for name, each in {"token_weights": times}.items() if "weight" in self.options}
        weight = self.head.weight
        loss = accel.parallel.linear_cross_entropy(self.ctx, x, weight, labels, **self.options, **given)
        return loss if loss.dim() == 0 else loss.square().mean()


SHARES = torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64)
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "none": {"reduction": "none"},
    "weights": {"weight": SHARES, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mesh", ["cp=2", pytest.param("cp=2,tp=2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_loss_without_logits_in_the_forward_is_of_all_positions(ranks: Simulator, name: str, mesh: str) -> None:
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 5
    labels = ids.masked_fill(torch.arange(LENGTH) < 5, -100)
    times = ids % 3 + torch.ones(2, LENGTH, dtype=torch.float64)

    def step(ctx: accel.DistContext, mesh: str) -> dict[str, Tensor]:
        ctx = accel.replace(ctx, mesh=mesh)
        with accel.seeding.seeded(ctx, 0):
            model: Any = LinearLoss(ctx, **OPTIONS[name]).double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        plan = Plan(tensor={"block.linear": "colwise_gather_output", "head": "colwise"}) if "tp" in mesh else None
        example = {"ids": ids, "labels": labels, "times": times}
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=example)
        part = accel.parallel.split_sequence(ctx, example)
        state = accel.train_state(ctx).next()
        with accel.accumulate(ctx, state, model):
            loss = model(part["ids"], part["labels"], part["times"])
            state = accel.backward(ctx, loss, state, weight=part["ids"].numel())
        _ = accel.optimizer_step(ctx, optimizer, state)
        return {"loss": loss.detach(), **accel.get_state_dict(ctx, model, dst=None)}

    expected = step(accel.single(), "")
    for found in ranks.run(lambda ctx: step(ctx, mesh), 4 if "tp" in mesh else 2, default_group=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_sum_over_words_in_the_forward_is_of_all_positions(ranks: Simulator) -> None:
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 5

    class OfWords(LastWords):
        def forward(self, ids: Tensor) -> Tensor:
            return accel.parallel.vocab_cross_entropy(self.ctx, super().forward(ids), ids)

    def loss(ctx: accel.DistContext, mesh: str) -> Tensor:
        ctx = accel.replace(ctx, mesh=mesh)
        with accel.seeding.seeded(ctx, 0):
            model: Any = OfWords(ctx, last=False).double()
        model.ctx = ctx
        part = accel.parallel.split_sequence(ctx, {"ids": ids}, shift=())["ids"]
        return accel.prepare_model(ctx, model)(part).detach()

    expected = loss(accel.single(), "")
    for found in ranks.run(lambda ctx: loss(ctx, "cp=2"), 2, default_group=True):
        torch.testing.assert_close(found, expected)


class Weighted(torch.autograd.Function):
    """A sum of products. Ranks sum it in the forward, so each would compute the gradient of its positions alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * weight).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, (ctx.saved_tensors[0] * grads[0]).sum((0, 1))


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Any, Weighted).apply(x.cumsum(1), self.weight * 2)


def test_gradients_of_a_loss_alone_are_proved(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, Scalar())
        with assert_raises(PrepareError, got="a gradient of a parameter"):
            _ = model(accel.parallel.split_sequence(ctx, {"x": X})["x"])

    _ = ranks.run(rank, 2, default_group=True)


def _kept(_context: object, operator: object, *_args: object, **_named: object) -> CheckpointPolicy:
    is_kept = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_checkpoint_that_keeps_outputs_of_operators_keeps_none_of_a_proof(ranks: Simulator) -> None:
    def gradient(ctx: accel.DistContext, mesh: str) -> Tensor:
        ctx = accel.replace(ctx, mesh=mesh)
        with accel.seeding.seeded(ctx, 0):
            model: Any = accel.prepare_model(ctx, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double())
        keeps = partial(create_selective_checkpoint_contexts, _kept)
        part = accel.parallel.split_sequence(ctx, {"x": X})["x"]
        checkpoint(model, part, use_reentrant=False, context_fn=keeps).square().sum().backward()
        return accel.unwrap_model(model)[0].weight.grad

    found = ranks.run(lambda ctx: gradient(ctx, "cp=2"), 2, default_group=True)
    torch.testing.assert_close(sum(found), gradient(accel.single(), ""))
