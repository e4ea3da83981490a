# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts that ranks share train as in one process: parameters and norms, however tokens choose."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from catching import assert_raises
from processes import job, run_ranks
from steps import ByState
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import accel
from accel.tensors import full_tensor
from accel.testing import simulate

EXPERTS, WIDTH, HIDDEN, TOKENS = 8, 8, 4, 40
TENSOR = {"first": "colwise_gather_output", "last": "rowwise_split_input"}
NAMED = {"layers.*.experts": "dispatch"}


class Experts(nn.Module):
    """Stacked experts with the forward that tokens can be dispatched to."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 2)
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / 2)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 2)

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        assert self.num_experts == len(self.up)
        outputs = torch.zeros_like(tokens)
        for expert in indices.unique().tolist():
            row, choice = torch.where(indices == expert)
            hidden = (tokens[row] @ self.up[expert].T + self.bias[expert]).tanh()
            outputs = outputs.index_add(0, row, hidden @ self.down[expert].T * weights[row, choice, None])
        return outputs


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, tokens: Tensor) -> tuple[Tensor, accel.parallel.Routing]:
        routing = accel.parallel.route_tokens(self.router(tokens), 2)
        return tokens + self.experts(tokens, routing.indices, routing.weights), routing


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[accel.parallel.Routing]]:
        hidden, routings = self.first(tokens), []
        for layer in self.layers:
            hidden, routing = layer(hidden)
            routings.append(routing)
        return self.last(hidden), routings


def mixture(seed: int = 3) -> Mixture:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Mixture().double()


def batch(micro: int) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(micro), dtype=torch.float64)


def own_tokens(ctx: accel.DistContext, tokens: Tensor, *, uneven: bool) -> Tensor:
    """This rank's tokens; few on the first ranks, or none, where they are uneven."""
    at, count = ctx.data_parallel
    part, parts = ctx.axis("cp")
    at, count = at * parts + part, count * parts
    cuts = [round(TOKENS * (i / count) ** (3 if uneven else 1)) for i in range(count + 1)]
    return tokens[cuts[at] : cuts[at + 1]]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def steps(
    ctx: accel.DistContext, model: nn.Module, optimizer: Any, *, uneven: bool = False, first: int = 0, micros: int = 4
) -> list[float]:
    """Clipped steps of two micro-batches each, with a balance loss: the norms."""
    run = ByState(ctx, 2)
    norms = []
    for micro in range(first, first + micros):
        run.begin()
        tokens = own_tokens(ctx, batch(micro), uneven=uneven)
        with run.accumulate(model):
            outputs, routings = model(tokens)
            error = (outputs - tokens.sum(1, keepdim=True).sin()).square().sum()
            balance = sum(accel.parallel.balance_loss(ctx, each.probabilities, each.indices) for each in routings)
            loss = error / max(len(tokens), 1) + 0.1 * balance
            run.backward(loss, weight=len(tokens))
        if run.sync:
            run.step(optimizer, max_norm=0.5)
            norms.append(float(run.grad_norm))
    return norms


def train(
    ctx: accel.DistContext, mesh: str, *, strategy: str = "fsdp", uneven: bool = False
) -> tuple[dict[str, Tensor], list[float]]:
    if mesh:
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
    model = mixture(3 + ctx.rank)  # the first rank's values count
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=accel.parallel.Plan(experts=NAMED, tensor=TENSOR))
    norms = steps(ctx, model, optimizer, uneven=uneven)
    return {name: whole(each) for name, each in accel.unwrap_model(model).named_parameters()}, norms


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, Tensor], list[float]]:
    return train(accel.single(), "")


