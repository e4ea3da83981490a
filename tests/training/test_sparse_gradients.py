# SPDX-License-Identifier: Apache-2.0
"""Embeddings with sparse gradients train on one rank and under DDP as in one process; elsewhere they are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from processes import job, script_ranks
from profiles import share
from steps import begin_batch
from torch import nn

import accel
from accel.errors import NonFiniteError, PrepareError, StepError
from accel.parallel.axes.replicate._comm_hooks import gather_sparse
from accel.testing import Simulator, simulate

TOLERANCE = {"rtol": 0, "atol": 1e-10}
WORLDS = [1, 2]


class Words(nn.Module):
    """Two trained tables, one of them shared by two modules, a frozen one, and a dense layer."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(7, width, sparse=True, padding_idx=0)
        self.bag = nn.EmbeddingBag(7, width, sparse=True, mode="sum")
        self.again = nn.Embedding(7, width, sparse=True)
        self.again.weight = self.bag.weight
        self.fixed = nn.Embedding(7, width, sparse=True).requires_grad_(False)
        self.head = nn.Linear(width, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        looked_up = (self.table(ids) + self.again(ids) + self.fixed(ids)).sum(1)
        return self.head(torch.tanh(looked_up + self.bag(ids)))


def make_model() -> Words:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Words().double()


def tables_of(model: nn.Module) -> list[nn.Parameter]:
    return [each for name, each in model.named_parameters() if each.requires_grad and "head" not in name]


def make_optimizers(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    tables, head = tables_of(model), [each for name, each in model.named_parameters() if "head" in name]
    if kind == "SGD":
        return [torch.optim.SGD([*tables, *head], lr=0.1)]
    return [torch.optim.SparseAdam(tables, lr=0.05), torch.optim.AdamW(head, lr=0.05)]


def words(window: int, micro: int, rank: int, units: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((window * 10 + micro) * 10 + rank)
    return torch.randint(0, 7, (units, 3), generator=generator)


class Case(NamedTuple):
    """A generated run: units by window, micro-batch and rank, and how its steps are taken."""

    units: list[list[list[int]]]
    optimizer: str
    max_norm: float | None
    max_value: float | None
    scale: float
    sync_each_batch: bool
    divided: bool
    overflow: int | None
    gathers: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.integers(1, 3))
    ranks = st.lists(st.integers(0, 3), min_size=world, max_size=world)
    clip = draw(st.sampled_from(["none", "norm", "value"]))
    return Case(
        units=draw(st.lists(st.lists(ranks, min_size=1, max_size=3), min_size=1, max_size=3)),
        optimizer=draw(st.sampled_from(["SparseAdam", "SGD"])),
        max_norm=0.3 if clip == "norm" else None,
        max_value=0.05 if clip == "value" else None,
        scale=draw(st.sampled_from([1.0, 1024.0])),
        sync_each_batch=draw(st.booleans()),
        divided=draw(st.booleans()),
        overflow=draw(st.sampled_from([None, None, 0, 1])),
        gathers=draw(st.booleans()),
    )


class Outcome(NamedTuple):
    stepped: list[bool]
    norms: list[torch.Tensor]
    parameters: list[torch.Tensor]


def train(ctx: accel.DistContext, case: Case) -> Outcome:
    model = accel.prepare_model(ctx, make_model(), comm_hook=gather_sparse if case.gathers else None)
    optimizers = make_optimizers(model, case.optimizer)
    outcome = Outcome([], [], [])
    scaler = accel.LossScale(scale=case.scale, dynamic=True)
    state = accel.train_state(ctx, accumulation=3, sync_each_batch=case.sync_each_batch, scaler=scaler)
    for at, window in enumerate(case.units):
        for micro, counts in enumerate(window):
            count = counts[ctx.rank]
            state = begin_batch(ctx, state, last=micro == len(window) - 1)
            with accel.accumulate(ctx, state, model):
                loss = model(words(at, micro, ctx.rank, count)).square().sum() / max(count, 1)
                if case.overflow == at and ctx.rank == 0 and micro == 0:
                    loss = loss * math.inf
                state = accel.backward(ctx, loss, state, weight=count)
        if case.divided:
            state = accel.unscale_gradients(ctx, optimizers, state)
        state = accel.optimizer_step(ctx, optimizers, state, max_norm=case.max_norm, max_value=case.max_value)
        outcome.stepped.append(state.stepped)
        outcome.parameters.append(flat(model))
        if state.stepped and state.grad_norm is not None:
            outcome.norms.append(state.grad_norm)
    assert all(each.grad is None for each in model.parameters())
    return outcome


def train_by_hand(case: Case) -> Outcome:
    """One process, one batch of all units to a step, torch alone."""
    model = make_model()
    optimizers, outcome = make_optimizers(model, case.optimizer), Outcome([], [], [])
    for at, window in enumerate(case.units):
        parts = [words(at, micro, rank, n) for micro, counts in enumerate(window) for rank, n in enumerate(counts)]
        ids = torch.cat(parts)
        (model(ids).square().sum() / max(len(ids), 1)).backward()
        stepped = len(ids) > 0 and not (case.overflow == at and window[0][0])
        if stepped:
            outcome.norms.append(clip_by_hand(model, case))
            for each in optimizers:
                each.step()
        model.zero_grad()
        outcome.stepped.append(stepped)
        outcome.parameters.append(flat(model))
    return outcome


def clip_by_hand(model: nn.Module, case: Case) -> torch.Tensor:
    values = []
    for each in model.parameters():
        if each.grad is not None:
            each.grad = each.grad.coalesce() if each.grad.is_sparse else each.grad
            values.append(each.grad.values() if each.grad.is_sparse else each.grad)
    norm = torch.cat([each.flatten() for each in values]).norm()
    for each in values:
        if case.max_norm is not None:
            each.mul_((case.max_norm / (norm + 1e-6)).clamp(max=1.0))
        if case.max_value is not None:
            each.clamp_(-case.max_value, case.max_value)
    return norm


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten().clone() for each in accel.unwrap_model(model).parameters()])


