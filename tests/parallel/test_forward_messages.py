# SPDX-License-Identifier: Apache-2.0
"""Forwards that call torch.distributed, as a contrastive loss does, are refused where not all ranks run them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from catching import assert_raises
from processes import job, run_ranks
from steps import begin_batch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives

import accel
from accel.errors import PrepareError, StageError
from accel.testing import Simulator


class Gathering(nn.Module):
    """Compares rows with the rows of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.relu(self.up(x)))
        found = [torch.empty_like(x) for _ in range(distributed.get_world_size())]
        distributed.all_gather(found, x.detach())
        return x @ torch.cat(found).t()


class Functional(Gathering):
    """Adds a sum over all ranks, by an operator."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.relu(self.up(x)))
        return x + _functional_collectives.all_reduce(x.detach(), "sum", distributed.group.WORLD)


class Waiting(Gathering):
    """Waits for all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        distributed.barrier()
        return self.down(torch.relu(self.up(x)))


class _Rows(torch.autograd.Function):
    """The rows of all ranks, as packages gather them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = [torch.empty_like(x) for _ in range(distributed.get_world_size())]
        distributed.all_gather(found, x)
        ctx.length = len(x)
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0][: ctx.length]


class _SummedGradient(torch.autograd.Function):
    """Sums gradients over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        total: Tensor = grads[0].clone()
        distributed.all_reduce(total)
        return total


class Paired(nn.Module):
    """Layers of a known form, and rows of all ranks by a function of a package."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Any:
        return cast(Any, _Rows).apply(self.net(x))


class Counted(Paired):
    """Counts rows of all ranks before."""

    def forward(self, x: Tensor) -> Any:
        count = x.new_ones(())
        distributed.all_reduce(count)
        return super().forward(x) / count


class Chosen(Paired):
    """Chooses rows by their values before."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x[(x.sum(1) < 1e9).nonzero()[:, 0]])


class InBackward(Gathering):
    """Sends a message in its backward."""

    def forward(self, x: Tensor) -> Any:
        return cast(Any, _SummedGradient).apply(self.down(torch.relu(self.up(x))))


