# SPDX-License-Identifier: Apache-2.0
"""Hand-written models train on ranks along tp as in one process, and most of their parameters are divided."""

from __future__ import annotations

import copy
import operator
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, cast

import pytest
import torch
from functorch.compile import make_boxed_func
from handwritten import MODELS, Handwritten, named
from pipelines import batch_of, by_hand, differences, train
from planned_parts import found_plan, rules_of
from steps import two_steps
from tables import in_turn
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

import accel
from accel.comm import SilentGroup
from accel.errors import PrepareError
from accel.parallel.axes.tensor import _dependence, _found
from accel.parallel.axes.tensor._layers import GroupLayer
from accel.parallel.axes.tensor._rules import install, lines_of, share_of
from accel.parallel.parts import NoRuleError
from accel.parallel.parts._part import name_of
from accel.tensors import full_tensor, is_dtensor
from accel.testing import Simulator


def _called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def trained(ctx: accel.DistContext, entry: Handwritten, mesh: str = "") -> tuple[Any, float]:
    """Parameters after two steps with batches of other sizes than the example, and the share that is divided."""
    ctx = accel.replace(ctx, mesh=mesh) if mesh else ctx
    model = entry.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    model, optimizer = accel.prepare(ctx, model, optimizer, example=entry.batch(1, 2).inputs)
    batch = entry.batch(2, 3, 9)
    losses = two_steps(ctx, model, optimizer, lambda: entry.loss(_called(model, batch.inputs), batch.targets))
    state = accel.get_state_dict(ctx, model, dst=None)
    return (losses, {name: each for name, each in state.items() if each.is_floating_point()}), divided_share(model)


def divided_share(model: nn.Module) -> float:
    """Return the share of a model's parameters that ranks along the last axis divide."""
    divided = [each for each in model.parameters() if is_dtensor(each) and each.placements[-1].is_shard()]
    return sum(each.numel() for each in divided) / sum(each.numel() for each in model.parameters())


def compared(ranks: Simulator, entry: Handwritten, mesh: str, size: int) -> float:
    """Train on a mesh and in one process; return the divided share."""
    want, _ = trained(accel.single(), entry)
    runs = ranks.run(lambda ctx: trained(ctx, entry, mesh), size, default_group=True)
    for got, _ in runs:
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    return runs[0][1]


# A run with dropout is not that of one process.
TRAINED = [each for each in MODELS if "random" not in each.tags]
# What stays whole as a whole, and why; a share in percent for the others.
REFUSED = frozenset({"lstm", "gru", "hooked_features"})
# Parts of a block that are called one by one, of a unit of fsdp.
REFUSED_ON = frozenset({("called_by_parts", "dp=2,tp=2")})
LEAST: Mapping[str, int] = {
    "nano_gpt": 90, "min_gpt": 90, "llama": 98, "grouped_gpt": 85, "lambdas": 90, "shared_block": 90, "mamba": 90,
    "moe": 90, "lora": 85, "lora_of_last_block": 90, "residuals_between": 90, "t5_encoder": 95, "t5": 95,
    "torch_transformer": 90, "bert": 85, "mapping": 90, "reward": 90, "dit": 90, "weight_norm": 90, "keyed_blocks": 90,
    "listed_losses": 90, "cached_values": 90, "closures": 90, "branch_on_inputs": 90, "checkpointed": 90,
    "reentrant": 90, "in_place": 90, "called_by_parts": 90, "nested_outputs": 90, "frozen_body": 90, "vit": 75,
    "aux_attribute": 90, "lens": 90, "single_stream": 90,
    "kept_statistics": 90, "listed_parameters": 90, "checkpointed_methods": 90,
    "gated_normed": 95, "parallel_fused": 98, "state_space": 95, "long_convolution": 94, "sorted_experts": 95,
    "unet": 95, "complex_states": 95, "spectral_norm": 94, "unet_batch_norm": 95, "resnet": 95,
    "spectral_hooked": 94, "cells": 95, "carried_states": 95, "time_loop": 95, "gnn": 95,
    "batched_experts": 95, "rescaled": 90, "rounded": 95, "named_weights": 95, "einsums": 95,
}  # fmt: skip


