# SPDX-License-Identifier: Apache-2.0
"""A rank that runs out of memory in the backward of a prepared model: all ranks try the next size, and soon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from catching import assert_raises
from processes import job, script_ranks
from steps import begin_batch
from torch import nn

import accel
from accel.errors import CollectiveMismatch, OutOfMemoryError, PeerError

ERRORS = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    "python": MemoryError(),
}


def _train(ctx, size, fails, error, *, accumulation=1):
    """Take two steps; where `fails(rank, size)`, the second backward raises midway."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accel.prepare(ctx, model, optimizer)
    state = accel.train_state(ctx, accumulation=accumulation)
    for step in range(2):
        for micro in range(accumulation):
            if step == 1 and micro == accumulation - 1 and fails(ctx.rank, size):
                accel.unwrap_model(model)[1].weight.register_hook(_raising(error))
            state = begin_batch(ctx, state)
            with accel.accumulate(ctx, state, model):
                loss = model(torch.ones(size, 4).double() * (ctx.rank + 1)).mean()
                state = accel.backward(ctx, loss, state)
        state = accel.optimizer_step(ctx, optimizer, state)
    return size, [parameter.tolist() for parameter in accel.unwrap_model(model).parameters()]


def _beyond_four(rank, size):
    return rank == 1 and size > 4


def _raising(error):
    def hook(grad):
        raise error

    return hook


@pytest.mark.parametrize(
    ("kind", "accumulation", "world_size", "seed"),
    [("cuda", 1, 2, None), ("cpu", 1, 2, 1), ("python", 2, 2, None), ("cuda", 2, 3, 1)],
)
def test_all_ranks_train_on_with_the_size_that_fits(ranks, kind, accumulation, world_size, seed):
    """The result is that of a run which began with this size: no gradient of the failed attempts is left."""

    def search(ctx):
        torch.manual_seed(0)

        def train(size):
            return _train(ctx, size, _beyond_four, ERRORS[kind], accumulation=accumulation)

        found = accel.find_executable_batch_size(ctx, train, 16)
        return found, accel.gather_object(ctx, found[0])

    def directly(ctx):
        torch.manual_seed(0)
        return _train(ctx, 4, lambda rank, size: False, None, accumulation=accumulation)

    searched, direct = ranks.run(search, world_size, seed=seed), ranks.run(directly, world_size)
    assert [found for found, _ in searched] == direct
    assert all(sizes == [4] * world_size for _, sizes in searched)


def test_two_ranks_that_run_out_together_are_one_failure(ranks):
    def rank(ctx):
        return accel.find_executable_batch_size(
            ctx, lambda size: _train(ctx, size, lambda rank, size: size > 2, ERRORS["cuda"])[0], 8
        )

    assert ranks.run(rank, 3) == [2, 2, 2]


def test_no_size_that_fits_is_the_same_error_on_all_ranks(ranks):
    def rank(ctx):
        with assert_raises(OutOfMemoryError, got="rank 1: OutOfMemoryError: CUDA out of memory") as caught:
            accel.find_executable_batch_size(
                ctx, lambda size: _train(ctx, size, lambda rank, size: rank == 1, ERRORS["cuda"]), 4
            )
        accel.wait_for_everyone(ctx)
        return str(caught.value)

    assert len(set(ranks.run(rank, 3))) == 1


def test_another_error_in_a_backward_reaches_the_other_ranks(ranks):
    def rank(ctx):
        told = pytest.raises(KeyError, match="a bug") if ctx.rank == 1 else assert_raises(PeerError, problem="a bug")
        with told:
            accel.find_executable_batch_size(
                ctx, lambda size: _train(ctx, size, lambda rank, size: rank == 1, KeyError("a bug")), 4
            )
        return accel.gather_object(ctx, ctx.rank)

    assert ranks.run(rank, 3) == [[0, 1, 2]] * 3


def test_a_search_within_a_search_ends_with_the_outer_one(ranks):
    def rank(ctx):
        def outer(size):
            if ctx.rank == 1 and size > 2:
                raise ERRORS["cuda"]  # while the other ranks train
            return size, accel.find_executable_batch_size(
                ctx, lambda inner: _train(ctx, inner, lambda rank, inner: rank == 0 and inner > 1, ERRORS["cuda"])[0], 4
            )

        return accel.find_executable_batch_size(ctx, outer, 8)

    assert ranks.run(rank, 2) == [(2, 1)] * 2


def test_ranks_that_disagree_say_so_as_ever(ranks):
    def rank(ctx):
        with pytest.raises(CollectiveMismatch):
            accel.find_executable_batch_size(ctx, lambda size: accel.reduce(ctx, torch.ones(1 + ctx.rank)), 4)
        return accel.gather_object(ctx, ctx.rank)

    assert ranks.run(rank, 2) == [[0, 1]] * 2


SCRIPT = """
import json, sys
import torch
from torch import nn
import accel
from steps import begin_batch

tried, found = [], {}
def train(ctx, size, fails):
    tried.append(size)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accel.prepare(ctx, model, optimizer)
    kept.append(model)  # as a closure or a logger might
    state = accel.train_state(ctx)
    for step in range(3):
        if step == 1 and ctx.rank == 1 and size > 4:
            def hook(grad):
                raise fails
            def watch(module, given, out):
                out.register_hook(hook)
            accel.unwrap_model(model)[1].register_forward_hook(watch)
        state = accel.backward(ctx, model(torch.ones(size, 64)).mean(), begin_batch(ctx, state))
        state = accel.optimizer_step(ctx, optimizer, state)
    return size

kept = []
with accel.session(device="cpu", timeout_s=300, strategy=sys.argv[2]) as ctx:
    error = torch.OutOfMemoryError("CUDA out of memory.")
    found["size"] = accel.find_executable_batch_size(ctx, lambda size: train(ctx, size, error), 16)
    found["tried"] = tried
    try:
        accel.find_executable_batch_size(ctx, lambda size: train(ctx, size, KeyError("a bug")), 16)
    except (KeyError, accel.errors.PeerError) as error:
        found["error"] = [type(error).__name__, str(error)]
    found["ranks"] = accel.gather_object(ctx, ctx.rank)
    with open(f"{sys.argv[1]}-{ctx.rank}", "w") as file:
        json.dump(found, file)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        ("ddp", 2),
        pytest.param("fsdp", 2, marks=pytest.mark.slow),
        pytest.param("ddp", 4, marks=pytest.mark.slow),
    ],
)
def test_real_ranks_do_not_wait_for_the_time_out(tmp_path: Path, strategy: str, size: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with script_ranks(script, job(size), tmp_path / "found", strategy, folder=tmp_path) as ranks:
        assert [rank.wait(25) for rank in ranks] == [0] * size  # the time-out is at 300, and patience at 10 times
    for rank in range(size):
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        assert (found["size"], found["tried"][:3], found["ranks"]) == (4, [16, 8, 4], list(range(size)))
        assert found["error"][0] == ("KeyError" if rank == 1 else "PeerError")
        assert "a bug" in found["error"][1]