@settings(max_examples=share(0.6), deadline=None)
@given(case=cases(), seed=st.integers(0, 9))
def test_any_split_is_one_process_with_one_batch(ranks: Simulator, case: Case, seed: int) -> None:
    expected = train_by_hand(case)
    for got in ranks.run(lambda ctx: train(ctx, case), len(case.units[0][0]), seed=seed):
        assert got.stepped == expected.stepped
        torch.testing.assert_close(got.norms, expected.norms, **TOLERANCE)
        torch.testing.assert_close(got.parameters, expected.parameters, **TOLERANCE)


def one_step(ctx: accel.DistContext, model: nn.Module, **options: object) -> torch.Tensor:
    model = accel.prepare_model(ctx, model, **options)
    state = accel.backward(ctx, model(words(0, 0, ctx.rank, 3)).square().mean(), begin_batch(ctx))
    _ = accel.optimizer_step(ctx, make_optimizers(model, "SparseAdam"), state, max_norm=0.2)
    return flat(model)


OPTIONS: list[dict[str, object]] = [
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": False},
    {"broadcast_buffers": False, "bucket_cap_mb": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_options_of_ddp_take_the_same_step(options: dict[str, object]) -> None:
    plain = simulate(lambda ctx: one_step(ctx, make_model()), 2)
    found = simulate(lambda ctx: one_step(ctx, make_model(), **options), 2)
    torch.testing.assert_close(found, plain, **TOLERANCE)
    assert torch.equal(found[0], found[1])


def test_a_model_that_the_user_wrapped_trains() -> None:
    def train_wrapped(ctx: accel.DistContext) -> torch.Tensor:
        return one_step(ctx, nn.parallel.DistributedDataParallel(make_model()))

    plain = simulate(lambda ctx: one_step(ctx, make_model()), 2)
    torch.testing.assert_close(simulate(train_wrapped, 2, default_group=True), plain, **TOLERANCE)


def test_a_step_in_the_backward() -> None:
    ctx, model, twin = accel.single(), make_model(), make_model()
    accel.training.fused_step(
        ctx, model(words(0, 0, 0, 3)).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    twin(words(0, 0, 0, 3)).square().mean().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    torch.testing.assert_close(flat(model), flat(twin), **TOLERANCE)


@pytest.mark.parametrize("world", WORLDS)
def test_a_nan_in_a_row_is_named(world: int) -> None:
    def spoil(ctx: accel.DistContext) -> None:
        model = accel.prepare_model(ctx, make_model())
        accel.unwrap_model(model).table.weight.data[3] = math.nan
        state = accel.backward(ctx, model(torch.tensor([[1, 3, 3]])).square().mean(), begin_batch(ctx))
        _ = accel.optimizer_step(ctx, make_optimizers(model, "SGD"), state)

    with assert_raises(NonFiniteError, where=r"table\.weight"):
        _ = simulate(spoil, world)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3, sparse=True)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.table.weight


class Doubled(nn.Embedding):
    """A sparse embedding with a dense parameter of its own, which DDP would take for a sparse one."""

    def __init__(self) -> None:
        super().__init__(7, 3, sparse=True)
        self.factor = nn.Parameter(torch.ones(()))


def under(strategy: str) -> Callable[[accel.DistContext], object]:
    return lambda ctx: accel.prepare(accel.replace(ctx, strategy=strategy), make_model())


def joined(ctx: accel.DistContext) -> None:
    model = accel.prepare_model(ctx, make_model())
    with accel.join_uneven_inputs(ctx, model):
        pass


def with_masters(ctx: accel.DistContext) -> object:
    precision = accel.precision.Precision(compute="bf16", params="bf16", master_weights="fp32")
    return accel.prepare(accel.replace(ctx, precision=precision), make_model())


COMPRESSED = {"got": "comm_hook that compresses"}
REFUSED: dict[str, tuple[Callable[[accel.DistContext], object], dict[str, str]]] = {
    "fsdp": (
        under("fsdp"),
        {"got": "spread along shard", "where": r"prepare_model, table\.weight, bag\.weight", "fix": "sparse=False"},
    ),
    "fp16 hook": (lambda ctx: accel.prepare_model(ctx, make_model(), comm_hook="fp16"), COMPRESSED),
    "bf16 hook": (lambda ctx: accel.prepare_model(ctx, make_model(), comm_hook="bf16"), COMPRESSED),
    "power sgd": (
        lambda ctx: accel.prepare_model(ctx, make_model(), comm_hook=accel.parallel.PowerSgd()),
        {"got": "comm_hook that"},
    ),
    "masters": (with_masters, {"got": "master weights"}),
    "local sgd": (
        lambda ctx: accel.parallel.prepare_local_model(ctx, make_model()),
        {"got": "local SGD", "where": "prepare_local_model, table"},
    ),
    "join": (joined, {"got": "run out of inputs", "where": "join_uneven_inputs"}),
    "tied": (
        lambda ctx: accel.prepare(ctx, Tied()),
        {"problem": "sparse gradients and dense ones", "got": r"head\.weight"},
    ),
    "a further parameter": (
        lambda ctx: accel.prepare(ctx, nn.Sequential(Doubled())),
        {"problem": "dense ones", "got": r"0\.factor"},
    ),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", REFUSED)
def test_elsewhere_they_are_refused_on_any_number_of_ranks(name: str, world: int) -> None:
    prepare, fields = REFUSED[name]

    def refused(ctx: accel.DistContext) -> None:
        with assert_raises(PrepareError, **fields):
            _ = prepare(ctx)

    _ = simulate(refused, world, default_group=True)


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "cp=2", "dp=2,ep=2", "dp=2,tp=2"])
def test_meshes_refuse_them(mesh: str) -> None:
    def refused(ctx: accel.DistContext) -> None:
        with assert_raises(PrepareError, got="sparse=True and parameters spread along"):
            _ = accel.prepare(accel.replace(ctx, mesh=mesh), make_model())

    _ = simulate(refused, 4 if mesh == "dp=2,tp=2" else 2, default_group=True)


FREE: dict[str, Callable[[], nn.Module]] = {
    "frozen": lambda: make_model().requires_grad_(False),
    "dense": lambda: nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 1)),
}