TABLE_MESHES = [("tp=2", 2, True), ("tp=4", 4, False), ("dp=2,tp=2", 4, False)]

# Operators of messages, and copies.
MESSAGES = frozenset({"clone", "alias", "detach", "copy", "cat", "new_empty"})


class Attention(nn.Module):
    """Counts its heads in a mapping, where no style finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.settings = {"heads": 4}

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = (each.view(rows, tokens, self.settings["heads"], -1) for each in self.qkv(x).split(width, 2))
        weights = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).softmax(-1)
        return x + self.out((weights @ v.transpose(1, 2)).transpose(1, 2).reshape(rows, tokens, width))


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(Attention() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def stacked() -> nn.Module:
    torch.manual_seed(0)
    return Stacked().double()


def _calls(run: Callable[[], object]) -> tuple[list[str], int]:
    """Return the names of the functions that run a rule of parts, and the number of calls of functions of accel."""
    rules: list[str] = []
    calls = 0

    def note(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        if event == "call" and "accel/parallel/" in frame.f_code.co_filename:
            calls += 1
            if frame.f_code.co_name == "__torch_function__":
                rules.append(name_of(frame.f_locals["func"]))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return rules, calls


def test_each_function_of_a_block_runs_one_rule_in_few_calls() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(Attention(), nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
    group: Any = SilentGroup(2)
    plan = found_plan(block, 2, [torch.empty(2, 6, 8)])
    rules = rules_of(block, plan.styles, 2, regions=plan.regions)
    for path, rule in rules.items():
        module = block.get_submodule(path)
        for name, dim in rule.dims.items():
            setattr(module, name, nn.Parameter(module.get_parameter(name).detach().chunk(2, dim)[0].clone()))
    install(block, rules, lambda rule: GroupLayer(rule, group))
    x = torch.randn(2, 6, 8, requires_grad=True)
    attention, pair = block
    views = ["split", "view", "view", "view", "transpose", "permute", "transpose", "transpose", "reshape"]
    for _ in range(2):  # the first pass fills the caches of layouts
        rules_run, calls = _calls(lambda: attention(x).sum().backward())
    assert sorted(rules_run) == sorted([*views, "linear", "linear", "matmul", "matmul", "softmax"])
    assert calls <= 24 * len(rules_run)
    assert _calls(lambda: pair(x).sum().backward())[0] == ["linear", "gelu", "linear"]


def test_a_divided_layer_that_is_called_by_itself_returns_a_whole_tensor(ranks: Simulator) -> None:
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 3, 8)

    def rank(ctx: accel.DistContext) -> Any:
        model: Any = stacked()
        if ctx.world_size > 1:
            model = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), model, example=[batch_of(0, 2)[0]])
            assert divided_share(model) > 0.8
        given = x.clone().requires_grad_()
        hidden = model.blocks[0].qkv(given)
        output = model.blocks[1].out(hidden[..., 4:12].softmax(-1))
        output.square().sum().backward()
        layers = (model.blocks[0].qkv, model.blocks[1].out)
        grads = [full_tensor(each.grad) for layer in layers for each in layer.parameters()]
        return hidden.detach(), output.detach(), given.grad, grads

    want = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


class Block(nn.Module):
    """An attention that no style divides, and a pair of layers that styles divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = Attention()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.first(x))
        return x + self.down(torch.relu(self.up(self.second(x))))


