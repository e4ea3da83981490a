# SPDX-License-Identifier: Apache-2.0
"""Ranks that share samples are told when a loader of the script's own gives them different batches."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from pipelines import Words, loss_sum
from steps import begin_batch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import accel
from accel import comm
from accel.testing import Simulator

STAGES = accel.parallel.Plan(micro_batches=2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
            self.drop = nn.Dropout(0.5)

    def forward(self, batch: Any, scale: Any = None) -> Tensor:
        hidden = batch["x"] if isinstance(batch, dict) else batch
        return self.drop(self.body(hidden.float()))


WHOLE: dict[str, Any] = dict.fromkeys(("body.0", "body.2"), "replicated")


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> Any:
        return torch.arange(at, at + 5) % 11, torch.arange(at + 1, at + 6) % 11


def _by_global_rank(ctx: accel.DistContext) -> DataLoader[Any]:
    return DataLoader(Sentences(), batch_size=4, sampler=DistributedSampler(Sentences(), ctx.world_size, ctx.rank))


def _tensor(ctx: accel.DistContext, mesh: str = "tp=2", **options: Any) -> tuple[accel.DistContext, nn.Module]:
    ctx = accel.replace(ctx, mesh=mesh)
    return ctx, accel.prepare_model(ctx, Net(), **options)


def _pipelined(ctx: accel.DistContext, mesh: str) -> tuple[accel.DistContext, nn.Module]:
    ctx = accel.replace(ctx, mesh=mesh)
    return ctx, accel.prepare_model(ctx, Words(4), plan=accel.parallel.Plan(micro_batches=2, tensor={}))


def _run(ctx: accel.DistContext, model: nn.Module, batch: Any, trains: bool) -> None:
    """One forward of a pipeline or of a whole model."""
    ids, targets = batch
    if ctx.axis("pp").size == 1:
        _ = model.train(trains)({"x": ids[:, :4]})
    elif trains:
        state = begin_batch(ctx)
        weight = float(targets.numel())
        more = {"targets": targets, "loss_fn": loss_sum, "weight": weight}
        _ = accel.forward_backward(ctx, model, state, ids, **more)
    else:
        _ = accel.training.forward(ctx, model, ids)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "dp=2,tp=2", "dp=2,pp=2", "pp=2,tp=2"])
def test_a_sampler_by_global_rank_is_refused_and_prepares_loader_passes(ranks: Simulator, mesh: str, trains: bool):
    def rank(ctx: accel.DistContext, *, prepared: bool) -> None:
        raw = _by_global_rank(ctx)
        ctx, model = _pipelined(ctx, mesh) if "pp" in mesh else _tensor(ctx, mesh)
        if not prepared:
            return _run(ctx, model, next(iter(raw)), trains)
        loader = accel.prepare_loader(ctx, DataLoader(Sentences(), batch_size=4))
        return _run(ctx, model, next(accel.batches(ctx, loader)).data, trains)

    size = 4 if "," in mesh else 2
    _ = ranks.run(lambda ctx: rank(ctx, prepared=True), size, default_group=True)
    mode = "training" if trains else "evaluation"
    fields = {"problem": "different batches", "where": f"first forward in {mode}", "fix": "prepare_loader"}
    with assert_raises(accel.errors.DataError, **fields) as caught:
        _ = ranks.run(lambda ctx: rank(ctx, prepared=False), size, default_group=True)
    assert "int64 [" in str(caught.value)
    assert re.search(r"on rank \d, other values on rank \d", str(caught.value))


class Marked(Tensor):
    """A tensor of another class."""


X = torch.arange(12.0).view(3, 4)

DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "one integer": (X.long(), X.long().index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(0)), "int64 [3, 4]"),
    "shape": (X, X[:2], "float32 [3, 4] on rank 0, argument 0.x float32 [2, 4]"),
    "dtype": (X, X.double(), "float32 [3, 4] on rank 0, argument 0.x float64 [3, 4]"),
    "rows in another order": (X, X.flip(0), "float32 [3, 4]"),
    "samples of one distribution": (torch.randn(2**18, 4), torch.randn(2**18, 4), "float32 [262144, 4]"),
    "class": (X, X.as_subclass(Marked), "float32 [3, 4]"),
    "a number and none": (X, X.masked_fill(X == 3, torch.nan), "float32"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_each_kind_of_difference_is_noticed_and_its_leaf_is_named(ranks: Simulator, name: str):
    left, right, said = DIFFERENT[name]

    def rank(ctx: accel.DistContext) -> None:
        _, model = _tensor(ctx)
        _ = model({"x": (left, right)[ctx.rank]})

    with pytest.raises(accel.errors.DataError) as caught:
        _ = ranks.run(rank, 2, default_group=True)
    assert f"on the ranks 0, 1, which share a model along tp or pp, got argument 0.x {said}" in str(caught.value)


@pytest.mark.parametrize("at", [0, 5, 40])
def test_a_leaf_among_many_is_noticed(ranks: Simulator, at: int):
    def rank(ctx: accel.DistContext, other: int) -> None:
        _, model = _tensor(ctx)
        _ = model(X, [torch.tensor([float(k)]) + (k == at) * other * ctx.rank for k in range(41)])

    _ = ranks.run(lambda ctx: rank(ctx, 0), 2, default_group=True)
    with assert_raises(accel.errors.DataError, got="float32"):
        _ = ranks.run(lambda ctx: rank(ctx, 1), 2, default_group=True)


def _frozen_encoder(ctx: accel.DistContext) -> None:
    """Its outputs differ along tp in their last digits, as those of a fused kernel do."""
    _, model = _tensor(ctx)
    hidden = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        _ = model.train(dtype is torch.float32)((hidden * (1 + 1e-6 * ctx.rank)).to(dtype))


def _ragged(ctx: accel.DistContext) -> None:
    _, model = _tensor(ctx)
    for rows in (4, 3, 1, 0, 7):
        model(X[:1].expand(rows, 4)).sum().backward()


def _own_objects(ctx: accel.DistContext) -> None:
    """Arguments that are no batch: objects, numbers that are not counted, what is not finite everywhere."""
    _, model = _tensor(ctx)
    for scale in (
        object(),
        {"a": float(ctx.rank)},
        torch.tensor([torch.nan, torch.inf]),
        torch.randn(3, 2).to_sparse(),
        torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged),
        torch.complex(X, X).conj(),
        torch.arange(4)[::2][1:],  # one element with another stride than 1
    ):
        model = copy.deepcopy(model)
        _ = model(X, scale)


def _whole_everywhere(ctx: accel.DistContext) -> None:
    """A model that each rank has whole may be evaluated by one of them."""
    _, model = _tensor(ctx, plan=accel.parallel.Plan(tensor=WHOLE))
    if ctx.is_main_process:
        _ = model.eval()(X)


def _spread_by_the_user(ctx: accel.DistContext) -> None:
    """A model that its user has divided may take parts of a batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    cut = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Shard(0))
    plan: Any = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(net, mesh, cut)
    parallelize_module(net, mesh, plan)
    model = accel.prepare_model(accel.replace(ctx, mesh=mesh), net)
    _ = model(X[:1] + ctx.rank)


