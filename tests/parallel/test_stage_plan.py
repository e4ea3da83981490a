# SPDX-License-Identifier: Apache-2.0
"""Plans of pipeline stages: pure, complete, balanced; what does not divide a model is told at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, cast, get_args, get_type_hints

import pytest
import torch
from blocks import Stack
from catching import assert_raises, caught
from handwritten import Handwritten, named
from hypothesis import given, settings, strategies as st
from planned_parts import planned, split_batch, stage_modules, without_memory
from profiles import share
from torch import nn

import accel
from accel.errors import ConfigError, PrepareError
from accel.parallel._micro_batches import plan_rows
from accel.parallel.axes.pipeline import ReplayedModule
from accel.parallel.axes.pipeline._layout import make_layout
from accel.testing import Simulator
from accel.topology import Balance, divide

SCHEDULES = get_args(get_type_hints(accel.parallel.Plan)["schedule"])
COSTS = st.lists(st.integers(0, 9), min_size=1, max_size=9)


class Gpt(nn.Module):
    """Names and tied head of a language model; `extra` is a parameter around the blocks."""

    def __init__(self, depth: int = 3, *, extra: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(5, 4), nn.Embedding(6, 4), nn.Dropout(0.1)
        self.inner = nn.ModuleDict({"h": nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(depth))})
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.wte.weight
        if extra:
            self.scale = nn.Parameter(torch.ones(4))


@given(costs=COSTS, data=st.data())
def test_a_division_is_the_best_of_all(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    prices = data.draw(st.lists(st.floats(0, 1), min_size=len(costs), max_size=len(costs)) | st.just([]))
    equal = sum(costs) / parts or 1.0

    def price(ends: tuple[int, ...]) -> float:
        spans = list(itertools.pairwise((0, *ends)))
        return sum((sum(costs[a:b]) / equal) ** 2 + (prices[a] if prices else 0.0) for a, b in spans)

    ends = divide(costs, parts, prices)
    assert len(ends) == parts
    assert ends[-1] == len(costs)
    assert all(begin < end for begin, end in itertools.pairwise((0, *ends)))
    best = min(price((*cuts, len(costs))) for cuts in itertools.combinations(range(1, len(costs)), parts - 1))
    assert price(ends) == pytest.approx(best)


@given(count=st.integers(1, 12), data=st.data())
def test_equal_costs_make_earlier_parts_longer(count: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, count))
    ends = divide([3.0] * count, parts)
    assert [b - a for a, b in itertools.pairwise((0, *ends))] == [
        count // parts + (at < count % parts) for at in range(parts)
    ]


@given(count=st.integers(1, 9), data=st.data())
def test_parts_begin_where_the_price_is_finite(count: int, data: st.DataObject) -> None:
    allowed = data.draw(st.sets(st.integers(1, count))) | {0}
    prices = [0.0 if at in allowed else math.inf for at in range(count + 1)]
    ends = divide([1.0] * (count + 1), data.draw(st.integers(1, len(allowed))), prices)
    assert set(ends[:-1]) <= allowed


@settings(max_examples=share(0.5))
@given(depth=st.integers(2, 9), data=st.data())
def test_every_module_of_a_chain_has_one_stage(depth: int, data: st.DataObject) -> None:
    model = Stack(depth)
    stages = data.draw(st.integers(1, depth))
    plan = accel.parallel.stage_plan(model, stages)
    assert list(itertools.chain(*plan)) == ["first", *(f"blocks.{at}" for at in range(depth)), "last"]
    blocks = [sum(path.startswith("blocks.") for path in stage) for stage in plan]
    assert max(blocks) - min(blocks) <= 1 or max(blocks) == -(-depth // stages)


def test_a_plan_follows_the_order_of_a_model_on_any_device() -> None:
    with torch.device("meta"):
        plan = accel.parallel.stage_plan(Gpt(), 2)
    assert plan == (("wte", "wpe", "inner.h.0", "inner.h.1"), ("inner.h.2", "norm", "head"))


def test_costs_move_blocks() -> None:
    costs = {"wte": 2, "head": 0, "inner.h.2": 0.5}
    assert accel.parallel.stage_plan(Gpt(), 2, costs=costs)[0] == ("wte", "wpe", "inner.h.0")


def test_a_sequential_is_a_chain_of_its_modules() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert accel.parallel.stage_plan(model, 2) == (("1",), ("3",))


@pytest.mark.parametrize(
    ("model", "stages", "fields"),
    [
        (
            nn.Linear(2, 2),
            2,
            {"problem": "fewer calls of modules than stages", "expected": "at least 2", "got": "none"},
        ),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 2, {"expected": "at least 2", "got": "^0$"}),
        (Gpt(), 8, {"expected": "at least 8", "got": "wte, wpe, inner.h.0.0"}),
    ],
)
def test_models_of_fewer_modules_than_stages_are_refused(model: nn.Module, stages: int, fields: dict[str, str]) -> None:
    with assert_raises(PrepareError, **fields):
        accel.parallel.stage_plan(model, stages)


@pytest.mark.parametrize("stages", [0, -1, 1.5, True])
def test_numbers_of_stages_are_integers_from_one(stages: int) -> None:
    with assert_raises(ConfigError, problem="the number of stages is not valid"):
        accel.parallel.stage_plan(Gpt(), stages)


@pytest.mark.parametrize(
    ("costs", "fields"),
    [
        ({"inner.h.9": 1}, {"problem": "than a module that stages divide"}),
        ({"wte": -1}, {"problem": "the cost is not valid"}),
        ({"wte": "1"}, {"where": "wte"}),
    ],
)
def test_costs_are_numbers_of_modules_that_stages_divide(costs: dict[str, float], fields: dict[str, str]) -> None:
    with assert_raises(ConfigError, **fields):
        accel.parallel.stage_plan(Gpt(), 2, costs=costs)


def test_a_parameter_around_the_modules_is_in_every_stage() -> None:
    plan = planned(without_memory(Gpt(extra=True), torch.device("cpu")), None, 3)
    assert all("scale" in held for held in plan.holds)
    tied = [("wte.weight" in held, "head.weight" in held) for held in plan.holds]
    assert tied == [(True, True), (False, False), (True, True)]


def test_more_stages_than_blocks_begin_at_other_modules() -> None:
    plan = accel.parallel.stage_plan(Gpt(), 5)
    assert list(itertools.chain(*plan)) == ["wte", "wpe", *(f"inner.h.{at}" for at in range(3)), "norm", "head"]
    assert all(plan)


def test_towers_without_an_example_follow_one_another() -> None:
    plan = accel.parallel.stage_plan(nn.Transformer(8, 2, 2, 2, 8, batch_first=True), 2)
    assert [path for path in plan[0] if ".layers." in path] == ["encoder.layers.0", "encoder.layers.1"]
    assert [path for path in plan[1] if ".layers." in path] == ["decoder.layers.0", "decoder.layers.1"]


def test_all_problems_of_stages_are_told_at_once() -> None:
    stages = [["wte", "inner.h.0"], ["inner.h.1", "hed"], []]
    with pytest.raises(PrepareError) as caught:
        planned(without_memory(Gpt(), torch.device("cpu")), None, stages)
    lines = str(caught.value).split("\n")[1:-1]
    assert [line.strip() for line in lines] == [
        "stage 2 has no module",
        "'hed' is no module of the model. Did you mean `head`?",
    ]


@pytest.mark.parametrize("stages", [[["wte"], ["wte"]], [["inner.h.1"], ["inner.h.0"]], [["wte"], ["drop"]]])
def test_stages_begin_in_the_order_of_their_modules(stages: list[list[str]]) -> None:
    with assert_raises(PrepareError, problem="does not call the modules of the stages in their order"):
        planned(without_memory(Gpt(), torch.device("cpu")), None, stages)


@given(schedule=st.sampled_from(SCHEDULES), ranks=st.integers(2, 5), per=st.integers(1, 3))
def test_ranks_share_the_stages_or_the_schedule_is_refused(schedule: str, ranks: int, per: int) -> None:
    refused = caught(make_layout, schedule, ranks, per, None)
    if refused is not None:
        assert isinstance(refused, ConfigError)
        assert refused.where == "plan=, stages_per_rank"
        return
    layout = make_layout(schedule, ranks, per, None)
    found = [layout.of(rank) for rank in range(ranks)]
    assert sorted(itertools.chain(*found)) == list(range(ranks * per))
    assert {len(each) for each in found} == {per}
    assert layout.owners == {stage: rank for rank, own in enumerate(found) for stage in own}


@pytest.mark.parametrize(
    ("schedule", "per", "micro", "fields"),
    [
        ("1F1B", 1, 2, {"expected": "3 or more", "got": "^2$"}),
        ("DualPipeV", 2, 5, {"expected": "6 or more", "got": "^5$"}),
        ("Interleaved1F1B", 2, 7, {"expected": "a multiple of 2"}),
        ("GPipe", 2, None, {"fix": "Use Interleaved1F1B"}),
        ("ZBVZeroBubble", 1, None, {"expected": "2, one on each side of its V"}),
        ("LoopedBFS", 1, None, {"expected": "2 or more"}),
    ],
)
def test_numbers_that_a_schedule_cannot_run_are_refused(
    schedule: str, per: int, micro: int | None, fields: dict[str, str]
) -> None:
    with assert_raises(ConfigError, **fields):
        make_layout(schedule, 3, per, micro)


@given(rows=st.integers(1, 30), count=st.integers(1, 8), equal=st.booleans())
def test_micro_batches_hold_each_row_once(rows: int, count: int, equal: bool) -> None:
    found = plan_rows(rows, count, equal=equal)
    assert len(found) == count
    real = [row for each in found for row in range(each.begin, each.begin + each.real)]
    assert real == list(range(rows))
    assert all(1 <= each.size >= each.real for each in found)
    if equal:
        assert len({each.size for each in found}) == 1
    else:
        assert max(each.size for each in found) - min(each.real for each in found) <= 1


@settings(max_examples=share(0.6))
@given(rows=st.integers(1, 9), count=st.integers(1, 5), equal=st.booleans())
def test_what_fills_a_micro_batch_up_is_the_last_row(rows: int, count: int, equal: bool) -> None:
    inputs = {"ids": torch.arange(2 * rows).view(rows, 2), "positions": torch.arange(2)[None], "cache": False}
    for each in split_batch(inputs, torch.arange(rows), count, equal=equal):
        expected = [min(each.rows.begin + at, rows - 1) for at in range(each.rows.size)]
        assert each.targets.tolist() == expected
        assert each.kwargs["ids"][:, 0].tolist() == [2 * row for row in expected]
        assert torch.equal(each.kwargs["positions"], inputs["positions"])
        assert each.kwargs["cache"] is False


@pytest.mark.parametrize(
    ("inputs", "fields"),
    [
        ((torch.ones(3, 2), torch.ones(4)), {"problem": "different numbers of rows"}),
        (torch.ones(0, 2), {"problem": "without rows"}),
        ({"text": "a"}, {"got": "no tensor"}),
    ],
)
def test_batches_that_cannot_be_split_are_refused(inputs: object, fields: dict[str, str]) -> None:
    with assert_raises(accel.errors.DataError, **fields):
        split_batch(inputs, None, 2, equal=True)


class Uneven(nn.Module):
    """Blocks beside a large embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(400, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 4)) for _ in range(6))
        self.head = nn.Linear(4, 400, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


@pytest.mark.parametrize(("balance", "first"), [("blocks", 3), ("memory", 3), ("time", 4)])
def test_stages_are_balanced_by_blocks_memory_or_time(balance: Any, first: int) -> None:
    stages = accel.parallel.stage_plan(Uneven(), 2, balance=balance)
    assert sum(path.startswith("blocks") for path in stages[0]) == first
    heavy = accel.parallel.stage_plan(Uneven(), 2, balance=balance, costs={"embed": 1e9})
    assert sum(path.startswith("blocks") for path in heavy[0]) == 1


def test_an_unknown_balance_is_refused() -> None:
    with assert_raises(ConfigError, problem="unknown balance"):
        _ = accel.parallel.stage_plan(Uneven(), 2, balance="parameters")  # type: ignore[arg-type]


def test_an_example_divides_by_the_recorded_calls() -> None:
    ids = torch.zeros(2, 5, dtype=torch.int64)
    assert accel.parallel.stage_plan(Uneven(), 2, example=ids)[0] == ("embed", *(f"blocks.{at}" for at in range(4)))
    first = {
        balance: sum(path.startswith("blocks") for path in accel.parallel.stage_plan(
            Uneven(), 2, example=ids, balance=balance)[0])
        for balance in get_args(Balance)
    }  # fmt: skip
    assert first == {"blocks": 3, "memory": 3, "time": 4}
    heavy = accel.parallel.stage_plan(Uneven(), 2, example=ids, costs={"embed": 1e9})
    assert heavy[0] == ("embed",)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("each", named("nano_gpt", "unet", "backwards", "listed_losses"), ids=lambda each: each.name)
def test_a_plan_by_an_example_has_the_stages_that_prepare_makes(
    ranks: Simulator, each: Handwritten, stages: int
) -> None:
    example = each.batch(6, 4).inputs

    def prepared(ctx: accel.DistContext) -> Sequence[str]:
        ctx = accel.replace(ctx, mesh=f"pp={stages}")
        model = accel.prepare(ctx, each.make(), example=example)
        return cast(ReplayedModule, stage_modules(model)[0]).own

    found = ranks.run(prepared, stages, default_group=True)
    assert tuple(found) == accel.parallel.stage_plan(each.make(), stages, example=example)