def test_equal_blocks_are_proved_once_and_the_first_rank_may_end_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs: list[nn.Module] = []
    gradients: list[Tensor] = []
    prove, rows_in = _found.prove, cast(Any, _dependence)._rows_in
    monkeypatch.setattr(_found, "prove", lambda *a, **named: (proofs.append(a[0]), prove(*a, **named))[1])
    monkeypatch.setattr(_dependence, "_rows_in", lambda each: (gradients.append(each), rows_in(each))[1])
    counts: list[tuple[int, int]] = []
    for depth in (2, 8):
        proofs.clear()
        gradients.clear()
        model = nn.Sequential(nn.Sequential(*(Block() for _ in range(depth))))
        plan = accel.parallel.tensor_plan(model, example=[torch.ones(2, 4, 8)])
        attention = {"0.*.attention.qkv": "packed_colwise_3", "0.*.attention.out": "rowwise"}
        assert plan == {**attention, "0.*.up": "colwise", "0.*.down": "rowwise"}
        counts.append((len(proofs), len(gradients)))
    assert counts[0][0] == counts[1][0]
    assert counts[1][1] < 800  # with those of each rank nearly 1,000


class Merged(nn.Module):
    """A layer whose low-rank correction is added to its weight, by one of torch's ways to multiply."""

    def __init__(self, inputs: int, outputs: int, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))
        self.multiply = multiply

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight + self.multiply(self.b, self.a) * 0.5)