class InTraining(Gathering):
    """Sends a message in training."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.relu(self.up(x)))
        if self.training:
            distributed.all_reduce(x.detach().clone())
        return x


def prepare_tensor(ctx: accel.DistContext, kind: type[nn.Module], name: str) -> None:
    ctx = accel.replace(ctx, mesh="tp=2")
    with assert_raises(PrepareError, got=rf"(its forward|it) calls torch\.distributed\.{name}"):
        _ = accel.prepare_model(ctx, kind(), example=torch.randn(4, 8))


def run_stages(ctx: accel.DistContext, kind: type[nn.Module], name: str) -> None:
    ctx = accel.replace(ctx, mesh="pp=2")
    x, plan = torch.randn(4, 8), accel.parallel.Plan(micro_batches=2)

    with assert_raises(StageError, problem="sends a message to all ranks", expected=rf"torch\.distributed\.{name}"):
        model = accel.prepare_model(ctx, kind(), plan=plan, example=x)
        _ = accel.forward_backward(ctx, model, begin_batch(ctx), x, loss_fn=torch.sum, weight=4)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Gathering, "all_gather"),
        (Functional, "all_reduce"),
        (Paired, "all_gather"),
        (Counted, "all_gather"),
        (Chosen, "all_gather"),
        (InBackward, "all_reduce"),
        (InTraining, "all_reduce"),
    ],
)
def test_a_plan_is_not_searched_in_them(ranks: Simulator, kind: type[nn.Module], name: str) -> None:
    _ = ranks.run(lambda ctx: prepare_tensor(ctx, kind, name), 2, default_group=True)


def test_known_layers_are_divided_around_a_mean_of_all_ranks(ranks: Simulator) -> None:
    """Which is the same for any number of ranks with the same rows."""

    class Centered(Paired):
        def forward(self, x: Tensor) -> Tensor:
            x = self.net(x)
            mean = x.detach().mean(0)
            if distributed.is_initialized():
                total = _functional_collectives.all_reduce_coalesced([mean], "sum", distributed.group.WORLD)
                mean = total[0] / distributed.get_world_size()
            return x - mean

    def run(ctx: accel.DistContext) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(4, 8)
        return accel.prepare_model(ctx, Centered(), example=x)(x).detach()

    for found in ranks.run(lambda ctx: run(accel.replace(ctx, mesh="tp=2")), 2, default_group=True):
        torch.testing.assert_close(found, run(accel.single()))


def test_known_layers_are_divided_around_a_message_among_ranks_along_dp(ranks: Simulator) -> None:
    """Ranks along tp send the same rows, each among the ranks that read others."""

    class Among(Paired):
        def __init__(self, group: Any) -> None:
            super().__init__()
            self.group = [group]

        def forward(self, x: Tensor) -> Tensor:
            x = self.net(x)
            found = [torch.empty_like(x) for _ in range(2)]
            if self.group[0] is None:
                return x @ torch.cat([x, x]).detach().t()
            distributed.all_gather(found, x.detach(), group=self.group[0])
            return x @ torch.cat(found).t()

    def run(ctx: accel.DistContext, mesh: str) -> Tensor:
        ctx = accel.replace(ctx, mesh=mesh)
        torch.manual_seed(0)
        x = torch.randn(4, 8)
        group = accel.group_of(ctx, "dp") if mesh else None
        return accel.prepare_model(ctx, Among(group), example=x)(x).detach()

    for found in ranks.run(lambda ctx: run(ctx, "dp=2,tp=2"), 4, default_group=True):
        torch.testing.assert_close(found, run(accel.single(), ""))


def test_an_operator_to_all_ranks_is_no_part_of_a_stage(ranks: Simulator) -> None:
    _ = ranks.run(lambda ctx: run_stages(ctx, Functional, "all_reduce"), 2, default_group=True)


class Summing(nn.Module):
    """Adds a sum over the ranks of a group."""

    def __init__(self, group: Any, how: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.group, self.how = [group], how

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.relu(self.up(x)))
        found = x.detach().clone()
        if self.group[0] is None:
            return x + 2 * found
        if self.how == "operator":
            return x + _functional_collectives.all_reduce(found, "sum", self.group[0])
        if self.how == "place":
            distributed.all_reduce(found, distributed.ReduceOp.SUM, self.group[0])
        else:
            distributed.all_reduce(found, group=self.group[0])
        return x + found


@pytest.mark.parametrize("how", ["keyword", "place", "operator"])
def test_a_message_among_ranks_with_one_stage_runs(ranks: Simulator, how: str) -> None:
    """A forward on fake tensors, which records the stages, sends none."""

    def run(ctx: accel.DistContext, mesh: str) -> Tensor:
        ctx = accel.replace(ctx, mesh=mesh)
        torch.manual_seed(0)
        group = accel.group_of(ctx, "dp") if mesh else None
        x, plan = torch.randn(4, 8), accel.parallel.Plan(micro_batches=2)
        model = accel.prepare_model(ctx, Summing(group, how), plan=plan, example=x)
        loss, _ = accel.forward_backward(ctx, model, begin_batch(ctx), x, loss_fn=torch.sum, weight=4)
        return loss

    expected = run(accel.single(), "")
    for loss in ranks.run(lambda ctx: run(ctx, "pp=2,dp=2"), 4, default_group=True):
        torch.testing.assert_close(loss, expected)


def assert_refused(rank: int, environs: list[dict[str, str]]) -> None:
    torch.set_num_threads(1)
    with accel.session(environs[rank], device="cpu") as ctx:
        for kind, name in ((Gathering, "all_?gather"), (Functional, "all_?reduce"), (Waiting, "barrier")):
            prepare_tensor(ctx, kind, name)
            run_stages(ctx, kind, name)
        prepare_tensor(ctx, InBackward, "all_reduce")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_refuse_them() -> None:
    """They waited for each other."""
    run_ranks(assert_refused, job(2))