def assert_law(results: list[Any], alone: tuple[dict[str, Tensor], list[float]]) -> None:
    for parameters, norms in results:
        assert norms == pytest.approx(alone[1], abs=1e-12)
        for name, each in alone[0].items():
            torch.testing.assert_close(parameters[name], each, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("ranks", "mesh", "strategy", "uneven"),
    [
        (2, "dp=2,ep=2", "ddp", True),
        (2, "dp=2,ep=2", "fsdp", False),
        (4, "dp=4,ep=2", "fsdp", True),
    ],
)
def test_training_is_that_of_one_process(ranks, mesh, strategy, uneven, alone):
    run = simulate(lambda ctx: train(ctx, mesh, strategy=strategy, uneven=uneven), ranks, default_group=True)
    assert_law(run, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "mesh", "strategy"),
    [
        (4, "dp=4,ep=4", "fsdp"),
        (8, "dp=8,ep=4", "fsdp"),
        (8, "dp_replicate=2,dp_shard=4,ep=2", "fsdp"),
        (4, "dp=4,ep=2", "ddp"),
    ],
)
def test_training_on_more_axes_is_that_of_one_process(ranks, mesh, strategy, alone):
    assert_law(simulate(lambda ctx: train(ctx, mesh, strategy=strategy, uneven=True), ranks, default_group=True), alone)


def _real_rank(rank: int, environ: list[dict[str, str]], path: str) -> None:
    with accel.session(environ=environ[rank], device="cpu", mesh="dp=2,ep=2", strategy="fsdp") as ctx:
        results = train(ctx, "", uneven=True)
        if rank == 0:
            torch.save(results, path)


@pytest.mark.slow
def test_training_in_processes_is_that_of_one(alone, tmp_path):
    run_ranks(_real_rank, job(2), str(tmp_path / "rank0.pt"))
    assert_law([torch.load(tmp_path / "rank0.pt")], alone)


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [(2, "tp=2,ep=2"), (4, "dp=2,tp=2,ep=4"), pytest.param(4, "tp=4,ep=2", marks=pytest.mark.slow)],
)
def test_ranks_along_tp_dispatch_a_part_of_their_tokens_each(ranks, mesh, alone):
    assert_law(simulate(lambda ctx: train(ctx, mesh, uneven=True), ranks, default_group=True), alone)


def test_a_module_that_dispatches_tokens_itself_sees_its_own_experts(alone):
    class Own(Experts):
        def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            sent = accel.parallel.dispatch_tokens(tokens, indices, experts=EXPERTS, group=self.group)
            stacked = zip(sent.rows.split(list(sent.counts)), self.up, self.bias, self.down, strict=True)
            outputs = [(rows @ up.T + bias).tanh() @ down.T for rows, up, bias, down in stacked]
            return accel.parallel.combine_tokens(torch.cat(outputs), sent, weights)

    def run(ctx: accel.DistContext) -> tuple[dict[str, Tensor], list[float]]:
        ctx = accel.replace(ctx, mesh="dp=2,ep=2")
        model = mixture()
        for layer in model.layers:
            layer.experts.__class__ = Own
            layer.experts.group = accel.group_of(ctx, "ep")
        model = accel.prepare_model(ctx, model, plan=accel.parallel.Plan(experts=dict.fromkeys(NAMED, "local")))
        norms = steps(ctx, model, torch.optim.SGD(model.parameters(), lr=0.5), uneven=True)
        return {name: whole(each) for name, each in model.named_parameters()}, norms

    assert_law(simulate(run, 2, default_group=True), alone)


def test_ranks_whose_experts_nobody_chooses_and_frozen_routers(alone):
    """All logits are alike, so every token chooses the same two experts; ranks without them have no row."""

    def run(ctx: accel.DistContext, mesh: str) -> tuple[dict[str, Tensor], list[float]]:
        if mesh:
            ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp")
        model = mixture()
        for layer in model.layers:
            _ = layer.router.requires_grad_(False).weight.zero_()
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=accel.parallel.Plan(experts=NAMED))
        norms = steps(ctx, model, optimizer, uneven=True)
        return {name: whole(each) for name, each in model.named_parameters()}, norms

    one = run(accel.single(), "")
    assert_law(simulate(lambda ctx: run(ctx, "dp=2,ep=2"), 2, default_group=True), one)
    assert one[1] != pytest.approx(alone[1], abs=1e-3)


