# SPDX-License-Identifier: Apache-2.0
"""One record is carried: any world trains the same model with it, and each assignment that is dropped is an error."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import accel
from accel.errors import StepError
from accel.testing import simulate

SEEDED = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(22, 4, generator=SEEDED).double(), torch.randint(0, 3, (22,), generator=SEEDED))
EXACT = {"rtol": 0, "atol": 1e-12}


class Run:
    """What a loop works on: a model, its optimizer, a loader of 6 samples to a global batch, 3 batches to a window."""

    def __init__(self, ctx: accel.DistContext, *, accumulation: int = 3) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Linear(4, 3).double()
        self.ctx = ctx
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.loader = accel.prepare_loader(ctx, DataLoader(DATA, batch_size=6, shuffle=True), global_batch=6)
        self.model, self.optimizer = accel.prepare(ctx, model, self.optimizer)
        self.start = accel.train_state(ctx, seed=0, accumulation=accumulation)

    def loss(self, batch: accel.Batch) -> torch.Tensor:
        inputs, targets = batch.data
        return cross_entropy(self.model(inputs), targets)

    def step(self, state: accel.TrainState, **options: Any) -> accel.TrainState:
        return accel.optimizer_step(self.ctx, self.optimizer, state, **options)

    def micro(self, state: accel.TrainState, batch: accel.Batch) -> accel.TrainState:
        """One batch of the common loop, with its step if one is due."""
        state = state.next(batch)
        with accel.accumulate(self.ctx, state, self.model):
            state = accel.backward(self.ctx, self.loss(batch), state)
        return self.step(state) if state.sync else state

    def epochs(self, state: accel.TrainState, epochs: int) -> accel.TrainState:
        while state.epoch < epochs:
            for batch in accel.batches(self.ctx, self.loader, state):
                state = self.micro(state, batch)
        return state

    def parameters(self) -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in accel.unwrap_model(self.model).parameters()])


def golden(windows: list[list[int]]) -> torch.Tensor:
    """The parameters after one plain step for each window's samples."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for samples in windows:
        optimizer.zero_grad()
        inputs, targets = DATA[samples]
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def windows_of(epochs: int, accumulation: int = 3) -> list[list[int]]:
    """The samples of each window, from the data order alone."""
    found: list[list[int]] = []
    for epoch in range(epochs):
        samples = accel.data.order(0, epoch, len(DATA)).at(torch.arange(len(DATA)))
        size = 6 * accumulation
        found += [samples[at : at + size] for at in range(0, len(samples), size)]
    return found


@given(world_size=st.integers(1, 4), accumulation=st.integers(1, 5))
@settings(max_examples=share(0.1))
def test_any_world_and_window_give_the_parameters_of_a_plain_loop(world_size: int, accumulation: int) -> None:
    def train(ctx: accel.DistContext) -> tuple[torch.Tensor, accel.TrainState]:
        run = Run(ctx, accumulation=accumulation)
        state = run.epochs(run.start, 2)
        return run.parameters(), state

    expected = windows_of(2, accumulation)
    for parameters, state in simulate(train, world_size):
        torch.testing.assert_close(parameters, golden(expected), **EXACT)
        assert (state.epoch, state.updates, state.stepped, state.sync) == (2, len(expected), True, False)


DROPS = ["next", "backward", "step", "next once", "backward once", "step once"]


@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_dropped_assignment_is_an_error_on_every_rank(drop: str, world_size: int) -> None:
    seen: list[tuple[int, str]] = []

    def train(ctx: accel.DistContext) -> None:
        run = Run(ctx)
        state, call = run.start, ""

        def kept(call: str, at: int, old: accel.TrainState, new: accel.TrainState) -> accel.TrainState:
            return old if drop == call or (drop == f"{call} once" and at == 2) else new

        try:
            for number, batch in enumerate(accel.batches(ctx, run.loader, state)):
                state = kept("next", number, state, state.next(batch))
                with accel.accumulate(ctx, state, run.model):
                    state = kept("backward", number, state, accel.backward(ctx, run.loss(batch), state))
                if state.sync:
                    state = kept("step", number, state, run.step(state))
            call = "save"
            accel.save_state(ctx, "unused", {"state": state}, step=0)
        except (accel.errors.StepError, accel.errors.ConfigError) as error:
            seen.append((ctx.rank, f"{call} {error}"))

    simulate(train, world_size)
    assert sorted(rank for rank, _ in seen) == list(range(world_size))
    line = {"next": "state.next(batch)", "backward": "accel.backward(", "step": "accel.optimizer_step("}[
        drop.split()[0]
    ]
    assert all(line in text for _, text in seen), seen