@pytest.mark.parametrize("make", FREE.values(), ids=FREE)
def test_what_has_no_sparse_gradients_is_prepared(make: Callable[[], nn.Module]) -> None:
    def prepare_all(ctx: accel.DistContext) -> None:
        _ = accel.prepare_model(ctx, make(), comm_hook="bf16")
        _ = accel.prepare(accel.replace(ctx, strategy="fsdp"), make())
        _ = accel.parallel.prepare_local_model(ctx, make())

    _ = simulate(prepare_all, 2, default_group=True)


class Other(nn.Module):
    """A table of which a forward makes another use than that of the module."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.table = nn.Embedding(7, 3, sparse=use != "sparse")
        self.head = nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.use == "none":
            return self.head(torch.ones(1, 3))
        if self.use == "sparse":
            return self.head(nn.functional.embedding(ids, self.table.weight, sparse=True))
        return self.head(self.table.weight[ids])


@pytest.mark.parametrize(
    ("use", "text"), [("sparse", "of another parameter"), ("dense", "a dense gradient"), ("none", "no gradient")]
)
def test_gradients_that_ddp_does_not_expect_are_told(use: str, text: str) -> None:
    def step(ctx: accel.DistContext) -> None:
        model = accel.prepare_model(ctx, Other(use), find_unused_parameters=use == "none")
        with assert_raises(StepError, got=text, fix="only by its forward"):
            accel.backward(ctx, model(torch.tensor([1, 2])).mean(), begin_batch(ctx))

    _ = simulate(step, 2)


def test_gradients_that_stayed_on_their_rank_are_refused() -> None:
    def step(ctx: accel.DistContext) -> None:
        model = accel.prepare_model(ctx, make_model())
        with accel.no_sync(ctx, model):
            state = accel.backward(ctx, model(words(0, 0, ctx.rank, 3)).mean(), begin_batch(ctx))
        with assert_raises(StepError, problem="not exchanged", got=r"table\.weight"):
            _ = accel.optimizer_step(ctx, torch.optim.SparseAdam(tables_of(model)), state)

    _ = simulate(step, 2)


@pytest.mark.parametrize("world", WORLDS)
def test_a_kept_graph(world: int) -> None:
    def step(ctx: accel.DistContext) -> None:
        model = accel.prepare_model(ctx, make_model())
        state = begin_batch(ctx)
        with accel.accumulate(ctx, state, model):
            loss = model(words(0, 0, ctx.rank, 3)).square().mean()
            state = accel.backward(ctx, loss, state, retain_graph=True)
        optimizers = make_optimizers(model, "SparseAdam")
        if ctx.world_size == 1:
            assert accel.optimizer_step(ctx, optimizers, state).stepped
            return
        with assert_raises(StepError, got="retain_graph"):
            _ = accel.optimizer_step(ctx, optimizers, state)

    _ = simulate(step, world)


SCRIPT = """
import sys

