# SPDX-License-Identifier: Apache-2.0
"""`train_step` is the open loop's calls and nothing else: the same parameters and losses on any mesh and window."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.testing import simulate

SEEDED = torch.Generator().manual_seed(0)
INPUTS, TARGETS = torch.randn(22, 4, generator=SEEDED).double(), torch.randint(0, 3, (22,), generator=SEEDED)
BATCH, EPOCHS = 6, 2  # a ragged last batch: 22 = 3 * 6 + 4
EXACT = {"rtol": 0, "atol": 1e-12}
loss_sum = partial(cross_entropy, reduction="sum")


class Outcome(NamedTuple):
    parameters: torch.Tensor
    losses: torch.Tensor
    rates: list[float]
    state: accel.TrainState


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)).double()


def flat(model: nn.Module) -> torch.Tensor:
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in model.parameters()]
    return torch.cat([each.detach().flatten() for each in whole])


def train(
    ctx: accel.DistContext, *, accumulation: int, one_call: bool, max_norm: float | None = 0.5, split: bool = False
) -> Outcome:
    """The common loop, by `train_step` or opened; `split` makes two optimizers that end one window."""
    model = make_model()
    halves = [[model[0], model[1]], [model[2], model[3]]] if split else [[model]]  # type: ignore[index]
    optimizers: list[Any] = [
        torch.optim.SGD([value for part in parts for value in part.parameters()], lr=0.2) for parts in halves
    ]
    loader = accel.prepare_loader(
        ctx, DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=BATCH, shuffle=True), global_batch=BATCH
    )
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    model, *optimizers = accel.prepare(ctx, model, *optimizers)
    optimizer, scheduler = (optimizers, schedulers) if split else (optimizers[0], schedulers[0])
    state, losses = accel.train_state(ctx, seed=0, accumulation=accumulation), []
    while state.epoch < EPOCHS:
        for batch in accel.batches(ctx, loader, state):
            if one_call:
                state, loss = accel.train_step(
                    ctx, state, batch, model, optimizer, loss_sum, scheduler=scheduler, max_norm=max_norm
                )
            else:
                state = state.next(batch)
                inputs, targets = batch.data
                with accel.accumulate(ctx, state, model):
                    loss = loss_sum(model(inputs), targets) / max(batch.valid, 1)
                    state = accel.backward(ctx, loss, state)
                if state.sync:
                    state = accel.optimizer_step(ctx, optimizer, state, scheduler=scheduler, max_norm=max_norm)
            losses.append(loss.detach())
    rates = [scheduler.get_last_lr()[0] for scheduler in schedulers]
    return Outcome(flat(accel.unwrap_model(model)), torch.stack(losses), rates, state)


def by_hand(accumulation: int, max_norm: float, gamma: float = 0.9) -> tuple[torch.Tensor, torch.Tensor]:
    """A single-process loop by torch alone: the parameters, and the mean loss of each global batch."""
    model, losses = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    for epoch in range(EPOCHS):
        samples = torch.as_tensor(accel.data.order(0, epoch, len(INPUTS)).at(torch.arange(len(INPUTS))))
        for window in samples.split(BATCH * accumulation):
            optimizer.zero_grad()
            for batch in window.split(BATCH):
                loss = loss_sum(model(INPUTS[batch]), TARGETS[batch])
                (loss / len(window)).backward()
                losses.append(loss.detach() / len(batch))
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            scheduler.step()
    return flat(model), torch.stack(losses)


@given(world_size=st.integers(1, 4), accumulation=st.integers(1, 5))
@settings(max_examples=share(0.08), deadline=None)
def test_any_world_and_window_give_the_parameters_of_a_plain_loop(world_size: int, accumulation: int) -> None:
    found = simulate(partial(train, accumulation=accumulation, one_call=True), world_size)
    parameters, losses = by_hand(accumulation, 0.5)
    for outcome in found:
        torch.testing.assert_close(outcome.parameters, parameters, **EXACT)
        assert outcome.state.sync is False
    if world_size == 1:
        torch.testing.assert_close(found[0].losses, losses, **EXACT)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("split", [False, True])
def test_it_equals_the_open_loop(world_size: int, split: bool) -> None:
    one = simulate(partial(train, accumulation=3, one_call=True, split=split), world_size)
    opened = simulate(partial(train, accumulation=3, one_call=False, split=split), world_size)
    for mine, theirs in zip(one, opened, strict=True):
        torch.testing.assert_close(mine.parameters, theirs.parameters, **EXACT)
        torch.testing.assert_close(mine.losses, theirs.losses, **EXACT)
        assert (mine.rates, mine.state) == (theirs.rates, theirs.state)


@pytest.mark.parametrize(("mesh", "strategy"), [("dp=2", "fsdp"), ("pp=2", "ddp")])
def test_it_takes_the_steps_of_one_process_on_a_mesh(mesh: str, strategy: Any) -> None:
    def rank(ctx: accel.DistContext) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
        model = make_model()
        model = accel.prepare_model(ctx, model, plan=accel.parallel.Plan(micro_batches=2))
        optimizer = accel.prepare_optimizer(ctx, torch.optim.SGD(model.parameters(), lr=0.2))
        rows = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=BATCH, shuffle=True)
        loader = accel.prepare_loader(ctx, rows, global_batch=BATCH)
        state, losses = accel.train_state(ctx, seed=0, accumulation=2), []
        while state.epoch < EPOCHS:
            for batch in accel.batches(ctx, loader, state):
                state, loss = accel.train_step(ctx, state, batch, model, optimizer, loss_sum, max_norm=0.5)
                losses.append(loss)
        return accel.get_state_dict(ctx, model), losses

    found = simulate(rank, 2, default_group=True)
    whole = next(weights for weights, _ in found if weights)
    expected = make_model()
    _ = expected.load_state_dict(whole)
    torch.testing.assert_close(flat(expected), by_hand(2, 0.5, gamma=1.0)[0], **EXACT)
    assert [len(losses) for _, losses in found] == [8, 8]


def one_batch(data: Any = None) -> tuple[Any, ...]:
    ctx = accel.single()
    model = make_model()
    model, optimizer = accel.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.2))
    rows: Any = TensorDataset(INPUTS, TARGETS) if data is None else data
    loader = accel.prepare_loader(ctx, DataLoader(rows, batch_size=BATCH))
    state = accel.train_state(ctx)
    return ctx, state, list(accel.batches(ctx, loader, state)), model, optimizer


def test_a_mapping_passes_its_inputs_and_targets() -> None:
    rows = [{"x": x, "y": y} for x, y in zip(INPUTS, TARGETS, strict=True)]
    ctx, state, batches, model, optimizer = one_batch(rows)
    data = batches[0].data
    state, loss = accel.train_step(
        ctx, state, batches[0], model, optimizer, loss_sum, inputs=data["x"], targets=data["y"]
    )
    assert state.updates == 1
    torch.testing.assert_close(loss, cross_entropy(make_model()(data["x"]), data["y"]), **EXACT)


def test_weight_and_last_reach_the_step() -> None:
    ctx, _, batches, model, optimizer = one_batch()
    state = accel.train_state(ctx, accumulation=4)
    twin = make_model()
    state, loss = accel.train_step(ctx, state, batches[0], model, optimizer, loss_sum, weight=3.0, last=True)
    found = loss_sum(twin(batches[0].data[0]), batches[0].data[1]) / 3
    found.backward()
    torch.optim.SGD(twin.parameters(), lr=0.2).step()
    assert state.updates == 1
    torch.testing.assert_close(loss, found.detach(), **EXACT)
    torch.testing.assert_close(flat(model), flat(twin), **EXACT)


def test_slips_are_typed_errors_and_change_nothing() -> None:
    ctx, state, batches, model, optimizer = one_batch()
    before = flat(model)
    batch = batches[0]
    with assert_raises(accel.errors.ConfigError, problem="inputs= is given without targets="):
        accel.train_step(ctx, state, batch, model, optimizer, loss_sum, inputs=batch.data[0])
    with assert_raises(accel.errors.ConfigError, problem="targets= is given without inputs="):
        accel.train_step(ctx, state, batch, model, optimizer, loss_sum, targets=batch.data[1])
    with assert_raises(accel.errors.ConfigError, expected="a TrainState"):
        accel.train_step(ctx, accel.loss_scale(ctx), batch, model, optimizer, loss_sum)  # type: ignore[arg-type]
    three = TensorDataset(INPUTS, TARGETS, TARGETS)
    _, other, triples, _, _ = one_batch(three)
    with assert_raises(accel.errors.DataError, expected="two items", got="3 items", fix=r"inputs=batch\.data"):
        accel.train_step(ctx, other, triples[0], model, optimizer, loss_sum)
    mappings = one_batch([{"x": x, "y": y} for x, y in zip(INPUTS, TARGETS, strict=True)])[2]
    with assert_raises(accel.errors.DataError, got="dict with keys x, y"):
        accel.train_step(ctx, other, mappings[0], model, optimizer, loss_sum)
    assert torch.equal(flat(model), before)
    kept, _ = accel.train_step(ctx, state, batch, model, optimizer, loss_sum)
    _ = accel.train_step(ctx, kept, batches[1], model, optimizer, loss_sum)  # the state is dropped
    with pytest.raises(accel.errors.StepError):
        accel.train_step(ctx, kept, batches[2], model, optimizer, loss_sum)
