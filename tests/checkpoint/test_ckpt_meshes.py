# SPDX-License-Identifier: Apache-2.0
"""What was saved on one mesh is loaded on any other, and training goes on as if nothing had been."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_helpers import equal
from ckpt_meshes import Layout, build, state, step, world_size

import accel

SOURCES: list[Layout] = [
    ("plain", (1,)),
    ("fsdp", (1,)),
    ("fsdp", (2,)),
    ("fsdp", (4,)),
    ("hsdp", (2, 2)),
    ("tensor", (2,)),
    ("both", (2, 2)),
]
GOALS: list[Layout] = [
    ("plain", (1,)),
    ("fsdp", (1,)),
    ("fsdp", (2,)),
    ("fsdp", (3,)),
    ("fsdp", (4,)),
    ("fsdp", (6,)),
    ("hsdp", (2, 3)),
    ("tensor", (3,)),
    ("both", (2, 2)),
    ("both", (2, 3)),
]
LEAN = {
    (("fsdp", (4,)), ("plain", (1,))),
    (("fsdp", (4,)), ("hsdp", (2, 3))),
    (("both", (2, 2)), ("fsdp", (3,))),
    (("both", (2, 2)), ("both", (2, 3))),
    (("plain", (1,)), ("fsdp", (4,))),
    (("hsdp", (2, 2)), ("both", (2, 2))),
}
PAIRS = [
    pytest.param(source, goal, id=f"{source} to {goal}", marks=() if (source, goal) in LEAN else pytest.mark.slow)
    for source in SOURCES
    for goal in GOALS
]
TOLERANCE = {"rtol": 0, "atol": 1e-9}
BEFORE, AFTER = 2, 2


def run(ranks: Any, body: Any, layout: Layout) -> list[Any]:
    return ranks.run(body, world_size(layout), default_group=True)


@pytest.fixture(scope="module")
def uninterrupted() -> list[dict[str, Any]]:
    layout: Layout = ("plain", (1,))
    model, optimizer = build(layout)
    found = []
    for number in range(BEFORE + AFTER):
        step(layout, 0, model, optimizer, number)
        found.append(state(model, optimizer))
    return found


def save(ranks: Any, layout: Layout, out: Path) -> list[dict[str, Any]]:
    def body(ctx: accel.DistContext) -> dict[str, Any]:
        model, optimizer = build(layout)
        for number in range(BEFORE):
            step(layout, ctx.rank, model, optimizer, number)
        accel.save_state(ctx, out, {"model": model, "optimizer": optimizer}, step=BEFORE)
        return state(model, optimizer)

    return run(ranks, body, layout)


def resume(ranks: Any, layout: Layout, path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The state just after loading, and two steps later."""

    def body(ctx: accel.DistContext) -> tuple[dict[str, Any], dict[str, Any]]:
        model, optimizer = build(layout, seed=9)
        accel.load_state(ctx, path, {"model": model, "optimizer": optimizer})
        loaded = state(model, optimizer)
        for number in range(BEFORE, BEFORE + AFTER):
            step(layout, ctx.rank, model, optimizer, number)
        return loaded, state(model, optimizer)

    return run(ranks, body, layout)


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], tuple[Path, dict[str, Any]]]:
    """Where a source was saved, and what it was; each is saved once."""

    @functools.cache
    def saved(source: Layout) -> tuple[Path, dict[str, Any]]:
        out = tmp_path_factory.mktemp("meshes")
        return out / f"step-{BEFORE:08d}", save(ranks, source, out)[0]

    return saved


@pytest.mark.parametrize(("source", "goal"), PAIRS)
def test_any_mesh_loads_the_bits_that_another_saved_and_trains_on(ranks, saved, uninterrupted, source, goal):
    path, expected = saved(source)
    torch.testing.assert_close(expected, uninterrupted[BEFORE - 1], **TOLERANCE)
    for loaded, later in resume(ranks, goal, path):
        assert equal(loaded, expected)
        torch.testing.assert_close(later, uninterrupted[-1], **TOLERANCE)
