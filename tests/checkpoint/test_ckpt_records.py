# SPDX-License-Identifier: Apache-2.0
"""Records at any depth: they come back in their own classes, their guards are asked, each rank keeps its own part."""

import dataclasses
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU, Window
from hypothesis import given, strategies as st
from torch import nn

import accel
from accel.context import DistContext
from accel.errors import CheckpointError, ConfigError
from accel.loop_state import StreamPosition, WorkerPosition
from accel.testing import simulate


class Best(msgspec.Struct, frozen=True):
    score: float = 0.0
    weights: torch.Tensor | None = None


class Wire(msgspec.Struct, frozen=True, rename="camel", array_like=True, tag="wire"):
    last_step: int = 0
    history: tuple[Best, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    name: str = ""
    best: Best | None = None


Pair = namedtuple("Pair", ["low", "high"])


class State(msgspec.Struct, frozen=True):
    """Nests records as fields, as the one record of a training loop does."""

    cursor: accel.Cursor = accel.Cursor()
    accum: accel.Accumulation = accel.Accumulation()
    scaler: accel.LossScale | None = None
    more: dict[str, Any] = {}


def there_and_back(item: object, into: object, tmp_path: Path) -> Any:
    path = accel.save_state(CPU, tmp_path / "run", {"item": item}, step=1)
    return accel.load_state(CPU, path, {"item": into})["item"]


RECORDS = st.sampled_from(
    [
        accel.Cursor(3, 2, 40),
        accel.Accumulation(4, updates=7),
        accel.LossScale(scale=8.0, good_steps=3),
        accel.parallel.LocalSgd(every=5),
        Best(0.5),
        Wire(3, (Best(1.0), Best(2.0))),
        Settings("a", Best(0.25)),
        Pair(1, (2, 3)),
        State(accel.Cursor(1), more={"inner": [accel.Cursor(9)]}),
    ]
)
NESTED = st.recursive(
    RECORDS | st.integers() | st.none(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=3).map(OrderedDict),
        inner.map(lambda value: State(more={"deeper": value})),
    ),
    max_leaves=8,
)


@given(NESTED)
def test_records_at_any_depth_come_back_in_their_own_classes(tmp_path_factory: Any, value: object) -> None:
    tmp_path = tmp_path_factory.mktemp("records")
    assert there_and_back([value], [value], tmp_path) == [value]


def test_records_of_accel_come_back_where_the_live_value_has_none_yet(tmp_path: Path) -> None:
    saved = {"windows": [accel.Accumulation(2, updates=3)], "cursors": (accel.Cursor(1, 2),)}
    assert there_and_back(saved, {}, tmp_path) == saved
    assert there_and_back([accel.Cursor(1, 2)], None, tmp_path) == [accel.Cursor(1, 2)]


def test_classes_of_users_are_found_by_annotations_and_among_other_records(tmp_path: Path) -> None:
    saved = Settings("a", Best(0.5))
    assert there_and_back(saved, Settings(), tmp_path) == saved
    assert there_and_back([Best(1.0), Best(2.0)], [Best()], tmp_path) == [Best(1.0), Best(2.0)]


def test_a_record_whose_class_is_not_among_what_is_passed_is_refused_by_its_path(tmp_path: Path) -> None:
    path = accel.save_state(CPU, tmp_path, {"item": {"a": [0, Best(1.0)]}, "other": 1}, step=1)
    with assert_raises(CheckpointError, problem=r"item\.a\[1\]: expected a live Best in its place"):
        accel.load_state(CPU, path, {"item": {}, "other": 0})
    loaded = accel.load_state(CPU, path, {"item": {}, "other": 0}, strict=False)
    assert loaded == {"item": {}, "other": 1}
    assert len(loaded.skipped) == 1


def test_two_classes_of_one_name_are_told_apart_by_path_and_else_refused(tmp_path: Path) -> None:
    other = msgspec.defstruct("Best", [("score", float, 0.0)], frozen=True)
    saved = [Best(1.0), other(2.0)]
    assert there_and_back(saved, [Best(), other()], tmp_path) == saved
    with assert_raises(CheckpointError, problem=r"item\[2\]: expected one class Best .* 2 such classes"):
        there_and_back([*saved, Best(3.0)], [Best(), other()], tmp_path)


def test_a_nested_record_with_other_fields_is_refused_by_its_path(tmp_path: Path) -> None:
    newer = msgspec.defstruct("Best", [("score", float, 0.0), ("loss", float, 0.0)], frozen=True)
    with assert_raises(CheckpointError, problem=r"item\.x: expected Best of score, loss, got no loss"):
        there_and_back({"x": Best(1.0)}, {"x": newer()}, tmp_path)


