# SPDX-License-Identifier: Apache-2.0
"""A small run to save and load, and how to tell whether two runs are the same bits."""

from __future__ import annotations

import copy
import random
from typing import Any

import msgspec
import numpy
import torch
from torch import nn

from accel import load_state
from accel.checkpoint._background import copy_to_host as copy_to_host
from accel.checkpoint._boxes import Box as Box
from accel.checkpoint._manifest import (
    FORMAT as FORMAT,
    Item as Item,
    Manifest as Manifest,
    decode_manifest as decode_manifest,
    encode_manifest as encode_manifest,
)
from accel.checkpoint._read import open_checkpoint as open_checkpoint
from accel.checkpoint._retention import plan_keep as plan_keep
from accel.context import DistContext, single
from accel.errors import ConfigError

CPU = single()


class Cursor(msgspec.Struct, frozen=True):
    epoch: int = 0
    consumed: int = 0
    best: float | None = None


class Window(msgspec.Struct, frozen=True):
    micro: int = 0
    weight: torch.Tensor | None = None

    def check_saveable(self) -> None:
        if self.micro:
            raise ConfigError("in the middle of a window", got=f"micro={self.micro}", fix="Save after optimizer_step.")


def network(seed: int = 0, width: int = 6) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, 2)
        )


class Run:
    """Model, optimizer, scheduler and cursor, trained on noise from the global stream."""

    def __init__(self, optimizer: Any = None, scheduler: Any = None, *, seed: int = 0, width: int = 6) -> None:
        self.model = network(seed, width)
        make = optimizer or (lambda params: torch.optim.AdamW(params, lr=0.01))
        self.optimizer = make(self.model.parameters())
        make = scheduler or (lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]))
        self.scheduler = make(self.optimizer)
        self.cursor = Cursor()
        self.window = Window()

    def step(self, count: int = 1) -> list[torch.Tensor]:
        losses = []
        for _ in range(count):
            loss = self.model(torch.randn(8, 4)).square().mean() + random.random()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(loss.item()) if plateau else self.scheduler.step()
            self.cursor = msgspec.structs.replace(self.cursor, consumed=self.cursor.consumed + 8)
            losses.append(loss.detach())
        return losses

    def items(self) -> dict[str, object]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "cursor": self.cursor,
            "window": self.window,
        }

    def load(self, ctx: DistContext, path: Any) -> Run:
        self.load_with(ctx, path, {})
        return self

    def load_with(self, ctx: DistContext, path: Any, more: dict[str, object]) -> dict[str, Any]:
        loaded: dict[str, Any] = load_state(ctx, path, self.items() | more)
        self.cursor, self.window = loaded["cursor"], loaded["window"]
        return loaded

    def state(self) -> list[Any]:
        """Everything, as plain values that can be compared."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        slots = [dict(self.optimizer.state.get(p, {})) for g in self.optimizer.param_groups for p in g["params"]]
        whole = [dict(self.model.state_dict()), groups, slots, self.scheduler.state_dict(), self.cursor]
        return copy.deepcopy(whole)


def equal(one: Any, other: Any) -> bool:
    """Whether two nested values are the same types and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and one.equal(other)
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def streams() -> tuple[Any, ...]:
    return random.getstate(), torch.get_rng_state().tolist()


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one that it shares its state with."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)  # pyright: ignore[reportAssignmentType]
    param_groups = property(lambda self: self.optimizer.param_groups)  # pyright: ignore[reportAssignmentType]
    defaults = property(lambda self: self.optimizer.defaults)  # pyright: ignore[reportAssignmentType]

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()
