# SPDX-License-Identifier: Apache-2.0
"""Experts in a `ModuleList`, called by loops of several kinds, train on ranks that share them as in a plain loop."""

from __future__ import annotations

import contextlib
import functools
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import families
import pytest
import torch
from catching import assert_raises
from families import TOLERANCE, Family, Mesh, cell
from processes import job, run_ranks
from steps import begin_batch
from torch import Tensor, nn

import accel
from accel.errors import ConfigError, PrepareError
from accel.testing import simulate

EXPERTS, WIDTH = 4, 8
PLAN = accel.parallel.Plan(experts={"layers.*.experts": "dispatch"}, tensor={})


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(self.up(rows).tanh())


class Block(nn.Module):
    """A router and a loop over experts, of a kind."""

    def __init__(self, kind: str = "hit") -> None:
        super().__init__()
        self.kind = kind
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.reshape(-1, WIDTH)
        weights, indices = self.router(tokens).softmax(-1).topk(2)
        mixed = getattr(self, self.kind)(tokens, indices, weights)
        return hidden + mixed.view_as(hidden) + self.shared(hidden)

    def hit(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The loop of Mixtral in transformers 4: experts that nobody chose are left out."""
        outputs = torch.zeros_like(tokens) + 0 * weights.sum()  # the router takes part without tokens, too
        mask = nn.functional.one_hot(indices, EXPERTS).permute(2, 1, 0)
        for at in mask.sum((-1, -2)).nonzero().flatten().tolist():
            choice, row = torch.where(mask[at])
            hidden = self.experts[at](tokens[None, row].reshape(-1, WIDTH)) * weights[row, choice, None]
            outputs.index_add_(0, row, hidden)
        return outputs

    def every(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Each expert once, some without a row, in an order of its own, and with an operation in place."""
        outputs = torch.zeros_like(tokens)
        for at, expert in reversed(list(enumerate(self.experts))):
            row, choice = torch.where(indices == at)
            outputs[row] += expert(tokens[row]).mul_(weights[row, choice, None])
        return outputs

    def dense(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """All experts on all tokens, as [1, tokens, width]."""
        factors = torch.zeros(len(tokens), EXPERTS, dtype=tokens.dtype).scatter(1, indices, weights)
        return sum(expert(tokens[None])[0] * factors[:, at, None] for at, expert in enumerate(self.experts))

    def scaled(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Rows times the router's weights, for one choice after another; the gradient passes through the rows."""
        outputs = torch.zeros_like(tokens)
        for choice in range(2):
            for at, expert in enumerate(self.experts):
                row = (indices[:, choice] == at).nonzero().flatten()
                outputs = outputs.index_add(0, row, expert(tokens[row] * weights[row, choice, None]))
        return outputs


class BareBlock(Block):
    """Experts that are single layers of torch, in a list."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))


class DictBlock(Block):
    """Experts in a dict, by name."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.experts = nn.ModuleDict({f"expert_{at}": Expert() for at in range(EXPERTS)})

    def named(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The loop of Switch Transformers in transformers 4, by the names of a dict."""
        outputs = torch.zeros_like(tokens)
        for at, expert in enumerate(self.experts.values()):
            row, choice = torch.where(indices == at)
            outputs = outputs.index_add(0, row, expert(tokens[row]) * weights[row, choice, None])
        return outputs


class BareDictBlock(DictBlock):
    """Experts that are single layers of torch, in a dict."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.experts = nn.ModuleDict({f"expert_{at}": nn.Linear(WIDTH, WIDTH) for at in range(EXPERTS)})


class Words(nn.Module):
    def __init__(self, kind: str, block: Callable[[str], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, WIDTH)
        self.layers = nn.ModuleList([block(kind), block(kind)])
        self.head = nn.Linear(WIDTH, 99)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        hidden = self.embed(input_ids) * attention_mask[..., None]
        for layer in self.layers:
            hidden = layer(hidden)
        return SimpleNamespace(logits=self.head(hidden))


def _prepared(ctx: accel.DistContext, model: Any, optimizer: Any, _example: Any) -> Any:
    return accel.prepare(ctx, model, optimizer, plan=PLAN)


@pytest.mark.parametrize(
    ("kind", "axes", "strategy", "accumulations"),
    [
        ("hit", "dp=2,ep=2", "fsdp", (1, 3)),
        ("every", "dp=2,ep=2", "ddp", (3,)),
        pytest.param("dense", "dp=2,ep=2", "fsdp", (1,), marks=pytest.mark.slow),
        ("scaled", "tp=2,ep=2", "fsdp", (3,)),
        pytest.param("hit", "dp=4,ep=2", "fsdp", (3,), marks=pytest.mark.slow),
        pytest.param("every", "dp=4,ep=4", "fsdp", (1, 3), marks=pytest.mark.slow),
        pytest.param("hit", "dp=2,tp=2,ep=4", "fsdp", (1, 3), marks=pytest.mark.slow),
        pytest.param("scaled", "dp=4,ep=2", "ddp", (1, 3), marks=pytest.mark.slow),
    ],
)
def test_a_loop_over_experts_trains_as_in_one_process(ranks, monkeypatch, kind, axes, strategy, accumulations):
    family = Family(functools.partial(Words, kind), "", {})
    monkeypatch.setitem(families.FAMILIES, kind, family)
    assert cell(ranks, kind, Mesh(axes, strategy, _prepared), accumulations=accumulations) <= TOLERANCE


@pytest.mark.parametrize(
    ("block", "kind", "axes", "strategy"),
    [
        (BareBlock, "hit", "dp=2,ep=2", "ddp"),
        (BareDictBlock, "named", "dp=2,ep=2", "fsdp"),
        pytest.param(DictBlock, "named", "dp=4,ep=2", "fsdp", marks=pytest.mark.slow),
        pytest.param(BareBlock, "every", "dp=4,ep=2", "fsdp", marks=pytest.mark.slow),
        pytest.param(BareDictBlock, "named", "tp=2,ep=2", "ddp", marks=pytest.mark.slow),
    ],
)
def test_experts_of_single_layers_and_in_dicts_train_as_in_one_process(ranks, monkeypatch, block, kind, axes, strategy):
    name = block.__name__
    monkeypatch.setitem(families.FAMILIES, name, Family(functools.partial(Words, kind, block), "", {}))
    assert cell(ranks, name, Mesh(axes, strategy, _prepared), accumulations=(3,)) <= TOLERANCE


class PairBlock(Block):
    """Has experts of two layers that tensor parallelism would divide without an example."""

    def __init__(self, kind: str = "hit") -> None:
        super().__init__(kind)
        pairs = (nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH)) for _ in range(EXPERTS))
        self.experts = nn.ModuleList(pairs)


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["tp=2,ep=2", "dp=2,tp=2,ep=2"])
def test_layers_of_experts_along_ep_are_not_divided_along_tp(ranks, monkeypatch, axes):
    """A plan of the user's that names them is refused."""

    def prepare(ctx: accel.DistContext, model: Any, optimizer: Any, _example: Any) -> Any:
        experts = PLAN.experts
        styles = {"layers.*.experts.*.0": "colwise", "layers.*.experts.*.2": "rowwise", "head": "colwise_gather_output"}
        with assert_raises(PrepareError, got=r"layers\.\*\.experts\.\*\.0, layers\.\*\.experts\.\*\.2$"):
            _ = accel.prepare(ctx, model, optimizer, plan=accel.parallel.Plan(experts=experts, tensor=styles))
        return accel.prepare(ctx, model, optimizer, plan=accel.parallel.Plan(experts=experts))

    monkeypatch.setitem(families.FAMILIES, "pairs", Family(functools.partial(Words, "hit", PairBlock), "", {}))
    assert cell(ranks, "pairs", Mesh(axes, "fsdp", prepare), accumulations=(3,)) <= TOLERANCE


class Net(nn.Module):
    def __init__(self, block: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block or Block()])

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            tokens = layer(tokens)
        return tokens


def net(kind: str = "hit") -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net(Block(kind)).double()


def tokens_of(ctx: accel.DistContext, micro: int) -> Tensor:
    """Tokens of this rank: none of the first micro-batch's on the first of two ranks."""
    whole = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(micro), dtype=torch.float64)
    at, count = ctx.data_parallel
    cuts = [0, 9] if count == 1 else [0, 3 * micro, 9]
    return whole[cuts[at] : cuts[at + 1]]


