# SPDX-License-Identifier: Apache-2.0
"""`find_lr`: real steps that leave no trace, the same test on every rank and any number of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from language_models import make_objects, plan_of, rows
from profiles import share
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.errors import ConfigError, DataError, StepError
from accel.schedules import LrRange, find_lr
from accel.tensors import local_part
from accel.testing import Simulator, simulate
from accel.training._lr_range import lr_range, spaced

SEEDED = torch.Generator().manual_seed(0)
INPUTS = torch.randn(22, 4, generator=SEEDED).double()
TARGETS = INPUTS @ torch.randn(4, 1, generator=SEEDED).double()
loss_sum = nn.MSELoss(reduction="sum")


class Noisy(nn.Module):
    """A layer that draws from two streams, counts its calls in a buffer, fills another, and changes its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("latest", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.latest = x.detach().mean()
        self.training = not self.training
        return x + 1e-3 * random.random() + 1e-3 * torch.rand(())


def make_net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(4, 8), Noisy(), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1)
        ).double()
    net[3].eval()  # a mode of its own
    net[4].requires_grad_(False)
    return net


MADE: dict[str, Callable[[nn.Module], Any]] = {
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=1e-3, amsgrad=True),
    "tensor": lambda net: torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-3), foreach=False),
    "two": lambda net: [torch.optim.SGD(net[0].parameters(), lr=0.0), torch.optim.Adam(net[6].parameters(), lr=1e-3)],
}


class Case(NamedTuple):
    """A generated run.

    Attributes:
        world, strategy: the ranks.
        optimizer: a row of `MADE`.
        before: optimizer steps before the test, after which there is state.
        accumulation: micro-batches in a window.
        raises: call of the loss that raises, if the test gets there; None for none.
    """

    world: int
    strategy: str
    optimizer: str
    before: int
    accumulation: int
    raises: int | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.integers(1, 3))
    return Case(
        world=world,
        strategy=draw(st.sampled_from(["ddp", "fsdp"])) if world > 1 else "ddp",
        optimizer=draw(st.sampled_from(list(MADE))),
        before=draw(st.integers(0, 3)),
        accumulation=draw(st.integers(1, 2)),
        raises=draw(st.none() | st.integers(1, 40)),
    )


class Run:
    """One rank's objects."""

    def __init__(self, ctx: accel.DistContext, case: Case) -> None:
        self.ctx = accel.replace(ctx, strategy=case.strategy)
        torch.manual_seed(7)
        random.seed(7)
        net = make_net()
        found = MADE[case.optimizer](net)
        self.optimizers = found if isinstance(found, list) else [found]
        self.model, *self.optimizers = accel.prepare(self.ctx, net, *self.optimizers)
        plain = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=6, shuffle=True)
        self.loader = accel.prepare_loader(self.ctx, plain, global_batch=6)
        self.state = accel.train_state(self.ctx, seed=1, accumulation=case.accumulation)

    def train(self, steps: int) -> None:
        batches = accel.batches(self.ctx, self.loader, self.state, repeat=True)
        end = self.state.updates + steps
        while self.state.updates < end:
            self.state, _ = accel.train_step(self.ctx, self.state, next(batches), self.model, self.optimizers, loss_sum)

    def seen(self) -> list[Any]:
        """Everything that training depends on: values, and identities of what others may hold."""
        modules = list(self.model.modules())
        tensors = [*self.model.parameters(), *(each for module in modules for each in module._buffers.values())]
        for optimizer in self.optimizers:
            tensors += [entry for state in optimizer.state.values() for entry in state.values()]
        groups = [
            {name: value for name, value in group.items() if name != "params"} | {"count": len(group["params"])}
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]
        values = [local_part(each).tolist() if isinstance(each, torch.Tensor) else each for each in tensors]
        streams = torch.get_rng_state().tolist(), random.getstate()
        modes = [module.training for module in modules]
        left = [repr(each.grad) for each in self.model.parameters()]
        return [[id(each) for each in tensors], values, repr(groups), streams, modes, left, repr(self.state)]


