# SPDX-License-Identifier: Apache-2.0
"""`total_steps` is the number of optimizer steps that the loop takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from catching import assert_raises
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import accel
from accel.testing import simulate


@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 9),
    accumulation=st.integers(1, 5),
    epochs=st.integers(1, 3),
    drop_last=st.booleans(),
    shared=st.booleans(),
    world_size=st.integers(1, 4),
)
def test_it_counts_the_windows_of_a_loop(
    samples: int, batch: int, accumulation: int, epochs: int, drop_last: bool, shared: bool, world_size: int
) -> None:
    size = batch * (1 if shared else world_size)
    if drop_last and samples < size:
        return
    plain = DataLoader(TensorDataset(torch.arange(samples)), batch, drop_last=drop_last)
    loader = accel.prepare_loader(accel.single(), plain, global_batch=size, data_parallel=(world_size - 1, world_size))
    accum, steps = accel.Accumulation(accumulation), 0
    for _ in range(epochs):
        count = samples // size if drop_last else -(-samples // size)
        for number in range(count):
            accum = accum.next(last=number == count - 1)
            if accum.sync:
                accum, steps = accum.close(stepped=True), steps + 1
    assert accel.total_steps(loader, accumulation=accumulation, epochs=epochs) == steps


def test_wrong_arguments_are_refused_by_name() -> None:
    plain = DataLoader(TensorDataset(torch.arange(4)))
    loader = accel.prepare_loader(accel.single(), plain)
    with assert_raises(accel.errors.ConfigError, where=r"total_steps\(accumulation=\)"):
        accel.total_steps(loader, accumulation=0)
    with assert_raises(accel.errors.ConfigError, where=r"total_steps\(epochs=\)"):
        accel.total_steps(loader, epochs=1.5)  # pyright: ignore[reportArgumentType]
    with assert_raises(accel.errors.ConfigError, expected=r"total_steps\(loader, ctx=ctx, \.\.\.\)"):
        accel.total_steps(plain)
    with assert_raises(
        accel.errors.ConfigError, problem="the value is not a context", got="int", where=r"total_steps\(ctx=\)"
    ):
        accel.total_steps(plain, ctx=5)  # pyright: ignore[reportArgumentType]
    with assert_raises(
        accel.errors.ConfigError, problem="cut already", got="ctx=, global_batch=", fix="Leave them out"
    ):
        accel.total_steps(loader, ctx=accel.single(), global_batch=4)
    with assert_raises(accel.errors.DataError, expected="steps=", fix=r"accel\.total_steps\(loader, steps=1000"):
        accel.total_steps(DataLoader(Endless()), ctx=accel.single())
    with assert_raises(
        accel.errors.ConfigError, problem="knows its steps", expected="4 batches", got="steps=5", fix="Leave"
    ):
        accel.total_steps(loader, steps=5)
    with assert_raises(accel.errors.ConfigError, where=r"total_steps\(steps=\)"):
        accel.total_steps(loader, steps=0)
    with assert_raises(accel.errors.DataError, expected=r"from accel\.prepare_loader, or torch's DataLoader"):
        accel.total_steps([1, 2])  # pyright: ignore[reportArgumentType]


@given(
    samples=st.integers(1, 40),
    batch=st.integers(1, 9),
    tail=st.sampled_from(["ragged", "pad", "drop"]),
    accumulation=st.integers(1, 4),
    world_size=st.integers(1, 4),
)
def test_a_plain_loader_has_the_steps_of_the_prepared_one(
    samples: int, batch: int, tail: Any, accumulation: int, world_size: int
) -> None:
    size = batch * world_size
    if tail == "drop" and samples < size:
        return
    plain = DataLoader(TensorDataset(torch.arange(samples)), batch)
    cut: Any = {"global_batch": size, "tail": tail, "data_parallel": (world_size - 1, world_size)}
    loader = accel.prepare_loader(accel.single(), plain, **cut)
    prepared = accel.total_steps(loader, accumulation=accumulation, epochs=3)
    assert accel.total_steps(plain, ctx=accel.single(), accumulation=accumulation, epochs=3, **cut) == prepared


def test_keywords_of_a_prepared_loader_are_taken() -> None:
    own, prepared = (inspect.signature(each).parameters.keys() for each in (accel.total_steps, accel.prepare_loader))
    assert prepared - own == {"stream", "replay", "steps_per_message"}  # streams have no number of steps
    plain = DataLoader(TensorDataset(torch.arange(23)), batch_size=3)
    for seeds in (False, True):
        assert accel.total_steps(plain, ctx=accel.single(), seed_samples=seeds) == 8


def test_a_schedule_precedes_one_prepare_of_everything() -> None:
    def rank(ctx: accel.DistContext) -> tuple[int, int]:
        plain = DataLoader(TensorDataset(torch.arange(23.0)), batch_size=3)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters())
        steps = accel.total_steps(plain, ctx=ctx, accumulation=2, epochs=2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        *_, loader = accel.prepare(ctx, model, optimizer, scheduler, plain)
        return steps, accel.total_steps(loader, accumulation=2, epochs=2)

    assert simulate(rank, 3) == [(4, 4)] * 3


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))
