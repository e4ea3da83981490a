# SPDX-License-Identifier: Apache-2.0
"""Tensors with a dimension that ranks along tp divide, and one that ranks along cp divide."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from catching import assert_raises
from handwritten import Handwritten, named
from handwritten_runs import called
from steps import ByState
from test_context_models import LENGTH, cut, floats, own_of, weighted
from torch import Tensor, nn
from torch.nn import functional

import accel
from accel.comm import summed
from accel.context import group_of
from accel.errors import PrepareError
from accel.parallel.axes.context._positions import PositionRanks
from accel.parallel.axes.context._selected import whole_of
from accel.parallel.axes.tensor._part_layers import LayerRanks
from accel.parallel.axes.tensor._styles import Rule
from accel.parallel.parts import NoRuleError, PartTensor, RowCut, RowLayout, make, rows_of
from accel.parallel.parts._nested import NestedPart
from accel.tensors import full_tensor, is_dtensor
from accel.testing import Simulator

MESH = "tp=2,cp=2"
HEADS, WIDTH, TOKENS = 4, 8, 8
PACKED = RowCut(3, ((WIDTH, 2),))  # queries, keys and values in one weight


def heads_of(x: Tensor, weight: Tensor) -> Any:
    packed = functional.linear(x, weight).split(WIDTH, 2)
    return [each.view(len(x), x.shape[1], HEADS, -1).transpose(1, 2) for each in packed]


def merged(mixed: Tensor) -> Tensor:
    return mixed.transpose(1, 2).contiguous().view(len(mixed), mixed.shape[2], WIDTH)


def by_hand(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = heads_of(x, weight)
    order = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    scores = (q @ k.transpose(-2, -1) / 2).masked_fill(~order, -torch.inf)
    return merged(scores.softmax(-1) @ v)


def by_torch(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = heads_of(x, weight)
    return merged(functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def by_einsum(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = heads_of(x, weight)
    slopes = torch.arange(1.0, HEADS + 1, dtype=x.dtype).view(-1, 1, 1)
    places = torch.arange(x.shape[1])
    bias = slopes * (places[:, None] - places).abs()  # of each head and pair of positions
    weights = (torch.einsum("bhqd,bhkd->bhqk", q, k) - bias).softmax(-1)
    return merged(torch.einsum("bhqk,bhkd->bhqd", weights, v))


def in_place(x: Tensor, weight: Tensor) -> Tensor:
    found = functional.linear(x, weight)
    first, second, third = found.chunk(3, -1)
    first = first.clone()
    first += second
    first.mul_(third.sigmoid())
    return functional.relu_(first)


def over_positions(x: Tensor, weight: Tensor) -> Tensor:
    """Functions that gather positions: a state along them, a shift, and a single one."""
    first, second, third = functional.linear(x, weight).chunk(3, -1)
    return first.cumsum(1) + second.roll(1, 1) * third[:, :1]


def with_dropout(x: Tensor, weight: Tensor) -> Tensor:
    torch.manual_seed(3)
    first, second, _ = functional.dropout(functional.linear(x, weight), 0.5).chunk(3, -1)
    return functional.gelu(first) * second


def over_features(x: Tensor, weight: Tensor) -> Tensor:
    """Norms that sum over features of all ranks along tp."""
    first, second, _ = functional.linear(x, weight).chunk(3, -1)
    return functional.layer_norm(first, (WIDTH,)) + second * torch.rsqrt(second.square().mean(-1, keepdim=True) + 1e-5)


def linear_attention(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = heads_of(x, weight)
    q, k = functional.elu(q) + 1, functional.elu(k) + 1
    return merged(q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(2, keepdim=True).transpose(-1, -2)))


def written(x: Tensor, weight: Tensor) -> Tensor:
    """Writes to some positions, and to some features of each head."""
    first, second, _ = functional.linear(x, weight).chunk(3, -1)
    first = first.clone()
    first[:, 0] += second[:, 1]
    first[:, 2:4] = 0.5
    heads = first.view(2, x.shape[1], HEADS, -1)
    heads[..., 0] *= 2
    return first


def reordered(x: Tensor, weight: Tensor) -> Tensor:
    first, second, third = functional.linear(x, weight).chunk(3, -1)
    at = torch.arange(x.shape[1]).flip(0)
    index = at[None, :, None].expand(2, -1, WIDTH)
    return first.gather(1, index) + second.index_select(1, at) * third[torch.arange(2)[:, None], at[None]]


def by_module(x: Tensor, weight: Tensor) -> Tensor:
    """torch's function of its module, where queries are no keys."""
    second = x.transpose(0, 1)
    out, *_ = functional.multi_head_attention_forward(
        second * 2, second, second, WIDTH, HEADS, weight, None, None, None, False, 0.0,
        torch.eye(WIDTH, dtype=x.dtype), None, need_weights=False,
    )  # fmt: skip
    first, *_ = functional.linear(x, weight).chunk(3, -1)
    return first + out.transpose(0, 1)