def assert_rewound(ctx: accel.DistContext, case: Case) -> None:
    other = Run(ctx, case)
    other.train(case.before + 3)
    after = other.seen()
    run = Run(ctx, case)
    run.train(case.before)
    calls = 0

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == case.raises:
            raise KeyError("in the middle")
        return loss_sum(output, targets)

    before, found = run.seen(), None
    try:
        found = find_lr(
            run.ctx, run.state, run.loader, run.model, run.optimizers, loss_fn, low=1e-6, high=1e3, steps=12
        )
    except KeyError:
        assert calls == case.raises
    else:
        assert len(found.losses) > 6
        assert found.losses[0] != found.losses[-1]
    assert calls
    assert run.seen() == before
    run.train(3)  # as if there had been no test
    if found is not None:
        assert run.seen()[1:] == after[1:]
    # DDP, armed by a forward without its backward, averages the next window's gradients in two parts.
    for mine, theirs in zip(run.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(local_part(mine), local_part(theirs), rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=share(0.1))
@given(case=cases())
def test_it_leaves_no_trace_also_where_it_raises(case: Case) -> None:
    simulate(lambda ctx: assert_rewound(ctx, case), case.world, default_group=True)


def _found(ctx: accel.DistContext, strategy: str = "ddp", accumulation: int = 1) -> LrRange:
    ctx = accel.replace(ctx, strategy=strategy)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1))
    plain = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=12 // accumulation, shuffle=True)
    loader = accel.prepare_loader(ctx, plain, global_batch=12 // accumulation)
    state = accel.train_state(ctx, accumulation=accumulation)
    return find_lr(ctx, state, loader, model, optimizer, loss_sum, low=1e-5, high=1e3, steps=40)


def test_every_rank_and_every_number_of_ranks_finds_the_same() -> None:
    [alone] = simulate(_found, 1, default_group=True)
    assert alone.suggestion is not None
    assert alone.diverged
    for world, strategy in ((2, "ddp"), (3, "fsdp")):
        found = simulate(lambda ctx, how=strategy: _found(ctx, how), world, default_group=True)
        assert all(each == found[0] for each in found)
        assert found[0].losses == pytest.approx(alone.losses, rel=1e-6)
        assert (found[0].learning_rates, found[0].suggestion) == (alone.learning_rates, alone.suggestion)


@settings(deadline=None, max_examples=share(0.6))
@given(
    curvature=st.floats(1e-2, 1e3),
    steps=st.integers(30, 120),
    offset=st.sampled_from([0.0, 5.0]),
    accumulation=st.integers(1, 3),
)
def test_the_suggestion_of_a_quadratic_is_stable(
    curvature: float, steps: int, offset: float, accumulation: int
) -> None:
    ctx = accel.single()
    net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(net.weight, 3.0)
    model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=1.0))
    ones = torch.ones(8, 1, dtype=torch.float64)
    loader = accel.prepare_loader(ctx, DataLoader(TensorDataset(ones, ones), batch_size=2))

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (curvature / 2 * output.square() + offset * targets).sum()

    state = accel.train_state(ctx, accumulation=accumulation)
    found = find_lr(ctx, state, loader, model, optimizer, loss_fn, low=1e-6, high=1e5, steps=steps)
    assert found.suggestion is not None
    assert 1e-2 / curvature < found.suggestion < 2 / curvature  # gradient descent is stable below 2 / curvature
    assert found.diverged
    assert math.isclose(found.losses[0], curvature / 2 * 9 + offset)


def test_a_loss_of_one_rank_that_is_not_finite_ends_the_test_on_all() -> None:
    def run(ctx: accel.DistContext) -> tuple[LrRange, int]:
        calls = 0

        def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            bad = ctx.rank == 1 and calls > 14
            return loss_sum(output, targets) * (float("nan") if bad else 1.0)

        ctx = accel.replace(ctx, strategy="ddp")
        net = nn.Linear(4, 1).double()
        model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1))
        loader = accel.prepare_loader(ctx, DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=2))
        state = accel.train_state(ctx)
        found = find_lr(ctx, state, loader, model, optimizer, loss_fn, low=1e-9, high=1e-6, steps=30)
        return found, calls

    (found, calls), (other, others) = simulate(run, 2)
    assert found == other
    assert calls == others
    assert found.diverged
    assert 10 <= len(found.losses) < 15
    assert all(map(math.isfinite, found.losses))


def test_groups_keep_their_ratios() -> None:
    ctx, rates = accel.single(), list[tuple[float, float]]()
    net = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)).double()
    optimizer = torch.optim.SGD([{"params": net[0].parameters(), "lr": 0.2}, {"params": net[1].parameters()}], lr=0.05)
    optimizer.register_step_pre_hook(lambda each, *_: rates.append(tuple(g["lr"] for g in each.param_groups)))
    model, optimizer = accel.prepare(ctx, net, optimizer)
    loader = accel.prepare_loader(ctx, DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=4))
    found = find_lr(ctx, accel.train_state(ctx), loader, model, optimizer, loss_sum, low=1e-6, high=1e-4, steps=10)
    assert rates == [(rate, pytest.approx(rate / 4)) for rate in spaced(1e-6, 1e-4, 10)]
    assert found.learning_rates == tuple(spaced(1e-6, 1e-4, 10))
    assert found.learning_rates[-1] == 1e-4


