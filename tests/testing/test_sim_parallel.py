# SPDX-License-Identifier: Apache-2.0
"""What torch has for parallel training, unmodified, gives four simulated ranks the numbers of one process."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from accel.testing import simulate_groups

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit
    from torch.distributed.optim import ZeroRedundancyOptimizer

RANKS, STEPS, SAMPLES = 4, 3, 16
SEEDS = [None, 5]
Numbers = dict[str, torch.Tensor]


def _model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(STEPS, SAMPLES, 6, generator=generator, dtype=torch.float64)
    return rows, torch.randn(STEPS, SAMPLES, 4, generator=generator, dtype=torch.float64)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, part: int = 0, parts: int = 1) -> None:
    """Train on part `part` of `parts` of every batch; equal parts, so that means of means are means."""
    rows, targets = _data()
    for step in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(rows[step, part::parts]), targets[step, part::parts]).backward()
        optimizer.step()


def _alone() -> Numbers:
    model = _model()
    _train(model, _optimizer(model))
    return model.state_dict()


def _full(model: nn.Module) -> Numbers:
    """The parameters as one process holds them."""
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def assert_same(ranks: list[Numbers], expected: Numbers) -> None:
    for got in ranks:
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name].detach(), tensor, rtol=1e-10, atol=1e-10)


def _shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _tensor_parallel(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _ddp(rank: int) -> Numbers:
    model = DistributedDataParallel(_model())
    _train(model, _optimizer(model), rank, RANKS)
    return _full(model.module)


def _ddp_accumulating(rank: int) -> Numbers:
    model, (rows, targets) = DistributedDataParallel(_model()), _data()
    optimizer = _optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in (0, 1):
            mine = slice(2 * rank + part, None, 2 * RANKS)
            with model.no_sync() if part == 0 else contextlib.nullcontext():
                (nn.functional.mse_loss(model(rows[step, mine]), targets[step, mine]) / 2).backward()
        optimizer.step()
    return _full(model.module)


def _ddp_hook(rank: int) -> Numbers:
    model = DistributedDataParallel(_model())
    model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    _train(model, _optimizer(model), rank, RANKS)
    return _full(model.module)


def _fsdp(rank: int) -> Numbers:
    model = _shard(_model(), init_device_mesh("cpu", (RANKS,)))
    _train(model, _optimizer(model), rank, RANKS)
    return _full(model)


def _hsdp(rank: int) -> Numbers:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = _shard(_model(), mesh)
    _train(model, _optimizer(model), rank, RANKS)
    return _full(model)


def _tp(rank: int) -> Numbers:
    model = _tensor_parallel(_model(), init_device_mesh("cpu", (RANKS,)))
    _train(model, _optimizer(model))
    return _full(model)


def _fsdp_and_tp(rank: int) -> Numbers:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = _shard(_tensor_parallel(_model(), mesh["tensor"]), mesh["data"])
    _train(model, _optimizer(model), rank // 2, 2)
    return _full(model)


def _zero(rank: int) -> Numbers:
    model = DistributedDataParallel(_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    _train(model, optimizer, rank, RANKS)
    return _full(model.module)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("seed", [SEEDS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in SEEDS[1:])])
@pytest.mark.parametrize(
    "way", [_ddp, _ddp_accumulating, _ddp_hook, _fsdp, _hsdp, _tp, _fsdp_and_tp, _zero], ids=lambda way: way.__name__
)
def test_training_equals_one_process(way, seed):
    ranks = simulate_groups(lambda group: way(group.rank()), RANKS, seed=seed, default_group=True)
    assert_same(ranks, _alone())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("schedule", [Schedule1F1B, ScheduleGPipe])
def test_a_pipeline_equals_one_process(schedule, seed):
    def rank(group):
        me = group.rank()
        parts = _model()
        cuts = [0, 1, 2, 4, 5]
        stage = PipelineStage(parts[cuts[me] : cuts[me + 1]], me, RANKS, torch.device("cpu"))
        pipeline = schedule(stage, n_microbatches=RANKS, loss_fn=nn.functional.mse_loss)
        mine = list(stage.submod.parameters())
        optimizer = torch.optim.SGD(mine, lr=0.1, momentum=0.9) if mine else None
        rows, targets = _data()
        for step in range(STEPS):
            parts.zero_grad()
            first, last = (rows[step],) if me == 0 else (), {"target": targets[step]} if me == RANKS - 1 else {}
            pipeline.step(*first, **last)
            if optimizer is not None:
                optimizer.step()
        kept = parts.state_dict()
        return {name: kept[name] for name in kept if cuts[me] <= int(name[0]) < cuts[me + 1]}

    found = {}
    for part in simulate_groups(rank, RANKS, seed=seed, default_group=True):
        found |= part
    assert_same([found], _alone())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("schedule", "places"), [(ScheduleInterleaved1F1B, [(0, 2), (1, 3)]), (ScheduleZBVZeroBubble, [(0, 3), (1, 2)])]
)
def test_a_pipeline_of_two_stages_a_rank_has_the_gradients_of_one_process(schedule, places, seed):
    rows, targets = (numbers[0] for numbers in _data())
    cuts = [0, 1, 2, 4, 5]

    def rank(group):
        model, mine = _model(), places[group.rank()]
        stages = [
            PipelineStage(model[cuts[place] : cuts[place + 1]], place, len(cuts) - 1, torch.device("cpu"))
            for place in mine
        ]
        pipeline = schedule(stages, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        pipeline.step(*([rows] if 0 in mine else []), **({"target": targets} if 3 in mine else {}))
        return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    model = _model()
    nn.functional.mse_loss(model(rows), targets).backward()
    first, second = simulate_groups(rank, 2, seed=seed, default_group=True)
    assert not first.keys() & second.keys()
    assert_same([first | second], {name: each.grad for name, each in model.named_parameters()})


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hook_with_state_of_its_own_and_join_with_zero_keep_ranks_equal(seed):
    def rank(group):
        model = DistributedDataParallel(_model())
        model.register_comm_hook(PowerSGDState(group, start_powerSGD_iter=2), powerSGD_hook)
        _train(model, _optimizer(model), group.rank(), RANKS)
        other = DistributedDataParallel(_model())
        optimizer = ZeroRedundancyOptimizer(other.parameters(), torch.optim.SGD, lr=0.1)
        with Join([other, optimizer]):
            _train_some(other, optimizer, steps=[3, 1, 2, 2][group.rank()])
        return {f"{i} {name}": each for i, one in enumerate((model, other)) for name, each in _full(one.module).items()}

    ranks = simulate_groups(rank, RANKS, seed=seed, default_group=True)
    assert_same(ranks[1:], ranks[0])
    assert not torch.equal(ranks[0]["0 0.weight"], ranks[0]["1 0.weight"])


def _train_some(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(_data()[0][step]).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("seed", SEEDS)
def test_uneven_inputs_with_join_equal_one_process(seed):
    counts = [3, 1, 4, 2]

    def batch(rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * rank + step)
        return torch.randn(2, 6, generator=generator, dtype=torch.float64)

    def rank(group):
        model = DistributedDataParallel(_model())
        optimizer = _optimizer(model)
        with Join([model]):
            for step in range(counts[group.rank()]):
                optimizer.zero_grad()
                model(batch(group.rank(), step)).square().mean().backward()
                optimizer.step()
        return _full(model.module)

    model = _model()
    optimizer = _optimizer(model)
    for step in range(max(counts)):
        optimizer.zero_grad()
        for i in range(RANKS):
            if step < counts[i]:  # by default DDP divides by the first number of ranks, gone ones included
                (model(batch(i, step)).square().mean() / RANKS).backward()
        optimizer.step()
    ranks = simulate_groups(rank, RANKS, seed=seed, default_group=True)
    assert_same([ranks[counts.index(max(counts))]], model.state_dict())


@pytest.mark.parametrize("seed", SEEDS)
def test_distributed_tensors_compute_what_plain_ones_do(seed):
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 6), (6, 3)))

    def rank(group):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        a = distribute_tensor(left, mesh, [Shard(0), Shard(1)])
        b = distribute_tensor(right, mesh, [Replicate(), Shard(0)])
        product = a @ b
        moved = product.redistribute(mesh, [Shard(1), Shard(0)])
        return product.full_tensor(), moved.to_local(), moved.full_tensor()

    for product, _, moved in simulate_groups(rank, RANKS, seed=seed, default_group=True):
        torch.testing.assert_close(product, left @ right, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(moved, left @ right, rtol=1e-10, atol=1e-10)
