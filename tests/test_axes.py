# SPDX-License-Identifier: Apache-2.0
"""Axes of a mesh: the ranks along each, what a text says, and combinations that no mesh has."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import pytest
import torch
from catching import assert_raises
from hypothesis import assume, given, strategies as st
from tables import rows

import accel
from accel.errors import ConfigError, EnvError
from accel.parallel import Axes, Plan
from accel.topology import AXES, FACTORS, axes_position, coordinates, fit_axes, mesh_sizes, rank_rows

divisors = {size: [each for each in range(1, size + 1) if size % each == 0] for size in range(1, 82)}


@st.composite
def axes(draw: st.DrawFn) -> Axes:
    """Any axes of up to 16 ranks."""
    left = 16
    sizes: dict[str, int] = {}
    names = ["pp", *draw(st.sampled_from([["dp"], ["dp_replicate", "dp_shard"]])), "cp", "tp"]
    for name in names:
        sizes[name] = draw(st.integers(1, min(4, left)))
        left //= sizes[name]
    taken = sizes.get("dp", 1) * sizes.get("dp_shard", 1) * sizes["cp"] * sizes["tp"]
    return Axes(**sizes, ep=draw(st.sampled_from(divisors[taken])))


@given(each=axes())
def test_ranks_lie_as_on_torchs_mesh(each: Axes) -> None:
    shape = [getattr(each, name) for name in FACTORS]
    grid = torch.arange(each.world_size).view(shape)
    for rank in range(each.world_size):
        at = coordinates(each, rank)
        assert int(grid[tuple(at[name] for name in FACTORS)]) == rank


@given(each=axes(), data=st.data())
def test_a_row_has_the_ranks_that_differ_along_its_axes_alone(each: Axes, data: st.DataObject) -> None:
    along = data.draw(st.sets(st.sampled_from(FACTORS)))
    rows = rank_rows(each, *along)
    assert sorted(itertools.chain(*rows)) == list(range(each.world_size))
    for row in rows:
        assert list(row) == sorted(row)
        assert len(row) == math.prod(getattr(each, name) for name in along)
        off = {tuple(coordinates(each, rank)[name] for name in FACTORS if name not in along) for rank in row}
        assert len(off) == 1


@given(each=axes())
def test_experts_take_neighbours_of_one_stage_and_replica(each: Axes) -> None:
    rows = rank_rows(each, "ep")
    for row in rows:
        assert list(row) == list(range(row[0], row[0] + each.ep))
        assert [coordinates(each, rank)["ep"] for rank in row] == list(range(each.ep))
        assert len({(coordinates(each, rank)["pp"], coordinates(each, rank)["dp_replicate"]) for rank in row}) == 1
    for row in rank_rows(each, "efsdp"):
        assert len({coordinates(each, rank)["ep"] for rank in row}) == 1
        assert len(row) == each.expert_ranks // each.ep
    assert rank_rows(each, "ep", "efsdp") == rank_rows(each, "dp", "dp_shard", "cp", "tp")


@given(each=axes())
def test_ranks_with_one_share_of_the_samples_differ_in_pp_cp_and_tp_alone(each: Axes) -> None:
    positions = [axes_position(each, AXES, rank) for rank in range(each.world_size)]
    counts = {position.data[1] for position in positions}
    assert counts == {each.dp * each.dp_replicate * each.dp_shard}
    for rank, position in enumerate(positions):
        at = {name: axis.rank for name, axis in position.axes if name in FACTORS and name != "dp"}
        assert at.items() <= coordinates(each, rank).items()
        same = {other for other, there in enumerate(positions) if there.data == position.data}
        assert same == set(next(row for row in rank_rows(each, "pp", "cp", "tp") if rank in row))


def _written(sizes: dict[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


@given(each=axes(), data=st.data())
def test_a_text_names_axes_in_any_order_and_one_may_be_left_open(each: Axes, data: st.DataObject) -> None:
    stated = {name: getattr(each, name) for name in AXES if getattr(each, name) > 1} or {"dp": 1}
    shuffled = dict(data.draw(st.permutations(list(stated.items()))))
    assert fit_axes(_written(shuffled), each.world_size, where="here") == each
    assert list(mesh_sizes(_written(shuffled), where="here")) == list(stated)
    left = data.draw(st.sampled_from([name for name in shuffled if name != "ep"] or [None]))
    assume(left is not None)
    assert fit_axes(_written({**shuffled, left: -1}), each.world_size, where="here") == each


@given(each=axes(), world_size=st.integers(1, 64))
def test_a_mesh_has_all_ranks_or_is_refused(each: Axes, world_size: int) -> None:
    text = _written(dict(each.sizes)) or "dp=1"
    if each.world_size == world_size:
        assert fit_axes(text, world_size, where="here") is not None
        return
    with assert_raises(EnvError, expected=f"^{each.world_size} ranks for ", got=f"^{world_size}$", where="^here$"):
        fit_axes(text, world_size, where="here", error=EnvError)


@given(text=st.text(st.sampled_from("dptcfs=,-01 2\n"), max_size=12))
def test_any_text_is_a_mesh_or_refused_by_name(text: str) -> None:
    try:
        sizes = mesh_sizes(text, where="here")
    except ConfigError as refused:
        error = refused
    else:
        assert set(filter(None, text.split(","))) == set(filter(None, _written(sizes).split(",")))
        return
    assert error.where == "here"


def test_no_text_is_no_mesh() -> None:
    assert fit_axes("", 7, where="here") is None


@rows(
    "text, fields",
    [
        (
            "dp",
            {
                "problem": "the mesh is not valid",
                "expected": "a text such as dp=2,tp=2 or dp=-1,tp=4",
                "got": "'dp'",
                "where": "here",
            },
        ),
        ("dp=0", {"got": "'dp=0'"}),
        ("dp=2,", {"got": "'dp=2,'"}),
        ("dp=2\n", {"got": r"'dp=2\\n'"}),
        ((2, 2), {"got": r"\(2, 2\)"}),
        (
            "dp=2,dp=2",
            {"problem": "an axis is repeated", "got": "'dp=2,dp=2'", "where": "here", "fix": "Name dp once."},
        ),
        (
            "dp_shards=2",
            {
                "problem": "unknown axis of a mesh",
                "got": "'dp_shards' in 'dp_shards=2'",
                "fix": "Did you mean `dp_shard`?",
            },
        ),
        ("fsdp=2", {"problem": "unknown axis of a mesh", "got": "'fsdp'"}),
        ("dp=-1,tp=-1", {"problem": "two sizes are -1", "got": "'dp=-1,tp=-1'"}),
        (
            "dp=2,dp_shard=2",
            {"problem": "two names for data parallelism", "got": "dp=2 together with dp_shard=2", "where": "here"},
        ),
        ("dp=2,ep=-1", {"problem": "the size of an axis is not valid", "expected": "1 or more", "got": "ep=-1"}),
        (
            "dp=2,tp=2,ep=3",
            {
                "problem": "experts cannot be divided among these ranks",
                "expected": "an ep that divides 4",
                "got": "ep=3",
            },
        ),
        ("dp_replicate=4,ep=2", {"expected": "an ep that divides 1"}),
    ],
)
def test_what_is_no_mesh_is_refused_with_its_text(text: Any, fields: dict[str, str]) -> None:
    with assert_raises(ConfigError, **fields):
        mesh_sizes(text, where="here")


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"pp": 1.5}, {"dp": 2, "dp_replicate": 2}, {"dp": -1}, {"ep": 2}])
def test_axes_that_no_mesh_has_are_refused(sizes: dict[str, Any]) -> None:
    with assert_raises(ConfigError, where="Axes"):
        Axes(**sizes)


def test_a_plan_is_a_value_that_files_hold() -> None:
    plan = Plan(
        tensor={"layers.*.up": "colwise"}, stages=(("a",), ("b", "c")), units=("layers.*",), reshard_after_forward=4
    )
    assert msgspec.convert(msgspec.to_builtins(plan), Plan) == plan
    assert msgspec.convert({"context": "ring", "units": 1000, "offload": True}, Plan).context == "ring"
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"schedule": "2F2B"}, Plan)


def test_a_rank_knows_its_place_along_every_axis(ranks: Any) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="tp=2,dp_shard=2,dp_replicate=2,ep=4")
        assert ctx.axes == Axes(dp_replicate=2, dp_shard=2, tp=2, ep=4)
        experts = accel.group_of(ctx, "ep")
        assert experts is accel.group_of(ctx, "ep")
        members = torch.distributed.get_process_group_ranks(experts)
        return [tuple(ctx.axis(name)) for name in ("dp", "dp_shard", "tp", "ep", "cp")], members

    said = ranks.run(rank, 8, default_group=True)
    for at, (places, members) in enumerate(said):
        assert places == [(at // 2, 4), (at // 2 % 2, 2), (at % 2, 2), (at % 4, 4), (0, 1)]
        assert members == list(range(at // 4 * 4, at // 4 * 4 + 4))
