# SPDX-License-Identifier: Apache-2.0
"""Keys along axes of a mesh: unrelated where ranks differ along one of them, equal elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import example, given, settings, strategies as st
from profiles import share
from torch import nn

import accel
from accel.errors import ConfigError
from accel.seeding import Key
from accel.testing import Simulator
from accel.topology import FACTORS, Axes, coordinates

# data parallelism by one name or by two
NAMES = (("pp", "dp", "cp", "tp"), ("pp", "dp_replicate", "dp_shard", "cp", "tp"))


@st.composite
def meshes(draw: st.DrawFn) -> Axes:
    """Axes of a mesh of at most 8 ranks."""
    sizes = {name: draw(st.sampled_from([1, 2])) for name in draw(st.sampled_from(NAMES))}
    for name in FACTORS:  # too many: the first ones go
        if math.prod(sizes.values()) > 8 and name in sizes:
            sizes[name] = 1
    return Axes(**sizes)


def keys_of(ranks: Simulator, axes: Axes, along: Any) -> list[tuple[Key, Key]]:
    def rank(ctx: accel.DistContext) -> tuple[Key, Key]:
        ctx = accel.replace(ctx, mesh=str(axes) or "dp=1")
        return accel.seeding.rank_key(ctx, Key(3), along=along), accel.seeding.rank_key(ctx, Key(3))

    return ranks.run(rank, axes.world_size, default_group=True)


@settings(max_examples=share(0.5))
@given(axes=meshes(), along=st.permutations(FACTORS).flatmap(lambda names: st.integers(0, 6).map(lambda n: names[:n])))
@example(axes=Axes(dp_shard=2), along=["dp_replicate"])
def test_keys_are_equal_just_where_ranks_agree_along_the_axes(ranks: Simulator, axes: Axes, along: list[str]) -> None:
    keys = [key for key, _ in keys_of(ranks, axes, along)]
    asked = {*along, *(("dp_replicate", "dp_shard") if "dp" in along else ())}
    asked |= {"dp"} if "dp_replicate" in along else set()  # under the strategy ddp, dp is of replicas
    at = [tuple(place for name, place in coordinates(axes, rank).items() if name in asked) for rank in range(len(keys))]
    for a in range(len(keys)):
        for b in range(len(keys)):
            assert (keys[a] == keys[b]) == (at[a] == at[b])
    assert [key for key, _ in keys_of(ranks, axes, sorted(along))] == keys  # whatever their order


@settings(max_examples=share(0.2))
@given(axes=meshes())
def test_data_parallelism_alone_is_the_default(ranks: Simulator, axes: Axes) -> None:
    for along in (("dp",), ("dp_shard", "dp_replicate")):
        assert all(key == default for key, default in keys_of(ranks, axes, along))


def test_dropout_differs_where_activations_do(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> tuple[Any, Any, Any]:
        ctx = accel.replace(ctx, mesh="dp=2,cp=2,tp=2")

        def dropped(*along: str) -> tuple[float, ...]:
            with accel.seeding.seeded(ctx, accel.seeding.rank_key(ctx, Key(0), along=along)):
                return tuple(nn.functional.dropout(torch.ones(64), 0.5).tolist())

        return dropped("dp"), dropped("dp", "cp"), dropped("dp", "cp", "tp")

    samples, positions, blocks = zip(*ranks.run(rank, 8, default_group=True), strict=True)
    assert [len(set(each)) for each in (samples, positions, blocks)] == [2, 4, 8]
    for at in range(0, 8, 2):
        assert positions[at] == positions[at + 1]  # along tp activations are alike outside of its blocks
    assert samples[:4] == (samples[0],) * 4


def test_global_streams_follow_the_axes_too(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> tuple[float, Key]:
        ctx = accel.replace(ctx, mesh="cp=2,tp=2")
        key = accel.seeding.set_seed(ctx, 0, along=("dp", "cp"))
        assert key == accel.seeding.rank_key(ctx, Key(0), along=("cp", "dp"))
        return float(torch.rand(())), key

    drawn = [each for each, _ in ranks.run(rank, 4, default_group=True)]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


def test_experts_have_keys_of_their_own(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> Key:
        ctx = accel.replace(ctx, mesh="dp=4,ep=2")
        return accel.seeding.rank_key(ctx, Key(0), along=("ep",))

    first, second, third, fourth = ranks.run(rank, 4, default_group=True)
    assert first == third != second == fourth


def test_one_rank_has_the_key_of_the_first(ranks: Simulator) -> None:
    one = accel.seeding.rank_key(accel.single(), Key(1), along=("dp", "cp", "tp"))
    assert one == accel.seeding.rank_key(accel.single(), Key(1))
    assert ranks.run(lambda ctx: accel.seeding.rank_key(ctx, Key(1), along=("dp", "tp")), 2)[0] == one


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"along": "tp"}, "('tp',)"),
        ({"along": ("tq",)}, "unknown axis"),
        ({"along": ("tp",), "data_rank": 0}, "along, or data_rank"),
    ],
)
def test_refused_with_the_way_out(options: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        accel.seeding.rank_key(accel.single(), Key(0), **options)
    assert words in str(caught.value)


def test_axes_have_no_effect_where_all_draw_the_same() -> None:
    with assert_raises(ConfigError, problem="along has no effect"):
        accel.seeding.set_seed(accel.single(), 0, per_rank=False, along=("dp",))