@pytest.mark.parametrize("multiply", [operator.matmul, torch.matmul, torch.mm], ids=["@", "matmul", "mm"])
def test_a_weight_with_a_merged_correction_is_divided(multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    pair = nn.Sequential(Merged(8, 32, multiply), nn.GELU(), Merged(32, 8, multiply))
    plan = found_plan(pair, 2, [torch.empty(2, 4, 8)])  # is proved
    assert plan.regions[""].keys() == {"0.weight", "0.b", "2.weight", "2.a"}
    assert share_of(pair, rules_of(pair, plan.styles, 2, regions=plan.regions)) > 0.9


class GatedHeads(nn.Module):
    """Heads with gates that a layer computes from the queries and keys of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.gate = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.query(x), self.key(x)
        gates = self.gate(torch.cat([q, k], -1)).sigmoid().transpose(1, 2).unsqueeze(-1)
        q, k = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in (q, k))
        return self.out((gates * functional.scaled_dot_product_attention(q, k, k)).transpose(1, 2).flatten(2))


def test_layers_that_read_all_divided_heads_keep_no_layer_whole() -> None:
    plan = found_plan(GatedHeads(), 2, [torch.zeros(2, 5, 8)])
    dims = {name: each.dim for layouts in plan.regions.values() for name, each in layouts.items() if "weight" in name}
    assert dims == {"query.weight": 0, "key.weight": 0, "out.weight": 1, "gate.weight": 1}


class Listed(nn.Module):
    """Four layers of one shape in a list, the last of which ends the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.settings = {"heads": 4}

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = (layer(x).view(rows, tokens, self.settings["heads"], -1).transpose(1, 2) for layer in self.layers[:3])
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.layers[3](mixed.transpose(1, 2).reshape(rows, tokens, width))


def test_the_bias_behind_a_sum_stays_whole_beside_layers_like_its_own() -> None:
    torch.manual_seed(0)
    plan = found_plan(Listed(), 2, [torch.empty(2, 4, 8)])
    weights = {f"layers.{at}.weight" for at in range(4)}
    assert plan.regions[""].keys() == weights | {f"layers.{at}.bias" for at in range(3)}


@pytest.mark.nightly
def test_blocks_of_stages_compute_with_parts(ranks: Simulator) -> None:
    plan = accel.parallel.Plan(schedule="1F1B", stages_per_rank=1, micro_batches=4)
    example = [batch_of(0, 2)[0]]

    def rank(ctx: accel.DistContext) -> Any:
        return train(ctx, stacked, plan, mesh="pp=2,tp=2", accumulation=2, example=example)

    found = ranks.run(rank, 4, default_group=True)
    assert max(differences(found, by_hand(stacked, accumulation=2))) < 1e-10


class Local(nn.Module):
    """The block's attention with a rank's heads alone, written for them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 12), nn.Linear(4, 8, bias=False)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (each.view(rows, tokens, 2, -1) for each in self.qkv(x).split(4, 2))
        weights = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).softmax(-1)
        return x + (self.out((weights @ v.transpose(1, 2)).transpose(1, 2).reshape(rows, tokens, 4)) + self.bias)


def _compiled(block: nn.Module, x: Tensor) -> tuple[list[Counter[str]], Tensor, Tensor]:
    """Operators in the graph of a block's forward but for views, copies and messages; its output; the input's
    gradient."""
    graphs: list[Counter[str]] = []

    def noted(graph: Any, _inputs: Any) -> Any:
        calls = [each.target for each in graph.graph.nodes if each.op == "call_function"]
        computing = [each for each in calls if getattr(each, "namespace", "") == "aten" and not each.is_view]
        names = [each.overloadpacket.__name__ for each in computing if "view" not in str(each)]
        graphs.append(Counter(name for name in names if name not in MESSAGES))
        return make_boxed_func(graph)

    x = x.detach().clone().requires_grad_()
    backend = aot_autograd(fw_compiler=noted, bw_compiler=lambda graph, _: make_boxed_func(graph))
    compiled: Any = torch.compile(block, backend=backend, fullgraph=True)
    out: Tensor = compiled(x)
    out.square().sum().backward()
    assert x.grad is not None
    return graphs, out.detach(), x.grad


@pytest.mark.slow
def test_a_compiled_block_of_parts_has_the_operators_of_local_layers(ranks: Simulator) -> None:
    ids = batch_of(0, 2)[0]
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def rank(ctx: accel.DistContext) -> tuple[list[Counter[str]], Tensor, Tensor]:
        ctx = accel.replace(ctx, mesh="tp=2")
        model: Any = accel.prepare_model(ctx, stacked(), example=[ids])
        return _compiled(model.blocks[0], x)

    (local, *_), _, _ = _compiled(Local().double(), x)
    whole: Any = stacked()
    own = x.clone().requires_grad_()
    want = whole.blocks[0](own)
    want.square().sum().backward()
    assert own.grad is not None
    for graphs, out, grad in ranks.run(rank, 2, default_group=True, timeout_s=300):
        torch.testing.assert_close(out, want.detach())
        torch.testing.assert_close(grad, own.grad)
        for each in graphs:
            assert each == local


@pytest.mark.slow
def test_a_compiled_model_of_parts_trains_as_in_one_process(ranks: Simulator) -> None:
    """Blocks of one class have one graph a rank."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()

    def rank(ctx: accel.DistContext) -> Any:
        model = stacked()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        if ctx.world_size > 1:
            ctx = accel.replace(ctx, mesh="tp=2")
            model, optimizer = accel.prepare(ctx, model, optimizer, example=[batch_of(0, 2)[0]])
            accel.compile_model(model, "repeated", backend="aot_eager", fullgraph=True)
        ids = batch_of(1, 4)[0]
        losses = two_steps(ctx, model, optimizer, lambda: model(ids).square().mean())
        return losses, accel.get_state_dict(ctx, model, dst=None)

    want = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True, timeout_s=300):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    torch.compiler.reset()


