# SPDX-License-Identifier: Apache-2.0
"""Ranks that share samples draw alike, others do not; models begin alike; nothing is left behind."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.errors import CollectiveMismatch, ConfigError
from accel.seeding import Key

relaxed = settings(deadline=None, max_examples=share(0.5))


def _draw() -> tuple[float, ...]:
    dropped = nn.functional.dropout(torch.ones(64), 0.5).tolist()
    return random.random(), float(np.random.rand()), float(torch.rand(())), *dropped


@relaxed
@given(seed=st.integers(0, 2**63 - 1), tensor_parallel=st.sampled_from([1, 2, 4]))
def test_ranks_that_share_samples_draw_alike_and_others_do_not(ranks, seed, tensor_parallel):
    def rank(ctx):
        key = accel.seeding.set_seed(ctx, seed, data_rank=ctx.rank // tensor_parallel)
        return key, _draw()

    keys, drawn = zip(*ranks.run(rank, 4), strict=True)
    for a in range(4):
        for b in range(4):
            same = a // tensor_parallel == b // tensor_parallel
            assert (keys[a] == keys[b]) == (drawn[a] == drawn[b]) == same


@pytest.mark.parametrize(
    ("names", "shares"),
    [
        (("dp", "tp"), [0, 0, 1, 1]),
        (("pp", "data"), [0, 1, 0, 1]),
        (("dp_replicate", "dp_shard"), [0, 1, 2, 3]),
        (("cp", "tp"), [0, 0, 0, 0]),
    ],
)
def test_a_mesh_says_who_draws_alike(ranks, names, shares):
    def rank(ctx):
        told = accel.replace(ctx, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
        accel.seeding.set_seed(told, 5)
        by_mesh = _draw()
        accel.seeding.set_seed(ctx, 5, data_rank=shares[ctx.rank])
        assert _draw() == by_mesh
        assert accel.seeding.rank_key(told, Key(7)) == accel.seeding.rank_key(ctx, Key(7), data_rank=shares[ctx.rank])
        return by_mesh

    drawn = ranks.run(rank, 4, default_group=True)
    assert [drawn.index(mine) for mine in drawn] == [shares.index(share) for share in shares]


def test_streams_that_a_checkpoint_does_not_have_follow_the_mesh(ranks, tmp_path):
    saved = accel.save_state(accel.single(), tmp_path, {"cursor": accel.Cursor()}, step=0)

    def rank(ctx):
        told = accel.replace(ctx, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
        accel.load_state(told, saved, {"cursor": accel.Cursor()})
        return _draw()

    drawn = ranks.run(rank, 4, default_group=True)
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


def test_without_an_index_every_rank_has_samples_of_its_own(ranks):
    assert len(set(ranks.run(lambda ctx: (accel.seeding.set_seed(ctx, 0), _draw())[1], 4))) == 4
    assert len(set(ranks.run(lambda ctx: (accel.seeding.set_seed(ctx, 0, per_rank=False), _draw())[1], 4))) == 1


@relaxed
@given(seed=st.integers(0, 99), world_size=st.integers(1, 4))
def test_models_begin_alike_and_the_streams_go_on_as_if_they_had_not(ranks, seed, world_size):
    def rank(ctx):
        accel.seeding.set_seed(ctx, seed)
        expected = _draw()
        accel.seeding.set_seed(ctx, seed)
        with accel.seeding.seeded(ctx, 7):
            weight = nn.Linear(3, 3).weight.detach().clone()
        assert _draw() == expected
        with accel.seeding.seeded(ctx, accel.seeding.rank_key(ctx, Key(7))):
            own = nn.Linear(3, 3).weight.detach().clone()
        return weight, own

    everyone = ranks.run(rank, world_size)
    assert all(torch.equal(weight, everyone[0][0]) for weight, _ in everyone)
    assert len({tuple(own.flatten().tolist()) for _, own in everyone}) == world_size


def test_ranks_that_are_seeded_apart_still_share_out_every_sample(ranks):
    """Accelerate orders data by streams that then differ: 11 of 16 samples."""

    def rank(ctx):
        accel.seeding.set_seed(ctx, 3, per_rank=True)
        loader = accel.prepare_loader(ctx, DataLoader(TensorDataset(torch.arange(16)), batch_size=2, shuffle=True))
        return [int(i) for batch in accel.batches(ctx, loader, accel.Cursor(seed=3)) for i in batch.data[0]]

    seen = [i for mine in ranks.run(rank, 2) for i in mine]
    assert sorted(seen) == list(range(16))


def test_streams_can_be_taken_from_the_first_rank(ranks):
    def rank(ctx):
        accel.seeding.set_seed(ctx, 5)
        random.gauss(0, 1)
        accel.seeding.synchronize_rng(ctx)
        return _draw()

    assert len(set(ranks.run(rank, 3))) == 1

    def alone(ctx):
        if ctx.rank:
            accel.seeding.synchronize_rng(ctx)
        else:
            accel.wait_for_everyone(ctx)

    with assert_raises(CollectiveMismatch, got="synchronize_rng"):
        ranks.run(alone, 2)


@pytest.mark.parametrize("before", [False, True])
def test_deterministic_mode_ends_with_its_block(before):
    def flags():
        cudnn = torch.backends.cudnn
        return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark

    torch.use_deterministic_algorithms(before)
    torch.backends.cudnn.benchmark = before
    try:
        outside = flags()
        with accel.seeding.deterministic(warn_only=True):
            assert flags() == (True, True, False)
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        with pytest.raises(KeyError), accel.seeding.deterministic():
            raise KeyError(flags())
        assert flags() == outside
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        (lambda ctx: accel.seeding.set_seed(ctx, -1), {"problem": "the seed is not valid", "where": "set_seed"}),
        (lambda ctx: accel.seeding.set_seed(ctx, True), {"problem": "the seed is not valid"}),
        (
            lambda ctx: accel.seeding.set_seed(ctx, 0, data_rank=1),
            {"expected": "from 0 to 0", "got": "^1$", "where": "data_rank"},
        ),
        (
            lambda ctx: accel.seeding.set_seed(ctx, 0, data_rank="0"),
            {"expected": "an integer from 0 to 0", "got": "'0'"},
        ),
        (
            lambda ctx: accel.seeding.set_seed(ctx, 0, per_rank=False, data_rank=0),
            {"problem": "data_rank has no effect"},
        ),
        (lambda ctx: accel.seeding.seeded(ctx, 1.5), {"problem": "the seed is not valid", "where": "seeded"}),
    ],
)
def test_what_is_no_seed_or_share_is_refused_before_anything_is_seeded(call, fields):
    before = torch.get_rng_state()
    with assert_raises(ConfigError, **fields):
        call(accel.single())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_drawn_seed_is_that_of_all_ranks_another_in_each_run_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="accel.seeding"):
        runs = [accel.testing.simulate(accel.seeding.draw_seed, 3) for _ in range(3)]
    assert all(len(set(seeds)) == 1 and 0 <= seeds[0] < 2**31 for seeds in runs)
    assert len({seeds[0] for seeds in runs}) == 3
    assert caplog.messages == [f"drew the seed {seeds[0]}" for seeds in runs]
    assert accel.seeding.draw_seed(accel.single()) != accel.seeding.draw_seed(accel.single())
