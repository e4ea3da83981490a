# SPDX-License-Identifier: Apache-2.0
"""Blocks change lists, dictionaries and dataclasses that they are given: stages of a pipeline repeat each change."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import assert_raises
from handwritten import Handwritten
from handwritten._entry import cross_entropy, ids
from handwritten.manners import Block, Words
from handwritten_runs import compare, piped, plain
from steps import begin_batch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import accel
from accel.errors import StageError
from accel.parallel import Plan
from accel.testing import Simulator


@dataclasses.dataclass
class States:
    last: Tensor | None = None
    calls: int = 0


class Item:
    """An object of a class that nothing describes."""

    def __init__(self) -> None:
        self.last: Tensor | None = None


def _pops(held: Any, at: int, x: Tensor) -> Tensor:
    if at < 2:
        held.append(x)
        return x
    return x + 0.5 * held.pop()


def _inserts(held: Any, at: int, x: Tensor) -> Tensor:
    held.insert(0, x)
    return x + 0.5 * held[-1] + 0.25 * held[at // 2]


def _reverses(held: Any, at: int, x: Tensor) -> Tensor:
    held.append(x)
    held.reverse()
    return x + 0.5 * held[at // 2]


def _fills_slots(held: Any, at: int, x: Tensor) -> Tensor:
    held[at] = x
    return x + 0.5 * held[at // 2]


def _replaces(held: Any, _at: int, x: Tensor) -> Tensor:
    before = held.get("last", 0)
    held["last"] = x
    held["calls"] = held.get("calls", 0) + 1
    return x + 0.5 * before * held["calls"]


def _takes_out(held: Any, at: int, x: Tensor) -> Tensor:
    if at < 2:
        held[at] = x
        return x
    return x + 0.5 * held.pop(3 - at) * (2 + len(held))


def _sets_fields(held: Any, _at: int, x: Tensor) -> Tensor:
    before = x if held.last is None else held.last
    held.last = x
    held.calls += 1
    return x + 0.5 * before * held.calls


def _sets_attributes(held: Any, _at: int, x: Tensor) -> Tensor:
    before = x if held.last is None else held.last
    held.last = x
    return x + 0.5 * before


class Changing(Words):
    """Blocks change a container that the forward makes, and read it."""

    def __init__(self, make: Callable[[], Any], change: Callable[[Any, int, Tensor], Tensor]) -> None:
        self.make, self.change = make, change
        super().__init__()
        for at, block in enumerate(self.blocks):
            block.at, block.change = at, change

    class kind(Block):  # noqa: N801 - what `Words` makes
        at: int
        change: Callable[[Any, int, Tensor], Tensor]

        def forward(self, x: Tensor, held: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return self.change(held, self.at, super().forward(x))

    def forward(self, ids: Tensor) -> Tensor:
        x, held = self.embed(ids), self.make()
        for block in self.blocks:
            x = block(x, held)
        return self.head(self.norm(x))


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any, int, Tensor], Tensor]]] = {
    "pops": (list, _pops),
    "inserts": (list, _inserts),
    "reverses": (list, _reverses),
    "fills slots": (lambda: [None] * 4, _fills_slots),
    "replaces": (dict, _replaces),
    "takes out": (dict, _takes_out),
    "sets fields": (States, _sets_fields),
}


@pytest.mark.parametrize("name", CHANGES)
def test_stages_repeat_what_blocks_of_other_stages_change(ranks: Simulator, name: str) -> None:
    each = Handwritten(name, lambda: Changing(*CHANGES[name]), ids, cross_entropy)

    def run(ctx: accel.DistContext) -> Any:
        return piped(ctx, each, "pp=3", Plan(micro_batches=3), rows=6, evaluates=name == "pops")

    assert compare(ranks.run(run, 3, default_group=True), plain(each, 3, rows=6), outputs=name == "pops") == []


class Counts(nn.Module):
    """Counts calls in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, held: dict[str, int]) -> Tensor:
        held["calls"] += 1
        return x + held["calls"] * self.layer(x)


