# SPDX-License-Identifier: Apache-2.0
"""Uneven inputs on the CPU: ranks that run dry keep the others going, and end with their parameters."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from processes import job, script_ranks
from profiles import share
from steps import begin_batch
from torch import distributed as dist, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

import accel
from accel.errors import ConfigError, PrepareError
from accel.testing import InjectedFault, Simulator


def make() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(3, 1, bias=False).double()


def batches(rank: int, steps: int) -> torch.Tensor:
    return torch.randn(steps, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def train(ctx: accel.DistContext, steps: list[int], *, initial: bool) -> torch.Tensor:
    model = accel.prepare_model(ctx, make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = accel.train_state(ctx)
    with accel.join_uneven_inputs(ctx, model, divide_by_initial_world_size=initial):
        for inputs in batches(ctx.rank, steps[ctx.rank]):
            state = accel.backward(ctx, model(inputs).square().mean(), begin_batch(ctx, state))
            state = accel.optimizer_step(ctx, optimizer, state)
    return accel.unwrap_model(model).weight.detach()


def by_hand(steps: list[int], *, initial: bool) -> torch.Tensor:
    model = make()
    data = [batches(rank, count) for rank, count in enumerate(steps)]
    for step in range(max(steps)):
        here = [rank for rank, count in enumerate(steps) if count > step]
        model.zero_grad()
        total = sum(model(data[rank][step]).square().mean() for rank in here)
        (total / (len(steps) if initial else len(here))).backward()
        with torch.no_grad():
            model.weight -= 0.1 * model.weight.grad
    return model.weight.detach()


@settings(max_examples=share(0.24), deadline=None)
@given(steps=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
def test_every_step_is_that_of_the_ranks_that_take_it(steps: list[int]) -> None:
    expected = by_hand(steps, initial=True)
    with Simulator() as simulator:
        world = len(steps)
        for got in simulator.run(lambda ctx: train(ctx, steps, initial=True), world, default_group=world > 1):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_the_block_leaves_nothing_behind(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model, before = accel.prepare_model(ctx, make()), warnings.filters[:]
        with accel.join_uneven_inputs(ctx, model):
            pass
        assert warnings.filters == before
        if ctx.rank == 0:  # alone, which within the block would wait for the others
            model(batches(0, 1)[0])

    ranks.run(rank, 2, default_group=True)


def test_a_rank_that_fails_answers_nobody(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        with accel.join_uneven_inputs(ctx, accel.prepare_model(ctx, make())):
            raise InjectedFault("on purpose")

    with pytest.raises(InjectedFault):
        ranks.run(rank, 2, default_group=True)


def test_what_cannot_be_joined_is_refused(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        for models, error, fields in (
            ([make()], PrepareError, {"got": "a Linear that DDP does not wrap"}),
            ([torch.optim.SGD(make().parameters())], PrepareError, {"got": "a SGD that DDP does not wrap"}),
            ([], ConfigError, {"expected": "the models that the block trains"}),
        ):
            with assert_raises(error, **fields), accel.join_uneven_inputs(ctx, *models):
                pass

    ranks.run(rank, 2)


class Counted(JoinHook):
    """Answers the exchange of a `Counter` without a count."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def main_hook(self) -> None:
        self.counter.exchange(0)


class Counter(Joinable):
    """Adds the steps of all ranks, an exchange a step."""

    def __init__(self, group: dist.ProcessGroup, options: list[dict[str, object]]) -> None:
        super().__init__()
        self.group, self.options, self.total = group, options, 0

    def __call__(self) -> None:
        Join.notify_join_context(self)
        self.exchange(1)

    def exchange(self, count: int) -> None:
        counts = torch.tensor([count])
        dist.all_reduce(counts, group=self.group)
        self.total += int(counts)

    def join_hook(self, **kwargs: object) -> JoinHook:
        self.options.append(kwargs)
        return Counted(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.group


def test_other_joinables_join_beside_a_model_or_alone(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> tuple[int, int]:
        model = accel.prepare_model(ctx, make())
        counter = Counter(model.process_group, options := [])
        state = accel.train_state(ctx)
        with accel.join_uneven_inputs(ctx, counter, model):
            for inputs in batches(ctx.rank, 2 + ctx.rank):
                counter()
                accel.backward(ctx, model(inputs).square().mean(), begin_batch(ctx, state))
        beside = counter.total
        with accel.join_uneven_inputs(ctx, counter, divide_by_initial_world_size=False):
            for _ in range(3 - ctx.rank):
                counter()
        assert [each["divide_by_initial_world_size"] for each in options] == [True, True, False, False]
        return beside, counter.total

    assert ranks.run(rank, 3, default_group=True) == [(2 + 3 + 4, 9 + 3 + 2 + 1)] * 3


def test_a_joinable_is_left_alone_on_one_rank() -> None:
    counter = Counter(dist.group.WORLD, options := [])
    with accel.join_uneven_inputs(accel.single(), counter):
        pass
    assert not options


REAL = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, accel
from test_join_uneven_inputs import by_hand, train
torch.set_num_threads(1)
with accel.session(device="cpu") as ctx:
    for initial in (True, False):  # False makes DDP wait in C++, which simulated ranks cannot
        got = train(ctx, [2, 5], initial=initial)
        torch.testing.assert_close(got, by_hand([2, 5], initial=initial), rtol=0, atol=1e-10)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_uneven_inputs_over_gloo(tmp_path: Path) -> None:
    script = tmp_path / "real.py"
    script.write_text(REAL)
    with script_ranks(script, job(2), Path(__file__).parent, folder=tmp_path) as ranks:
        assert not any(rank.wait(120) for rank in ranks), [rank.said() for rank in ranks]