def steps(ctx: accel.DistContext, model: nn.Module, optimizer: Any, first: int = 0) -> list[float]:
    norms = []
    state = accel.train_state(ctx)
    for micro in range(first, first + 2):
        state = begin_batch(ctx, state)
        tokens = tokens_of(ctx, micro)
        with accel.accumulate(ctx, state, model):
            loss = (model(tokens) - 1).square().sum() / max(len(tokens), 1)
            state = accel.backward(ctx, loss, state, weight=len(tokens))
        state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
        assert state.grad_norm is not None
        norms.append(float(state.grad_norm))
    return norms


def prepared(ctx: accel.DistContext, mesh: str) -> tuple[accel.DistContext, Any, Any]:
    ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp") if mesh else ctx
    model = net()
    return ctx, *accel.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), plan=PLAN)


@pytest.mark.parametrize(("saved", "loaded"), [((2, "dp=2,ep=2"), (1, "")), ((1, ""), (2, "dp=2,ep=2"))])
def test_ranks_without_a_token_and_checkpoints_on_another_mesh(saved, loaded, tmp_path):
    def save(ctx: accel.DistContext) -> list[float]:
        ctx, model, optimizer = prepared(ctx, saved[1])
        norms = steps(ctx, model, optimizer)
        accel.save_state(ctx, tmp_path, {"model": model, "optimizer": optimizer}, step=1)
        return norms + steps(ctx, model, optimizer, 2)

    def load(ctx: accel.DistContext) -> list[float]:
        ctx, model, optimizer = prepared(ctx, loaded[1])
        _ = accel.load_state(ctx, tmp_path, {"model": model, "optimizer": optimizer})
        return steps(ctx, model, optimizer, 2)

    ctx, model, optimizer = prepared(accel.single(), "")
    expected = steps(ctx, model, optimizer) + steps(ctx, model, optimizer, 2)
    for found in simulate(save, saved[0], default_group=True):
        assert found == pytest.approx(expected, abs=1e-12)
    for found in simulate(load, loaded[0], default_group=True):
        assert found == pytest.approx(expected[2:], abs=1e-12)