def _language_model(ctx: accel.DistContext, mesh: str) -> tuple[LrRange, bool]:
    ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp" if "dp" in mesh else "ddp")
    net, optimizer = make_objects(ctx, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    loader = accel.prepare_loader(ctx, DataLoader(rows(), batch_size=4), global_batch=4)
    model, optimizer = accel.prepare(ctx, net, optimizer, plan=plan_of())

    def unpack(batch: accel.Batch) -> tuple[Any, Any, torch.Tensor]:
        labels = batch.data.masked_fill(batch.data == 3, -100)
        labels[int(batch.valid) :] = -100
        part = accel.parallel.split_sequence(ctx, {"ids": batch.data, "labels": labels})
        wanted = part.pop("labels")
        return part, wanted, (wanted != -100).sum()

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return accel.parallel.vocab_cross_entropy(ctx, logits.flatten(0, 1), targets.flatten())

    before = [local_part(each).clone() for each in model.parameters()]
    state = accel.train_state(ctx)
    found = find_lr(
        ctx, state, loader, model, optimizer, loss_fn, low=1e-3, high=1e2, steps=12, max_norm=0.5, unpack=unpack
    )
    return found, all(torch.equal(old, local_part(new)) for old, new in zip(before, model.parameters(), strict=True))


def test_tensor_context_and_data_parallel_meshes_find_the_same() -> None:
    with Simulator() as ranks:
        [(alone, _)] = ranks.run(lambda ctx: _language_model(ctx, "tp=1"), 1, default_group=True)
        for mesh in ("dp=2,tp=2", "cp=2"):
            size = 4 if "," in mesh else 2
            found = ranks.run(lambda ctx, mesh=mesh: _language_model(ctx, mesh), size, default_group=True)
            assert all(each == (found[0][0], True) for each in found)
            assert found[0][0].losses[:8] == pytest.approx(alone.losses[:8], rel=1e-6)


def test_what_it_cannot_test_is_refused_before_a_step() -> None:
    def piped(ctx: accel.DistContext) -> str:
        ctx = accel.replace(ctx, mesh="pp=2")
        loader = accel.prepare_loader(ctx, DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=2))
        net = nn.Linear(1, 1)
        with assert_raises(ConfigError, problem="no pipeline", got="pp=2", fix="another mesh") as caught:
            find_lr(ctx, accel.train_state(ctx), loader, net, torch.optim.SGD(net.parameters(), lr=1.0), loss_sum)
        return str(caught.value)

    assert len(set(simulate(piped, 2, default_group=True))) == 1
    run = Run(accel.single(), Case(1, "ddp", "adam", 0, 2, None))

    def found(state: Any = run.state, **options: Any) -> LrRange:
        return find_lr(run.ctx, state, run.loader, run.model, run.optimizers, loss_sum, **options)

    with assert_raises(ConfigError, expected="0 < low < high", got=r"low=1\.0, high=0\.1"):
        found(low=1.0, high=0.1)
    with assert_raises(ConfigError, problem="too few steps"):
        found(steps=9)
    with assert_raises(ConfigError, problem="the state is not valid", expected="a TrainState"):
        found(accel.Cursor())
    with assert_raises(StepError, problem="state has no record of"):
        found(run.state.next(next(accel.batches(run.ctx, run.loader, run.state))))
    run.loader = accel.prepare_loader(run.ctx, DataLoader(TensorDataset(INPUTS, INPUTS, TARGETS), batch_size=2))
    with assert_raises(DataError, problem="not a pair", got="3 items", where="find_lr", fix="Pass unpack="):
        found()


@given(
    fall=st.floats(0.5, 5.0),
    at=st.integers(30, 70),
    noise=st.floats(0.0, 0.2),
    level=st.sampled_from([-3.0, 0.0, 10.0]),
    seed=st.integers(0, 99),
)
def test_the_suggestion_is_where_a_curve_falls_fastest(
    fall: float, at: int, noise: float, level: float, seed: int
) -> None:
    draws = random.Random(seed)
    curve = [level + fall / (1 + math.exp((step - at) / 4)) + draws.gauss(0, noise * fall) for step in range(100)]
    found = lr_range(spaced(1e-6, 1.0, 100), curve, diverged=False)
    assert found.suggestion is not None
    assert abs(found.learning_rates.index(found.suggestion) - at) <= 8


def test_a_constant_suggests_nothing_and_noise_seldom_does() -> None:
    def suggests(draws: random.Random, noise: float) -> bool:
        losses = [2.0 + draws.gauss(0, noise) for _ in range(100)]
        return lr_range(spaced(1e-6, 1.0, 100), losses, diverged=False).suggestion is not None

    assert not suggests(random.Random(0), 0.0)
    for noise in (1e-9, 1.0):
        assert sum(suggests(random.Random(seed), noise) for seed in range(200)) < 30


def test_the_figure_is_an_image_and_the_table_ends_with_the_suggestion() -> None:
    [found] = simulate(_found, 1, default_group=True)
    image = ElementTree.fromstring(found.figure())
    assert image.tag.endswith("svg")
    lines = [each for each in image.iter() if each.tag.endswith("polyline")]
    assert [len((each.get("points") or "").split()) for each in lines] == [len(found.losses)] * 2
    assert f"{found.suggestion:.2e}" in {each.text for each in image.iter()}
    text = str(found).splitlines()
    assert text[0].split() == ["LEARNING", "RATE", "LOSS", "SMOOTHED"]
    assert text[-2:] == [
        f"diverged at {found.learning_rates[-1]:.2e}",
        f"suggestion: {found.suggestion:.2e}, where the loss falls fastest",
    ]
    flat = lr_range([1e-3, 1e-2], [1.0, 1.0], diverged=False)
    assert str(flat).endswith("suggestion: none, the loss fell by no more than its noise")
    assert ElementTree.fromstring(flat.figure()).tag == image.tag
    assert ElementTree.fromstring(lr_range([], [], diverged=True).figure()).tag == image.tag
