# SPDX-License-Identifier: Apache-2.0
"""Blocks change lists, dicts and dataclasses that they are given: the caller sees it, on units of fsdp as anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from steps import two_steps
from tables import rows
from torch import Tensor, nn

import accel
from accel.bigmodel.run._crossings import move_inputs
from accel.testing import Simulator

INPUT = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)


@dataclasses.dataclass
class Notes:
    first: Tensor
    total: Any = 0.0
    seen: list[Tensor] = dataclasses.field(default_factory=list)


class Pair(NamedTuple):
    first: Tensor
    losses: list[Tensor]


def _total(each: dict[str, Any], h: Tensor) -> None:
    each["total"] = each.get("total", 0.0) + h


def _attribute(notes: Notes, h: Tensor) -> None:
    notes.total = notes.total + h
    notes.seen.append(h)


def _replace(values: list[Tensor], h: Tensor) -> None:
    values[0] = values[0] + h


def _shorten(values: list[Tensor], h: Tensor) -> None:
    while len(values) > 1:
        values.pop()
    values.insert(0, h)


class Kind(NamedTuple):
    """A container: made of a tensor, changed by a block with its result, and read at the end."""

    make: Callable[[Tensor], Any]
    change: Callable[[Any, Tensor], None]
    read: Callable[[Any], Tensor]


KINDS = {
    "list": Kind(lambda x: [x], list.append, lambda values: torch.stack(values).sum()),
    "empty list": Kind(lambda _: [], list.append, lambda values: torch.stack(values).sum()),
    "item": Kind(lambda x: [x], _replace, lambda values: values[0].square().sum()),
    "shorter": Kind(lambda x: [x, x.sin()], _shorten, lambda values: sum(each.square().sum() for each in values)),
    "dict": Kind(lambda x: {"first": x}, _total, lambda each: each["total"].square().sum()),
    "list in dict": Kind(
        lambda x: {"first": x, "all": [x]},
        lambda each, h: each["all"].append(h),
        lambda each: torch.stack(each["all"]).sum(),
    ),
    "list in tuple": Kind(
        lambda x: (x, [x]), lambda each, h: each[1].append(h), lambda each: torch.stack(each[1]).sum()
    ),
    "named tuple": Kind(
        lambda x: Pair(x, []), lambda each, h: each.losses.append(h), lambda each: torch.stack(each.losses).sum()
    ),
    "dataclass": Kind(Notes, _attribute, lambda notes: notes.total.sum() + torch.stack(notes.seen).square().sum()),
}


class Block(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor, *, notes: Any) -> Tensor:
        h = torch.tanh(self.linear(x))
        self.kind.change(notes, h)
        return x + h


class Model(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.blocks = nn.Linear(4, 4), nn.ModuleList(Block(kind) for _ in range(3))
        self.kind = kind
        _ = self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        notes = self.kind.make(x)
        for block in self.blocks:
            x = block(x, notes=notes)
        return x.sum() + self.kind.read(notes)


def _trained(ctx: accel.DistContext, kind: Kind) -> tuple[Any, dict[str, Tensor]]:
    model = Model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accel.prepare(ctx, model, optimizer)
    losses = two_steps(ctx, model, optimizer, lambda: model(INPUT))
    return losses, accel.get_state_dict(ctx, model, dst=None)


@rows("name, kind", list(KINDS.items()))
def test_blocks_on_units_change_what_they_are_given(ranks: Simulator, name: str, kind: Kind) -> None:
    want = _trained(accel.single(), kind)
    runs = ranks.run(lambda ctx: _trained(accel.replace(ctx, strategy="fsdp"), kind), 2, default_group=True)
    for got in runs:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@rows("name, kind", list(KINDS.items()))
def test_blocks_on_several_devices_change_what_they_are_given(name: str, kind: Kind) -> None:
    model = Model(kind)
    want = model(INPUT)
    skeleton = accel.bigmodel.describe(model)
    runs = {each.name: ("cpu", "cpu:0")[at % 2] for at, each in enumerate(skeleton.segments)}
    with ExitStack() as opened:
        move_inputs(model, accel.bigmodel.DeviceMap(skeleton=skeleton, home=runs, runs=runs), opened)
        torch.testing.assert_close(model(INPUT), want)
    torch.testing.assert_close(model(INPUT), want)
    assert type(model.blocks[0]) is Block


def test_what_is_not_changed_stays_the_callers(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> bool:
        own: list[Tensor] = []

        def make(x: Tensor) -> list[Tensor]:
            own[:] = [x]
            return [x]

        def read(values: list[Tensor]) -> Tensor:
            assert len(values) == 4
            assert values[0] is own[0]
            return torch.stack(values).sum()

        _ = _trained(accel.replace(ctx, strategy="fsdp"), Kind(make, list.append, read))
        return len(own) == 1

    assert all(ranks.run(rank, 2, default_group=True))