class Joined(Attention):
    """Joins tensors of tuples, as rotary positions are written, and takes the head of keys by a list."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(x).split(8, 2))
        return x + self.out(functional.scaled_dot_product_attention(self.joined(q), k, v).transpose(1, 2).flatten(2))

    def joined(self, q: Tensor) -> Tensor:
        """Return heads that depend on all of them, by a function that takes a tuple."""
        return {
            "cat": lambda: torch.cat((-q[..., 1:], q[..., :1]), dim=-1),
            "of rows": lambda: torch.cat(tensors=(q, 2 * q))[: len(q)],
            "stack": lambda: torch.stack((q, q * q)).sum(0),
            "index": lambda: q[(slice(None), slice(None), torch.tensor([1, 0, 2]))],
            "nested": lambda: torch.cat((torch.stack((q, -q), -1).flatten(-2)[..., ::2], q), -1)[..., :2],
        }[self.form]()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["cat", "of rows", "stack", "index", "nested"])
def test_a_compiled_module_finds_parts_in_tuples(ranks: Simulator, form: str) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(Joined(form)).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)

    def rank(ctx: accel.DistContext) -> dict[str, Tensor]:
        model: Any = copy.deepcopy(whole)
        if ctx.world_size > 1:
            ctx = accel.replace(ctx, mesh="tp=2")
            model = accel.prepare_model(ctx, model, example=[x])
            assert divided_share(model) > 0.5
            model[0].compile(backend="aot_eager", fullgraph=True)
        out = model(x)
        out.square().sum().backward()
        return {"out": out.detach()} | {key: full_tensor(each.grad) for key, each in model.named_parameters()}

    torch.compiler.reset()
    want = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True, timeout_s=300):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


class Around(nn.Module):
    """A block whose heads are joined outside of the module that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Rotated(), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.first(x))


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inside(x).unflatten(-1, (4, 2))
        return torch.cat((-heads[..., 1:], heads[..., :1]), -1).flatten(2).tanh()


@pytest.mark.slow
def test_a_module_within_a_region_that_is_compiled_alone_finds_parts_in_tuples(ranks: Simulator) -> None:
    torch.manual_seed(0)
    whole = Around().double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)

    def rank(ctx: accel.DistContext) -> Tensor:
        model: Any = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), copy.deepcopy(whole), example=[x])
        assert divided_share(model) > 0.5
        model.first.compile(backend="aot_eager")
        return model(x).detach()

    torch.compiler.reset()
    for got in ranks.run(rank, 2, default_group=True, timeout_s=300):
        torch.testing.assert_close(got, whole(x).detach(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("is_own", [False, True])
def test_the_share_of_a_plan_by_structure_or_by_hand_is_logged(
    ranks: Simulator, caplog: pytest.LogCaptureFixture, is_own: bool
) -> None:
    def rank(ctx: accel.DistContext) -> None:
        net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        plan = accel.parallel.Plan(tensor={"0": "colwise", "2": "rowwise"}) if is_own else None
        _ = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), net, plan=plan)

    with caplog.at_level("WARNING", "accel.parallel"):
        _ = ranks.run(rank, 2, default_group=True)
    (text,) = [each.getMessage() for each in caplog.records if each.name == "accel.parallel"]
    assert text.startswith("Sequential: 99% of the parameters are divided along tp=2, by ")
    assert text.endswith("by styles of your own") == is_own


ROWS, PAIR = torch.empty(2, 3, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
STRUCTURES: Mapping[str, tuple[nn.Module, list[Tensor]]] = {
    "transformer": (nn.Transformer(8, 2, 1, 1, 16, batch_first=True), [ROWS, ROWS]),
    "encoder": (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False), [ROWS]),
    "decoder": (nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 1), [ROWS, ROWS]),
    "attention": (nn.MultiheadAttention(8, 2), [ROWS, ROWS, ROWS]),
    "pairs": (nn.Sequential(PAIR, nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), [ROWS]),
}


@pytest.mark.parametrize("what", STRUCTURES)
def test_an_example_never_divides_less_than_none(what: str) -> None:
    model, inputs = STRUCTURES[what]
    plan = found_plan(model, 2, inputs)
    found = share_of(model, rules_of(model, plan.styles, 2, regions=plan.regions))
    assert found >= share_of(model, rules_of(model, accel.parallel.tensor_plan(model), 2)) > 0.5


