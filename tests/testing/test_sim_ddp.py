# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel, unmodified, trains on simulated ranks as one process would."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from accel.testing import Deadlock, simulate_groups

SAMPLES = 16


def _model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(3, SAMPLES, 6, generator=generator, dtype=torch.float64)
    return rows, torch.randint(0, 3, (3, SAMPLES), generator=generator)


def _alone(steps: int) -> dict[str, torch.Tensor]:
    model, (rows, labels) = _model(), _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows[step]), labels[step]).backward()
        optimizer.step()
    return model.state_dict()


def _train(group, *, steps: int = 3, micro: int = 1, hook=None, **options) -> dict[str, torch.Tensor]:
    rank, size, (rows, labels) = group.rank(), group.size(), _data()
    model = DistributedDataParallel(_model(), process_group=group, **options)
    if hook is not None:
        model.register_comm_hook(group, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        mine = range(rank, SAMPLES, size)
        parts = [list(mine)[i::micro] for i in range(micro)]
        for part in parts[:-1]:
            with model.no_sync():
                (nn.functional.cross_entropy(model(rows[step, part]), labels[step, part]) / micro).backward()
        (nn.functional.cross_entropy(model(rows[step, parts[-1]]), labels[step, parts[-1]]) / micro).backward()
        optimizer.step()
    return model.module.state_dict()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"micro": 2},
        {"hook": default_hooks.allreduce_hook},
        {"bucket_cap_mb": 1e-4},
        {"gradient_as_bucket_view": True, "static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=["plain", "no_sync", "comm_hook", "small_buckets", "static_graph", "unused"],
)
@pytest.mark.parametrize("seed", [None, 3])
def test_training_equals_one_process(size, options, seed):
    expected = _alone(3)
    for got in simulate_groups(lambda group: _train(group, **options), size, seed=seed):
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-12, atol=1e-12)


def test_ranks_agree_to_the_bit_in_every_schedule():
    runs = [simulate_groups(_train, 3, seed=seed) for seed in (None, 0, 1)]
    for run in runs:
        for state in run:
            assert all(torch.equal(state[name], runs[0][0][name]) for name in state)


def test_parameters_and_buffers_follow_rank_0():
    def rank(group):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        nn.init.constant_(model[0].weight, float(group.rank()))
        wrapped = DistributedDataParallel(model, process_group=group)
        weight = model[0].weight.detach().clone()
        model[1].running_mean.fill_(float(group.rank() + 5))
        wrapped(torch.zeros(2, 4)).sum().backward()
        with torch.no_grad():
            wrapped(torch.zeros(2, 4))
        return weight, model[1].running_mean.clone()

    first, *others = simulate_groups(rank, 3)
    assert torch.equal(first[0], torch.zeros(4, 4))
    for weight, mean in others:
        assert torch.equal(weight, first[0])
        assert torch.equal(mean, first[1])


def test_models_that_differ_between_ranks_are_found_by_ddp():
    def rank(group):
        DistributedDataParallel(nn.Linear(2, 2 + group.rank()), process_group=group)

    with pytest.raises(RuntimeError, match=r"verifies.*shape|appears not to match"):
        simulate_groups(rank, 2)


def test_a_deadlock_inside_of_the_reducer_unwinds_and_the_next_run_works():
    def rank(group):
        model = DistributedDataParallel(_model(), process_group=group)
        loss = model(_data()[0][0]).sum()
        if group.rank() == 0:
            loss.backward()

    for _ in range(3):
        with assert_raises(Deadlock, got=r"rank 0: waiting in all_reduce\(SUM, float64\[\d+\]\) at test_sim_ddp.py"):
            simulate_groups(rank, 2)
    assert len(simulate_groups(_train, 2)) == 2


def test_hooks_that_keep_communicating_see_their_own_rank():
    seen = []

    def hook(group, bucket):
        seen.append(group.rank())
        return (
            dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
            .get_future()
            .then(lambda future: future.value()[0])
        )

    results = simulate_groups(lambda group: _train(group, hook=hook, steps=1), 2)
    assert sorted(set(seen)) == [0, 1]
    torch.testing.assert_close(results[0]["0.weight"], copy.deepcopy(_alone(1))["0.weight"], rtol=1e-12, atol=1e-12)
