# SPDX-License-Identifier: Apache-2.0
"""Megatron's order of ranks as a mesh: for every order and all sizes up to 16 ranks, by formula and by Megatron."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises

import accel
from accel.engines.megatron import RankMesh, from_megatron, megatron_items, megatron_mesh, mesh_of_groups

ORDERS = ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "tp-pp-dp-ep-cp", "pp-dp-cp-ep-tp"]
MOST = 16


def all_sizes() -> Iterator[dict[str, int]]:
    """The sizes of tp, cp, dp and pp whose product is at most 16."""
    for sizes in itertools.product(range(1, MOST + 1), repeat=4):
        if math.prod(sizes) <= MOST:
            yield dict(zip(("tp", "cp", "dp", "pp"), sizes, strict=True))


def group_of(sizes: Mapping[str, int], order: str, rank: int, *along: str) -> tuple[int, ...]:
    """The ranks that differ from one along some kinds of parallelism; the first in the order is the fastest."""
    names = [name for name in order.split("-") if name in sizes]
    places = [dict(zip(reversed(names), place, strict=True)) for place in places_of(sizes, names)]
    mine = places[rank]
    fixed = [name for name in names if name not in along]
    return tuple(at for at, each in enumerate(places) if all(each[name] == mine[name] for name in fixed))


def places_of(sizes: Mapping[str, int], names: list[str]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(sizes[name]) for name in reversed(names)))


@pytest.mark.parametrize("order", ORDERS)
def test_every_rank_finds_the_mesh_of_megatrons_order(order: str) -> None:
    for sizes in all_sizes():
        world = math.prod(sizes.values())
        names = tuple(name for name in reversed(order.split("-")) if sizes.get(name, 1) > 1) or ("dp",)
        expected = RankMesh(names, tuple(sizes[name] for name in names))
        for rank in {0, world // 2, world - 1}:
            groups = {name: group_of(sizes, order, rank, name) for name in sizes}
            found = mesh_of_groups(groups, rank, world)
            assert found == expected, (sizes, rank)
            assert all(found.row(name, rank) == groups[name] for name in sizes)


@pytest.mark.parametrize("order", ["tp-ep-dp-pp", "tp-ep-pp-dp", "ep-dp-tp-pp"])
def test_experts_divide_the_data_ranks_where_they_lie_within_them(order: str) -> None:
    for shape in itertools.product(range(1, 5), range(2, 5), range(1, 5), range(1, 3)):
        sizes = dict(zip(("tp", "ep", "dp", "pp"), shape, strict=True))
        world = math.prod(shape)
        is_one = group_is_even(sizes, order)
        for rank in {0, world // 2, world - 1}:
            groups = {name: group_of(sizes, order, rank, name) for name in ("tp", "pp", "ep")}
            data = group_of(sizes, order, rank, "dp", "ep")
            edp = group_of(sizes, order, rank, "dp")
            if not is_one:
                continue
            found = mesh_of_groups({**groups, "cp": (rank,), "dp": data, "edp": edp}, rank, world)
            assert found.row("ep", rank) == groups["ep"]
            assert found.row("dp", rank) == edp
            assert math.prod(found.sizes) == world


def group_is_even(sizes: Mapping[str, int], order: str) -> bool:
    """Whether nothing lies between dp and ep in the order, so that both are one group of Megatron's."""
    several = [name for name in order.split("-") if sizes[name] > 1 or name in ("dp", "ep")]
    return abs(several.index("dp") - several.index("ep")) == 1


def test_experts_across_other_ranks_leave_the_dense_mesh() -> None:
    groups = {"tp": (0,), "cp": (0, 1), "dp": (0, 2), "pp": (0,), "ep": (0, 1, 2, 3), "edp": (0,)}
    assert mesh_of_groups(groups, 0, 4) == RankMesh(("dp", "cp"), (2, 2))


@pytest.mark.parametrize("tp", [(0,), (0, 2), (0, 1, 2)])
def test_groups_that_are_no_mesh_are_named(tp: tuple[int, ...]) -> None:
    with assert_raises(accel.errors.ConfigError, problem="do not form one mesh") as caught:
        mesh_of_groups({"tp": tp, "cp": (0,), "dp": (0, 2), "pp": (0,)}, 0, 4)
    assert f"tp={len(tp)} {list(tp)}" in caught.value.got


def test_a_missing_megatron_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", None)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(accel.errors.MissingExtraError) as caught:
        from_megatron()
    assert "accel-torch[megatron]" in caught.value.fix


class _State:
    """A parallel state that nobody has initialized."""

    @staticmethod
    def model_parallel_is_initialized() -> bool:
        return False


def test_a_parallel_state_that_is_not_initialized_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", cast(Any, _State))
    with pytest.raises(accel.errors.ConfigError) as caught:
        megatron_mesh("cpu")
    assert "initialize_model_parallel" in caught.value.fix
    assert not dist.is_initialized()


class _TwoByTwo:
    """A parallel state of two tensor-parallel halves and two stages."""

    model_parallel_is_initialized = staticmethod(lambda: True)
    get_tensor_model_parallel_world_size = staticmethod(lambda: 2)
    get_pipeline_model_parallel_world_size = staticmethod(lambda: 2)
    get_context_parallel_world_size = staticmethod(lambda: 1)
    get_data_parallel_world_size = staticmethod(lambda: 1)


def test_a_context_of_other_sizes_is_refused_with_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", cast(Any, _TwoByTwo))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(accel.errors.ConfigError) as caught:
        megatron_items(accel.single(), torch.nn.Linear(1, 1))
    assert caught.value.expected == "tp=2, pp=2"
    assert caught.value.got == "tp=1, pp=1"


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::")
def test_the_mesh_is_that_of_megatrons_rank_generator() -> None:
    state = pytest.importorskip("megatron.core.parallel_state")
    for order, sizes in itertools.product(ORDERS, all_sizes()):
        world = math.prod(sizes.values())
        made = state.RankGenerator(ep=1, order=order, **sizes)
        groups = {name: {rank: tuple(row) for row in made.get_ranks(name) for rank in row} for name in sizes}
        for rank in range(world):
            found = mesh_of_groups({name: by_rank[rank] for name, by_rank in groups.items()}, rank, world)
            assert all(found.row(name, rank) == groups[name][rank] for name in sizes)
            assert all(groups[name][rank] == group_of(sizes, order, rank, name) for name in sizes)
