# SPDX-License-Identifier: Apache-2.0
"""Meshes that a context opens: all ranks in their order, groups that end with the context, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from processes import patience
from profiles import share
from torch.distributed.device_mesh import init_device_mesh

import accel
from accel.errors import CollectiveMismatch, ConfigError
from accel.testing import simulate

SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda shape: math.prod(shape) <= 8)


def _along(mesh, name):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=mesh.get_group(name))
    return total.item()


@settings(deadline=None, max_examples=share(0.3))
@given(shape=SHAPES)
def test_a_mesh_that_is_opened_is_torchs_own_with_the_same_neighbours(ranks, shape):
    names = ("dp", "cp", "tp")[: len(shape)]
    text = ",".join(f"{name}={size}" for name, size in zip(names, shape, strict=True))

    def rank(ctx):
        opened = accel.replace(ctx, mesh=text)
        torchs = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
        assert opened == accel.replace(ctx, mesh=torchs)
        assert torch.equal(opened.mesh.mesh, torchs.mesh)
        assert opened.mesh.mesh_dim_names == names
        return [(_along(opened.mesh, name), _along(torchs, name)) for name in names]

    for sums in ranks.run(rank, math.prod(shape), default_group=True):
        assert all(mine == torchs for mine, torchs in sums)


def test_closing_ends_the_groups_of_a_mesh_and_leaves_those_of_others(ranks):
    def rank(ctx):
        theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        opened = accel.replace(accel.from_group(dist.group.WORLD, device="cpu"), mesh="dp=2,tp=2")
        groups = opened.mesh.get_all_groups()
        accel.close(opened)
        accel.close(opened)
        for group in groups:
            with pytest.raises(KeyError):
                dist.get_process_group_ranks(group)
        return _along(theirs, "dp"), _along(theirs, "tp"), accel.reduce(ctx, torch.tensor(1)).item()

    assert ranks.run(rank, 4, default_group=True) == [(2, 1, 4), (4, 1, 4), (2, 5, 4), (4, 5, 4)]


@pytest.mark.parametrize("axes", [("dp",), ("tp", "dp"), ("dp", "cp"), ("dp", "cp", "tp"), ("dp", "pp"), ("pp",), ()])
def test_a_group_along_axes_has_the_ranks_that_differ_in_these_alone(ranks, axes):
    def rank(ctx):
        ctx = accel.replace(ctx, mesh="dp=2,cp=2,tp=2")
        group = accel.group_of(ctx, *axes)
        assert accel.group_of(ctx, *reversed(axes)) is group
        members = [ctx.rank] if group is None else sorted(dist.get_process_group_ranks(group))
        others = [name for name in ("dp", "cp", "tp") if name not in axes]
        return members, tuple(ctx.axis(name) for name in others)

    said = ranks.run(rank, 8, default_group=True)
    for members, at in said:
        assert members == [other for other, (_, there) in enumerate(said) if there == at]


def test_groups_along_axes_end_with_the_context(ranks):
    def rank(ctx):
        opened = accel.replace(accel.from_group(dist.group.WORLD, device="cpu"), mesh="dp=2,cp=2,tp=2")
        group = accel.group_of(opened, "dp", "tp")
        accel.close(opened)
        with pytest.raises(KeyError):
            dist.get_process_group_ranks(group)
        with pytest.raises(accel.errors.ContextClosedError):
            accel.group_of(opened, "dp", "tp")
        return True

    assert all(ranks.run(rank, 8, default_group=True))


def test_without_a_mesh_all_ranks_are_one_axis(ranks):
    def rank(ctx):
        with assert_raises(ConfigError, problem="unknown axis of a mesh", got="'tpp'", fix=r"Did you mean `tp`\?"):
            accel.group_of(ctx, "tpp")
        return ctx.axis("dp"), ctx.axis("tp"), accel.group_of(ctx, "dp") is ctx.comm.group, accel.group_of(ctx, "tp")

    assert ranks.run(rank, 2) == [((at, 2), (0, 1), True, None) for at in range(2)]
    assert (accel.single().axis("dp"), accel.group_of(accel.single(), "dp")) == ((0, 1), None)


def test_ranks_that_name_other_axes_are_told(ranks):
    def rank(ctx):
        ctx = accel.replace(ctx, mesh="dp=2,cp=2,tp=2")
        with assert_raises(CollectiveMismatch, expected="group_of"):
            accel.group_of(ctx, *(("dp", "cp") if ctx.rank else ("dp", "tp")))
        return True

    assert all(ranks.run(rank, 8, default_group=True))


def test_an_empty_text_takes_the_mesh_away(ranks):
    def rank(ctx):
        opened = accel.replace(ctx, mesh="tp=2")
        return opened.data_parallel, accel.replace(opened, mesh="") == ctx

    assert ranks.run(rank, 2, default_group=True) == [((0, 1), True)] * 2


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (
            "dp=3",
            {
                "expected": "3 ranks for dp=3",
                "got": "2",
                "where": "mesh=",
                "fix": "Start 3 processes, or let one size be -1.",
            },
        ),
        (
            "dp=-1,tp=4",
            {
                "expected": "a multiple of 4 ranks for dp=-1,tp=4",
                "got": "2",
                "where": "mesh=",
                "fix": "Start a multiple of 4 proc",
            },
        ),
        ("stage=2", {"problem": "unknown axis of a mesh", "got": "'stage' in 'stage=2'", "where": "mesh="}),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_on_all_ranks(ranks, text, fields):
    def rank(ctx):
        with assert_raises(ConfigError, **fields):
            accel.replace(ctx, mesh=text)
        return True

    assert all(ranks.run(rank, 2, default_group=True))


def test_ranks_that_open_different_meshes_are_told(ranks):
    def rank(ctx):
        with assert_raises(
            CollectiveMismatch, expected="rank 0: mesh at .*tp=2", got="rank 1: mesh at .*dp=2"
        ) as caught:
            accel.replace(ctx, mesh="dp=2" if ctx.rank else "tp=2")
        return str(caught.value)

    first, second = ranks.run(rank, 2, default_group=True)
    assert first == second


def test_a_mesh_needs_the_default_group():
    with assert_raises(ConfigError, got="a process without a group", fix=r"session\(mesh=\.\.\.\)"):
        accel.replace(accel.single(), mesh="dp=1")
    with assert_raises(ConfigError, got="another group, of 2 ranks"):
        simulate(lambda ctx: accel.replace(ctx, mesh="dp=2"), 2)


def test_one_process_has_a_mesh_of_one_rank_and_leaves_no_group():
    with accel.session({"ACCEL_MESH": "dp=-1,tp=1"}, device="cpu") as ctx:
        assert (ctx.mesh.shape, ctx.data_parallel, ctx.world_size) == ((1, 1), (0, 1), 1)
        assert _along(ctx.mesh, "tp") == 0
        assert accel.gather(ctx, torch.ones(2)).tolist() == [1, 1]
    assert not dist.is_initialized()
    with accel.session({"ACCEL_MESH": "dp=1"}, device="cpu", mesh="") as ctx:  # an argument beats the environment
        assert (ctx.mesh, ctx.backend) == (None, "none")


PROGRAM = """
import json, sys
import torch, torch.distributed as dist
import accel
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