@pytest.mark.parametrize(("kind", "moves"), [("hit", False), ("every", True)])
@pytest.mark.parametrize(("mesh", "ranks"), [("dp=2,ep=2", 2), pytest.param("dp=4,ep=2", 4, marks=pytest.mark.slow)])
def test_experts_that_no_rank_calls_get_no_gradient(kind, moves, mesh, ranks):
    """As in one process: the optimizer leaves them, and decays the weights of those that are called without a row."""

    def run(ctx: accel.DistContext, mesh: str) -> tuple[dict[str, Tensor], list[float]]:
        ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp") if mesh else ctx
        model = net(kind)
        with torch.no_grad():
            _ = model.layers[0].router.weight.zero_()  # all tokens choose the same two experts
        _ = model.layers[0].router.requires_grad_(False)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], weight_decay=0.5)
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=PLAN)
        state = accel.train_state(ctx)
        norms = []
        for micro in range(2):
            state = begin_batch(ctx, state)
            tokens = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(micro), dtype=torch.float64)
            at, count = ctx.data_parallel
            with accel.accumulate(ctx, state, model):
                state = accel.backward(ctx, (model(tokens.chunk(count)[at]) - 1).square().mean(), state)
            state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
            norms.append(float(state.grad_norm))
        return accel.get_state_dict(ctx, model, dst=None), norms

    expected, norms = run(accel.single(), "")
    names = [f"layers.0.experts.{at}.up.weight" for at in range(EXPERTS)]
    assert [torch.equal(expected[name], net().state_dict()[name]) for name in names].count(True) == (0 if moves else 2)
    for found, own in simulate(lambda ctx: run(ctx, mesh), ranks, default_group=True):
        assert own == pytest.approx(norms, abs=1e-12)
        for name, each in expected.items():
            torch.testing.assert_close(found[name], each, rtol=0, atol=1e-10)


def _real_rank(rank: int, environ: list[dict[str, str]], path: str) -> None:
    with accel.session(environ=environ[rank], device="cpu", mesh="dp=2,ep=2", strategy="fsdp") as ctx:
        ctx, model, optimizer = prepared(ctx, "")
        norms = steps(ctx, model, optimizer)
        if rank == 0:
            torch.save(norms, path)