def _gate(one: Tensor, other: Tensor) -> Tensor:
    assert type(one) is type(other) is Tensor
    return one.sin() * other


def _normed(heads: Tensor) -> Tensor:
    assert type(heads) is Tensor
    return heads / heads.norm(dim=-1, keepdim=True)


def by_kernels(x: Tensor, weight: Tensor) -> Tensor:
    """Kernels that get this rank's rows and positions."""
    first, second, _ = functional.linear(x, weight).chunk(3, -1)
    gated = accel.parallel.local_map(_gate, "elements")(first, second)
    return accel.parallel.local_map(_normed, "rows")(gated.view(2, x.shape[1], HEADS, -1)).flatten(2)


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate.sigmoid() * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        share = gate.sigmoid()
        return grads[0] * up * share * (1 - share), grads[0] * share


def own_function(x: Tensor, weight: Tensor) -> Tensor:
    first, second, third = functional.linear(x, weight).chunk(3, -1)
    return cast(Tensor, cast(Any, Gated).apply(first, second)) * third + first


ATTENTIONS = (by_hand, by_torch, by_einsum, linear_attention)
FUNCTIONS = (
    *ATTENTIONS,
    in_place,
    over_positions,
    with_dropout,
    over_features,
    written,
    reordered,
    by_module,
    by_kernels,
    own_function,
)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_rules_of_both_axes_compose(ranks: Simulator, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight, out = (
        torch.randn(*shape, generator=draw, dtype=torch.float64)
        for shape in ((2, TOKENS, WIDTH), (3 * WIDTH, WIDTH), (WIDTH, WIDTH))
    )
    leaves = [each.clone().requires_grad_() for each in (x, weight, out)]
    whole = functional.linear(function(leaves[0], leaves[1]), leaves[2])
    expected = torch.autograd.grad(whole.square().sum(), leaves)

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=MESH)
        _ = accel.parallel.split_sequence(ctx, {"x": x})
        along_cp = PositionRanks(ctx)
        layer = SimpleNamespace(group=group_of(ctx, "tp"), rule=Rule(style="replicated"))
        along_tp = LayerRanks(cast(Any, layer), nests=True)
        layouts = [RowLayout(0, PACKED), RowLayout(1, RowCut(1, ((WIDTH, 2),)))]
        own = [
            each.index_select(layout.dim, torch.tensor(rows_of(layout.cut, along_tp.rank, 2))).requires_grad_()
            for each, layout in zip((weight, out), layouts, strict=True)
        ]
        place = accel.parallel.split_sequence(ctx, {"x": x})["x"].requires_grad_()
        here = along_cp.part(place, 1)
        parts = [make(each, layout, along_tp) for each, layout in zip(own, layouts, strict=True)]
        inside = function(here, parts[0])
        assert isinstance(inside, NestedPart)
        assert inside.shape == (2, TOKENS, WIDTH)
        assert inside.rows.shape == (2, TOKENS, WIDTH // 2)
        with pytest.raises(NoRuleError, match="tp divide too"):  # for a model in the forward that takes own positions
            _ = along_cp.left(inside)
        with pytest.raises(NoRuleError, match="two models"):
            _ = inside + make(inside, inside.division, LayerRanks(cast(Any, layer), nests=True))
        found = functional.linear(inside, parts[1])
        assert type(found) is PartTensor
        assert found.ranks is along_cp
        torch.testing.assert_close(whole_of(found), whole.detach(), rtol=0, atol=1e-12)
        grads = torch.autograd.grad(whole_of(found.square().sum()) / 2, [place, *own])  # of two ranks
        want = accel.parallel.split_sequence(ctx, {"x": expected[0]})["x"]
        torch.testing.assert_close(grads[0], want, rtol=0, atol=1e-10)
        for got, each, layout in zip(grads[1:], expected[1:], layouts, strict=True):
            rows = each.index_select(layout.dim, torch.tensor(rows_of(layout.cut, along_tp.rank, 2)))
            total = summed(got, cast(Any, group_of(ctx, "cp")))
            torch.testing.assert_close(total, rows, rtol=0, atol=1e-10)

    _ = ranks.run(rank, 4, default_group=True)


class Result:
    """Parameters after two windows of AdamW, norms, and the share of parameters that ranks along tp divide."""

    def __init__(self, model: nn.Module, parameters: dict[str, Tensor], norms: list[float]) -> None:
        self.parameters = {name: each for name, each in parameters.items() if each.is_floating_point()}
        self.norms = norms
        self.share = share_of(model)


def share_of(model: nn.Module) -> float:
    """Return the share of parameters that ranks along tp divide, which may be sharded along cp too."""
    divided = 0
    for each in model.parameters():
        if is_dtensor(each):
            names = each.device_mesh.mesh_dim_names or ("tp",)
            divided += each.numel() * any(
                placement.is_shard() and name == "tp" for placement, name in zip(each.placements, names, strict=True)
            )
    return divided / sum(each.numel() for each in model.parameters())


ROWS = (3, 3, 2)  # of micro-batches: a window of one, a window of two
WINDOWS = ((0,), (1, 2))


def adam_of(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def train(ctx: accel.DistContext, entry: Handwritten, mesh: str, plan: accel.parallel.Plan | None = None) -> Result:
    """Train with own positions of each batch; of outputs that all ranks have, each takes its share of the loss."""
    ctx = accel.replace(ctx, mesh=mesh)
    outputs = [[each.detach() for each in floats(called(entry.make(), batch))] for batch in batches(entry)]
    model: nn.Module = entry.make()
    model, optimizer = accel.prepare(ctx, model, adam_of(model), example=entry.batch(1, 2).inputs, plan=plan)
    norms: list[float] = []
    for window in WINDOWS:
        run = ByState(ctx, len(window))
        for at in window:
            run.begin(last=at == window[-1])
            with run.accumulate(model):
                own = floats(called(model, cut(ctx, batches(entry)[at])))
                run.backward(loss_of(ctx, own, outputs[at]) / ROWS[at], weight=ROWS[at])
        run.step(optimizer, max_norm=0.5)
        norms.append(float(run.grad_norm))
    return Result(model, accel.get_state_dict(ctx, model, dst=None), norms)


def batches(entry: Handwritten) -> list[Any]:
    return [entry.batch(5 + at, rows, LENGTH).inputs for at, rows in enumerate(ROWS)]


def draws_for(outputs: list[Tensor]) -> list[Tensor]:
    return [
        torch.randn(each.shape, generator=torch.Generator().manual_seed(at)).to(each) for at, each in enumerate(outputs)
    ]


def loss_of(ctx: accel.DistContext, own: list[Tensor], outputs: list[Tensor]) -> Tensor:
    size = ctx.axis("cp").size
    pairs = zip(draws_for(outputs), own, strict=True)
    return weighted(own, [own_of(ctx, draw, mine) / (1 if mine.shape != draw.shape else size) for draw, mine in pairs])


def plain(entry: Handwritten) -> Result:
    """The same training by a loop of torch alone."""
    model = entry.make()
    optimizer = adam_of(model)
    norms: list[float] = []
    for window in WINDOWS:
        total = 2 * sum(ROWS[at] for at in window)  # the weights of both ranks along cp
        for at in window:
            outputs = floats(called(model, batches(entry)[at]))
            (weighted(outputs, draws_for(outputs)) / total).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return Result(model, {name: each.detach() for name, each in model.state_dict().items()}, norms)


def check(
    ranks: Simulator, entry: Handwritten, mesh: str = MESH, size: int = 4, plan: accel.parallel.Plan | None = None
) -> float:
    """Compare training on a mesh with a plain loop; return the share of parameters that tp divides."""
    expected = plain(entry)
    found = ranks.run(lambda ctx: train(ctx, entry, mesh, plan), size, default_group=True)
    for each in found:
        torch.testing.assert_close(each.parameters, expected.parameters, rtol=0, atol=1e-10)
        assert each.norms == pytest.approx(expected.norms, rel=1e-10)
    return found[0].share


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("nano_gpt", 0.93),  # packed projections, counts in a config
        ("t5", 0.9),  # two sequences, biases with an entry for each head
        pytest.param("moe", 0.94, marks=pytest.mark.slow),  # experts by hand
        pytest.param("lora", 0.87, marks=pytest.mark.slow),  # low-rank corrections
        ("cached_values", 0.94),  # tensors of heads and positions that pass units by a mapping
        pytest.param("perceiver", 0.92, marks=pytest.mark.slow),  # torch's attention, of two sequences
    ],
)
def test_hand_written_models_train_with_the_parts_of_tp_alone(ranks: Simulator, name: str, share: float) -> None:
    assert check(ranks, *named(name)) >= share


