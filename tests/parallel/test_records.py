# SPDX-License-Identifier: Apache-2.0
"""A record of a model's forward says what stages need: without memory as with it, no less, and hardly more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import replays
import torch
from handwritten import MODELS, Handwritten, named
from hypothesis import given, settings, strategies
from planned_parts import Cut, ForwardRecord, cut_record, record_forward, without_memory
from profiles import share
from tables import in_turn
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel.errors import AccelError, PrepareError, StageError
from accel.fakes import is_fake
from accel.parallel._copies import copied_model
from accel.parallel._record import Label
from accel.parallel.axes.pipeline import pipeline_of
from accel.parallel.axes.pipeline._cut import MOST_TWICE, share_twice
from accel.parallel.axes.pipeline._stages import recorded_calls
from accel.random import Key
from accel.testing import Simulator

QUICK = ("nano_gpt", "residuals_between", "listed_losses", "moe")
IN_TWO = ("nano_gpt", "in_place", "aux_attribute")  # stages, by default
FEW_CALLS = ("lstm", "gru")  # three modules
DECOMPOSED = ("codebooks",)  # torch makes a matmul of cdist where tensors have no values: other FLOPs
AGAIN = ("dlrm",)  # products between its modules
# A kind of forward each: draws of its own, side effects, checkpoints, several towers, one block several times.
DROPPING = (
    "nano_gpt_dropout",
    "vae",
    "t5",
    "unet",
    "moe",
    "listed_losses",
    "aux_attribute",
    "hooked_features",
    "reentrant",
    "nested_checkpoints",
    "residuals_between",
    "halting",
    "shared_block",
    "clip",
    "spectral_norm",
    "mamba",
)
FIXED = [each for each in MODELS if "random" not in each.tags]


def _slow(entries: list[Handwritten], *quick: str) -> list[Any]:
    """The entries as parameters; all but some run nightly."""
    marks = [() if each.name in quick else pytest.mark.nightly for each in entries]
    return [pytest.param(each, id=each.name, marks=mark) for each, mark in zip(entries, marks, strict=True)]


def _facts(record: ForwardRecord, *, flops: bool = True) -> Any:
    leaves = [[msgspec.structs.replace(leaf, value=None) for leaf in each.leaves] for each in record.calls]
    needs = [
        (each.needs, dict(each.arguments), [stash[:2] for stash in each.stashes], each.writes, flops and each.flops)
        for each in record.calls
    ]
    return record.paths, leaves, needs, record.end, record.decisions, record.held, record.between


@pytest.mark.parametrize("entry", _slow(list(MODELS), *QUICK))
def test_a_record_without_memory_says_what_a_real_one_says(entry: Handwritten) -> None:
    try:
        given = replays.example(entry, 2)
    except PrepareError:
        assert entry.name in FEW_CALLS
        return
    batch = given.batch
    real = record_forward(copied_model(entry.make(), {}), given.record.units, batch.args, batch.kwargs)
    if "decisions" in entry.tags:  # random numbers take another way
        assert given.record.paths == real.paths
    else:
        flops = entry.name not in DECOMPOSED
        assert _facts(given.record, flops=flops) == _facts(real, flops=flops)


@pytest.mark.parametrize(
    ("entry", "stages"),
    [
        *((each, 2) for each in named(*IN_TWO)),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in in_turn([each for each in FIXED if each.name not in IN_TWO], 3, 4, 2)
        ),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_stages_are_the_model(entry: Handwritten, stages: int) -> None:
    try:
        given = replays.example(entry, stages)
    except (PrepareError, StageError):
        assert entry.name in (*FEW_CALLS, *AGAIN)
        return
    assert replays.difference(replays.run_plain(given), replays.run_stages(given, replays.cut(given, stages))) < 1e-10


@pytest.mark.parametrize("trains", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("entry", _slow([replays.dropping(each) for each in named(*DROPPING)], "nano_gpt_dropout"))
def test_any_cut_draws_the_random_numbers_of_one_stage(entry: Handwritten, trains: bool) -> None:
    """Dropout is on in modules and between them; stages begin at calls that are drawn."""
    record = replays.example(entry, 1, trains=trains)
    one = cut_record(record.record, [0])

    @settings(max_examples=share(0.08))
    @given(strategies.data())
    def law(data: strategies.DataObject) -> None:
        calls = range(1, len(record.record.calls))
        begins = data.draw(strategies.sets(strategies.sampled_from(calls), min_size=1, max_size=4))
        key = Key(data.draw(strategies.integers(0, 99)))
        plan = cut_record(record.record, [0, *sorted(begins)])
        assert replays.difference(replays.run_stages(record, one, key), replays.run_stages(record, plan, key)) < 1e-10

    law()
    drawn = [replays.run_stages(record, one, Key(seed))[0].item() for seed in range(2)]
    assert (drawn[0] != drawn[1]) == trains


def _mistakes(plan: Cut) -> Iterator[tuple[str, Cut]]:
    """Plans with one need, one parameter or one dense output less, or one need in place of another."""
    for at, stage in enumerate(plan.stages):
        for each in stage.needs:
            yield f"stage {at} without {each}", _with(plan, at, needs=tuple(x for x in stage.needs if x != each))
        held = sorted(each for each in stage.holds if each.endswith("weight"))
        for each in held[:: max(1, len(held) // 3)]:
            yield f"stage {at} without {each}", _with(plan, at, holds=stage.holds - {each})
        if at and stage.needs and stage.needs[0].kind == "output" and stage.needs[0].call:
            other = Label("output", stage.needs[0].call - 1, 0)
            yield f"stage {at} with {other}", _with(plan, at, needs=(other, *stage.needs[1:]))


def _with(plan: Cut, at: int, **changes: Any) -> Cut:
    stages = list(plan.stages)
    stages[at] = msgspec.structs.replace(stages[at], **changes)
    return msgspec.structs.replace(plan, stages=tuple(stages))


@pytest.mark.parametrize(
    "entry", _slow(named("nano_gpt", "unet", "clip", "residuals_between", "t5"), "residuals_between")
)
def test_a_wrong_plan_is_loud(entry: Handwritten) -> None:
    given = replays.example(entry, 3)
    want = replays.run_plain(given)
    plan = replays.cut(given, 3)
    ties = [set(each.names) for each in given.record.held if len(each.names) > 1]
    silent: list[str] = []
    mistakes = list(_mistakes(plan))
    for what, wrong in mistakes[:: 5 if entry.name == "residuals_between" else 1]:
        if any(what.endswith(tuple(f" {name}" for name in names)) for names in ties):
            continue  # another name of it stays
        try:
            off = replays.difference(want, replays.run_stages(given, wrong))
        except (AccelError, RuntimeError, KeyError):
            continue
        if off < 1e-8:
            silent.append(what)
    assert silent == []


@pytest.mark.parametrize("name", ["nano_gpt", "residuals_between"])
@pytest.mark.parametrize("stages", [2, 4])
def test_one_hidden_state_is_sent_at_a_boundary(name: str, stages: int) -> None:
    given = replays.example(named(name)[0], stages)
    for stage in replays.cut(given, stages).stages[:-1]:
        (sent,) = map(given.record.leaf, stage.passes)
        assert sent.shape == (4, 6, 16)


@pytest.mark.parametrize("entry", _slow(list(MODELS), "called_by_parts", "nano_gpt", "dlrm"))
def test_flops_are_hardly_computed_twice_or_the_place_is_named(entry: Handwritten) -> None:
    try:
        given = replays.example(entry, 4)
    except PrepareError:
        assert entry.name in FEW_CALLS
    except StageError as error:
        found = entry.name, "before the call of top_l.0" in str(error)
        assert found in [(name, True) for name in AGAIN]
    else:
        assert share_twice(given.record, replays.begins(given.record, 4)) <= MOST_TWICE


class Tables(nn.Module):
    """Large tables outside of blocks, in each block and in an attribute; the forward changes two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        for block in self.blocks:
            block.register_buffer("table", torch.rand(64, 512))
        self.register_buffer("mask", torch.rand(64, 512))
        self.register_buffer("queue", torch.zeros(64, 512))
        self.angles = torch.rand(64, 512)

    def forward(self, x: Tensor) -> Tensor:
        self.queue[0] += 1
        self.angles.mul_(2)
        for block in self.blocks:
            x = block(x) * block.table[: len(x), :4] * self.mask[: len(x), :4] * self.angles[: len(x), :4]
        return x