def test_tensors_in_nested_records_come_back(tmp_path: Path) -> None:
    saved = [Settings("a", Best(1.0, torch.arange(3.0)))]
    found = there_and_back(saved, [Settings("", Best(0.0, torch.zeros(3)))], tmp_path)
    assert torch.equal(found[0].best.weights, torch.arange(3.0))


def test_a_train_state_is_saved_after_a_step_at_any_depth(tmp_path: Path) -> None:
    model, optimizer = accel.prepare(CPU, *((m := torch.nn.Linear(2, 2)), torch.optim.SGD(m.parameters(), lr=0.1)))
    state = accel.train_state(CPU)
    loader = accel.prepare_loader(CPU, torch.utils.data.DataLoader([torch.ones(2)] * 4, batch_size=2))
    for batch in accel.batches(CPU, loader, state):
        state = state.next(batch)
        with assert_raises(ConfigError, where=r"item item\[0\]"):
            accel.save_state(CPU, tmp_path, {"item": [state]}, step=1)
        with accel.accumulate(CPU, state, model):
            state = accel.backward(CPU, model(batch.data).mean(), state)
        state = accel.optimizer_step(CPU, optimizer, state, max_norm=1.0)
    saved = {"runs": [state], "nested": State(more={"x": state})}
    path = accel.save_state(CPU, tmp_path, saved, step=1)
    fresh = accel.train_state(CPU)
    live = {"runs": [fresh], "nested": State(more={"x": fresh})}
    assert accel.load_state(CPU, path, live) == saved
    loaded = accel.load_state(CPU, path, {"runs": [], "nested": None, "state": fresh}, strict=False)
    assert loaded["runs"] == [state]
    assert type(loaded["runs"][0]) is accel.TrainState


def test_a_record_in_a_value_without_a_live_one_of_its_class_is_refused_with_what_to_pass(tmp_path: Path) -> None:
    path = accel.save_state(CPU, tmp_path, {"runs": {"a": [accel.train_state(CPU)]}, "count": 1}, step=1)
    with assert_raises(CheckpointError, problem="a live TrainState in its place or as an item") as caught:
        accel.load_state(CPU, path, {"runs": {}, "count": 0})
    assert "runs.a[0]" in str(caught.value)
    assert "count" not in caught.value.problem


def test_a_record_of_users_with_attributes_beside_its_fields_is_refused_by_its_path(tmp_path: Path) -> None:
    kind = msgspec.defstruct("Cached", [("at", int, 0)], dict=True)
    record = kind()
    record.more = 3
    with assert_raises(CheckpointError, got="also more") as caught:
        accel.save_state(CPU, tmp_path, {"item": [record]}, step=1)
    assert caught.value.where == "item[0]"


@pytest.mark.parametrize(
    "place",
    [
        lambda window: [window],
        lambda window: {"a": ({3: window},)},
        lambda window: State(accum=window),
        lambda window: State(more={"x": [window]}),
        lambda window: Settings(name=[window]),  # pyright: ignore[reportArgumentType]
    ],
)
def test_the_guard_of_a_record_is_asked_at_any_depth(place: Any, tmp_path: Path) -> None:
    with assert_raises(ConfigError, problem="unfinished window") as caught:
        accel.save_state(CPU, tmp_path, {"item": place(accel.Accumulation(4).next())}, step=1)
    assert caught.value.where.startswith("item item")
    assert not list(tmp_path.glob("step-*"))


class Holder:
    """An object with a state that has records in it."""

    def __init__(self, *records: object) -> None:
        self.records = list(records)

    def state_dict(self) -> dict[str, Any]:
        return {"records": self.records}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.records = state_dict["records"]


