# SPDX-License-Identifier: Apache-2.0
"""Blocks change lists, dictionaries and dataclasses that they are given: stages of a pipeline repeat each change."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from handwritten import Handwritten
from handwritten._entry import cross_entropy, ids
from handwritten.manners import Block, Words
from handwritten_runs import compare, piped, plain
from hypothesis import given, strategies as st
from torch import Tensor

import accel
from accel.parallel import Plan
from accel.parallel._containers import change_items, changed_items, items_of, new_items
from accel.parallel.axes.tensor._found_plan import found_plan
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


@pytest.mark.parametrize("change", [(States, _sets_fields), (Item, _sets_attributes)])
def test_a_plan_is_found_around_blocks_that_hide_tensors_in_objects(change: Any) -> None:
    """A block alone cannot be proved, as its object is not there: the model is, and no error of torch ends it."""
    plan = found_plan(Changing(*change), 2, [torch.zeros(2, 6, dtype=torch.long)])
    divided = {name for layouts in plan.regions.values() for name in layouts}
    assert "blocks.3.mix.weight" in divided


@given(
    st.lists(st.sampled_from("abcdef"), unique=True),
    st.lists(st.tuples(st.sampled_from(["put", "take", "reverse", "set"]), st.integers(0, 5), st.integers(10, 99))),
)
def test_a_change_of_a_container_is_repeated_on_its_copy(items: list[str], steps: list[tuple[str, int, int]]) -> None:
    for make in (list, lambda given: dict(zip(given, given, strict=True))):
        held: Any = make(items)
        other, before = copy.copy(held), items_of(held)
        for step, place, value in steps:
            _step(held, step, place, value)
        changed = changed_items(before, held)
        if changed is None:
            assert held == other
            continue
        change_items(other, items_of(other), changed, new_items(held, changed))
        assert [*items_of(other).items()] == [*items_of(held).items()]


def _step(held: Any, step: str, place: int, value: int) -> None:
    if isinstance(held, dict):
        if step == "take" and held:
            _ = held.pop([*held][place % len(held)])
        else:
            held[place if step == "put" else "abcdef"[place]] = value
    elif step == "put":
        held.insert(place, value)
    elif step == "reverse":
        held.reverse()
    elif held and step == "take":
        _ = held.pop(place % len(held))
    elif held:
        held[place % len(held)] = value