def test_a_dropped_step_at_the_end_of_an_epoch_is_an_error_in_the_next_pass_and_in_a_save(tmp_path: Path) -> None:
    ctx = accel.single()
    run = Run(ctx, accumulation=1)
    for batch in accel.batches(ctx, run.loader, run.start):
        if not batch.is_last:
            run.start = run.micro(run.start, batch)
            continue
        state = run.start.next(batch)
        state = accel.backward(ctx, run.loss(batch), state)
        run.step(state)
    with assert_raises(accel.errors.StepError, expected=r"state = accel.optimizer_step\(ctx, optimizer, state\)"):
        next(accel.batches(ctx, run.loader, state))
    with assert_raises(accel.errors.StepError, expected="optimizer_step"):
        state.next_epoch()
    with assert_raises(accel.errors.ConfigError, problem="unfinished window"):
        accel.save_state(ctx, tmp_path, {"state": state}, step=1)


def test_calls_out_of_order_name_the_line_to_write() -> None:
    ctx = accel.single()
    run = Run(ctx)
    batch = next(accel.batches(ctx, run.loader, run.start))
    with assert_raises(accel.errors.StepError, problem="no batch has begun", expected=r"state = state.next\(batch\)"):
        accel.accumulate(ctx, run.start, run.model)
    with assert_raises(accel.errors.StepError, problem="no batch has begun"):
        accel.backward(ctx, run.loss(batch), run.start)
    with assert_raises(
        accel.errors.StepError, problem="no batch has begun", fix=r"optimizer_step\(ctx, \[first, second\], state\)"
    ):
        run.step(run.start)
    begun = run.start.next(batch)
    for call in (lambda: begun.next(batch), lambda: run.step(begun)):
        with assert_raises(accel.errors.StepError, expected=r"state = accel.backward\(ctx, loss, state\)"):
            call()
    summed = accel.backward(ctx, run.loss(batch), begun)
    with assert_raises(accel.errors.StepError, problem="the window has not ended"):
        run.step(summed)
    with assert_raises(
        accel.errors.StepError, problem="the batch was taken already", fix=r"state.next\(\), and weight="
    ):
        summed.next(batch)
    with assert_raises(
        accel.errors.StepError, problem="does not begin at the state's position", expected="epoch 0, 0 samples"
    ):
        run.start.next(list(accel.batches(ctx, run.loader, run.start))[1])
    with assert_raises(accel.errors.ConfigError, problem="needs the full state", got="Accumulation"):
        accel.backward(ctx, run.loss(batch), begun, begun.accum)  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_several_backward_passes_of_one_batch_over_the_same_samples_add_up() -> None:
    def train(ctx: accel.DistContext) -> torch.Tensor:
        run = Run(ctx)
        state = run.start
        for batch in accel.batches(ctx, run.loader, state):
            state = state.next(batch)
            with accel.accumulate(ctx, state, run.model):
                outputs = run.model(batch.data[0])
                state = accel.backward(ctx, cross_entropy(outputs, batch.data[1]) / 4, state, retain_graph=True)
                state = accel.backward(ctx, cross_entropy(outputs, batch.data[1]) * 3 / 4, state, same_units=True)
            if state.sync:
                state = run.step(state)
        return run.parameters()

    for parameters in simulate(train, 2):
        torch.testing.assert_close(parameters, golden(windows_of(1)), **EXACT)


def test_several_backward_passes_of_one_batch_over_parts_of_it_take_their_weights() -> None:
    ctx = accel.single()
    run = Run(ctx)
    state = run.start
    for batch in accel.batches(ctx, run.loader, state):
        state = state.next(batch)
        inputs, targets = batch.data
        with accel.accumulate(ctx, state, run.model):
            for part in torch.arange(len(targets)).split(2):
                loss = cross_entropy(run.model(inputs[part]), targets[part])
                state = accel.backward(ctx, loss, state, weight=len(part))
        if state.sync:
            state = run.step(state)
    torch.testing.assert_close(run.parameters(), golden(windows_of(1)), **EXACT)


