# SPDX-License-Identifier: Apache-2.0
"""Runs of stages that replay a forward: random numbers, orders of calls, and errors, which are alike in every cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy
import pytest
import replays
import torch
from catching import assert_raises, caught
from handwritten import Handwritten, named
from handwritten.manners import Words
from planned_parts import Calls
from steps import begin_batch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel.errors import StageError
from accel.parallel import Plan
from accel.parallel.axes.pipeline import ReplayedModule, Work, pipeline_of
from accel.testing import Simulator


class Found(NamedTuple):
    """Losses of two batches, and gradients of the last one by name."""

    losses: list[float]
    gradients: Mapping[str, Tensor]


def _trained(
    ctx: accel.DistContext,
    model: Any,
    mesh: str,
    plan: Plan,
    batches: Any,
    loss_fn: Any,
    example: Any = None,
    *,
    alike: bool = True,
) -> Found:
    ctx = accel.replace(ctx, mesh=mesh) if mesh else ctx
    optimizer: Any = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.0)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=example)
    torch.manual_seed(0 if alike else ctx.rank)
    random.seed(ctx.rank)
    numpy.random.seed(ctx.rank)
    losses: list[float] = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss, _ = accel.forward_backward(
            ctx, model, begin_batch(ctx), inputs, targets=targets, loss_fn=loss_fn, weight=1
        )
        losses.append(float(loss))
    held = accel.unwrap_model(model).named_parameters()
    return Found(losses, {name: each.grad.clone() for name, each in held if each.grad is not None})


def assert_law(found: list[Found], expected: Found) -> None:
    for each in found:
        assert each.losses == pytest.approx(expected.losses, rel=1e-10)
        for name, gradient in each.gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-10, atol=1e-10)
    assert frozenset[str]().union(*(each.gradients for each in found)) == expected.gradients.keys()


class Dropped(Words):
    """Drops in blocks, in a module between them, and in a function between them."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids))
        for block in self.blocks:
            x = x + functional.dropout(block(x), 0.1, self.training)
        return self.head(self.norm(self.drop(x)))


class Noise(nn.Module):
    """Scales by a number of numpy."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * float(numpy.random.rand())) if self.training else x


class Hosted(Words):
    """Draws from the streams of python and numpy: at first, between blocks, and within a module."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()

    def forward(self, ids: Tensor) -> Tensor:
        scale = 1 + random.random() if self.training else 1.0
        x = self.embed(ids) * scale
        for block in self.blocks:
            x = self.noise(block(x)) * (1 + 0.1 * (random.random() if self.training else 0.0))
        return self.head(self.norm(x)) * scale


