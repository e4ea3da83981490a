# SPDX-License-Identifier: Apache-2.0
"""A context that knows its mesh: whose group it is on, which place it takes, and which meshes are not its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises
from processes import job, script_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import accel
from accel.errors import ConfigError
from accel.testing import simulate


def _mesh(names: tuple[str, ...] = ("dp", "tp")) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def _sum(ctx: accel.DistContext) -> int:
    return int(accel.reduce(ctx, torch.tensor(dist.get_rank())))


def _simulated(ranks, fn, world_size=4):
    return ranks.run(fn, world_size, default_group=True)


def test_the_place_follows_the_mesh_and_stays_with_every_copy(ranks):
    def rank(ctx):
        told = accel.replace(ctx, mesh=_mesh())
        assert accel.replace(told, precision="bf16").data_parallel == told.data_parallel
        assert accel.replace(told, containers=[]).mesh is told.mesh
        stated = accel.replace(told, mesh=_mesh(("model", "batch")), data_dims=("batch",))
        return ctx.data_parallel, told.data_parallel, stated.data_parallel

    expected = [((at, 4), (at // 2, 2), (at % 2, 2)) for at in range(4)]
    assert _simulated(ranks, rank) == expected


def test_without_a_mesh_every_rank_has_a_place_of_its_own(ranks):
    assert ranks.run(lambda ctx: (ctx.mesh, ctx.data_parallel), 2) == [(None, (0, 2)), (None, (1, 2))]
    assert accel.single().data_parallel == (0, 1)


def test_the_mesh_is_a_handle_and_the_place_a_value(ranks):
    def rank(ctx):
        by_name, by_hand = (
            accel.replace(ctx, mesh=_mesh()),
            accel.replace(ctx, mesh=_mesh(("a", "b")), data_dims=("a",)),
        )
        assert by_name == by_hand
        assert hash(by_name) == hash(by_hand)
        assert by_name != ctx
        assert "DeviceMesh" not in repr(by_name)
        return True

    assert all(_simulated(ranks, rank))


def test_a_mesh_of_all_ranks_is_adopted_with_the_default_group_in_any_order(ranks):
    def rank(_):
        mesh = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("dp", "tp"))
        ctx = accel.from_mesh(mesh, precision="bf16", local_world_size=2)
        total = _sum(ctx)
        accel.close(ctx)
        assert dist.is_initialized()
        return total, ctx.comm.rank, ctx.node_rank, ctx.precision.name, ctx.device.type, ctx.data_parallel

    assert _simulated(ranks, rank) == [
        (6, at, at // 2, "bf16", "cpu", (place, 2)) for at, place in enumerate([1, 0, 1, 0])
    ]


def test_a_part_of_one_dimension_is_adopted_with_its_own_group(ranks):
    def rank(_):
        whole = _mesh()
        groups = [accel.from_mesh(whole[name]) for name in ("dp", "tp")]
        return [(_sum(ctx), ctx.rank, ctx.world_size, ctx.data_parallel) for ctx in groups]

    assert _simulated(ranks, rank) == [
        [(2, 0, 2, (0, 2)), (1, 0, 2, (0, 1))],
        [(4, 0, 2, (0, 2)), (1, 1, 2, (0, 1))],
        [(2, 1, 2, (1, 2)), (5, 0, 2, (0, 1))],
        [(4, 1, 2, (1, 2)), (5, 1, 2, (0, 1))],
    ]


def test_a_part_of_several_dimensions_needs_a_group_that_somebody_made(ranks):
    def rank(ctx):
        whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        part, mine = whole["dp", "tp"], ctx.rank // 4
        with assert_raises(
            ConfigError, problem="no process group", got="2 dimensions of 4 ranks", fix="new_group.*mesh=mesh"
        ):
            accel.from_mesh(part)
        groups = [dist.new_group(list(range(4 * at, 4 * at + 4))) for at in range(2)]
        told = accel.replace(accel.from_group(groups[mine], device="cpu"), mesh=part)
        return _sum(told), told.rank, told.data_parallel

    expected = [(6 + 16 * (at // 4), at % 4, (at % 4 // 2, 2)) for at in range(8)]
    assert _simulated(ranks, rank, 8) == expected


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (
            lambda: _mesh()["dp"],
            {"problem": "other ranks than the context", "expected": r"the 4 ranks \[0, 1, 2, 3\]", "got": r"2, \["},
        ),
        (lambda: _mesh(("dp", "model")), {"problem": "of unknown meaning", "got": "'model'"}),
        (lambda: init_device_mesh("cpu", (2, 2)), {"got": "2 dimensions without names"}),
        (lambda: (2, 2), {"expected": "dp=2,tp=2.* or a torch DeviceMesh", "got": r"\(2, 2\)"}),
    ],
)
def test_what_is_no_mesh_of_the_context_is_refused(ranks, make, fields):
    def rank(ctx):
        with assert_raises(ConfigError, **fields):
            accel.replace(ctx, mesh=make())
        return True

    assert all(_simulated(ranks, rank))


def test_a_rank_that_is_not_on_the_mesh_is_told(ranks):
    def rank(ctx):
        mesh = DeviceMesh("cpu", [0, 1])
        for call in (lambda: accel.from_mesh(mesh), lambda: accel.replace(ctx, mesh=mesh)):
            try:
                found = str(call().data_parallel)
            except ConfigError as error:
                found = str(error)
            yield found

    for at, (made, replaced) in enumerate(_simulated(ranks, lambda ctx: list(rank(ctx)), 3)):
        off = "this rank is not on the mesh: expected rank 2 among its ranks, got [0, 1]"
        assert made == f"({at}, 2)" if at < 2 else made.startswith(off)
        assert replaced.startswith("the mesh has other ranks" if at < 2 else off)


def test_a_context_without_a_group_takes_a_mesh_of_its_only_rank(ranks):
    def rank(_):
        alone = accel.single()
        assert accel.replace(alone, mesh=DeviceMesh("cpu", [dist.get_rank()])).data_parallel == (0, 1)
        with assert_raises(ConfigError, expected="one rank", got=r"2, \[0, 1\]"):
            accel.replace(alone, mesh=DeviceMesh("cpu", [0, 1]))
        return True

    assert all(_simulated(ranks, rank, 2))


def test_a_group_that_torch_does_not_know_takes_no_mesh(ranks):
    def rank(_):
        mesh = DeviceMesh("cpu", [0, 1])
        with assert_raises(ConfigError, problem="torch does not know the context's group", expected="default group"):
            simulate(lambda unknown: accel.replace(unknown, mesh=mesh), 2)
        return True

    assert all(_simulated(ranks, rank, 2))


@pytest.mark.parametrize("mesh", [None, ""])
def test_dimensions_are_stated_of_a_mesh_alone(mesh):
    with assert_raises(ConfigError, problem="data_dims has no effect without mesh", where=r"replace\(data_dims=\)"):
        accel.replace(accel.single(), mesh=mesh, data_dims=("dp",))


PROGRAM = """
import json, sys
import torch, torch.distributed as dist
import accel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

