# SPDX-License-Identifier: Apache-2.0
"""Marks of guards are no part of records: a run repeats from an equal state, and a slip is found on its own record."""

from __future__ import annotations

import copy
import gc
import tempfile
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from catching import assert_raises
from hypothesis import example, given, settings, strategies as st
from profiles import share
from steps import WAYS, ByState
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import accel
from accel.testing import Simulator

ROWS = torch.randn(14, 3, generator=torch.Generator().manual_seed(0)).double()


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(ROWS)


def decoded(state: accel.TrainState) -> accel.TrainState:
    return msgspec.json.decode(msgspec.json.encode(state), type=accel.TrainState)


def afresh(state: accel.TrainState) -> accel.TrainState:
    parts = [msgspec.structs.replace(part) for part in (state.cursor, state.accum, state.scaler)]
    return accel.TrainState(*parts)


COPIES = [msgspec.structs.replace, decoded, afresh, copy.copy, copy.deepcopy]


class Case(NamedTuple):
    """A training function.

    Attributes:
        epochs: passes of the loop.
        accumulation: batches in a window.
        most: batches after which the loop leaves an epoch; None reads it to its end.
        passes: backward passes of a batch.
        dynamic: whether the loss scale changes.
        stream: whether the loader reads a stream.
        way: whether the loop carries the state or its parts.
    """

    epochs: int
    accumulation: int
    most: int | None
    passes: int
    dynamic: bool
    stream: bool
    way: type[ByState]


def loader_of(ctx: accel.DistContext, *, stream: bool = False) -> Any:
    if stream:
        return accel.prepare_loader(ctx, DataLoader(Stream(), batch_size=4), stream="elements")
    return accel.prepare_loader(ctx, DataLoader(TensorDataset(ROWS), batch_size=4, shuffle=True), global_batch=4)


def prepared(ctx: accel.DistContext) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Linear(3, 1).double()
    return accel.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(ctx: accel.DistContext, loader: Any, case: Case, start: accel.TrainState) -> tuple[list[float], Any]:
    """The run of a case: parameters, and the records at its end."""
    model, optimizer = prepared(ctx)
    run = case.way(ctx)
    run.start(start)
    for _ in range(case.epochs):
        for number, batch in enumerate(run.batches(loader), 1):
            inputs = batch.data if case.stream else batch.data[0]
            with run.accumulate(model):
                outputs = model(inputs)
                for at in range(case.passes):
                    more = {"retain_graph": at + 1 < case.passes, "same_units": at > 0}
                    run.backward(outputs.square().mean() * (at + 1), **more)
            if run.sync:
                run.step(optimizer)
            if number == case.most:
                break
        if case.most is not None:
            run = ended(run, model, case)
    found = accel.unwrap_model(model).get_parameter("weight").flatten().tolist()
    return found, (run.cursor, run.accum, run.scaler)


def ended(run: ByState, model: nn.Module, case: Case) -> ByState:
    """The loop after an epoch that it left, with its window abandoned."""
    if case.way is ByState:
        run.state = accel.training.discard(run.state, model).next_epoch()
    else:
        accel.training.clear_gradients(model)
        run.accum = run.accum.reset()
        run.cursor = accel.Cursor(run.cursor.seed, run.cursor.epoch + 1)
    return run


cases = st.builds(
    Case,
    epochs=st.integers(1, 2),
    accumulation=st.integers(1, 3),
    most=st.sampled_from([None, 1, 2]),
    passes=st.integers(1, 2),
    dynamic=st.booleans(),
    stream=st.booleans(),
    way=st.sampled_from(WAYS),
)


WHOLE_EPOCH = Case(epochs=1, accumulation=2, most=None, passes=1, dynamic=False, stream=False, way=ByState)