class Direct(nn.Module):
    """Attention that crosses the ranks along cp itself, of features that tp divides: grouped keys, a mask with an entry
    for each head, and sinks."""

    def __init__(self, ctx: accel.DistContext, method: Any, terms: str) -> None:
        super().__init__()
        self.ctx, self.method, self.terms = ctx, method, terms
        self.sizes = {"heads": 4, "keys": 4 if terms == "documents" else 2, "width": 16}
        self.kv = nn.Linear(16, 2 * 4 * self.sizes["keys"])
        self.q, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.sinks = nn.Parameter(torch.randn(4)) if terms == "mask and sinks" else None

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        query = self.q(x).view(rows, tokens, self.sizes["heads"], -1).transpose(1, 2)
        key, value = (
            each.view(rows, tokens, self.sizes["keys"], -1).transpose(1, 2)
            for each in self.kv(x).split(4 * self.sizes["keys"], dim=2)
        )
        given: dict[str, Any] = {}
        size = 1 if tokens == TOKENS else self.ctx.axis("cp").size
        if self.terms == "mask and sinks":
            given["attn_mask"] = torch.arange(4.0, dtype=x.dtype).view(1, 4, 1, 1) * torch.arange(tokens * size)
        if self.terms == "documents":
            given["documents"] = torch.zeros(rows, tokens, dtype=torch.long)
        if self.sinks is not None:
            given["sinks"] = self.sinks
        mixed = accel.parallel.context_attention(self.ctx, query, key, value, method=self.method, **given)
        found: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return found


