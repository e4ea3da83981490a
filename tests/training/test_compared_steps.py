# SPDX-License-Identifier: Apache-2.0
"""Ranks that have decided differently about an optimizer step are told by their next checked message."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import begin_batch
from torch import nn
from torch.distributed.algorithms.join import Join

import accel
from accel.errors import CollectiveMismatch
from accel.tensors import local_part
from accel.testing import Simulator

X = torch.linspace(-1, 1, 12).view(3, 4)


class Loop:
    """Steps of a model under fp16."""

    def __init__(self, ctx: accel.DistContext, prepare: Any = accel.prepare_model, **settings: Any) -> None:
        self.ctx = accel.replace(ctx, precision="fp16", **settings)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = prepare(self.ctx, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = accel.train_state(self.ctx)

    def step(self, *, bad: bool = False, before: bool = False, weight: float | None = None) -> bool:
        """Take a step; a gradient of this rank may become bad before the exchange or after."""
        self.state = begin_batch(self.ctx, self.state)
        with accel.accumulate(self.ctx, self.state, self.model):
            loss = self.model(X * (math.nan if bad and before else 1)).square().mean()
            self.state = accel.backward(self.ctx, loss, self.state, weight=weight)
        if bad and not before:
            next(iter(self.model.parameters())).grad.mul_(math.nan)
        self.state = accel.optimizer_step(self.ctx, self.optimizer, self.state)
        return bool(self.state.stepped)


def _gather(loop: Loop, _: Path) -> None:
    _ = accel.gather(loop.ctx, torch.ones(1))


def _save(loop: Loop, folder: Path) -> None:
    items = {"model": loop.model, "state": loop.state}
    _ = accel.save_state(loop.ctx, folder, items, step=1)


SAID = {
    "expected": "rank 0: step 2 taken, loss scale 65536.0 after it",
    "got": "rank 1: step 2 skipped, loss scale 32768.0 after it",
    "fix": "Resume from an earlier checkpoint",
}


@pytest.mark.parametrize("message", [_gather, _save])
@pytest.mark.parametrize("most_gathered", [64, 1])
def test_a_rank_that_skips_alone_is_told_by_the_next_message(
    ranks: Simulator, tmp_path: Path, message: Any, most_gathered: int
):
    def rank(ctx: accel.DistContext) -> None:
        ctx.comm.most_gathered = most_gathered
        loop = Loop(ctx)
        taken = [loop.step(bad=at == 2 and ctx.rank == 1) for at in range(8)]
        assert taken.count(False) == ctx.rank % 2
        message(loop, tmp_path)

    with assert_raises(CollectiveMismatch, **SAID):
        _ = ranks.run(rank, 2)
    assert not list(tmp_path.iterdir())


def test_a_difference_of_long_ago_is_told_and_only_once(ranks: Simulator):
    def rank(ctx: accel.DistContext) -> str:
        loop = Loop(ctx)
        for at in range(80):
            _ = loop.step(bad=at == 2 and ctx.rank == 2)
        with assert_raises(CollectiveMismatch, problem="decided differently") as caught:
            accel.wait_for_everyone(ctx)
        accel.wait_for_everyone(ctx)  # a script that goes on, such as to its last report, is not told again
        return str(caught.value)

    told = ranks.run(rank, 3)
    assert len(set(told)) == 1
    assert (
        "rank 0: step 16 taken, loss scale 65536.0 after it, got rank 2: step 15 taken, loss scale 32768.0" in told[0]
    )


def test_a_rank_with_a_step_more_is_told(ranks: Simulator):
    def rank(ctx: accel.DistContext) -> None:
        _ = Loop(ctx).step()
        if ctx.rank:
            ctx.comm.steps.add(updates=1, stepped=True, finite=True, scale=1.0)
        accel.wait_for_everyone(ctx)

    with assert_raises(CollectiveMismatch, expected="rank 0: no further step", got="rank 1: step 1 taken"):
        _ = ranks.run(rank, 2)


class Initialized(nn.Linear):
    """A layer that sets its bias from its first batch."""

    is_set = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found = super().forward(input)
        if not self.is_set:
            self.is_set = True
            self.bias.data.copy_(-found.detach().mean(0))
        return found + self.bias


def _set_by_the_forward(ctx: accel.DistContext) -> nn.Module:
    model = accel.prepare_model(ctx, nn.Sequential(Initialized(4, 2)))
    with torch.no_grad():
        _ = model(X + ctx.rank)
    return model


def _loaded_on_rank_0(ctx: accel.DistContext) -> nn.Module:
    model = accel.prepare_model(ctx, nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)))
    if ctx.rank == 0:
        accel.unwrap_model(model)[0].load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(2)})
    return model


def _frozen_part_loaded_on_rank_0(ctx: accel.DistContext) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    _ = net[0].requires_grad_(requires_grad=False)
    model = accel.prepare_model(ctx, net)
    if ctx.rank == 0:
        net[0].load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(2)})
    return model


@pytest.mark.parametrize("program", [_set_by_the_forward, _loaded_on_rank_0, _frozen_part_loaded_on_rank_0])
def test_replicas_that_differ_before_their_first_step_are_told(ranks: Simulator, program: Any):
    def rank(ctx: accel.DistContext) -> None:
        model = program(ctx)
        trained = [each for each in model.parameters() if each.requires_grad]
        loop = Loop(ctx)
        loop.model = model
        loop.optimizer = torch.optim.SGD(trained, lr=0.1)
        _ = loop.step()
        accel.wait_for_everyone(ctx)

    with assert_raises(
        CollectiveMismatch, problem="different parameters before", got=r"on rank 1 than on rank 0 of 0\."
    ):
        _ = ranks.run(rank, 2)


# rank with other values, and the rank that is to hold the same
MESHES = [
    ("dp=2", "ddp", 1, 0),
    ("tp=2", "ddp", 1, 0),
    ("dp=2,tp=2", "ddp", 1, 0),
    ("dp=2,tp=2", "fsdp", 3, 2),
    ("pp=2,dp=2", "ddp", 3, 2),
    ("dp_replicate=2,dp_shard=2", "fsdp", 3, 1),
]


@pytest.mark.parametrize(("mesh", "strategy", "changed", "other"), MESHES)
def test_what_ranks_hold_alike_is_compared_on_every_mesh(
    ranks: Simulator, mesh: str, strategy: str, changed: int, other: int
):
    """The values of one rank come in another order, so that their sum is the same."""
    size = math.prod(int(each.partition("=")[2]) for each in mesh.split(","))

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        model = accel.prepare_model(ctx, net, plan=accel.parallel.Plan(tensor={}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if ctx.rank == changed:
            part = local_part(next(each for each in model.parameters() if each.ndim == 2))
            _ = part.copy_(part.flatten().flip(0).view_as(part))
        state = begin_batch(ctx, accel.train_state(ctx))
        _, state = accel.forward_backward(
            ctx, model, state, X[:2], loss_fn=lambda output: output.square().sum(), weight=2
        )
        _ = accel.optimizer_step(ctx, optimizer, state)
        accel.wait_for_everyone(ctx)

    got = rf"on rank {changed} than on rank {other} of \d\.weight"
    with assert_raises(CollectiveMismatch, problem="different parameters before", got=got):
        _ = ranks.run(rank, size, default_group=True)


def test_each_of_two_models_with_the_same_names_is_compared(ranks: Simulator):
    def rank(ctx: accel.DistContext) -> None:
        one, other = Loop(ctx), Loop(ctx)
        if ctx.rank == 1:
            _ = next(iter(one.model.parameters())).data.add_(1)
        for each in (one, other):  # without a message between their first steps
            _ = each.step()
        accel.wait_for_everyone(ctx)

    got = r"on rank 1 than on rank 0 of 0\.weight"
    with assert_raises(CollectiveMismatch, problem="different parameters before", got=got):
        _ = ranks.run(rank, 2)


def test_replicas_that_differ_are_told_after_any_number_of_steps(ranks: Simulator):
    def rank(ctx: accel.DistContext) -> None:
        loop = Loop(ctx)
        loop.model = _loaded_on_rank_0(ctx)
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
        for _ in range(70):
            _ = loop.step()
        accel.wait_for_everyone(ctx)

    with assert_raises(CollectiveMismatch, problem="different parameters before", got="0.weight, 0.bias"):
        _ = ranks.run(rank, 2)


def _joined_without_inputs(ctx: accel.DistContext) -> None:
    """A rank has no inputs in the block, and takes its first step behind it."""
    loop = Loop(ctx)
    with accel.join_uneven_inputs(ctx, loop.model):
        for _ in range(2 - 2 * ctx.rank):
            _ = loop.step(weight=None)
    _ = loop.step()


def _ignored_by_ddp(ctx: accel.DistContext) -> None:
    """A frozen parameter that DDP leaves as each rank has it."""

    def prepare(ctx: accel.DistContext, net: nn.Module) -> nn.Module:
        net[0].rank = nn.Parameter(torch.full((1,), float(ctx.rank)), requires_grad=False)
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.rank"])
        return accel.prepare_model(ctx, net)

    loop = Loop(ctx, prepare)
    _ = loop.step()
    assert float(accel.unwrap_model(loop.model)[0].rank) == ctx.rank


def _changed_alike(ctx: accel.DistContext) -> None:
    loop = Loop(ctx)
    for each in loop.model.parameters():
        _ = each.data.mul_(0.5)
    _ = loop.step()


def _optimizers_in_other_orders(ctx: accel.DistContext) -> None:
    """Parameters in the order of a set, for example, which is another one on each rank."""
    replicated = accel.parallel.Plan(tensor={})
    loop = Loop(ctx, functools.partial(accel.prepare_model, plan=replicated), mesh="tp=2")
    loop.optimizer = torch.optim.SGD([*loop.model.parameters()][:: 1 - 2 * ctx.rank], lr=0.1)
    _ = loop.step()


def _local_sgd(ctx: accel.DistContext) -> None:
    """An overflow of one rank is its own affair until the average."""
    loop, local = Loop(ctx, accel.parallel.prepare_local_model), accel.parallel.LocalSgd(every=2)
    for at in range(4):
        assert loop.step(bad=at == 1 and ctx.rank == 1) == (at != 1 or ctx.rank != 1)
        local = accel.parallel.local_sgd_step(ctx, loop.model, local)


def _local_sgd_on_a_mesh(ctx: accel.DistContext) -> None:
    loop = Loop(ctx, accel.parallel.prepare_local_model, mesh="dp=2,tp=2")
    for at in range(2):
        _ = loop.step(bad=at == 1 and ctx.rank < 2, before=True)


def _two_models_in_turn(ctx: accel.DistContext) -> None:
    loops = [Loop(ctx), Loop(ctx)]
    for at in range(4):
        _ = loops[at % 2].step(bad=at == 1, before=True)


def _two_contexts(ctx: accel.DistContext) -> None:
    """Each half trains a model of its own beside that of all."""
    halves = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    loop, own = Loop(ctx), Loop(accel.from_group(halves[ctx.rank // 2]))
    for at in range(4):
        _ = loop.step()
        if ctx.rank < 2 or at == 3:
            _ = own.step(bad=at == 1, before=True)
            accel.wait_for_everyone(own.ctx)
        accel.wait_for_everyone(ctx)


def _skipped_everywhere(ctx: accel.DistContext) -> None:
    loop = Loop(ctx)
    assert [loop.step(bad=at == 1 and ctx.rank == 1, before=True) for at in range(3)] == [True, False, True]


def _empty_windows(ctx: accel.DistContext) -> None:
    loop = Loop(ctx)
    assert [loop.step(weight=float(at != 1)) for at in range(3)] == [True, False, True]


def _uneven(ctx: accel.DistContext) -> None:
    loop = Loop(ctx)
    with accel.join_uneven_inputs(loop.ctx, loop.model):
        for _ in range(1 + ctx.rank):
            _ = loop.step()
    accel.wait_for_everyone(ctx)
    _ = loop.step()


def _uneven_by_torch(ctx: accel.DistContext) -> None:
    loop: Any = Loop(ctx)
    with Join([loop.model]):
        for _ in range(1 + ctx.rank):
            _ = loop.step()


def _memory_runs_out_in_a_step(ctx: accel.DistContext) -> None:
    def attempt(size: int) -> int:
        loop = Loop(ctx)
        _ = loop.step()
        if size > 2 and ctx.rank == 1:
            raise torch.OutOfMemoryError("in the step")  # which the others take
        _ = loop.step()
        accel.wait_for_everyone(ctx)
        return size

    assert accel.find_executable_batch_size(ctx, attempt, starting_batch_size=4) == 2


def _an_error_that_all_ranks_know(ctx: accel.DistContext) -> None:
    """A rank may have failed between two ranks' decisions."""
    loop = Loop(ctx)
    if ctx.rank == 0:
        ctx.comm.steps.add(updates=0, stepped=True, finite=True, scale=1.0)
    with assert_raises(accel.errors.DataError, problem="one rank's"):
        _fail_on_rank_0(ctx)
    _ = loop.step()


