# SPDX-License-Identifier: Apache-2.0
"""States that ranks divide by names, as `Part`s: saved by any number of ranks, loaded by any other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

import accel
from accel.testing import Simulator


class Named:
    """Some of the values of a whole; a value has a tensor, and settings that are plain."""

    def __init__(self, names: range, *, fill: float | None = None) -> None:
        self.values: dict[str, Any] = {}
        for name in names:
            number = float(name) if fill is None else fill
            self.values[f"t.{name}"] = torch.full((name + 1,), number)
            self.values[f"s.{name}"] = {"rate": number}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.values = dict(state)


def rows_of(ctx: accel.DistContext, count: int) -> range:
    return range(ctx.rank * count // ctx.world_size, (ctx.rank + 1) * count // ctx.world_size)


@settings(max_examples=share(0.16))
@given(saving=st.integers(1, 4), loading=st.integers(1, 4), count=st.integers(1, 6))
def test_a_divided_state_loads_on_any_number_of_ranks(
    ranks: Simulator, tmp_path_factory: pytest.TempPathFactory, saving: int, loading: int, count: int
) -> None:
    out = tmp_path_factory.mktemp("parts")

    def save(ctx: accel.DistContext) -> None:
        items = {"named": accel.items.Part(Named(rows_of(ctx, count))), "state": accel.train_state(ctx)}
        accel.save_state(ctx, out, items, step=1)

    def load(ctx: accel.DistContext) -> None:
        live = Named(rows_of(ctx, count), fill=-1.0)
        accel.resume(ctx, out, {"named": accel.items.Part(live)}, accel.train_state(ctx))
        expected = Named(rows_of(ctx, count)).values
        assert live.values.keys() == expected.keys()
        for name, value in expected.items():
            same = torch.equal(live.values[name], value) if name.startswith("t") else live.values[name] == value
            assert same, name

    ranks.run(save, saving)
    ranks.run(load, loading)


def test_what_no_rank_loads_and_what_is_not_stored_are_named(tmp_path: Path) -> None:
    ctx = accel.single()
    path = accel.save_state(ctx, tmp_path, {"named": accel.items.Part(Named(range(3)))}, step=1)
    with assert_raises(accel.errors.CheckpointError, problem=r"in no rank's part:\n  named.s.2\n  named.t.2"):
        accel.load_state(ctx, path, {"named": accel.items.Part(Named(range(2)))})
    with assert_raises(
        accel.errors.CheckpointError, problem=r"missing in the checkpoint:\n    named.s.3\n    named.t.3"
    ):
        accel.load_state(ctx, path, {"named": accel.items.Part(Named(range(4)))})