def run_direct(
    ctx: accel.DistContext, mesh: str, method: Any, terms: str, *, compiles: bool = False
) -> tuple[dict[str, Tensor], float]:
    ctx = accel.replace(ctx, mesh=mesh)
    with accel.seeding.seeded(ctx, 0):
        model: nn.Module = Direct(ctx, method, terms).double()
        x = torch.randn(2, TOKENS, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model, optimizer = accel.prepare(ctx, model, adam_of(model), example=[x])
    if compiles:
        model = accel.compile_model(model, backend="aot_eager")
    run = ByState(ctx)
    run.begin()
    with run.accumulate(model):
        out = model(accel.parallel.split_sequence(ctx, {"x": x})["x"])
        run.backward(out.square().sum() * ctx.axis("cp").size)
    run.step(optimizer, max_norm=0.5)
    return accel.get_state_dict(ctx, model, dst=None), share_of(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("method", "terms"),
    [("gather", "mask and sinks"), ("ring", "documents"), ("heads", "none")],
)
def test_attention_across_ranks_takes_own_heads(ranks: Simulator, method: str, terms: str) -> None:
    expected = run_direct(accel.single(), "", method, terms)[0]
    for found, share in ranks.run(lambda ctx: run_direct(ctx, MESH, method, terms), 4, default_group=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        assert share > 0.9


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_with_attention_across_ranks_computes_the_same(ranks: Simulator) -> None:
    expected = run_direct(accel.single(), "", "ring", "documents")[0]

    def rank(ctx: accel.DistContext) -> dict[str, Tensor]:
        return run_direct(ctx, MESH, "ring", "documents", compiles=True)[0]

    for found in ranks.run(rank, 4, default_group=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "cached_values",  # tensors that pass units by a mapping
        "perceiver",  # torch's attention, of two sequences
        "nano_gpt",
    ],
)
def test_ranks_along_tp_share_the_tokens_of_a_rank_along_cp(ranks: Simulator, name: str) -> None:
    _ = check(ranks, *named(name), plan=accel.parallel.Plan(sequence=True))


def test_a_plan_that_is_written_shares_tokens_too(ranks: Simulator) -> None:
    (entry,) = named("nano_gpt")
    own: Any = {"transformer.h.*.mlp.c_fc": "colwise", "transformer.h.*.mlp.c_proj": "rowwise"}
    batch = entry.batch(5, 2, LENGTH).inputs
    (whole,) = floats(called(entry.make(), batch))

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=MESH)
        plan = accel.parallel.Plan(sequence=True, tensor=own)
        model = accel.prepare_model(ctx, entry.make(), plan=plan)
        (found,) = floats(called(model, cut(ctx, batch)))
        torch.testing.assert_close(found, own_of(ctx, whole, found), rtol=0, atol=1e-10)

    _ = ranks.run(rank, 4, default_group=True)