@pytest.mark.slow
def test_processes_train_as_one(tmp_path):
    run_ranks(_real_rank, job(2), str(tmp_path / "rank0.pt"))
    assert torch.load(tmp_path / "rank0.pt") == pytest.approx(steps(*prepared(accel.single(), "")), abs=1e-12)


def test_ranks_hold_a_part_of_each_expert_under_the_models_own_names():
    def run(ctx: accel.DistContext) -> tuple[list[str], int]:
        _, model, _ = prepared(ctx, "dp=2,ep=2")
        held = sum(each.to_local().numel() for each in model.layers[0].experts.parameters())
        return list(accel.unwrap_model(model).state_dict()), held

    experts = net().layers[0].experts
    assert (
        simulate(run, 2, default_group=True)
        == [(list(net().state_dict()), sum(each.numel() for each in experts.parameters()) // 2)] * 2
    )


def test_each_expert_counts_its_rows():
    def run(ctx: accel.DistContext, mesh: str) -> dict[str, list[int]]:
        ctx, model, optimizer = prepared(ctx, mesh)
        load = accel.training.ExpertLoad(model, experts={"layers.*.experts": EXPERTS})
        tokens = tokens_of(ctx, 1)
        state = begin_batch(ctx)
        with load.counting(state):
            state = accel.backward(ctx, model(tokens).square().mean(), state)
        state = accel.optimizer_step(ctx, optimizer, state)
        counts = load.update_(ctx, state).layers
        with (
            assert_raises(ConfigError, problem="do not show their tokens"),
            load.counting(begin_batch(ctx, state), mask=tokens),
        ):
            _ = model(tokens)
        return {path: each.tolist() for path, each in counts.items()}

    expected = run(accel.single(), "")
    assert sum(expected["layers.0.experts"]) == 18
    assert simulate(lambda ctx: run(ctx, "dp=2,ep=2"), 2, default_group=True) == [expected] * 2


class Jitter(Block):
    """A block that draws noise and drops rows, as in training, and the number of experts in python."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(hidden, 0.3) + torch.rand_like(hidden) * random.random())

    def hit(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        tokens = tokens[: random.randrange(1, len(tokens) + 1)].repeat(len(tokens), 1)[: len(tokens)]
        return super().hit(tokens, indices, weights)


class InPlace(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.mul_(2))


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(hidden)


class Twice(Block):
    """Experts of another output than their input."""

    def __init__(self) -> None:
        super().__init__()
        for each in self.experts:
            each.down = nn.Linear(12, 2 * WIDTH, bias=False)

    def hit(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return torch.stack([each(tokens) for each in self.experts]).sum(0)[:, :WIDTH]


def test_both_runs_draw_the_same_numbers():
    def run(ctx: accel.DistContext) -> list[float]:
        ctx = accel.replace(ctx, mesh="dp=2,ep=2")
        model = accel.prepare_model(ctx, Net(Jitter()), plan=PLAN)
        before, of_python = torch.get_rng_state(), random.getstate()
        found = []
        for _ in range(2):
            torch.set_rng_state(before)
            random.setstate(of_python)
            found.append(float(model(torch.ones(5, WIDTH)).detach().sum()))
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        _ = torch.nn.functional.dropout(torch.ones(5, WIDTH), 0.3), torch.rand(5, WIDTH)
        assert torch.equal(after, torch.get_rng_state())  # as of one run
        after_python = random.getstate()
        random.setstate(of_python)
        _ = random.random(), random.randrange(1, 6)
        assert after_python == random.getstate()
        return found

    for one, other in simulate(run, 2, default_group=True):
        assert one == other


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (InPlace, "a forward that changes an input"),
        (Counting, "a forward that changes the buffer seen"),
        (Twice, "outputs of 16 columns for rows of 8"),
    ],
)
def test_a_loop_that_cannot_run_twice_is_refused(block, told):
    def run(ctx: accel.DistContext) -> None:
        model = accel.prepare_model(accel.replace(ctx, mesh="dp=2,ep=2"), Net(block()), plan=PLAN)
        with assert_raises(PrepareError, got=f"{told}$", where=r"^Plan.experts, layers\.0\.experts"):
            _ = model(torch.ones(5, WIDTH))

    _ = simulate(run, 2, default_group=True)


class Meeting(Expert):
    """An expert that computes with other rows than a row's own, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        if way == "rows":
            _ = self.down.weight.detach().zero_()

    def forward(self, rows: Tensor) -> Tensor:
        if self.way == "capacity in training" and self.training:
            rows = torch.cat([rows[:2], 0 * rows[2:]])
        met = {"rows": 0, "positions": -2}.get(self.way)
        rows = nn.functional.dropout(rows, 0.1, self.training) if self.way == "dropout" else rows
        if self.way == "hooks" and self.training:
            _ = self.up(rows).register_hook(torch.clone)
        return super().forward(rows if met is None else rows - rows.mean(met, keepdim=True))


@pytest.mark.parametrize(
    ("way", "kind", "is_refused"),
    [
        ("rows", "hit", True),
        ("positions", "dense", True),
        ("capacity in training", "every", True),
        ("dropout", "hit", False),
        ("hooks", "hit", False),
    ],
)
def test_experts_that_compute_with_other_rows_are_refused(ranks, way, kind, is_refused):
    def run(ctx: accel.DistContext) -> None:
        model = net(kind)
        model.layers[0].experts = nn.ModuleList(Meeting(way) for _ in range(EXPERTS)).double()
        model = accel.prepare_model(accel.replace(ctx, mesh="dp=2,ep=2"), model, plan=PLAN)
        refused = assert_raises(
            PrepareError, got="outputs that differ, of some rows of expert", fix="leave ep out of the mesh"
        )
        with refused if is_refused else contextlib.nullcontext():
            _ = model(tokens_of(ctx, 1))

    _ = ranks.run(run, 2, default_group=True)


def test_an_expert_that_is_called_from_elsewhere_is_refused():
    def run(ctx: accel.DistContext) -> None:
        model = accel.prepare_model(accel.replace(ctx, mesh="dp=2,ep=2"), net(), plan=PLAN)
        with assert_raises(PrepareError, got="a call of expert 1 from elsewhere"):
            _ = model.layers[0].experts[1](torch.ones(5, WIDTH))

    _ = simulate(run, 2, default_group=True)


def _odd() -> Net:
    model = Net()
    model.layers[0].experts[2] = nn.Linear(WIDTH, WIDTH)
    return model


def _norms() -> Net:
    model = Net()
    for each in model.layers[0].experts:
        each.norm = nn.BatchNorm1d(WIDTH)
    return model


def _tied() -> Net:
    model = Net()
    model.layers[0].experts[1].up.weight = model.layers[0].shared.weight
    return model


def _narrow() -> Net:
    model = Net()
    for each in model.layers[0].experts:
        each.scale = nn.Parameter(torch.ones(1))
    return model


def _in_a_dict() -> Net:
    return Net(nn.ModuleDict({"experts": nn.ModuleList(Expert() for _ in range(EXPERTS))}))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_odd, "layers.0.experts: has experts of other parameters or shapes than their neighbours"),
        (_norms, "layers.0.experts: has the buffer 0.norm.running_mean, which ranks would change separately"),
        (_tied, "layers.0.experts: shares 1.up.weight with another module"),
        (_narrow, "layers.0.experts: has 0.scale [1], without a dimension that 2 divides"),
        (_in_a_dict, "layers.0.experts: is in a ModuleDict, which has no loop over it in its forward"),
    ],
)
def test_a_list_that_cannot_be_divided_is_refused(make, told):
    def run(ctx: accel.DistContext) -> None:
        with assert_raises(PrepareError, got=re.escape(told)):
            _ = accel.prepare_model(accel.replace(ctx, mesh="dp=2,ep=2"), make(), plan=PLAN)

    _ = simulate(run, 2, default_group=True)


def test_a_model_with_an_unnamed_list_is_refused_with_the_line_to_write():
    def run(ctx: accel.DistContext) -> None:
        with assert_raises(PrepareError, fix=re.escape('Plan(experts={"layers.*.experts": "dispatch"}).')):
            _ = accel.prepare_model(accel.replace(ctx, mesh="dp=2,ep=2"), net())

    _ = simulate(run, 2, default_group=True)
