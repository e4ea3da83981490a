# SPDX-License-Identifier: Apache-2.0
"""Kinds of items: one table holds all, and a handler in it is all that a new kind takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import msgspec
import pytest
import torch
from catching import assert_raises
from ckpt_helpers import Item
from torch import nn

import accel
from accel.items import _kinds
from accel.items._kinds import kind_of
from accel.items._source import Captured, ItemHandler, ItemLoad, StateChange
from accel.testing import simulate


class Tally:
    """Counts in a form of its own, which none of the library's kinds takes."""

    def __init__(self, *counts: int) -> None:
        self.counts = list(counts)


def _capture(name: str, live: Tally, to: Captured) -> Item:
    to.loose[f"{name}.counts"] = torch.tensor(live.counts)
    return Item("value", "Tally", len(live.counts))


@dataclass(kw_only=True, slots=True)
class TallyLoad(ItemLoad):
    live: Tally
    _before: list[int] = field(default_factory=list)

    def compare(self) -> None:
        if self.item.value != len(self.live.counts):
            self.problems.wrong_type(self.name, f"{len(self.live.counts)} counts", f"{self.item.value}")
        self.wanted.append((f"{self.name}.counts", None))

    def read(self) -> Sequence[StateChange]:
        self._before = list(self.live.counts)
        counts = self.source.saved.read(f"{self.name}.counts").tolist()
        return [StateChange(self.name, lambda: self._put(counts), lambda: self._put(self._before))]

    def _put(self, counts: list[int]) -> None:
        self.live.counts[:] = counts


TALLY = ItemHandler(
    kind="value", stored_type="Tally", takes=Tally, type_of=lambda _: "Tally", capture=_capture, load=TallyLoad
)


def test_a_handler_in_the_table_is_all_that_a_kind_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(ctx: accel.DistContext) -> None:
        _ = accel.save_state(ctx, tmp_path, {"tally": Tally(3, 4), "model": nn.Linear(2, 1)}, step=1)

    def load(ctx: accel.DistContext, tally: Tally | None, *, strict: bool = True) -> accel.items.Loaded:
        return accel.load_state(ctx, tmp_path, {"tally": tally, "model": nn.Linear(2, 1)}, strict=strict)

    with assert_raises(accel.errors.CheckpointError, problem="Tally"):
        _ = simulate(save, 2)
    monkeypatch.setattr(_kinds, "HANDLERS", (TALLY, *_kinds.HANDLERS))
    _ = simulate(save, 2)
    live = [Tally(0, 0), Tally(0, 0)]
    for rank, loaded in enumerate(simulate(lambda ctx: load(ctx, live[ctx.rank]), 2)):
        assert loaded["tally"] is live[rank]
        assert live[rank].counts == [3, 4]
    assert simulate(lambda ctx: load(ctx, None)["tally"], 1) == [None]  # which leaves it in the file
    with assert_raises(accel.errors.CheckpointError, problem="expected 1 counts, got 2"):
        _ = simulate(lambda ctx: load(ctx, Tally(0)), 1)
    other = Tally(5)
    assert simulate(lambda ctx: load(ctx, other, strict=False).skipped, 1)[0]
    assert other.counts == [5]


class Color(Enum):
    RED = 1


@dataclass
class Point:
    x: int = 1


class Scheduler(msgspec.Struct):
    """A record that has the methods of a stateful object, too."""

    at: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_the_entry_of_an_item_tells_the_handler_that_wrote_it(tmp_path: Path) -> None:
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    items = {
        "module": layer,
        "optimizer": optimizer,
        "folder": accel.items.Folder(save=lambda path: (path / "file").write_bytes(b"a")),
        "record": Scheduler(),
        "point": Point(),
        "stateful": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "value": {"a": [1, None]},
        "tensor": torch.ones(2),
        "path": tmp_path,
    }
    [path] = simulate(lambda ctx: accel.save_state(ctx, tmp_path / "run", items, step=1), 1)
    stored = msgspec.json.decode((path / "manifest.json").read_bytes())["items"]
    for name, item in items.items():
        entry = msgspec.convert(stored[name], Item)
        assert _kinds.stored_handler(entry).capture is _kinds.handler_of(item).capture, name
        assert entry.type == _kinds.handler_of(item).type_of(item), name


def test_a_class_is_no_object_with_its_methods() -> None:
    for kind in (
        nn.Linear,
        torch.optim.SGD,
        torch.optim.lr_scheduler.LRScheduler,
        Scheduler,
        Point,
        accel.items.Folder,
    ):
        assert kind_of(kind) == "value", kind