@example(case=WHOLE_EPOCH, again=[msgspec.structs.replace], world_size=2)
@example(
    case=WHOLE_EPOCH._replace(most=1, passes=2, dynamic=True), again=[decoded, msgspec.structs.replace], world_size=1
)
@given(case=cases, again=st.lists(st.sampled_from(COPIES), min_size=1, max_size=2), world_size=st.integers(1, 2))
@settings(max_examples=share(0.06), deadline=None)
def test_a_run_from_an_equal_state_on_the_same_loader_is_the_same_run(
    ranks: Simulator, case: Case, again: list[Callable[..., accel.TrainState]], world_size: int
) -> None:
    def rank(ctx: accel.DistContext) -> None:
        loader = loader_of(ctx, stream=case.stream)
        scaler = accel.LossScale(scale=8.0, dynamic=True) if case.dynamic else None
        start = accel.train_state(ctx, seed=3, accumulation=case.accumulation, scaler=scaler)
        if case.way is not ByState:  # a loop by the parts gets the parts, of which a shallow copy is none
            start = afresh(start)
        first = train(ctx, loader, case, start)
        for each in again:
            twin = afresh(each(start)) if case.way is not ByState else each(start)
            assert twin == start
            assert train(ctx, loader, case, twin) == first

    ranks.run(rank, world_size)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_from_the_same_object_is_refused_after_any_number_of_epochs(epochs: int, way: type[ByState]) -> None:
    ctx = accel.single()
    case = WHOLE_EPOCH._replace(epochs=epochs, way=way)
    loader, start = loader_of(ctx), afresh(accel.train_state(ctx, seed=3, accumulation=case.accumulation))
    first = train(ctx, loader, case, start)
    for _ in range(2):
        with assert_raises(accel.errors.DataError, problem="would repeat the epoch"):
            train(ctx, loader, case, start)
        assert train(ctx, loader, case, afresh(start)) == first


class Slip(NamedTuple):
    """A slip, in a context and a loader of its own.

    Attributes:
        record: the record that goes on although a later one exists.
        call: the call that must refuse it.
    """

    record: Any
    call: Callable[[Any], object]


def dropped_epoch(ctx: accel.DistContext) -> Slip:
    loader, state = loader_of(ctx), accel.train_state(ctx)
    state.next_epoch()
    return Slip(state, lambda record: next(accel.batches(ctx, loader, record)))


def dropped_epoch_within_the_loop(ctx: accel.DistContext) -> Slip:
    model, optimizer = prepared(ctx)
    loader, state = loader_of(ctx), afresh(accel.train_state(ctx))  # no context knows it before the step
    for batch in accel.batches(ctx, loader, state):
        state = accel.backward(ctx, model(batch.data[0]).mean(), state.next(batch))
        state = accel.optimizer_step(ctx, optimizer, state)
        state.next_epoch()
        break
    return Slip(state, lambda record: next(accel.batches(ctx, loader, record)))


def dropped_epoch_after_a_load(ctx: accel.DistContext) -> Slip:
    with tempfile.TemporaryDirectory() as folder:
        accel.save_state(ctx, folder, {"state": accel.train_state(ctx)}, step=0)
        state = accel.load_state(ctx, folder, {"state": accel.train_state(ctx)})["state"]
    loader = loader_of(ctx)
    state.next_epoch()
    return Slip(state, lambda record: next(accel.batches(ctx, loader, record)))


def dropped_pass(ctx: accel.DistContext) -> Slip:
    loader, state = loader_of(ctx), accel.train_state(ctx)
    assert len(list(accel.batches(ctx, loader, state))) == 4
    return Slip(state, lambda record: next(accel.batches(ctx, loader, record)))


def two_passes(ctx: accel.DistContext, steps: int) -> tuple[accel.TrainState, Any, Any]:
    """A state after one of two backward passes of its batch, with the next batch and an optimizer."""
    model, optimizer = prepared(ctx)
    state = accel.train_state(ctx, accumulation=steps)
    first, second, *_ = accel.batches(ctx, loader_of(ctx), state)
    state = state.next(first)
    state = accel.backward(ctx, model(first.data[0]).square().mean(), state)
    accel.backward(ctx, model(first.data[0]).square().mean(), state, same_units=True)
    return state, second, optimizer


def dropped_backward(ctx: accel.DistContext) -> Slip:
    state, batch, _ = two_passes(ctx, 2)
    return Slip(state, lambda record: record.next(batch))