def train(ctx):
    with accel.seeding.seeded(ctx, 1):
        model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    names = ctx.mesh.mesh_dim_names if ctx.mesh is not None else ()
    if "tp" in names:
        parallelize_module(model, ctx.mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if "dp" in names:
        fully_shard(model, mesh=ctx.mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.linspace(-1, 1, 11, dtype=torch.float64).view(-1, 1)
    loader = DataLoader(rows, batch_size=4 // ctx.data_parallel[1])
    model, optimizer, loader = accel.prepare(ctx, model, optimizer, loader)
    state = accel.train_state(ctx)
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        with accel.accumulate(ctx, state, model):
            loss = model(batch.data).square().mean()
            state = accel.backward(ctx, loss, state)
        if state.sync:
            state = accel.optimizer_step(ctx, optimizer, state)
    whole = [each.full_tensor() if ctx.mesh is not None else each for each in model.parameters()]
    return torch.cat([each.detach().flatten() for each in whole])

expected = train(accel.single(accumulation=2))
said = {}
for text in (None, "tp=2", "dp=-1"):  # the first is what the launcher said
    with accel.session(mesh=text) as ctx:
        off = float((train(ctx) - expected).abs().max())
        said[text or "launched"] = [ctx.data_parallel, list(ctx.mesh.shape), off < 1e-10]
        times = [group._get_backend(ctx.device).options._timeout.total_seconds() for group in ctx.mesh.get_all_groups()]
        said["timeouts"] = sorted(set(times + said.get("timeouts", [])))
    said["left"] = dist.is_initialized()
if ctx.rank == 0:
    print(json.dumps(said), file=open(sys.argv[1], "w"))
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_train_on_the_mesh_that_the_launcher_names(tmp_path: Path):
    script, said = tmp_path / "program.py", tmp_path / "said.json"
    script.write_text(PROGRAM)
    flags = ["--nproc-per-node", "2", "--cpu", "--accumulation", "2", "--timeout-s", "77", "--mesh", "dp=2,tp=-1"]
    command = [sys.executable, "-m", "accel.cli", "launch", *flags, str(script), str(said)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120), check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(said.read_text()) == {
        "launched": [[0, 2], [2, 1], True],
        "tp=2": [[0, 1], [2], True],
        "dp=-1": [[0, 2], [2], True],
        "timeouts": [77.0],
        "left": False,
    }