def _fail_on_rank_0(ctx: accel.DistContext) -> None:
    with accel.main_process_first(ctx):
        if ctx.rank == 0:
            raise accel.errors.DataError("one rank's")


def _towers(ctx: accel.DistContext) -> None:
    """Ranks along an axis of the user's own have models of their own."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "towers"))
    ddp = torch.nn.parallel.DistributedDataParallel

    def prepare(own: accel.DistContext, model: nn.Module) -> nn.Module:
        return accel.prepare_model(own, ddp(model, process_group=mesh.get_group("dp")))

    loop = Loop(accel.replace(ctx, mesh=mesh, data_dims=("dp",)), prepare)
    for at in range(3):
        _ = loop.step(bad=at == 1 and ctx.rank % 2 == 1, before=True)


PASS = [
    (_changed_alike, 2),
    (_ignored_by_ddp, 2),
    (_joined_without_inputs, 2),
    (_optimizers_in_other_orders, 2),
    (_local_sgd, 2),
    (_local_sgd_on_a_mesh, 4),
    (_two_models_in_turn, 2),
    (_two_contexts, 4),
    (_skipped_everywhere, 2),
    (_empty_windows, 2),
    (_uneven, 3),
    (_uneven_by_torch, 2),
    (_memory_runs_out_in_a_step, 2),
    (_an_error_that_all_ranks_know, 2),
    (_towers, 4),
]


@pytest.mark.parametrize(("program", "size"), PASS)
def test_right_programs_pass(ranks: Simulator, program: Any, size: int):
    def rank(ctx: accel.DistContext) -> None:
        program(ctx)
        accel.wait_for_everyone(ctx)

    _ = ranks.run(rank, size, default_group=True)
