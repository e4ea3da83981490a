# SPDX-License-Identifier: Apache-2.0
"""strict=False: what fits of an optimizer is loaded exactly, what does not keeps its live value and is counted."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_helpers import CPU, equal
from hypothesis import HealthCheck, given, settings, strategies as st
from profiles import share
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import accel
from accel.testing import simulate

NAMES = ["a", "b", "c", "d"]
SIZES = st.sampled_from([2, 3])


def layers(sizes: dict[str, int]) -> nn.Module:
    """Layers with a weight each, without a forward."""
    model = nn.Module()
    for name, size in sizes.items():
        model.register_module(name, nn.Linear(size, 1, bias=False))
    return model


def adam(model: nn.Module, groups: list[list[str]], lr: float) -> torch.optim.Optimizer:
    """One group for each list of layers, each with a rate of its own."""
    made = [
        {"params": [model.get_parameter(f"{name}.weight") for name in group], "lr": lr * (at + 1)}
        for at, group in enumerate(groups)
    ]
    return torch.optim.AdamW(made)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for each in model.parameters():
        each.grad = each.detach().clone()
    optimizer.step()
    optimizer.zero_grad()


@st.composite
def divided(draw: st.DrawFn) -> tuple[dict[str, int], list[list[str]]]:
    """Layers with their sizes, and the groups of those that an optimizer steps."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    sizes = {name: draw(SIZES) for name in names}
    stepped = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    cut = draw(st.integers(0, len(stepped)))
    return sizes, [group for group in (stepped[:cut], stepped[cut:]) if group]


OLD_SIZES, OLD_GROUPS = {"a": 2, "b": 3, "c": 2}, [["a", "b"], ["c"]]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = layers(OLD_SIZES)
    optimizer = adam(model, OLD_GROUPS, lr=0.01)
    step(model, optimizer)
    items = {"model": model, "optimizer": optimizer}
    return model, optimizer, accel.save_state(CPU, tmp_path_factory.mktemp("part"), items, step=0)


@settings(deadline=None, max_examples=share(0.5), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(live=divided(), steps=st.booleans())
def test_states_and_options_that_fit_are_the_stored_ones_and_others_the_live_ones(live, steps, stored):
    sizes, groups = live
    old_model, old, path = stored
    model = layers(sizes)
    optimizer = adam(model, groups, lr=0.5)
    if steps:
        step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    loaded = accel.load_state(CPU, path, {"model": model, "optimizer": optimizer}, strict=False)

    stepped, old_stepped = list(chain(*groups)), list(chain(*OLD_GROUPS))
    both = set(stepped) & set(old_stepped)
    for at, name in enumerate(stepped):
        found = optimizer.state[model.get_parameter(f"{name}.weight")]
        if name in both and sizes[name] == OLD_SIZES[name]:
            assert equal(found, old.state[old_model.get_parameter(f"{name}.weight")])
        else:
            assert equal(found, before["state"].get(at, {}))
    for at, group in enumerate(groups):
        common = both & set(group)
        same = [i for i, each in enumerate(OLD_GROUPS) if common and both & set(each) == common]
        assert optimizer.param_groups[at]["lr"] == (0.01 * (same[0] + 1) if same else 0.5 * (at + 1))
    fits = sizes == OLD_SIZES and sorted(map(sorted, groups)) == sorted(map(sorted, OLD_GROUPS))
    assert (loaded.skipped == ()) == fits
    step(model, optimizer)


def frozen(model: nn.Module) -> torch.optim.Optimizer:
    model.get_parameter("a.weight").requires_grad_(False)
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.5)