def test_a_proof_of_experts_is_not_among_what_a_selective_checkpoint_keeps(ranks):
    def run(ctx: accel.DistContext, mesh: str) -> dict[str, Tensor]:
        if mesh:
            ctx = accel.replace(ctx, mesh=mesh)
        model = mixture(3)
        accel.checkpoint_activations(model, Layer, keep="products")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=accel.parallel.Plan(experts=NAMED))
        _ = steps(ctx, model, optimizer)
        return {name: whole(each) for name, each in accel.unwrap_model(model).named_parameters()}

    want = run(accel.single(), "")
    for got in ranks.run(lambda ctx: run(ctx, "dp=2,ep=2"), 2, default_group=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


class Varied(Experts):
    """Experts that compute with what other ranks may have, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.added = nn.Parameter(torch.zeros(EXPERTS, WIDTH))
        self.seen: list[int] = []
        self.noise = torch.Generator()
        if way == "rows meet":
            _ = self.down.detach().zero_()

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        self.seen.append(len(tokens))
        if self.way == "failing":
            raise LookupError("an error of the module")
        rows = tokens - tokens.mean(0) if self.way == "rows meet" else tokens
        if self.way == "logarithms":
            rows = rows.log() if bool((rows >= 0).all()) else rows * torch.nan
        if self.way == "noise" and self.training:
            rows = rows + torch.randn(rows.shape, generator=self.noise)
        indices = indices[:, :1] if self.way == "first choice" else indices
        outputs = tokens.clone() if self.way == "residual" else torch.zeros_like(tokens)
        for expert in range(EXPERTS if self.way == "number" else len(self.up)):
            row, choice = torch.where(indices == expert)
            if self.way == "capacity" or (self.way == "capacity in training" and self.training):
                row, choice = row[: len(tokens) // 4], choice[: len(tokens) // 4]
            if self.way == "constant capacity":
                row, choice = row[:32], choice[:32]
            factor = weights[row, choice, None] ** (2 if self.way == "squared weights" else 1)
            if self.way == "experts meet":
                factor = factor / len(self.up)
            dropout = 0.2 if self.way == "dropout" else 0.0
            hidden = nn.functional.dropout(rows[row] @ self.up[expert].T, dropout, self.training)
            if self.way == "hooks" and self.training:
                _ = hidden.register_hook(torch.clone)
            bias = self.added[expert] * (1 if self.way == "bias without weights" else factor)
            outputs = outputs.index_add(0, row, hidden @ self.down[expert].T * factor + bias)
        return outputs


WAYS = (
    "rows meet", "first choice", "residual", "number", "capacity", "squared weights", "experts meet",
    "bias without weights", "capacity in training", "constant capacity",
)  # fmt: skip


def varied(ctx: accel.DistContext, way: str) -> Varied:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layer = Layer()
        layer.experts = Varied(way)
    plan = accel.parallel.Plan(experts={"experts": "dispatch"})
    return accel.unwrap_model(
        accel.prepare_model(accel.replace(ctx, mesh="dp=2,ep=2"), layer.double(), plan=plan)
    ).experts


CHOICES = torch.tensor([[0, 5]] * 6)


def test_experts_that_compute_with_more_than_a_row_and_its_expert_are_refused(ranks):
    def rank(ctx: accel.DistContext) -> None:
        weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(1)).double()
        for way in WAYS:
            got = "IndexError" if way == "number" else "outputs that differ"
            with assert_raises(accel.errors.PrepareError, got=got, where="forward of Varied"):
                _ = varied(ctx, way)(batch(0)[:6], CHOICES, weights)

    _ = ranks.run(rank, 2, default_group=True)


def test_all_ranks_refuse_what_one_of_them_sees(ranks):
    """A residual connection is the experts' own where the weights of a token sum to 1, as on rank 1."""

    def rank(ctx: accel.DistContext) -> None:
        weights = torch.full((6, 2), 0.5 - 0.2 * (ctx.rank == 0), dtype=torch.float64)
        with assert_raises(accel.errors.PrepareError, got="outputs that differ"):
            _ = varied(ctx, "residual")(batch(0)[:6], CHOICES, weights)

    _ = ranks.run(rank, 2, default_group=True)


def test_an_error_of_the_experts_comes_through_as_itself(ranks):
    def rank(ctx: accel.DistContext) -> None:
        with pytest.raises(LookupError, match="an error of the module"):
            _ = varied(ctx, "failing")(batch(0)[:6], CHOICES, torch.ones(6, 2).double())

    _ = ranks.run(rank, 2, default_group=True)


def test_a_proof_decides_by_tokens_or_later_and_changes_nothing(ranks):
    """Random rows have no logarithm, and no rank has tokens at first; a proof leaves what modules note as it was."""

    def rank(ctx: accel.DistContext) -> None:
        for way in ("logarithms", "dropout", "noise"):
            experts = varied(ctx, way)
            before = torch.Generator()
            for count in (0, 6, 6):
                rng_state = torch.get_rng_state()
                with torch.no_grad():
                    outputs = experts(batch(0)[:count].abs(), CHOICES[:count], torch.ones(count, 2).double())
                assert outputs.isfinite().all()
                assert len(experts.seen) == 1
                assert way == "dropout" or torch.equal(rng_state, torch.get_rng_state())
                _ = torch.randn(max(*experts.seen, 1), WIDTH, generator=before) if way == "noise" else None
                assert torch.equal(before.get_state(), experts.noise.get_state())
                assert (experts in experts.accel_proved) == (way != "logarithms" or count > 0)
                experts.seen.clear()

    _ = ranks.run(rank, 2, default_group=True)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_experts_that_set_hooks_in_training_are_proved(ranks, is_checkpointed):
    """Hooks need a gradient, which the rows and parameters of the first call have in a proof too."""

    def rank(ctx: accel.DistContext, way: str) -> Tensor:
        experts = varied(ctx, way)
        run = functools.partial(checkpoint, experts, use_reentrant=False) if is_checkpointed else experts
        run(batch(0)[:6], CHOICES, torch.ones(6, 2).double()).square().sum().backward()
        assert experts in experts.accel_proved
        assert all(each.grad is None or each.grad.isfinite().all() for each in experts.parameters())
        return full_tensor(experts.up.grad)

    wanted, found = (ranks.run(functools.partial(rank, way=each), 2, default_group=True) for each in ("", "hooks"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


class Narrow(nn.Module):
    """Frozen experts in 8 bits, of which a forward makes wide ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(EXPERTS, WIDTH, WIDTH).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return (tokens[:, None, None] @ self.up.to(tokens)[indices] * weights[..., None, None]).sum((1, 2))


def test_frozen_experts_in_8_bits_are_proved(ranks):
    def rank(ctx: accel.DistContext) -> None:
        plan = accel.parallel.Plan(experts={"0": "dispatch"})
        head = nn.Linear(WIDTH, 1)  # a parameter to train
        model = accel.prepare_model(accel.replace(ctx, mesh="dp=2,ep=2"), nn.Sequential(Narrow(), head), plan=plan)
        experts = accel.unwrap_model(model)[0]
        tokens = batch(0)[:6].float()
        outputs = experts(tokens, CHOICES, torch.ones(6, 2))
        torch.testing.assert_close(outputs, 2 * tokens.sum(1, keepdim=True).expand(-1, WIDTH))

    _ = ranks.run(rank, 2, default_group=True)


def _kept(_context: object, operator: object, *_args: object, **_named: object) -> CheckpointPolicy:
    is_kept = operator is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_checkpoint_that_keeps_outputs_of_operators_keeps_none_of_a_proof(ranks):
    def rank(ctx: accel.DistContext, policy: Any) -> Tensor:
        experts = varied(ctx, "")
        options = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)} if policy else {}
        run = functools.partial(checkpoint, experts, use_reentrant=False, **options) if policy else experts
        run(batch(0)[:6], CHOICES, torch.ones(6, 2).double()).square().sum().backward()
        return full_tensor(experts.up.grad)

    wanted, found = (ranks.run(functools.partial(rank, policy=each), 2, default_group=True) for each in (None, _kept))
    torch.testing.assert_close(found, wanted)


class Sorted(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows.view(len(self.up), -1, WIDTH)
        rows = rows - rows.mean(1, keepdim=True) if self.way == "rows meet" else rows
        rows = rows + 1 if self.way == "no zeros" else rows
        return ((rows @ self.up).tanh() @ self.down).flatten(0, 1)


def test_sorted_experts_that_compute_with_more_than_a_row_are_refused(ranks):
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp=2,ep=2")
        rows = torch.zeros(EXPERTS, 3, WIDTH).double()
        rows[:, ctx.rank] = 1
        plan = accel.parallel.Plan(experts={"0": "sorted"})
        for way in ("rows meet", "no zeros", ""):
            model = accel.prepare_model(ctx, nn.Sequential(Sorted(way)).double(), plan=plan)
            refused = assert_raises(accel.errors.PrepareError, got="outputs that differ", where="forward of Sorted")
            with refused if way else contextlib.nullcontext():
                _ = model(rows.flatten(0, 1))

    _ = ranks.run(rank, 2, default_group=True)


def test_a_mesh_whose_ep_is_a_dimension_of_its_own_is_refused():
    def run(ctx: accel.DistContext) -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
        ctx = accel.replace(ctx, mesh=mesh)
        with assert_raises(accel.errors.PrepareError, got="dimensions dp, ep"):
            _ = accel.prepare_model(ctx, mixture(), plan=accel.parallel.Plan(experts=NAMED))

    _ = simulate(run, 2, default_group=True)


def test_local_experts_beside_tp_are_refused():
    def run(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="tp=2,ep=2")
        plan = accel.parallel.Plan(experts=dict.fromkeys(NAMED, "local"))
        with assert_raises(accel.errors.PrepareError, got="each would dispatch all of them"):
            _ = accel.prepare_model(ctx, mixture(), plan=plan)

    _ = simulate(run, 2, default_group=True)


def test_ranks_hold_their_experts_alone_and_are_sharded_over_those_with_the_same():
    def run(ctx: accel.DistContext) -> tuple[int, ...]:
        ctx = accel.replace(ctx, mesh="dp=4,ep=2", strategy="fsdp")
        model = accel.prepare_model(ctx, mixture(), plan=accel.parallel.Plan(experts=NAMED))
        experts = model.layers[0].experts
        assert isinstance(experts.up, DTensor)
        assert (tuple(experts.up.shape), experts.num_experts) == ((EXPERTS, HIDDEN, WIDTH), EXPERTS)
        return tuple(experts.up.to_local().shape)

    assert simulate(run, 4, default_group=True) == [(2, HIDDEN, WIDTH)] * 4


@pytest.mark.parametrize(("saved", "loaded"), [((2, "dp=2,ep=2"), (1, "")), ((1, ""), (2, "dp=2,ep=2"))])
def test_a_checkpoint_goes_on_in_any_layout(saved, loaded, tmp_path):
    """Model and optimizer: the step after the load is the one that would have come."""

    def prepared(ctx: accel.DistContext, mesh: str, seed: int) -> tuple[accel.DistContext, Any, Any]:
        if mesh:
            ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp")
        model = mixture(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)  # of two meshes at once
        return ctx, *accel.prepare(ctx, model, optimizer, plan=accel.parallel.Plan(experts=NAMED))

    def save(ctx: accel.DistContext) -> tuple[dict[str, Tensor], list[float]]:
        ctx, model, optimizer = prepared(ctx, saved[1], 3)
        _ = steps(ctx, model, optimizer)
        accel.save_state(ctx, tmp_path, {"model": model, "optimizer": optimizer}, step=1)
        norms = steps(ctx, model, optimizer, first=4, micros=2)
        return {name: whole(each) for name, each in model.named_parameters()}, norms

    def load(ctx: accel.DistContext) -> tuple[dict[str, Tensor], list[float]]:
        ctx, model, optimizer = prepared(ctx, loaded[1], 5)
        _ = accel.load_state(ctx, tmp_path, {"model": model, "optimizer": optimizer})
        norms = steps(ctx, model, optimizer, first=4, micros=2)
        return {name: whole(each) for name, each in model.named_parameters()}, norms

    stayed = simulate(save, saved[0], default_group=True)[0]
    assert_law(simulate(load, loaded[0], default_group=True), stayed)


def test_evaluation_and_averaged_weights():
    """An Ema and a forward without gradients on spread experts are those of one process."""

    def run(ctx: accel.DistContext, mesh: str) -> tuple[Tensor, Tensor]:
        if mesh:
            ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp")
        model = mixture()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=accel.parallel.Plan(experts=NAMED))
        average = accel.training.Ema(model, decay=0.5)
        _ = steps(ctx, model, optimizer, micros=2)
        average.update_(model)
        with torch.no_grad():
            outputs, _ = model(batch(9))
        with average.applied_to(model), torch.no_grad():
            averaged, _ = model(batch(9))
        return outputs, averaged

    expected = run(accel.single(), "")
    for found in simulate(lambda ctx: run(ctx, "dp=2,ep=2"), 2, default_group=True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert not torch.allclose(*expected)