def dropped_backward_of_the_last_batch(ctx: accel.DistContext) -> Slip:
    state, _, optimizer = two_passes(ctx, 1)
    return Slip(state, lambda record: accel.optimizer_step(ctx, optimizer, record))


def dropped_window(ctx: accel.DistContext) -> Slip:
    """By the parts of a state."""
    state, _, _ = two_passes(ctx, 2)
    return Slip(state.accum, lambda record: record.next())


def dropped_division(ctx: accel.DistContext) -> Slip:
    model, optimizer = prepared(ctx)
    state = accel.train_state(ctx)
    batch = next(accel.batches(ctx, loader_of(ctx), state))
    state = accel.backward(ctx, model(batch.data[0]).square().mean(), state.next(batch))
    accel.unscale_gradients(ctx, optimizer, state)
    return Slip(state, lambda record: accel.clip_grad_norm_(ctx, model.parameters(), 1.0, record))


def dropped_scale(ctx: accel.DistContext) -> Slip:
    weight, scaler = nn.Parameter(torch.ones(1)), accel.LossScale(scale=8.0, dynamic=True)
    accum = accel.training.parts.backward(ctx, weight.sum(), scaler, accel.Accumulation().next())
    accum = accel.training.parts.optimizer_step(ctx, torch.optim.SGD([weight], lr=0.1), scaler, accum).accum
    return Slip(accum, lambda record: accel.training.parts.backward(ctx, weight.sum(), scaler, record.next()))


SLIPS = [
    dropped_epoch,
    dropped_epoch_within_the_loop,
    dropped_epoch_after_a_load,
    dropped_pass,
    dropped_backward,
    dropped_backward_of_the_last_batch,
    dropped_window,
    dropped_division,
    dropped_scale,
]


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_found_on_its_own_record_and_on_no_copy(slip: Callable[[accel.DistContext], Slip]) -> None:
    record, call = slip(accel.single())
    for _ in range(2):
        with assert_raises(accel.AccelError, problem="dropped|the window before|the previous window"):
            call(record)
    twin = msgspec.structs.replace(record)
    assert twin == record
    assert call(twin) is not None


def test_a_later_state_at_the_cursor_of_the_pass_before_is_a_slip() -> None:
    ctx = accel.single()
    loader, start = loader_of(ctx), accel.train_state(ctx)
    assert len(list(accel.batches(ctx, loader, start))) == 4
    later = accel.TrainState(start.cursor, msgspec.structs.replace(start.accum, updates=4), start.scaler)
    with assert_raises(accel.errors.DataError, problem="would repeat the epoch"):
        next(accel.batches(ctx, loader, later))


def test_calls_of_the_loop_leave_what_is_beside_a_records_fields() -> None:
    ctx = accel.single()
    model, optimizer = prepared(ctx)
    loader, state = loader_of(ctx), accel.train_state(ctx, scaler=accel.LossScale(scale=8.0, dynamic=True))
    for batch in accel.batches(ctx, loader, state):
        for call in (
            lambda state, batch=batch: state.next(batch),
            lambda state, batch=batch: accel.backward(ctx, model(batch.data[0]).mean(), state),
            lambda state, batch=batch: accel.backward(ctx, model(batch.data[0]).mean(), state, same_units=True),
            lambda state: accel.unscale_gradients(ctx, optimizer, state),
            lambda state: accel.optimizer_step(ctx, optimizer, state),
        ):
            figures = (state.figures, state.accum.losses)
            before = [dict(vars(each)) for each in figures]
            state = call(state)
            assert [dict(vars(each)) for each in figures] == before
        state.next_epoch()
        assert vars(state.figures).keys() == {"stepped", "grad_norm", "backward_at"}
        assert not any(hasattr(each, "__dict__") for each in (state, state.accum))


@pytest.mark.parametrize("slip", SLIPS)
def test_marks_keep_no_record_alive(slip: Callable[[accel.DistContext], Slip]) -> None:
    ctx = accel.single()
    record = weakref.ref(slip(ctx).record)
    gc.collect()
    assert record() is None