def assert_law(ranks: Simulator, entry: Handwritten, mesh: str, size: int) -> None:
    if entry.name in REFUSED or (entry.name, mesh) in REFUSED_ON:
        with pytest.raises((PrepareError, NoRuleError)):
            compared(ranks, entry, mesh, size)
    else:
        assert 100 * compared(ranks, entry, mesh, size) >= LEAST.get(entry.name, 0)


@pytest.mark.parametrize(
    "entry",
    [
        *named("grouped_gpt", "weight_norm", "in_place", "cached_values", "aux_attribute", "listed_parameters"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in named("lens", "single_stream")),
    ],
    ids=lambda each: each.name,
)
def test_a_hand_written_model_trains_divided_as_in_one_process(ranks: Simulator, entry: Handwritten) -> None:
    assert_law(ranks, entry, "tp=2", 2)


class MultiQuery(nn.Module):
    """Attention with one key and one value for all heads, by parameters with odd numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(16, 20), nn.Linear(20, 16)
        self.k, self.v = (nn.Parameter(torch.randn(15, 5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(*x.shape[:2], 4, 5).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            q, *((x[..., 1:] @ each)[:, None].expand_as(q) for each in (self.k, self.v))
        )
        return x + self.o(torch.einsum("bhtd->bthd", mixed).flatten(2))


def test_what_stays_whole_in_a_divided_module_is_named() -> None:
    plan = found_plan(nn.Sequential(MultiQuery(), MultiQuery()), 2, [torch.empty(2, 3, 16)])
    assert set(plan.regions["0"]) == {"0.q.weight", "0.q.bias", "0.o.weight"}
    why = "no division was found for k, v"
    assert plan.left == {"0": why, "1": why}
    assert lines_of(plan.left) == [f"0 and 1 like it: {why}"]


def assert_trains_as_one_process(ranks: Simulator, make: Callable[[], nn.Module], x: Tensor, least: float) -> None:
    """Assert that two steps on tp=2 equal the steps of one process, and that more than a share of the model is
    divided."""

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="tp=2") if ctx.world_size > 1 else ctx
        torch.manual_seed(0)
        model: Any = make().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        model, optimizer = accel.prepare(ctx, model, optimizer, example=[x[:2]])
        losses = two_steps(ctx, model, optimizer, lambda: model(x).square().mean())
        return losses, accel.get_state_dict(ctx, model, dst=None), divided_share(model) if ctx.world_size > 1 else 1.0

    *want, _ = rank(accel.single())
    for *got, share in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
        assert share > least


class Projected(nn.Module):
    """A block between two layers that end in a residual and in the result, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.block, self.out, self.small = nn.Linear(5, 8), Block(), nn.Linear(8, 6), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.into(x))
        return self.out(torch.sin(x)) * torch.sigmoid(self.small(x))


def test_large_layers_that_nothing_else_divides_gather_their_outputs(ranks: Simulator) -> None:
    plan = found_plan(Projected(), 2, [torch.empty(2, 3, 5)])
    gathered = {path for path, style in plan.styles.items() if style == "colwise_gather_output"}
    assert gathered == {"into", "out"}
    assert "out" not in str(plan.left)
    x = torch.linspace(-1, 1, 60, dtype=torch.float64).view(4, 3, 5)

    assert_trains_as_one_process(ranks, Projected, x, 0.85)