def test_records_in_states_of_objects_modules_and_optimizers_keep_class_and_guard(tmp_path: Path) -> None:
    class Noted(torch.nn.Linear):
        note: object = Best()

        def get_extra_state(self) -> object:
            return [self.note]

        def set_extra_state(self, state: Any) -> None:
            self.note = state[0]

    def items() -> dict[str, Any]:
        model = Noted(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["best"] = Best()
        return {"model": model, "optimizer": optimizer, "holder": Holder(Best())}

    saved, live = items(), items()
    saved["model"].note = saved["optimizer"].param_groups[0]["best"] = saved["holder"].records[0] = Best(2.0)
    accel.load_state(CPU, accel.save_state(CPU, tmp_path, saved, step=1), live)
    assert (live["model"].note, live["optimizer"].param_groups[0]["best"]) == (Best(2.0), Best(2.0))
    assert live["holder"].records == [Best(2.0)]
    for name, change in {
        "model": lambda: setattr(saved["model"], "note", Window(1)),
        "optimizer": lambda: saved["optimizer"].param_groups[0].update(best=Window(1)),
        "holder": lambda: saved["holder"].records.append(Window(1)),
    }.items():
        change()
        with assert_raises(ConfigError, problem="middle of a window", where=f"item {name}"):
            accel.save_state(CPU, tmp_path, {name: saved[name]}, step=2)


@pytest.mark.parametrize(
    ("place", "take"),
    [
        (lambda cursor: cursor, lambda item: item),
        (lambda cursor: [cursor], lambda item: item[0]),
        (lambda cursor: {"a": (1, cursor)}, lambda item: item["a"][1]),
        (lambda cursor: State(cursor), lambda item: item.cursor),
        (lambda cursor: State(more={"x": [cursor]}), lambda item: item.more["x"][0]),
        (Holder, lambda item: item.records[0]),
    ],
)
def test_each_rank_gets_its_own_stream_position_back_from_any_depth(place: Any, take: Any, tmp_path: Path) -> None:
    def body(ctx: DistContext) -> tuple[object, object]:
        mine = StreamPosition((WorkerPosition(elements=3 + ctx.rank),), ranks=2)
        item = place(accel.Cursor(seed=1, stream=mine))
        path = accel.save_state(ctx, tmp_path, {"item": item}, step=1)
        live = place(accel.Cursor())
        loaded: Any = accel.load_state(ctx, path, {"item": live})["item"]
        return take(loaded), take(item)

    one, other = simulate(body, 2)
    assert one[0] == one[1]
    assert other[0] == other[1]
    assert one[0] != other[0]


def test_the_position_in_a_stream_is_written_once_for_a_state(tmp_path: Path) -> None:
    ctx = accel.single()
    position = StreamPosition((WorkerPosition(state={"buffer": bytes(range(250)) * 400}),), ranks=1)
    state = accel.train_state(ctx).at(accel.Cursor(stream=position))
    rows = []
    for name, item in {"state": state, "cursor": state.cursor}.items():
        path = accel.save_state(ctx, tmp_path / name, {name: item}, step=1)
        assert accel.load_state(ctx, path, {name: item})[name] == item
        rows.append(sum(file.stat().st_size for file in path.glob("*.safetensors")))
    assert rows[0] < rows[1] + 1000


class Count(msgspec.Struct, frozen=True):
    """Keeps a number for each rank, and perhaps another record that does."""

    number: int = 0
    inner: Any = None

    def rank_part(self) -> object:
        return self.number

    def with_rank_part(self, part: Any) -> "Count":
        return msgspec.structs.replace(self, number=part)


def test_equal_numbers_of_a_record_and_one_inside_are_both_kept_by_rank(tmp_path: Path) -> None:
    def rank(ctx: DistContext) -> tuple[Any, Any]:
        saved = Count(5 + ctx.rank, Count(5 + ctx.rank))
        path = accel.save_state(ctx, tmp_path, {"count": saved}, step=1)
        return saved, accel.load_state(ctx, path, {"count": Count(inner=Count())})["count"]

    for saved, loaded in simulate(rank, 2):
        assert loaded == saved


def test_ranks_without_a_position_save_one_with_a_tensor_under_two_names(tmp_path: Path) -> None:
    def rank(ctx: DistContext) -> tuple[accel.Cursor, dict[str, Any]]:
        state = {"buffer": torch.arange(3)}
        read = StreamPosition((WorkerPosition(state={"read": state, "kept": state}),))
        cursor = accel.Cursor(consumed=4, stream=read if ctx.is_main_process else None)
        path = accel.save_state(ctx, tmp_path, {"one": cursor, "two": cursor}, step=1)
        return cursor, accel.load_state(ctx, path, {"one": accel.Cursor(), "two": accel.Cursor()})

    saved, loaded = simulate(rank, 2)[0]
    assert loaded["one"].stream is not None
    assert repr(loaded) == repr({"one": saved, "two": saved})


def test_a_position_that_rank_0_alone_holds_divides_the_writing_alike(tmp_path: Path) -> None:
    def rank(ctx: DistContext) -> bool:
        read = StreamPosition((WorkerPosition(state={"buffer": torch.arange(100_000)}),))
        cursor = accel.Cursor(consumed=4, stream=read if ctx.rank == 0 else None)
        saved, loaded = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))) for _ in range(2))
        for number, parameter in enumerate(saved.parameters()):
            nn.init.constant_(parameter, number)
        path = accel.save_state(ctx, tmp_path, {"model": saved, "cursor": cursor}, step=1)
        got = accel.load_state(ctx, path, {"model": loaded, "cursor": accel.Cursor()})["cursor"]
        same = all(map(torch.equal, saved.parameters(), loaded.parameters()))
        return same and (ctx.rank > 0 or repr(got) == repr(cursor))

    assert all(simulate(rank, 2))