def _made(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind().double()


def _words(rows: int) -> list[tuple[Tensor, Tensor]]:
    each = Handwritten("words", Words, named("nano_gpt")[0].draw, named("nano_gpt")[0].loss)
    return [tuple(each.batch(seed, rows)) for seed in range(2)]


LOSS = named("nano_gpt")[0].loss
CUTS = [
    ("pp=2", Plan(micro_batches=4)),
    ("pp=4", Plan(micro_batches=4, schedule="GPipe")),
    ("pp=2", Plan(micro_batches=4, schedule="Interleaved1F1B", stages_per_rank=2)),
]


@pytest.mark.parametrize(
    ("kind", "alike"),
    [
        (Dropped, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((Hosted, True), (Dropped, False), (Hosted, False))),
    ],
)
def test_random_numbers_are_those_of_every_other_cut(ranks: Simulator, kind: type[nn.Module], alike: bool) -> None:
    """Masks come from the number of the micro-batch and of the call, wherever these run; ranks whose own streams are
    different take those of the first one. The streams of python and numpy are different on each rank."""

    def run(mesh: str, plan: Plan) -> list[Found]:
        return ranks.run(
            lambda ctx: _trained(ctx, _made(kind), mesh, plan, _words(7), LOSS, alike=alike),
            int(mesh[-1]),
            default_group=True,
        )

    first, *others = [run(mesh, plan) for mesh, plan in CUTS]
    whole: dict[str, Tensor] = {name: each for found in first for name, each in found.gradients.items()}
    expected = Found(first[0].losses, whole)
    for found in [first, *others]:
        assert_law(found, expected)
    dry = _trained(accel.single(), _made(kind).eval(), "", Plan(micro_batches=4), _words(7), LOSS)
    assert abs(dry.losses[0] - expected.losses[0]) > 1e-3
    assert expected.losses[0] != expected.losses[1]


class Skips(Words):
    """Leaves out a block, or runs one twice, by the first words."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for at, block in enumerate(self.blocks):
            if at == 1 and int(ids[0, 0]) % 2:
                continue
            x = block(x)
            if at == 2 and int(ids[0, 1]) % 3 == 0:
                x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("has_example", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("mesh", "plan"), [CUTS[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in CUTS[1:])]
)
def test_micro_batches_may_call_modules_in_other_orders(
    ranks: Simulator, mesh: str, plan: Plan, has_example: bool
) -> None:
    batches = _words(8)
    firsts = [(int(ids[at, 0]) % 2, int(ids[at, 1]) % 3 == 0) for ids, _ in batches for at in range(0, 8, 2)]
    assert len(set(firsts)) > 2
    example = batches[0][0] if has_example else None
    expected = _trained(accel.single(), _made(Skips), "", Plan(micro_batches=4), batches, LOSS)
    found = ranks.run(
        lambda ctx: _trained(ctx, _made(Skips), mesh, plan, batches, LOSS, example), int(mesh[-1]), default_group=True
    )
    assert_law(found, expected)


class OfRank(Words):
    """Calls its blocks in another order on rank 1."""

    rank = 0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in reversed(self.blocks) if self.rank else self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def test_ranks_that_call_in_different_orders_are_told_before_a_message_is_sent(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> BaseException | None:
        model = accel.prepare_model(
            accel.replace(ctx, mesh="pp=2"), _made(OfRank), plan=CUTS[0][1], example=_words(4)[0][0]
        )
        for stage in accel.parallel._modules.stage_modules(model):
            stage.module.rank = ctx.rank
        ids, targets = _words(4)[0]
        pipeline: Any = pipeline_of(model)
        pipeline.replays.ghost.rank = ctx.rank
        on = accel.replace(ctx, mesh="pp=2")
        given = (on, model, begin_batch(on), ids)
        return caught(lambda: accel.forward_backward(*given, targets=targets, loss_fn=LOSS, weight=1))

    for error in ranks.run(rank, 2, default_group=True):
        assert isinstance(error, StageError)
        assert "different forwards" in str(error) or "another order" in str(error)


class SkipsOnOne(Skips):
    """Calls its blocks in another order on rank 1, for some words."""

    rank = 0

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids * (1 - self.rank))


def test_an_order_that_one_rank_alone_follows_is_told_before_a_message_is_sent(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> BaseException | None:
        ctx = accel.replace(ctx, mesh="pp=2")
        model = accel.prepare_model(ctx, _made(SkipsOnOne), plan=CUTS[0][1], example=_words(4)[0][0])
        pipeline: Any = pipeline_of(model)

        def step(first: int) -> None:
            ids, targets = _words(4)[0]
            ids = torch.full_like(ids, first)
            state = accel.train_state(ctx, accumulation=1).next()
            _ = accel.forward_backward(ctx, model, state, ids, targets=targets, loss_fn=LOSS, weight=1)

        step(0)
        pipeline.replays.ghost.rank = ctx.rank
        return caught(lambda: step(1))

    for error in ranks.run(rank, 2, default_group=True):
        assert isinstance(error, StageError)
        assert "different forwards" in str(error)


class Fails(nn.Module):
    """Fails wherever tensors have values, and not where the forward is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and torch.is_grad_enabled():
            raise ValueError("no such thing")
        return self.linear(x)


class FailsAlways(Fails):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + None  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize(
    ("kind", "told", "where"),
    [
        (Fails, "ValueError: no such thing", "in forward, stage 1 of 2, micro-batch 1 of 4, rank 1"),
        (FailsAlways, "the forward fails where it is recorded: TypeError", "test_replayed_runs.py:"),
    ],
)
def test_an_error_of_a_forward_names_its_place(ranks: Simulator, kind: Any, told: str, where: str) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model = _made(Words)
        model.blocks[3] = kind().double()  # pyright: ignore[reportIndexIssue]
        _ = _trained(ctx, model, "pp=2", CUTS[0][1], _words(4), LOSS)

    with assert_raises(StageError, problem=told) as error:
        ranks.run(rank, 2, default_group=True)
    assert where in error.value.where


def _raised_from(error: Exception) -> None:
    raise RuntimeError("torch's") from error


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_typed_error_with_a_place_stays_as_it_is(wrapped: bool) -> None:
    stage = ReplayedModule(nn.Linear(2, 2), Calls(), 0, 0, 1, ())
    stage.work = Work([], lambda output, _batch: output)
    given = StageError("no such thing", where="there")

    def fails() -> None:
        with stage._named("a pipeline stage", 0):
            if wrapped:
                _raised_from(given)
            raise given

    found = caught(fails)
    assert found is given
    assert found.__cause__ is None


def test_a_stage_holds_nothing_but_its_own(ranks: Simulator) -> None:
    """What other stages hold is in no table of parameters; as an attribute it is NaN, in the memory of one element."""

    def rank(ctx: accel.DistContext) -> tuple[set[str], set[str]]:
        model = accel.prepare_model(
            accel.replace(ctx, mesh="pp=2"), _made(Words), plan=CUTS[0][1], example=_words(4)[0][0]
        )
        held = {name for name, _ in model.named_parameters()}
        absent: set[str] = set()
        for name, each in _made(Words).named_parameters():
            path, _, own = name.rpartition(".")
            found = getattr(model.get_submodule(path), own)
            assert (found.dtype, found.shape) == (each.dtype, each.shape)
            if name not in held:
                absent.add(name)
                assert bool(found.isnan().all())
                assert found.untyped_storage().nbytes() == found.element_size()
        return held, absent

    (one, rest), (other, _) = ranks.run(rank, 2, default_group=True)
    assert one
    assert other == rest


class Counted(TorchDispatchMode):
    """Counts operators but views, and the elements that they make."""

    operators = 0
    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.name() != "aten::detach":
            self.operators += 1
            self.elements += sum(each.numel() for each in pytree.tree_leaves(out) if isinstance(each, Tensor))
        return out


@pytest.mark.parametrize(
    ("name", "operators", "share"),
    [("nano_gpt", 24, 0.02), ("residuals_between", 63, 0.06), ("t5", 24, 0.01), ("unet", 37, 0.6)],
)
def test_operators_beyond_those_of_one_process_are_few(name: str, operators: int, share: float) -> None:
    """Four stages make placeholders, and compute residuals between modules on them; widths are tiny here."""
    given = replays.example(named(name)[0], 4)
    plan = replays.cut(given, 4)

    def counted(run: Callable[[], object]) -> Counted:
        with Counted() as count:
            _ = run()
        return count

    made, plain = counted(given.entry.make), counted(lambda: replays.run_plain(given))
    parts = counted(lambda: [replays.stage_at(given, plan, at) for at in range(4)])
    staged = counted(lambda: replays.run_stages(given, plan))
    assert staged.operators - parts.operators <= plain.operators - made.operators + operators
    assert staged.elements - parts.elements <= (1 + share) * (plain.elements - made.elements)