def test_a_second_backward_of_a_batch_says_what_it_is_over() -> None:
    ctx = accel.single()
    run = Run(ctx)
    batch = next(accel.batches(ctx, run.loader, run.start))
    state = accel.backward(ctx, run.loss(batch), run.start.next(batch))
    with assert_raises(accel.errors.StepError, problem="counted already", fix="same_units=True.*weight="):
        accel.backward(ctx, run.loss(batch), state)


def test_an_epoch_left_between_two_windows_goes_on_there() -> None:
    def train(ctx: accel.DistContext) -> torch.Tensor:
        run = Run(ctx, accumulation=2)
        state = run.start
        for batch in accel.batches(ctx, run.loader, state):
            state = run.micro(state, batch)
            if state.updates == 1:
                break
        run.epochs(state, 1)
        return run.parameters()

    for parameters in simulate(train, 2):
        torch.testing.assert_close(parameters, golden(windows_of(1, 2)), **EXACT)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_epoch_left_within_a_window_needs_a_discard_which_drops_its_gradients(strategy: str) -> None:
    def train(ctx: accel.DistContext) -> torch.Tensor | None:
        ctx = accel.replace(ctx, strategy=strategy)
        run = Run(ctx)
        state = run.start
        for batch in accel.batches(ctx, run.loader, state):
            state = run.micro(state, batch)
            break
        with assert_raises(accel.errors.StepError, fix=r"state = accel.training.discard\(state, model\)"):
            next(accel.batches(ctx, run.loader, state))
        with assert_raises(accel.errors.StepError, fix="discard"):
            state.next_epoch()
        state = accel.training.discard(state, run.model).next_epoch()
        _ = run.epochs(state, 2)
        full = accel.get_state_dict(ctx, run.model)
        return torch.cat([each.flatten() for each in full.values()]) if full else None

    epoch = windows_of(2)[2:]
    parameters = simulate(train, 2, default_group=True)[0]
    torch.testing.assert_close(parameters, golden(epoch), **EXACT)


def test_discard_names_the_models_that_it_needs() -> None:
    with assert_raises(accel.errors.ConfigError, fix=r"state = accel.training.discard\(state, model\)"):
        accel.training.discard(accel.train_state(accel.single()))


def test_a_limit_of_batches_an_epoch() -> None:
    ctx = accel.single()
    run = Run(ctx)
    state = run.start
    while state.epoch < 2:
        for number, batch in enumerate(accel.batches(ctx, run.loader, state), 1):
            state = state.next(batch, last=number == 2)
            with accel.accumulate(ctx, state, run.model):
                state = accel.backward(ctx, run.loss(batch), state)
            if state.sync:
                state = run.step(state)
            if number == 2:
                break
        state = state.next_epoch()
    expected = [accel.data.order(0, epoch, len(DATA)).at(torch.arange(12)) for epoch in range(2)]
    torch.testing.assert_close(run.parameters(), golden(expected), **EXACT)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dropped_next_epoch_is_an_error_of_the_next_pass(ranks: int) -> None:
    def train(ctx: accel.DistContext) -> None:
        run = Run(ctx)
        state = run.start
        for batch in accel.batches(ctx, run.loader, state):
            state = run.micro(state, batch)
            if not state.sync and state.accum.micro == 0:
                break
        kept = state.next_epoch()
        with assert_raises(accel.errors.StepError, expected=r"state = state.next_epoch\(\)"):
            next(accel.batches(ctx, run.loader, state))
        for again in (kept, state.next_epoch(), msgspec.structs.replace(state)):
            assert next(accel.batches(ctx, run.loader, again)).start == again.cursor

    _ = simulate(train, ranks)


def test_a_state_begins_with_the_settings_and_the_loss_scale_that_it_is_given() -> None:
    ctx, scaler = accel.single(), accel.LossScale(scale=8.0, dynamic=True)
    state = accel.train_state(ctx, seed=3, accumulation=2, sync_each_batch=True, scaler=scaler)
    assert state == accel.TrainState(accel.Cursor(seed=3), accel.Accumulation(2, sync_each_batch=True), scaler)