def with_a_new_group(model: nn.Module) -> torch.optim.Optimizer:
    head = nn.Parameter(torch.ones(2))
    model.register_parameter("head", head)
    return torch.optim.AdamW(
        [{"params": [each for each in model.parameters() if each is not head]}, {"params": [head], "lr": 0.7}], lr=0.5
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (frozen, "loaded 3 of 4 states, and options of 1 of 1 groups; 0 of 3 parameters and 0 groups"),
        (with_a_new_group, "loaded 4 of 4 states, and options of 1 of 2 groups; 1 of 5 parameters and 1 groups"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_line_on_rank_0_counts_what_stays(
    change: Callable[[nn.Module], torch.optim.Optimizer], said: str, ranks: int, tmp_path: Path, caplog: Any
) -> None:
    def body(ctx: accel.DistContext) -> tuple[str, ...]:
        torch.manual_seed(0)
        model = layers(dict.fromkeys(NAMES, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step(model, optimizer)
        path = accel.save_state(ctx, tmp_path, {"model": model, "optimizer": optimizer}, step=0)
        other = layers(dict.fromkeys(NAMES, 2))
        return accel.load_state(ctx, path, {"model": other, "optimizer": change(other)}, strict=False).skipped

    with caplog.at_level(logging.WARNING, "accel.checkpoint"):
        skipped = simulate(body, ranks)
    [record] = caplog.records
    assert f"\n  optimizer: {said} keep their live values" in record.getMessage()
    assert sum("optimizer" in line for line in record.getMessage().splitlines()) == 1
    assert all("optimizer: parameter model." in " ".join(lines) for lines in skipped)  # each difference by name


def test_positions_mean_no_parameter_where_their_number_differs(tmp_path: Path) -> None:
    model = layers(dict.fromkeys(NAMES, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    path = accel.save_state(CPU, tmp_path, {"optimizer": optimizer}, step=0)
    other = torch.optim.AdamW(list(model.parameters())[1:], lr=0.5)
    _ = accel.load_state(CPU, path, {"optimizer": other}, strict=False)
    assert not other.state
    assert other.param_groups[0]["lr"] == 0.5


def make_sequence(optimizer: torch.optim.Optimizer) -> SequentialLR:
    return SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 10)], milestones=[2])


@pytest.mark.parametrize("make", [lambda each: CosineAnnealingLR(each, 10), make_sequence])
def test_a_scheduler_goes_on_with_a_new_group(make: Any, tmp_path: Path) -> None:
    model = layers(dict.fromkeys(NAMES, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = make(optimizer)
    for _ in range(3):
        step(model, optimizer)
        scheduler.step()
    path = accel.save_state(CPU, tmp_path, {"model": model, "optimizer": optimizer, "scheduler": scheduler}, step=0)
    other = layers(dict.fromkeys(NAMES, 2))
    grown = with_a_new_group(other)
    items = {"model": other, "optimizer": grown, "scheduler": make(grown)}
    loaded = accel.load_state(CPU, path, items, strict=False)
    assert any("scheduler: values of groups: expected 2 groups, got 1 groups" in line for line in loaded.skipped)
    for _ in range(4):
        step(model, optimizer)
        scheduler.step()
        step(other, grown)
        items["scheduler"].step()
    assert items["scheduler"].last_epoch == scheduler.last_epoch == 7
    assert len(items["scheduler"].get_last_lr()) == 2


def test_sharded_states_are_loaded_in_part(tmp_path: Path) -> None:
    def made(ctx: accel.DistContext, trained: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        for each in model[trained:]:
            each.requires_grad_(False)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
        return accel.prepare(accel.replace(ctx, strategy="fsdp"), model, optimizer)

    def body(ctx: accel.DistContext) -> None:
        torch.manual_seed(0)
        model, optimizer = made(ctx, 3)
        step(model, optimizer)
        path = accel.save_state(ctx, tmp_path, {"model": model, "optimizer": optimizer}, step=0)
        other, some = made(ctx, 2)
        _ = accel.load_state(ctx, path, {"model": other, "optimizer": some}, strict=False)
        for old, new in zip(list(model.parameters())[:4], list(other.parameters())[:4], strict=True):
            assert torch.equal(optimizer.state[old]["exp_avg"].to_local(), some.state[new]["exp_avg"].to_local())

    _ = simulate(body, 2, default_group=True)