def test_a_record_takes_no_memory_for_large_buffers_and_leaves_them_as_they_are() -> None:
    model = Tables()
    before = {name: each.clone() for name, each in model.named_buffers()} | {"angles": model.angles.clone()}
    ghost = without_memory(model, torch.device("cpu"))
    own = {name: each.data_ptr() for name, each in model.named_buffers()} | {"angles": model.angles.data_ptr()}
    shared = {name: each.data_ptr() for name, each in ghost.named_buffers()}
    assert shared | {"angles": ghost.angles.data_ptr()} == own
    units = tuple(f"blocks.{at}" for at in range(3))
    record = record_forward(ghost, units, (torch.rand(2, 4),), {})
    assert record.paths == units
    assert all(torch.equal(each, before[name]) for name, each in model.named_buffers())
    assert torch.equal(model.angles, before["angles"])


def test_a_pipeline_holds_the_large_buffers_of_its_stage_alone(ranks: Simulator) -> None:
    def held(ctx: accel.DistContext) -> tuple[dict[str, bool], list[str]]:
        model = accel.prepare_model(accel.replace(ctx, mesh="pp=2"), Tables(), example=torch.rand(4, 4))
        pipeline = pipeline_of(model)
        assert pipeline is not None
        ghost = pipeline.replays.ghost
        live = dict(model.named_buffers())
        return {name: is_fake(each) for name, each in ghost.named_buffers()}, sorted(live)

    for fakes, live in ranks.run(held, 2, default_group=True):
        assert {name for name, fake in fakes.items() if not fake} == set(live)
        assert {"mask", "queue"} < set(live) < set(fakes)


class _Operators(TorchDispatchMode):
    """Counts the operators that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_a_record_runs_at_most_five_operators_for_two_of_the_forward() -> None:
    """A law about time is one about operators here: 24 layers take 0.7 CPU seconds on one core."""
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(num_hidden_layers=24, hidden_size=64, intermediate_size=96, vocab_size=200)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    with _Operators() as plain:
        _ = model(torch.zeros(2, 8, dtype=torch.int64, device="meta"))
    with _Operators() as record:
        calls = recorded_calls(model)
    assert len(calls) == 27
    assert plain.count < record.count <= 2.5 * plain.count
