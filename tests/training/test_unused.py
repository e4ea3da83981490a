# SPDX-License-Identifier: Apache-2.0
"""Parameters that no rank has used: no gradient and no movement, on every strategy, as in one process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from steps import ByState, begin_batch
from torch import Tensor, nn
from torch.optim import SGD

import accel
from accel.parallel import _leftovers
from accel.testing import Simulator

HEAVY = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
TOLERANCE = {"rtol": 0, "atol": 1e-10}
SPREADS = [("ddp", ""), ("fsdp", ""), ("fsdp", "dp_replicate=2,dp_shard=2")]


class Blocks(nn.Module):
    """Three blocks and two heads, of which each call names those to leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head, self.other = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor, skipped: int, *, other: bool) -> Tensor:
        for at, block in enumerate(self.blocks):
            x = x if at == skipped else x + block(x)
        return self.other(x) if other else self.head(x)


def _prepared(ctx: accel.DistContext, model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    model = accel.prepare_model(ctx, model.double(), find_unused_parameters=True, **options)
    return model, HEAVY(model.parameters())


def _blocks(ctx: accel.DistContext) -> Blocks:
    with accel.seeding.seeded(ctx, 0):
        return Blocks()


def _rows(ctx: accel.DistContext, seed: int) -> Tensor:
    place, places = ctx.data_parallel
    rows = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return rows[place::places]


def _values(ctx: accel.DistContext, model: nn.Module) -> Mapping[str, Tensor]:
    return accel.get_state_dict(ctx, model, dst=None)


def assert_same_everywhere(ranks: Simulator, train: Any, spreads: Any = SPREADS) -> None:
    expected = ranks.run(train, 1, default_group=True)[0]
    for strategy, mesh in spreads:
        size = 4 if mesh else 2

        def rank(ctx: accel.DistContext, strategy: Any = strategy, mesh: str = mesh) -> Any:
            return train(accel.replace(ctx, strategy=strategy, mesh=mesh))

        for found in ranks.run(rank, size, default_group=True):
            torch.testing.assert_close(
                dict(found), dict(expected), **TOLERANCE, msg=lambda text, at=strategy: f"{at}: {text}"
            )


@pytest.mark.parametrize("read", ["step", "clip", "unscale"])
def test_what_nobody_used_stays_still(ranks: Simulator, read: str) -> None:
    def train(ctx: accel.DistContext) -> Any:
        model, optimizer = _prepared(ctx, _blocks(ctx))
        run = ByState(ctx, 2)
        for at in range(8):  # the second block and head take part in the first micro-batch of the first window alone
            run.begin()
            with run.accumulate(model):
                loss = model(_rows(ctx, at), 3 if at == 0 else 1, other=at == 0).square().mean()
                run.backward(loss)
            if not run.sync:
                continue
            if read == "clip":
                _ = run.clip_norm(model.parameters(), 0.05)
            if read == "unscale":
                run.unscale(optimizer)
            run.step(optimizer, max_norm=0.04)
        return _values(ctx, model)

    assert_same_everywhere(ranks, train)


def test_what_one_rank_used_moves_on_all(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        model, optimizer = _prepared(ctx, _blocks(ctx))
        run = ByState(ctx)
        for at in range(3):
            loss = model(_rows(ctx, at), 3, other=ctx.rank == 1 and at == 1).square().mean()
            run.begin()
            run.backward(loss)
            run.step(optimizer)
        return _values(ctx, model)

    def under(strategy: Any) -> Any:
        return ranks.run(lambda ctx: rank(accel.replace(ctx, strategy=strategy)), 2, default_group=True)

    for found, expected in zip(under("fsdp"), under("ddp"), strict=True):
        torch.testing.assert_close(dict(found), dict(expected), **TOLERANCE)


@pytest.mark.parametrize(
    "clear", [lambda _, optimizer: optimizer.zero_grad(), lambda model, _: accel.training.clear_gradients(model)]
)
def test_a_pass_that_was_cleared_used_nothing(ranks: Simulator, clear: Any) -> None:
    def train(ctx: accel.DistContext) -> Any:
        model, optimizer = _prepared(ctx, _blocks(ctx))
        for at in range(3):
            state = accel.backward(ctx, model(_rows(ctx, at), 3, other=True).square().mean(), begin_batch(ctx))
            if at:
                clear(model, optimizer)
                state = accel.backward(ctx, model(_rows(ctx, at), 1, other=False).square().mean(), begin_batch(ctx))
            _ = accel.optimizer_step(ctx, optimizer, state)
        return _values(ctx, model)

    assert_same_everywhere(ranks, train)


def test_the_fused_step_leaves_it_out_too(ranks: Simulator) -> None:
    def train(ctx: accel.DistContext) -> Any:
        model, optimizer = _prepared(ctx, _blocks(ctx))
        for at in range(3):
            accel.training.fused_step(
                ctx, model(_rows(ctx, at), 1 if at else 3, other=not at).square().mean(), optimizer
            )
        return _values(ctx, model)

    assert_same_everywhere(ranks, train, [("fsdp", "")])


class Shared(nn.Module):
    """A block with a weight that another one has too, and that a call may leave out."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.own, self.weight, self.uses = nn.Linear(4, 4), weight, True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.own(x))
        return x @ self.weight if self.uses else x


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,dp=2"])
def test_a_tied_weight_that_no_stage_used_stays_still(ranks: Simulator, mesh: str) -> None:
    def train(ctx: accel.DistContext) -> Any:
        with accel.seeding.seeded(ctx, 0):
            weight = nn.Parameter(torch.randn(4, 4))
            model = nn.Sequential(Shared(weight), nn.Linear(4, 4), Shared(weight))
        plan = accel.parallel.Plan(stages=(("0",), ("1", "2")), micro_batches=2)
        model, optimizer = _prepared(ctx, model, plan=plan)
        run = ByState(ctx)
        for at, users in enumerate([(0, 2), (2,), (), ()]):
            for path, each in model.named_modules():
                if isinstance(each, Shared):
                    each.uses = int(path.rpartition(".")[2]) in users
            rows = _rows(ctx, at)
            run.begin()
            run.forward_backward(model, rows, loss_fn=lambda out: out.square().sum(), weight=len(rows))
            run.step(optimizer)
        return _values(ctx, model)

    expected = ranks.run(train, 1, default_group=True)[0]
    size = 2 if mesh == "pp=2" else 4
    for found in ranks.run(lambda ctx: train(accel.replace(ctx, mesh=mesh)), size, default_group=True):
        torch.testing.assert_close(dict(found), dict(expected), **TOLERANCE)


def test_it_costs_one_message_a_step_and_none_without_the_option(ranks: Simulator, monkeypatch: Any) -> None:
    sent: list[int] = []
    reduce = _leftovers.all_reduce_flat
    monkeypatch.setattr(
        _leftovers, "all_reduce_flat", lambda comm, bits, op: (sent.append(len(bits)), reduce(comm, bits, op))[1]
    )

    def rank(ctx: accel.DistContext, *, find: bool) -> None:
        ctx = accel.replace(ctx, strategy="fsdp")
        model = accel.prepare_model(ctx, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), find_unused_parameters=find)
        optimizer, run = HEAVY(model.parameters()), ByState(ctx, 2)
        for _ in range(4):
            run.begin()
            with run.accumulate(model):
                run.backward(model(torch.ones(2, 4)).square().mean())
            if run.sync:
                _ = run.clip_norm(model.parameters(), 1.0)
                run.step(optimizer, max_norm=1.0)

    ranks.run(partial(rank, find=False), 2, default_group=True)
    assert sent == []
    ranks.run(partial(rank, find=True), 2, default_group=True)
    assert sent == [4] * 4  # two ranks, two steps


@pytest.mark.parametrize("mesh", ["dp=2", "dp_replicate=2,dp_shard=2"])
def test_gradients_of_some_micro_batches_are_summed_in_bf16_too(ranks: Simulator, mesh: str) -> None:
    """A block that the first micro-batch leaves out, and a head that none uses: its gradient waits in no format."""

    def rank(ctx: accel.DistContext, *, each: bool) -> Mapping[str, Tensor]:
        ctx = accel.replace(ctx, strategy="fsdp", mesh=mesh, precision="bf16")
        model = accel.prepare_model(ctx, _blocks(ctx), find_unused_parameters=True)
        optimizer = HEAVY(model.parameters())
        state = accel.train_state(ctx, accumulation=2, sync_each_batch=each)
        for batch in range(4):
            state = begin_batch(ctx, state)
            rows = _rows(ctx, batch).float()
            with accel.accumulate(ctx, state, model):
                with accel.autocast(ctx):
                    loss = model(rows, 1 if batch % 2 == 0 else 3, other=False).square().mean()
                state = accel.backward(ctx, loss, state)
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state)
        return _values(ctx, model)

    size = 4 if "replicate" in mesh else 2
    held, exchanged = (ranks.run(partial(rank, each=each), size, default_group=True)[0] for each in (False, True))
    before = ranks.run(lambda ctx: _blocks(ctx).state_dict(), 1)[0]
    for name, value in held.items():
        torch.testing.assert_close(value, exchanged[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(value, before[name]) == name.startswith("other")