def test_a_state_moves_to_another_position_between_windows_alone() -> None:
    run = Run(accel.single())
    begun = run.start.next(next(accel.batches(run.ctx, run.loader, run.start)))
    moved = run.start.at(begun.cursor)
    assert (moved.cursor, moved.accum, moved.scaler) == (begun.cursor, run.start.accum, run.start.scaler)
    with assert_raises(accel.errors.StepError, problem="the backward of this batch", where=r"state\.at"):
        begun.at(begun.cursor)


def test_evaluation_within_an_epoch_leaves_the_state_alone() -> None:
    def train(ctx: accel.DistContext) -> torch.Tensor:
        run = Run(ctx)
        state = run.start
        for batch in accel.batches(ctx, run.loader, state):
            state = run.micro(state, batch)
            with torch.no_grad():
                seen = sum(each.valid.world for each in accel.batches(ctx, run.loader))
            assert seen == len(DATA)
        return run.parameters()

    for parameters in simulate(train, 2):
        torch.testing.assert_close(parameters, golden(windows_of(1)), **EXACT)


def test_a_second_loader_beside_the_first_has_a_cursor_of_its_own() -> None:
    ctx = accel.single()
    run = Run(ctx)
    other = accel.prepare_loader(ctx, DataLoader(TensorDataset(torch.arange(40)), batch_size=8))
    state, cursor = run.start, accel.Cursor(seed=7)
    for batch, beside in zip(accel.batches(ctx, run.loader, state), accel.batches(ctx, other, cursor), strict=False):
        with assert_raises(accel.errors.StepError, fix="separate cursor"):
            state.next(beside)
        state = run.micro(state, batch)
        cursor = beside.next
    assert (state.epoch, cursor.consumed) == (1, 32)