def _data_parallel_ranks(ctx: accel.DistContext) -> None:
    model = accel.prepare_model(ctx, Net())
    _ = model(X + ctx.rank)


def _modes_and_copies(ctx: accel.DistContext) -> None:
    _, model = _tensor(ctx)
    for trains, other in itertools.product((True, False, True), (model, copy.deepcopy(model))):
        _ = other.train(trains)(X)


PASS = [
    _frozen_encoder,
    _ragged,
    _own_objects,
    _whole_everywhere,
    _spread_by_the_user,
    _data_parallel_ranks,
    _modes_and_copies,
]


@pytest.mark.parametrize("program", PASS, ids=lambda each: each.__name__.strip("_"))
def test_right_programs_pass(ranks: Simulator, program: Any):
    _ = ranks.run(program, 2, default_group=True)


def test_two_forwards_of_a_model_are_compared(ranks: Simulator, monkeypatch: pytest.MonkeyPatch):
    compared: list[str] = []
    gather = comm.agreed_values

    def counted(handle: Any, call: Any, *given: Any) -> Any:
        compared.append(call.detail)
        return gather(handle, call, *given)

    monkeypatch.setattr("accel.parallel._same_batches.agreed_values", counted)

    def rank(ctx: accel.DistContext) -> None:
        _, model = _tensor(ctx)
        for trains in (True, True, False, False, True):
            _ = model.train(trains)(X, [X] * (3 if trains else 60))

    _ = ranks.run(rank, 2, default_group=True)
    assert compared == ["the first in training"] * 2 + ["the first in evaluation"] * 2


def test_a_model_that_is_compiled_whole_is_compared_too(ranks: Simulator):
    def rank(ctx: accel.DistContext, shift: int) -> None:
        _, model = _tensor(
            ctx, plan=accel.parallel.Plan(tensor=WHOLE)
        )  # without collectives, which torch would not trace
        model = accel.compile_model(model, backend="eager", fullgraph=True)
        for _ in range(2):
            _ = model(X + shift * ctx.rank)

    _ = ranks.run(lambda ctx: rank(ctx, 0), 2, default_group=True)
    with assert_raises(accel.errors.DataError, problem="different batches"):
        _ = ranks.run(lambda ctx: rank(ctx, 1), 2, default_group=True)


def test_a_model_for_local_sgd_is_compared_along_tp(ranks: Simulator):
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp=2,tp=2")
        _ = accel.parallel.prepare_local_model(ctx, Net())(X + ctx.rank)

    with assert_raises(accel.errors.DataError, expected="on the ranks [02], [13],"):
        _ = ranks.run(rank, 4, default_group=True)


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
def test_batches_are_compared_again_after_a_resume(ranks: Simulator, tmp_path: Path, mesh: str):
    def rank(ctx: accel.DistContext) -> None:
        ctx, model = _pipelined(ctx, mesh) if "pp" in mesh else _tensor(ctx, mesh)
        right = torch.arange(20).view(4, 5) % 11
        for trains in (True, True, False):
            _run(ctx, model, (right, right), trains)
        saved = accel.save_state(ctx, tmp_path, {"model": model}, step=1)
        _ = accel.load_state(ctx, saved, {"model": model})
        for trains in (True, False):
            _run(ctx, model, (right, right), trains)
        _ = accel.load_state(ctx, saved, {"model": model})
        wrong = (right + ctx.rank) % 11
        for trains, mode in ((True, "training"), (False, "evaluation")):
            with assert_raises(accel.errors.DataError, problem="different batches", where=f"first forward in {mode}"):
                _run(ctx, model, (wrong, wrong), trains)

    _ = ranks.run(rank, 2, default_group=True)