import torch
from torch import nn

import accel


def train(ctx, out):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(12, 1)).double()
    sparse = torch.optim.SparseAdam(model[0].parameters(), lr=0.05)
    dense = torch.optim.AdamW(model[2].parameters(), lr=0.05)
    model, sparse, dense = accel.prepare(ctx, model, sparse, dense)
    state = accel.train_state(ctx, accumulation=2)
    ids = torch.randint(0, 50, (10, 3), generator=torch.Generator().manual_seed(1))
    loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(ids, batch_size=3), global_batch=3)
    for _ in range(2):
        for batch in accel.batches(ctx, loader, state):
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                state = accel.backward(ctx, model(batch.data).square().mean(), state)
            if state.sync:
                state = accel.optimizer_step(ctx, [sparse, dense], state, max_norm=0.1)
    accel.save_state(ctx, out, {"model": model, "sparse": sparse, "dense": dense, "state": state}, step=1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with accel.session(device="cpu") as ctx:
        train(ctx, sys.argv[1])
"""


@pytest.mark.multiprocess
def test_two_processes_are_one(tmp_path: Path) -> None:
    script, both, alone = tmp_path / "train_sparse.py", str(tmp_path / "both"), str(tmp_path / "alone")
    script.write_text(SCRIPT)
    with script_ranks(script, job(2), both, folder=tmp_path) as ranks:
        assert [rank.wait(200) for rank in ranks] == [0, 0], [rank.said() for rank in ranks]
        assert [rank.said() for rank in ranks] == ["", ""]  # not a warning either
    names: dict[str, Any] = {"__name__": "train_sparse"}
    exec(SCRIPT, names)
    with torch.random.fork_rng(devices=[]):
        names["train"](accel.single(), alone)
    ends = [resumed(folder) for folder in (both, alone)]
    torch.testing.assert_close(*(flat(model) for model, _ in ends), **TOLERANCE)
    torch.testing.assert_close(*(sparse.state_dict()["state"] for _, sparse in ends), **TOLERANCE)


def resumed(folder: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(12, 1)).double()
    sparse = torch.optim.SparseAdam(model[0].parameters(), lr=0.05)
    items = {"model": model, "sparse": sparse}
    _ = accel.load_state(accel.single(), accel.latest_checkpoint(folder), items, strict=False)
    return model, sparse
