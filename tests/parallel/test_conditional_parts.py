# SPDX-License-Identifier: Apache-2.0
"""Parts that only some ranks run, under `fsdp`: kept in a unit that always runs, or named on every rank."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from planned_parts import fsdp_units, matching
from processes import job, patience, script_ranks
from profiles import share
from steps import begin_batch
from torch import nn

import accel
from accel.comm import UnitLog, parting
from accel.comm._units import RankPlace, read_place
from accel.errors import CollectiveMismatch, PrepareError
from accel.parallel import Plan
from accel.testing import Simulator


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


class Vlm(nn.Module):
    """Text blocks, with a tower in front and one behind that a text-only batch skips."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList(_block() for _ in range(2))
        self.read = nn.ModuleList(_block() for _ in range(2))
        self.audio_tower = nn.ModuleDict({"blocks": nn.Sequential(_block(), _block())})

    def forward(self, text: torch.Tensor, parts: frozenset[str] = frozenset()) -> torch.Tensor:
        image = text
        for block in self.vision if "vision" in parts else ():
            image = block(image)
        text = text + image if "vision" in parts else text
        for block in self.read:
            text = block(text)
        return self.audio_tower["blocks"](text) if "audio" in parts else text


def _train(ctx: accel.DistContext, parts: tuple[str, ...], accumulation: int, **how: Any) -> dict[str, torch.Tensor]:
    """Two steps of four samples; the parts of half a batch, by the rank's index."""
    torch.manual_seed(0)
    model = accel.prepare_model(ctx, Vlm().double(), **how)
    model, adamw = accel.prepare(ctx, model, torch.optim.AdamW(model.parameters(), lr=0.1))
    state = accel.train_state(ctx, accumulation=accumulation)
    data = torch.randn(8 * accumulation, 4, dtype=torch.float64)
    loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(data, batch_size=4), global_batch=4)
    share, _ = ctx.data_parallel
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        halves = batch.data.chunk(2) if ctx.data_parallel[1] == 1 else [batch.data]
        with accel.accumulate(ctx, state, model):
            rows = [model(half, frozenset(parts[share + at].split())) for at, half in enumerate(halves)]
            state = accel.backward(ctx, torch.cat(rows).square().mean(), state)
        if state.sync:
            state = accel.optimizer_step(ctx, adamw, state)
    return accel.get_state_dict(ctx, model, dst=None)


TOGETHER = Plan(together=("vision*", "audio_*"))
KEPT = Plan(units=1, together=("Sequential",), reshard_after_forward=True)
USED = [("vision", ""), ("", "audio"), ("vision audio", ""), ("", ""), ("vision", "audio")]


@pytest.mark.parametrize("parts", [*USED[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in USED[2:])])
def test_parts_of_some_ranks_train_as_one_process_does(ranks: Simulator, parts: tuple[str, ...]) -> None:
    for accumulation, plan in ((1, TOGETHER), (2, KEPT)):
        alone = _train(accel.single(), parts, accumulation)
        found = ranks.run(
            lambda ctx, accumulation=accumulation, plan=plan: _train(
                accel.replace(ctx, strategy="fsdp"), parts, accumulation, plan=plan, find_unused_parameters=True
            ),
            2,
            default_group=True,
        )
        for each in found:
            torch.testing.assert_close(each, alone, rtol=0, atol=1e-12)


def test_a_plan_that_names_the_other_units_alone_trains_too(ranks: Simulator) -> None:
    plan = Plan(units=("read.*",))  # whose first block's input needs a gradient on one rank only
    alone = _train(accel.single(), USED[0], 1)
    found = ranks.run(
        lambda ctx: _train(accel.replace(ctx, strategy="fsdp"), USED[0], 1, plan=plan, find_unused_parameters=True),
        2,
        default_group=True,
    )
    torch.testing.assert_close(found[1], alone, rtol=0, atol=1e-12)


def test_no_unit_lies_in_parts_that_are_kept_together() -> None:
    net = Vlm()
    held = ("vision*", "audio_tower")
    assert fsdp_units(net, together=held) == ("read.0", "read.1", "")
    assert fsdp_units(net, units=1, together=held) == ("read.0.0", "read.1.0", "")
    assert fsdp_units(net, together=()) == fsdp_units(net)
    with assert_raises(PrepareError, got="vision.0", where="Plan.together"):
        fsdp_units(net, units=("vision.*", "read.*"), together=held)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("vision*", ["vision", "vision_tower"]),
        ("vision.*", ["vision.0", "vision.10"]),
        ("*", ["vision", "vision_tower"]),
        ("*.0", ["vision.0"]),
        ("vis*n.*", ["vision.0", "vision.10"]),
        ("", [""]),
    ],
)
def test_a_star_is_a_component_or_any_part_of_one(pattern: str, found: list[str]) -> None:
    assert matching(["", "vision", "vision_tower", "vision.0", "vision.10"], pattern) == found