class Head(nn.Module):
    """One head of attention, in modules of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(32, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / 2
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ self.value(x)


class Heads(nn.Module):
    """A block with a list of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out = nn.ModuleList(Head() for _ in range(8)), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 160), nn.GELU(), nn.Linear(160, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(torch.cat([head(x) for head in self.heads], -1))
        return x + self.mlp(x)


def test_small_layers_that_are_many_gather_their_outputs(ranks: Simulator) -> None:
    """The key of each head has less than 1 % of the parameters, and all of them have 7 %."""
    plan = found_plan(Heads(), 2, [torch.empty(2, 3, 32)])
    gathered = {path.rpartition(".")[2] for path, style in plan.styles.items() if style == "colwise_gather_output"}
    assert gathered == {"key", "query"}
    assert not plan.left
    x = torch.linspace(-1, 1, 192, dtype=torch.float64).view(2, 3, 32)

    def rank(ctx: accel.DistContext) -> tuple[Tensor, float]:
        ctx = accel.replace(ctx, mesh="tp=2") if ctx.world_size > 1 else ctx
        torch.manual_seed(0)
        model = accel.prepare_model(ctx, Heads().double(), example=[x[:1]])
        return model(x).detach(), divided_share(model) if ctx.world_size > 1 else 1.0

    want, _ = rank(accel.single())
    for got, share in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
        assert share > 0.95


class Convolutions(nn.Module):
    """A block of sounds: positions by a convolution of groups, and a softmax of all channels between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.block = nn.Conv1d(8, 8, 3, padding=1, groups=4), Block()
        self.into, self.out = nn.Conv1d(8, 32, 1), nn.Conv1d(16, 8, 1, bias=False)
        self.each = nn.Conv1d(16, 16, 3, padding=1, groups=16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x + self.positions(x.mT).mT)
        hidden = functional.glu(self.into(x.mT), 1)
        return x + self.out(self.each(hidden).softmax(1)).mT


def test_large_convolutions_that_nothing_else_divides_gather_their_channels(ranks: Simulator) -> None:
    plan = found_plan(Convolutions(), 2, [torch.empty(2, 5, 8)])
    gathered = {path for path in plan.regions if not path.startswith("block")}
    assert {"positions", "into", "out"} <= gathered
    assert not plan.left
    x = torch.linspace(-1, 1, 160, dtype=torch.float64).view(4, 5, 8)

    assert_trains_as_one_process(ranks, Convolutions, x, 0.9)


class PlainTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(40, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows[ids, :]


class PlainHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.columns, self.bias = nn.Parameter(torch.randn(8, 40)), nn.Parameter(torch.randn(40))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,dv->btv", x, self.columns) + self.bias


class PlainEnds(nn.Module):
    """Plain parameters for the embedding and the head, as in TransformerLens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = PlainTable(), Block(), PlainHead()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embed(ids)))


def test_plain_parameters_of_an_embedding_and_a_head_are_divided(ranks: Simulator) -> None:
    ids = torch.arange(12).view(3, 4) % 40
    plan = found_plan(PlainEnds(), 2, [ids])
    assert plan.regions["head"]["head.columns"].dim == 1
    assert "embed.rows" in plan.regions["embed"]
    assert not plan.left

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="tp=2") if ctx.world_size > 1 else ctx
        torch.manual_seed(0)
        model: Any = PlainEnds().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        model, optimizer = accel.prepare(ctx, model, optimizer, example=[ids[:2]])
        losses = two_steps(ctx, model, optimizer, lambda: model(ids).square().mean())
        return losses, accel.get_state_dict(ctx, model, dst=None)

    want = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