@pytest.mark.filterwarnings("ignore")
def test_the_backward_of_a_function_of_tokens_along_both_axes_is_refused(ranks: Simulator) -> None:
    (entry,) = named("autograd_function")
    batch = entry.batch(5, 3, LENGTH).inputs

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=MESH)
        plan = accel.parallel.Plan(sequence=True)
        model = accel.prepare_model(ctx, entry.make(), plan=plan, example=batch)
        (out,) = floats(called(model, cut(ctx, batch)))
        with pytest.raises(NoRuleError, match="in the backward of a function"):
            out.sum().backward()

    _ = ranks.run(rank, 4, default_group=True)


class Reads(nn.Module):
    """A forward that reads the weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.down(self.up(x).relu()), self.out.weight)


def test_a_weight_that_is_read_is_a_part(ranks: Simulator) -> None:
    inputs = torch.randn(2, TOKENS, 8, dtype=torch.double)

    def rank(ctx: accel.DistContext, mesh: str) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        ctx = accel.replace(ctx, mesh=mesh, plan=accel.parallel.Plan(tensor={"out": "colwise_gather_output"}))
        model: Any = accel.prepare_model(ctx, Reads().double())
        out = model(accel.parallel.split_sequence(ctx, {"x": inputs})["x"])
        out.square().sum().backward()
        grad = full_tensor(model.out.weight.grad)
        times = 2 if mesh else 1  # ranks along tp have the same
        return accel.reduce(ctx, out.detach().square().sum()) / times, accel.reduce(ctx, grad) / times

    want = rank(accel.single(), "")
    for got in ranks.run(lambda ctx: rank(ctx, MESH), 4, default_group=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def gated(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.7 * x)


def scripted(x: Tensor) -> Tensor:
    return torch.jit.script(gated)(x)


def vmapped(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: torch.tanh(row) * 2)(x)


def with_gradient(x: Tensor) -> Tensor:
    with torch.enable_grad():
        h = x.detach().requires_grad_()
        return torch.autograd.grad(h.square().sum(), h)[0]


class Ending(nn.Module):
    """Attention of heads that tp divides, and a function of its output."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for each in self.qkv(x).split(WIDTH, 2))
        mixed: Tensor = self.out(merged((q @ k.transpose(-2, -1)).softmax(-1) @ v))
        return x + self.end(mixed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("ends", "blocks"),
    [
        pytest.param([scripted], 1, id="a model"),
        pytest.param([scripted, vmapped, with_gradient], 2, id="units", marks=pytest.mark.slow),
    ],
)
def test_functions_that_lose_positions_are_refused_by_the_first_call(
    ranks: Simulator, ends: list[Callable[[Tensor], Tensor]], blocks: int
) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=MESH)
        x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        own = accel.parallel.split_sequence(ctx, {"x": x})["x"]

        def prepared(function: Callable[[Tensor], Tensor]) -> nn.Module:
            model = nn.Sequential(*(Ending(function) for _ in range(blocks))).double()
            return accel.prepare_model(ctx, model, example=[x])

        right = prepared(nn.Identity())
        assert right(own).shape == own.shape
        assert share_of(right) > 0.9
        for end in ends:
            with assert_raises(PrepareError, fix="Attend by accel.parallel.context_attention"):
                _ = prepared(end)(own)

    _ = ranks.run(rank, 4, default_group=True)