def test_an_unknown_part_is_refused(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        accel.prepare(accel.replace(ctx, strategy="fsdp"), Vlm(), plan=Plan(together=("sight",)))

    with assert_raises(PrepareError, got="'sight'", where="Plan.together"):
        ranks.run(rank, 2, default_group=True)


def assert_told_of_both_ranks(text: str) -> None:
    """Both ranks' units and lines, and where they parted."""
    assert "vision.0 where rank 1 ran the unit read.0" in text
    assert text.count(" of read.1") == 2
    assert len(re.findall(r"\.py:\d+ in \w+", text)) >= 2


def test_ranks_that_run_different_units_are_told_with_a_line_that_trains(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext, **how: Any) -> dict[str, torch.Tensor]:
        return _train(accel.replace(ctx, strategy="fsdp"), USED[0], 1, **how)

    with pytest.raises(CollectiveMismatch) as caught:
        ranks.run(rank, 2, default_group=True)
    assert_told_of_both_ranks(str(caught.value))
    assert '("vision.*",)' in caught.value.fix
    line = re.search(r"prepare_model\(ctx, model, (.*)\), before prepare", caught.value.fix)
    assert line is not None
    how = eval(f"dict({line[1]})", {"accel": accel})
    found = ranks.run(lambda ctx: rank(ctx, **how), 2, default_group=True)
    torch.testing.assert_close(found[0], _train(accel.single(), USED[0], 1), rtol=0, atol=1e-12)


class Experts(nn.Module):
    """An expert each of two ranks in a block, chosen by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
        self.last = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, chosen: list[str]) -> torch.Tensor:
        return self.last(sum((self.experts[name](inputs) for name in chosen), inputs))


def _expert_step(ctx: accel.DistContext, **how: Any) -> None:
    torch.manual_seed(0)
    model = accel.prepare_model(accel.replace(ctx, strategy="fsdp"), Experts(), **how)
    state = begin_batch(ctx)
    with accel.accumulate(ctx, state, model):
        loss = model(torch.ones(2, 4), ["one", "two"] if ctx.rank else ["one"]).sum()
        state = accel.backward(ctx, loss, state, weight=2)
    accel.optimizer_step(ctx, torch.optim.SGD(model.parameters(), lr=0.1), state)


def test_experts_that_a_rank_never_calls_name_the_option(ranks: Simulator) -> None:
    with assert_raises(CollectiveMismatch, fix="experts that it never calls.*find_unused_parameters=True"):
        ranks.run(_expert_step, 2, default_group=True)
    ranks.run(lambda ctx: _expert_step(ctx, find_unused_parameters=True), 2, default_group=True)


@given(
    st.lists(st.sampled_from("abc"), max_size=8),
    st.lists(st.sampled_from("abcd"), max_size=5),
    st.lists(st.sampled_from("abcd"), max_size=5),
    st.sampled_from([0, 3, 1020, 3000]),
)
@settings(max_examples=share(0.4))
def test_two_ranks_part_at_the_first_unit_that_differs(same: Any, one: Any, two: Any, earlier: int) -> None:
    places = []
    for each in (one, two):
        log = UnitLog()
        for unit in itertools.chain(itertools.repeat("x.0", earlier), same, each):
            log.add(unit)
        places.append(read_place(log.at("in the gather of x.0").word()))
    found = parting(dict(enumerate(places)))
    expected = next((pair for pair in zip(one, two, strict=False) if pair[0] != pair[1]), None)
    assert (found and found.units) == expected
    if found is not None:
        assert found.patterns


def test_three_ranks_are_compared_with_the_lowest() -> None:
    places = {rank: RankPlace("", 2, ["0.a", unit]) for rank, unit in ((1, "1.b"), (2, "1.b"), (5, "2.c"))}
    found = parting(places)
    assert found is not None
    assert (found.ranks, found.units, list(found.patterns)) == ((1, 5), ("1.b", "2.c"), ["*.b", "*.c"])
    assert parting({}) is parting({3: places[5]}) is None


SCRIPT = """
import sys, os
sys.path.insert(0, {folder!r})
import torch, accel
from steps import begin_batch
from test_conditional_parts import Vlm

torch.set_num_threads(1)
how, timeout_s = sys.argv[1:]
with accel.session(device="cpu", strategy="fsdp", timeout_s=float(timeout_s)) as ctx:
    model = accel.prepare(ctx, Vlm())
    state = begin_batch(ctx)
    parts = frozenset(["vision"] if ctx.rank == 0 else [])
    try:
        if how == "evaluate":
            with torch.no_grad():
                model(torch.ones(2, 4), parts)
                model(torch.ones(3, 4), frozenset())
                accel.gather(ctx, torch.ones(1))
        with accel.accumulate(ctx, state, model):
            loss = model(torch.ones(2, 4), parts)
            accel.backward(ctx, loss.sum(), state, weight=2)
    except accel.errors.PeerError as error:
        print("told:", str(error).replace(chr(10), " "), flush=True)
        os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("how", ["train", "evaluate"])
def test_processes_that_run_different_units_name_both(tmp_path: Path, how: str) -> None:
    script = tmp_path / "parts.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent)))
    with script_ranks(script, job(2), how, patience(6), folder=tmp_path) as found:
        assert [rank.wait(120) for rank in found] == [0, 0], [rank.said() for rank in found]
        told = [rank.said() for rank in found]
    for text in told:
        assert "vision.0 where rank 1 ran the unit read.0" in text
        assert re.search(r"rank 0 in the \w+( of gradients)? of \S+ at \S+\.py:\d+", text)
        assert re.search(r"rank 1 in .+ at \S+\.py:\d+", text)