class Counting(IterableDataset[int]):
    """A stream of a rank's own, of a length that differs by rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        return iter(range(100 * self.rank, 100 * self.rank + 12 + 4 * self.rank))


def test_positions_of_a_stream_that_differ_by_rank_are_saved_and_resumed(tmp_path: Path) -> None:
    def train(ctx: accel.DistContext, steps: int) -> list[int]:
        loader = accel.prepare_loader(ctx, DataLoader(Counting(ctx.rank), batch_size=2), stream="own")
        model = accel.prepare_model(ctx, nn.Linear(1, 1))
        state = accel.resume(ctx, tmp_path, {"model": model}, accel.train_state(ctx))
        seen: list[int] = []
        for batch in accel.batches(ctx, loader, state):
            seen += batch.data[: int(batch.valid)].tolist()
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                state = accel.backward(ctx, model(batch.data.float().unsqueeze(1)).mean(), state)
            state = accel.training.discard(state, model)
            if len(seen) >= 2 * steps:
                accel.save_state(ctx, tmp_path, {"model": model, "place": state}, step=len(seen))
                break
        return seen

    first = simulate(lambda ctx: train(ctx, 2), 2)
    rest = simulate(lambda ctx: train(ctx, 100), 2)
    for rank in range(2):
        assert first[rank] + rest[rank] == list(Counting(rank))
        assert len(first[rank]) == 4


def test_samples_of_no_loader_step_by_their_weights(tmp_path: Path) -> None:
    rows = torch.arange(12, dtype=torch.float64).view(6, 2)

    def rank(ctx: accel.DistContext, steps: int) -> list[float]:
        torch.manual_seed(0)
        model, optimizer = accel.prepare(ctx, *_objects())
        items: Any = {"model": model, "optimizer": optimizer}
        state = accel.resume(ctx, tmp_path, items, accel.train_state(ctx, accumulation=2))
        while state.updates < steps:
            for part in range(2):
                mine = rows[part::2][ctx.rank :: ctx.world_size]
                state = state.next()
                with accel.accumulate(ctx, state, model):
                    state = accel.backward(ctx, model(mine).mean(), state, weight=len(mine))
            state = accel.optimizer_step(ctx, optimizer, state)
            accel.save_state(ctx, tmp_path, items | {"state": state}, step=state.updates)
        return [float(each.detach().sum()) for each in model.parameters()]

    def _objects() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        net = torch.nn.Linear(2, 1).double()
        return net, torch.optim.SGD(net.parameters(), lr=1e-3)

    torch.manual_seed(0)
    net, optimizer = _objects()
    for _ in range(4):
        net(rows).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = [float(each.detach().sum()) for each in net.parameters()]
    simulate(lambda ctx: rank(ctx, 2), 3)
    for found in simulate(lambda ctx: rank(ctx, 4), 2):  # resumed on other ranks
        assert found == pytest.approx(expected, abs=1e-12)


def test_samples_of_no_loader_need_their_weight() -> None:
    ctx, model = accel.single(), torch.nn.Linear(2, 1)
    state = accel.train_state(ctx).next()
    loss = model(torch.ones(3, 2)).mean()
    with pytest.raises(StepError) as caught:
        accel.backward(ctx, loss, state)
    assert caught.value.fix.endswith("state = accel.backward(ctx, loss, state, weight=count).")
    state = accel.backward(ctx, loss, state, weight=3)  # the line of the fix
    with assert_raises(StepError, expected=r"state = accel\.optimizer_step"):
        state.next()


def test_two_windows_over_one_cursor_step_in_turn_by_the_parts() -> None:
    def train(ctx: accel.DistContext) -> tuple[int, int, int]:
        run, other = Run(ctx), Run(ctx)
        cursor = accel.Cursor(seed=0)
        one = two = accel.Accumulation(2)
        scaler = accel.loss_scale(ctx)  # shared in turn
        while cursor.epoch < 2:
            for batch in accel.batches(ctx, run.loader, cursor):
                cursor = batch.next
                one, two = one.next(last=batch.is_last), two.next(last=batch.is_last)
                with accel.training.parts.accumulate(ctx, one, run.model):
                    one = accel.training.parts.backward(ctx, run.loss(batch), scaler, one, weight=batch.valid)
                if one.sync:
                    step = accel.training.parts.optimizer_step(ctx, run.optimizer, scaler, one)
                    one, scaler = step.accum, step.scaler
                with accel.training.parts.accumulate(ctx, two, other.model):
                    two = accel.training.parts.backward(ctx, other.loss(batch), scaler, two, weight=batch.valid)
                if two.sync:
                    step = accel.training.parts.optimizer_step(ctx, other.optimizer, scaler, two)
                    two, scaler = step.accum, step.scaler
        torch.testing.assert_close(run.parameters(), other.parameters(), **EXACT)
        return cursor.epoch, one.updates, two.updates

    assert simulate(train, 2) == [(2, 4, 4)] * 2


def test_the_latest_step_is_known_but_neither_compared_nor_saved(tmp_path: Path) -> None:
    ctx = accel.single()
    run = Run(ctx, accumulation=1)
    assert (run.start.stepped, run.start.grad_norm) == (False, None)
    batch = next(accel.batches(ctx, run.loader, run.start))
    state = accel.backward(ctx, run.loss(batch), run.start.next(batch))
    stepped = run.step(state, max_norm=1e-3)
    assert stepped.stepped
    assert stepped.grad_norm is not None
    assert stepped.grad_norm > 1e-3
    bare = accel.TrainState(stepped.cursor, stepped.accum, stepped.scaler)
    assert (bare, bare.grad_norm) == (stepped, None)
    accel.save_state(ctx, tmp_path, {"state": stepped}, step=1)
    loaded = accel.load_state(ctx, accel.latest_checkpoint(tmp_path), {"state": run.start})["state"]
    assert loaded == stepped
    assert (loaded.stepped, loaded.grad_norm) == (False, None)


def test_division_and_clipping_by_calls_of_their_own_take_the_state() -> None:
    def train(ctx: accel.DistContext, apart: bool) -> torch.Tensor:
        run = Run(ctx, accumulation=1)
        state = run.start
        for batch in accel.batches(ctx, run.loader, state):
            state = state.next(batch)
            with accel.accumulate(ctx, state, run.model):
                state = accel.backward(ctx, run.loss(batch), state)
            if not apart:
                state = run.step(state, max_norm=0.3)
                continue
            norm = accel.clip_grad_norm_(ctx, run.model.parameters(), 0.3, state)
            accel.clip_grad_value_(ctx, run.model.parameters(), 10.0, state)
            unscaled = accel.unscale_gradients(ctx, run.optimizer, state)
            state = run.step(unscaled)
            assert norm > 0.3
        return run.parameters()

    apart, at_once = (simulate(lambda ctx, how=how: train(ctx, how), 2) for how in (True, False))
    torch.testing.assert_close(apart, at_once, rtol=0, atol=1e-6)


def test_a_skipped_step_of_fp16_moves_on_with_the_next_scale() -> None:
    with accel.session({}, precision="fp16", device="cpu") as ctx:
        run = Run(ctx, accumulation=1)
        state = run.start
        for number, batch in enumerate(accel.batches(ctx, run.loader, state)):
            state = state.next(batch)
            loss = run.loss(batch).float() * (math.inf if number == 0 else 1.0)
            state = accel.backward(ctx, loss, state)
            state = run.step(state)
            assert state.stepped == (number > 0)
        assert (state.updates, state.accum.skipped) == (3, 1)
        assert state.scaler.scale == run.start.scaler.scale / 2


def test_a_further_backward_or_a_division_that_was_dropped_is_an_error() -> None:
    ctx = accel.single()
    run = Run(ctx, accumulation=1)
    batch = next(accel.batches(ctx, run.loader, run.start))
    first = accel.backward(ctx, run.loss(batch), run.start.next(batch), weight=6)
    second = accel.backward(ctx, run.loss(batch), first, weight=6)
    with assert_raises(accel.errors.StepError, problem="later record.*dropped", fix="state = accel.backward"):
        run.step(first)
    unscaled = accel.unscale_gradients(ctx, run.optimizer, second)
    with assert_raises(accel.errors.StepError, problem="later record.*dropped", fix="state = accel.unscale_gradients"):
        run.step(second)
    assert run.step(unscaled).updates == 1

    accum = accel.training.parts.backward(
        ctx, run.loss(batch), run.start.scaler, accel.Accumulation(2).next(), weight=6
    )
    accel.training.parts.backward(ctx, run.loss(batch), run.start.scaler, accum, weight=6)
    with assert_raises(accel.errors.StepError, problem="later record.*dropped", fix="accum = parts.backward"):
        accum.next()


def test_a_first_backward_may_be_repeated_from_its_record() -> None:
    """As sharpness-aware minimization does, whose first gradients are cleared."""
    ctx = accel.single()
    run = Run(ctx, accumulation=1)
    for batch in accel.batches(ctx, run.loader, run.start):
        begun = run.start.next(batch)
        accel.backward(ctx, run.loss(batch), begun)
        run.optimizer.zero_grad()
        assert run.step(accel.backward(ctx, run.loss(batch), begun)).stepped
        break


COPIES: dict[str, Callable[[accel.TrainState], accel.TrainState]] = {
    "replace": msgspec.structs.replace,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "at": lambda state: state.at(state.cursor),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("nonfinite", ["raise", "defer"])
def test_figures_of_a_step_survive_each_copy_and_equality_leaves_them_out(how: str, nonfinite: Any) -> None:
    ctx = accel.single()
    run = Run(ctx, accumulation=1)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.1, fused=True)
    batch = next(accel.batches(ctx, run.loader, run.start))
    state = accel.backward(ctx, run.loss(batch), run.start.next(batch))
    state = accel.optimizer_step(ctx, optimizer, state, max_norm=1.0, nonfinite=nonfinite)
    other = COPIES[how](state)
    assert (other.stepped, other.backward_at) == (state.stepped, state.backward_at)
    assert other.grad_norm is not None
    assert torch.equal(other.grad_norm, cast(Any, state.grad_norm))
    plain = accel.TrainState(state.cursor, state.accum, state.scaler)
    assert not plain.stepped
    assert plain.grad_norm is None
    assert state == other == plain
    assert hash(state) == hash(plain)
    assert msgspec.json.decode(msgspec.json.encode(state), type=accel.TrainState) == state


@pytest.mark.parametrize("how", ["replace", "copy", "deepcopy", "pickle"])
def test_what_is_known_of_a_windows_losses_goes_along_with_its_copies(how: str) -> None:
    ctx = accel.single()
    run = Run(ctx)
    batch = next(accel.batches(ctx, run.loader, run.start))
    begun = accel.backward(ctx, run.loss(batch) * math.inf, run.start.next(batch, last=True))
    with assert_raises(accel.errors.NonFiniteError, got="the loss was not finite either"):
        run.step(COPIES[how](begun))
