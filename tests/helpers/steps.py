# SPDX-License-Identifier: Apache-2.0
"""A loop's records, as the state or as its parts: laws of the step run through either, most through the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.data import SampleCount


def two_steps(
    ctx: accel.DistContext, model: nn.Module, optimizer: Any, loss_of: Callable[[], torch.Tensor]
) -> list[tuple[float, float]]:
    """Take two clipped steps; return the loss and the norm of each."""
    found: list[tuple[float, float]] = []
    for _ in range(2):
        run = ByState(ctx)
        run.begin()
        with run.accumulate(model):
            loss = loss_of()
            run.backward(loss)
        run.step(optimizer, max_norm=0.5)
        found.append((float(loss.detach()), float(run.grad_norm)))
    return found


class ByState:
    """A loop that carries a `TrainState`. Each call replaces it, as the loop's assignments do.

    Attributes:
        ctx: the loop's context.
        state: the latest state.
        stepped: whether the latest step changed parameters.
        grad_norm: norm of the latest step.
    """

    def __init__(
        self,
        ctx: accel.DistContext,
        accumulation: int = 1,
        *,
        scaler: accel.LossScale | None = None,
        sync_each_batch: bool = False,
        seed: int = 0,
    ) -> None:
        self.ctx = ctx
        self.stepped, self.grad_norm = False, None
        self.start(
            accel.train_state(ctx, seed=seed, accumulation=accumulation, sync_each_batch=sync_each_batch, scaler=scaler)
        )

    def start(self, state: accel.TrainState) -> None:
        self.state = state

    @property
    def accum(self) -> accel.Accumulation:
        return self.state.accum

    @property
    def scaler(self) -> accel.LossScale:
        return self.state.scaler

    @property
    def cursor(self) -> accel.Cursor:
        return self.state.cursor

    @property
    def sync(self) -> bool:
        return self.accum.sync

    @property
    def updates(self) -> int:
        return self.accum.updates

    @property
    def skipped(self) -> int:
        return self.accum.skipped

    @property
    def records(self) -> tuple[Any, ...]:
        """What functions of the step take: the state, or loss scale and window."""
        return (self.state,)

    def batches(self, loader: Any) -> Iterator[accel.Batch]:
        """Batches of a training pass, each begun."""
        for batch in accel.batches(self.ctx, loader, self.state):
            self.begin(batch)
            yield batch

    def begin(self, batch: accel.Batch | None = None, *, last: bool = False) -> None:
        """Begin a micro-batch: of a batch, or of one sample for each rank."""
        self.state = self.state.next(batch or one_sample_each(self.ctx, self.cursor), last=last)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        return accel.accumulate(self.ctx, self.state, *models)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.state = accel.backward(self.ctx, loss, self.state, **options)

    def forward_backward(self, model: nn.Module, inputs: Any, **options: Any) -> torch.Tensor:
        loss, self.state = accel.forward_backward(self.ctx, model, self.state, inputs, **options)
        return loss

    def unscale(self, optimizer: Any) -> None:
        self.state = accel.unscale_gradients(self.ctx, optimizer, self.state)

    def clip_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, **options: Any) -> torch.Tensor:
        return accel.clip_grad_norm_(self.ctx, parameters, max_norm, *self.records, **options)

    def clip_value(self, parameters: Iterable[torch.Tensor], value: float) -> None:
        accel.clip_grad_value_(self.ctx, parameters, value, *self.records)

    def step(self, optimizer: Any, **options: Any) -> bool:
        """Take the step, and say whether parameters changed."""
        self.state = accel.optimizer_step(self.ctx, optimizer, self.state, **options)
        self.stepped, self.grad_norm = self.state.stepped, self.state.grad_norm
        return self.stepped


class ByParts(ByState):
    """The same loop with a cursor, an accumulation and a loss scale of its own."""

    cursor, accum, scaler = None, None, None  # type: ignore[assignment] - of each loop, not of its state

    def start(self, state: accel.TrainState) -> None:
        self.cursor, self.accum, self.scaler = state.cursor, state.accum, state.scaler
        self.weight: Any = None

    @property
    def records(self) -> tuple[Any, ...]:
        return self.scaler, self.accum

    def batches(self, loader: Any) -> Iterator[accel.Batch]:
        for batch in accel.batches(self.ctx, loader, self.cursor):
            self.begin(batch)
            yield batch

    def begin(self, batch: accel.Batch | None = None, *, last: bool = False) -> None:
        self.weight = None if batch is None else batch.valid
        if batch is not None:
            self.cursor = batch.next
        self.accum = self.accum.next(last=last or (batch is not None and batch.is_last))

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        return accel.training.parts.accumulate(self.ctx, self.accum, *models)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.accum = accel.training.parts.backward(self.ctx, loss, *self.records, **{"weight": self.weight, **options})

    def forward_backward(self, model: nn.Module, inputs: Any, **options: Any) -> torch.Tensor:
        options = {"weight": self.weight, **options}
        loss, self.accum = accel.training.parts.forward_backward(self.ctx, model, *self.records, inputs, **options)
        return loss

    def clip_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, **options: Any) -> torch.Tensor:
        return accel.training.parts.clip_grad_norm_(self.ctx, parameters, max_norm, *self.records, **options)

    def clip_value(self, parameters: Iterable[torch.Tensor], value: float) -> None:
        accel.training.parts.clip_grad_value_(self.ctx, parameters, value, *self.records)

    def unscale(self, optimizer: Any) -> None:
        self.accum = accel.training.parts.unscale_gradients(self.ctx, optimizer, *self.records)

    def step(self, optimizer: Any, **options: Any) -> bool:
        step = accel.training.parts.optimizer_step(self.ctx, optimizer, *self.records, **options)
        self.accum, self.scaler = step.accum, step.scaler
        self.stepped, self.grad_norm = step.stepped, step.grad_norm
        return self.stepped


WAYS = [ByState, ByParts]
both_ways = pytest.mark.parametrize("way", WAYS, ids=["state", "parts"])


def one_sample_each(ctx: accel.DistContext, cursor: accel.Cursor) -> accel.Batch:
    """A batch without data, of one sample for each rank: such batches count the same, as losses without a weight do."""
    after = accel.Cursor(cursor.seed, cursor.epoch, cursor.consumed + ctx.world_size)
    return accel.Batch(None, SampleCount(1, ctx.world_size), 1, is_last=False, next=after, start=cursor)


def begin_batch(
    ctx: accel.DistContext, state: accel.TrainState | None = None, *, last: bool = False
) -> accel.TrainState:
    """A state, by default a fresh one, within its next batch: one sample for each rank."""
    state = accel.train_state(ctx) if state is None else state
    return state.next(one_sample_each(ctx, state.cursor), last=last)