class Counting(nn.Module):
    """The number of forwards equals the number of calls only in the first forward, behind the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counts() for _ in range(4))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        held = {"forwards": self.forwards, "calls": 0}
        for block in self.blocks:
            x = block(x, held)
        return x


def test_a_number_is_no_item_from_before_that_equals_it(ranks: Simulator) -> None:
    batch = torch.linspace(-1, 1, 32).view(8, 4).sin().double()
    torch.manual_seed(0)
    net = Counting().double()
    expected = net(batch).square().mean()

    def run(ctx: accel.DistContext) -> Tensor:
        model = accel.prepare_model(accel.replace(ctx, mesh="pp=4"), copy.deepcopy(net), plan=Plan(micro_batches=4))
        state = begin_batch(ctx)
        loss, _ = accel.forward_backward(
            ctx, model, state, batch, loss_fn=lambda output: output.square().sum(), weight=batch.numel()
        )
        return loss

    for loss in ranks.run(run, 4, default_group=True):
        torch.testing.assert_close(loss, expected.detach())


class Anneals(nn.Module):
    """Returns the factor of the next block."""

    def __init__(self, number: Callable[[float], Any]) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(4, 4), number

    def forward(self, x: Tensor, factor: Any) -> tuple[Tensor, Any]:
        return x + self.layer(x) * factor, self.number(float(factor) / 2)


class Annealed(nn.Module):
    """Counts its forwards, and passes a factor of them to its first block."""

    def __init__(self, number: Callable[[float], Any], most: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Anneals(number) for _ in range(4))
        self.forwards, self.most = 0, most

    def forward(self, x: Tensor) -> Tensor:
        self.forwards = min(self.forwards + 1, self.most)
        factor: Any = float(self.forwards)
        for block in self.blocks:
            x, factor = block(x, factor)
        return x


def annealed(ctx: accel.DistContext, mesh: str, number: Callable[[float], Any], most: int) -> Tensor:
    batch = torch.linspace(-1, 1, 32).view(8, 4).sin().double()
    torch.manual_seed(0)
    ctx = accel.replace(ctx, mesh=mesh)
    model = accel.prepare_model(ctx, Annealed(number, most).double(), plan=Plan(micro_batches=4))
    loss, _ = accel.forward_backward(
        ctx, model, begin_batch(ctx), batch, loss_fn=lambda output: output.square().sum(), weight=batch.numel()
    )
    return loss


def test_a_number_of_a_block_that_varies_between_micro_batches_is_refused(ranks: Simulator) -> None:
    """Stages would compute with the number in the record. Tensors are sent."""
    with assert_raises(
        StageError, problem="another number than in the record", fix=r"torch\.as_tensor\(number\)"
    ) as caught:
        _ = ranks.run(lambda ctx: annealed(ctx, "pp=2", float, 4), 2, default_group=True)
    assert "expected 0.5" in str(caught.value)
    for number, most in ((torch.tensor, 4), (float, 1)):
        expected = annealed(accel.single(), "", number, most)
        for loss in ranks.run(lambda ctx, of=(number, most): annealed(ctx, "pp=2", *of), 2, default_group=True):
            torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)


class Listing(nn.Module):
    """Returns a number for each of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.numbers = nn.Linear(4, 4), [0.5]

    def forward(self, x: Tensor) -> tuple[Tensor, list[float]]:
        self.numbers.append(0.5)
        return self.layer(x), list(self.numbers)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Listing() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x


def test_more_numbers_than_in_the_record_are_refused(ranks: Simulator) -> None:
    def run(ctx: accel.DistContext) -> None:
        model = accel.prepare_model(accel.replace(ctx, mesh="pp=2"), Listed(), plan=Plan(micro_batches=2))
        _ = accel.forward_backward(ctx, model, begin_batch(ctx), torch.ones(4, 4), loss_fn=torch.sum, weight=4)

    with assert_raises(StageError, problem="another number than in the record") as caught:
        _ = ranks.run(run, 2, default_group=True)
    assert "expected 3 values" in str(caught.value)


@pytest.mark.parametrize("change", [(States, _sets_fields), (Item, _sets_attributes)])
def test_a_plan_is_found_around_blocks_that_hide_tensors_in_objects(ranks: Simulator, change: Any) -> None:
    """A block alone cannot be proved, as its object is not there: the model is, and no error of torch ends it."""
    ids = torch.arange(12).view(2, 6)

    def rank(ctx: accel.DistContext) -> tuple[Tensor, bool]:
        ctx = accel.replace(ctx, mesh="tp=2") if ctx.world_size > 1 else ctx
        torch.manual_seed(0)
        model = accel.prepare_model(ctx, Changing(*change).double(), example=[ids])
        return model(ids).detach(), isinstance(model.get_parameter("blocks.3.mix.weight"), DTensor)

    want, _ = rank(accel.single())
    for got, is_divided in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
        assert is_divided