def train(ctx, batch_size, mesh=None):
    with accel.seeding.seeded(ctx, 1):
        model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    if mesh is not None:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.linspace(-1, 1, 11, dtype=torch.float64).view(-1, 1)
    model, optimizer, loader = accel.prepare(ctx, model, optimizer, DataLoader(rows, batch_size=batch_size))
    state = accel.train_state(ctx)
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        with accel.accumulate(ctx, state, model):
            loss = model(batch.data).square().mean()
            state = accel.backward(ctx, loss, state)
        state = accel.optimizer_step(ctx, optimizer, state)
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    return torch.cat([each.detach().flatten() for each in whole])

with accel.session(device="cpu") as ctx:
    expected, said = train(accel.single(), 4), {}
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        told = accel.replace(ctx, mesh=mesh)
        accel.seeding.set_seed(told, 0)
        draws = accel.gather(told, torch.rand(1, dtype=torch.float64)).tolist()
        trained = train(told, 4 // shape[0], mesh["tp"] if shape == (1, 2) else None)
        adopted = accel.from_mesh(mesh)
        total = int(accel.reduce(adopted, torch.tensor(ctx.rank + 1)))
        accel.close(adopted)
        off = float((trained - expected).abs().max())
        said[str(shape)] = [told.data_parallel, draws[0] == draws[1], off < 1e-10, total, dist.is_initialized()]
    if ctx.rank == 0:
        print(json.dumps(said), file=open(sys.argv[1], "w"))
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_over_gloo_follow_their_mesh(tmp_path: Path):
    script, said = tmp_path / "program.py", tmp_path / "said.json"
    script.write_text(PROGRAM)
    with script_ranks(script, job(2), said, folder=tmp_path) as ranks:
        assert not any(rank.wait(120) for rank in ranks), [rank.said() for rank in ranks]
    assert json.loads(said.read_text()) == {
        "(1, 2)": [[0, 1], True, True, 3, True],
        "(2, 1)": [[0, 2], False, True, 3, True],
    }