class Tables(nn.Module):
    """A head without a layer, which reads the table of words, a bag of neighbours, and a loss in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.pairs = nn.Embedding(37, 8, padding_idx=1), nn.EmbeddingBag(33, 8, mode="mean")
        self.block, self.norm = Block(), nn.LayerNorm(8)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.stack([ids % 33, ids.roll(1, 1) % 33], -1)
        x = self.words(ids) + self.pairs(pairs.flatten(0, 1)).view(*ids.shape, 8)
        logits = self.norm(self.block(x)) @ self.words.weight.t()
        return functional.cross_entropy(logits.view(-1, 37), labels.view(-1)), logits


@pytest.mark.parametrize(
    ("mesh", "size", "sequence"),
    [("tp=2", 2, False), *(pytest.param(*each, marks=pytest.mark.slow) for each in TABLE_MESHES)],
)
def test_tables_that_styles_cannot_divide_are_divided_by_rows(
    ranks: Simulator, mesh: str, size: int, sequence: bool
) -> None:
    ids = torch.randint(37, (3, 9), generator=torch.Generator().manual_seed(2))

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh=mesh) if ctx.world_size > 1 else ctx
        torch.manual_seed(0)
        model: Any = Tables().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        plan = accel.parallel.Plan(sequence=sequence and ctx.world_size > 1)
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=[ids[:2, :6], ids[:2, :6]])
        losses = two_steps(ctx, model, optimizer, lambda: model(ids, ids.roll(-1, 1))[0])
        return losses, accel.get_state_dict(ctx, model, dst=None), divided_share(model) if ctx.world_size > 1 else 1.0

    *want, _ = rank(accel.single())
    for *got, share in ranks.run(rank, size, default_group=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
        assert share > 0.9


class Written(nn.Module):
    """A table of words that a plan by hand divides by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(37, 8), Block()

    def forward(self, ids: Tensor, _labels: Tensor) -> Tensor:
        return self.block(self.words(ids))


@pytest.mark.parametrize("kind", [Tables, Written])
@pytest.mark.parametrize("number", [-1, 37])
def test_numbers_that_no_rank_has_are_torchs_error(ranks: Simulator, kind: Any, number: int) -> None:
    ids = torch.randint(37, (3, 9), generator=torch.Generator().manual_seed(2))

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="tp=2")
        plan = accel.parallel.Plan(tensor={"words": "embedding_rowwise"}) if kind is Written else None
        model: Any = accel.prepare_model(ctx, kind(), plan=plan, example=[ids[:2, :6], ids[:2, :6]])
        wrong = ids.clone()
        wrong[0, 3] = number
        with pytest.raises(IndexError, match="out of range"):
            _ = model(wrong, ids)
        return divided_share(model)

    assert min(ranks.run(rank, 2, default_group=True)) > 0.2


class Rotations(nn.Module):
    """A state space with complex states, from real parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.angles, self.into = nn.Parameter(torch.rand(12)), nn.Linear(8, 24)
        self.real, self.imaginary = (nn.Parameter(torch.randn(8, 12)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        state = torch.view_as_complex(self.into(x).unflatten(-1, (12, 2))) * torch.exp(1j * self.angles)
        return x + torch.einsum("dn,btn->btd", torch.complex(self.real, self.imaginary), state.cumsum(1)).real


def test_layers_with_complex_weights_are_divided() -> None:
    plan = found_plan(nn.Sequential(Rotations(), Rotations()), 2, [torch.empty(2, 3, 8)])
    assert {"0.into.weight", "0.real", "0.imaginary"} <= set(plan.regions["0"])


class ReadBody(nn.Module):
    """Two equal bodies; of one, the module around it reads a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.body = copy.deepcopy(PAIR), copy.deepcopy(PAIR)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x + self.other(x)) * self.body[0].weight.mean()


def test_a_module_whose_weight_another_reads_has_not_the_plan_of_an_equal_one() -> None:
    plan = found_plan(ReadBody(), 2, [ROWS])
    assert set(plan.regions) == {"other"}
    assert plan.left == {"body": "no division was found for 0.weight"}


ON_MESHES = in_turn(TRAINED, "tp=2", "tp=4", "dp=2,tp=2")
ON_MESHES += [(*named(name), mesh) for name, mesh in REFUSED_ON if (*named(name), mesh) not in ON_MESHES]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize(("entry", "mesh"), ON_MESHES, ids=lambda each: getattr(each, "name", each))
def test_each_hand_written_model_trains_as_in_one_process_or_is_refused(
    ranks: Simulator, entry: Handwritten, mesh: str
) -> None:
    assert_law(ranks, entry, mesh, 2 if mesh == "tp=2" else 4)
