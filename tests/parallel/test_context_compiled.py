# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks of models as written, along cp: one graph with its messages, and the values of one process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import assert_raises
from handwritten import Handwritten, named
from handwritten_runs import called
from test_context_models import LENGTH, cut, floats, own_of, weighted
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import accel
from accel.errors import ConfigError
from accel.testing import Simulator
from accel.topology import ContextMethod

pytestmark = [
    pytest.mark.usefixtures("own_graphs"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # torch's, of a trace
]


def heads_of(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], 2, -1).transpose(1, 2)


def masked(x: Tensor) -> Tensor:
    order = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    scores = (heads_of(x) @ heads_of(x).transpose(-1, -2)).masked_fill(~order, -torch.inf)
    return (scores.softmax(-1) @ heads_of(x)).transpose(1, 2).reshape(x.shape)


def by_torch(x: Tensor) -> Tensor:
    """Attention by torch's function: causal, and with a bias of all positions."""
    places = torch.arange(x.shape[1])
    bias = -(places[:, None] - places).abs().to(x.dtype)
    causal = functional.scaled_dot_product_attention(heads_of(x), heads_of(x), heads_of(x), is_causal=True)
    biased = functional.scaled_dot_product_attention(heads_of(x), heads_of(x), heads_of(x), attn_mask=bias)
    return (causal + biased).transpose(1, 2).reshape(x.shape)


def over_positions(x: Tensor) -> Tensor:
    """Functions of all positions, and a table of positions."""
    steps = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
    return x.cumsum(1) / steps - x.mean(1, keepdim=True) + x.roll(1, 1) * torch.einsum("btc,bsc->bts", x, x)[..., :4]


class Mixing(nn.Module):
    """A block: a function of positions of a projection, and a residual."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.linear(self.norm(x)))


class Stack(nn.Module):
    """Two blocks, which may be called by a checkpoint."""

    def __init__(self, *blocks: nn.Module, again: bool = False) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(blocks)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def check(
    ranks: Simulator,
    plain: nn.Module,
    inputs: Any,
    *,
    fullgraph: bool = True,
    again: bool = False,
    method: ContextMethod | None = None,
    regions: str | None = "repeated",
    then: Callable[[nn.Module, Any], None] = lambda _model, _own: None,
) -> None:
    """Compare outputs and gradients of compiled blocks, or of a compiled model, with those of one process; then call a
    function with the model and own inputs."""
    plain = plain.double()
    expected = copy.deepcopy(plain)
    whole = floats(called(expected, inputs))
    draws = [torch.randn(each.shape, generator=torch.Generator().manual_seed(1)).to(each) for each in whole]
    weighted(whole, draws).backward()

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        plan = accel.parallel.Plan(context=method) if method else None
        model = accel.prepare_model(ctx, copy.deepcopy(plain), plan=plan)
        if again:
            model = accel.checkpoint_activations(model)
        model = accel.compile_model(model, regions, backend="aot_eager", fullgraph=fullgraph)
        for _ in range(2):
            model.zero_grad()
            own = floats(called(model, cut(ctx, inputs)))
            shares = [own_of(ctx, draw, mine) for draw, mine in zip(draws, own, strict=True)]
            weighted(own, shares).backward()
        for each, want in zip(own, whole, strict=True):
            torch.testing.assert_close(each, own_of(ctx, want, each), rtol=0, atol=1e-10)
        pairs = zip(accel.unwrap_model(model).parameters(), expected.parameters(), strict=True)
        for mine, want in pairs:
            torch.testing.assert_close(accel.reduce(ctx, mine.grad), want.grad, rtol=0, atol=1e-10)
        then(model, cut(ctx, inputs))

    ranks.run(rank, 2, default_group=True, timeout_s=300)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


X = torch.randn(2, LENGTH, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def refused_alone(model: nn.Module, own: Any) -> None:
    inner: Any = accel.unwrap_model(model)
    for each in (inner, copy.deepcopy(inner)):
        with assert_raises(ConfigError, problem="a part of the model was called alone"):
            each.blocks[0](own["x"])


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("mix", [masked, by_torch, over_positions], ids=lambda each: each.__name__)
def test_a_compiled_block_has_one_graph_and_is_refused_alone(
    ranks: Simulator, mix: Callable[[Tensor], Tensor], again: bool
) -> None:
    check(ranks, Stack(Mixing(mix), Mixing(mix), again=again), {"x": X}, then=refused_alone)
    assert graphs() == 2  # of each rank


def causal(x: Tensor) -> Tensor:
    """Attention by torch's function."""
    heads = heads_of(x)
    return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).reshape(x.shape)


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("method", ["ring", "heads"])
def test_a_compiled_block_has_one_graph_with_each_method(ranks: Simulator, method: ContextMethod, again: bool) -> None:
    check(ranks, Stack(Mixing(causal), Mixing(causal), again=again), {"x": X}, method=method)
    assert graphs() == 2  # of each rank
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("entry", "again"),
    [
        pytest.param(*named("nano_gpt"), False, id="nano_gpt", marks=pytest.mark.slow),
        pytest.param(*named("nano_gpt"), True, id="nano_gpt, recomputed", marks=pytest.mark.slow),
        pytest.param(*named("llama"), False, id="llama", marks=pytest.mark.slow),
        pytest.param(*named("grouped_gpt"), False, id="grouped_gpt", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_of_hand_written_models_have_one_graph(
    ranks: Simulator, entry: Handwritten, again: bool
) -> None:
    check(ranks, entry.make(), entry.batch(5, 3, LENGTH).inputs, again=again)
    assert 0 < graphs() <= 4
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_a_compiled_model_has_one_graph(ranks: Simulator, again: bool) -> None:
    check(ranks, Stack(Mixing(causal), Mixing(causal), again=again), {"x": X}, regions=None)
    assert graphs() == 2  # of each rank


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("entry", "method"),
    [
        pytest.param(*named("nano_gpt"), "ring", id="nano_gpt, ring", marks=pytest.mark.slow),
        pytest.param(*named("llama"), "heads", id="llama, heads", marks=pytest.mark.nightly),
    ],
)
def test_a_compiled_hand_written_model_has_one_graph(
    ranks: Simulator, entry: Handwritten, method: ContextMethod
) -> None:
    check(ranks, entry.make(), entry.batch(5, 3, LENGTH).inputs, method=method, regions=None)
    assert graphs() == 2
    assert not torch._dynamo.utils.counters["graph_break"]


class OfTransformers(nn.Module):
    """A Llama that is given embeddings, some of which it takes for padding."""

    def __init__(self, kinds: Any) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = kinds.LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes)
        self.body = kinds.LlamaModel(config)
        self.body.embed_tokens.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        seen = (x[..., 0] < 1).long()
        return self.body(inputs_embeds=x, attention_mask=seen, use_cache=False).last_hidden_state * seen[..., None]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_compiled_blocks_of_transformers_have_one_graph(ranks: Simulator, method: ContextMethod) -> None:
    transformers: Any = pytest.importorskip("transformers")
    whole = torch.randn(2, LENGTH, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    check(ranks, OfTransformers(transformers), {"x": whole}, method=method)
    assert 0 < graphs() <= 4
    assert not torch._dynamo.utils.counters["graph_break"]


class Keeping(Mixing):
    """Adds a value that the first block has put into the caller's dict."""

    def forward(self, x: Tensor, kept: dict[str, Tensor] | None = None) -> Tensor:
        assert kept is not None
        return super().forward(x) + kept.setdefault("first", x)


class KeepingStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        kept: dict[str, Tensor] = {}
        x = self.first(x)
        for block in self.blocks:
            x = block(x, kept)
        return x


class HookedStack(Stack):
    """Adds what hooks of its blocks have seen."""

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        hooks = [each.register_forward_hook(lambda _module, _given, out: seen.append(out)) for each in self.blocks]
        x = super().forward(x)
        for each in hooks:
            each.remove()
        return x + torch.stack(seen).sum(0).cumsum(1)


def written(x: Tensor) -> Tensor:
    """Changes a view of some positions."""
    x = x * 1
    row = x[:, 1]
    row += 1
    return x * x.cumsum(1)


CASES = {
    "a list or a dict among its inputs": KeepingStack(Keeping(masked), Keeping(masked)),
    "hooks, which would not get parts": HookedStack(Mixing(masked), Mixing(masked)),
    "Unsupported method call": Stack(Mixing(written), Mixing(written)),
}


@pytest.mark.parametrize(
    "reason", [pytest.param(each, marks=[pytest.mark.slow] * each.startswith("Unsupported")) for each in CASES]
)
def test_a_block_that_is_no_graph_computes_uncompiled_and_says_why(
    ranks: Simulator, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    with caplog.at_level(logging.WARNING, "accel.parallel"):
        check(ranks, CASES[reason], {"x": X}, fullgraph=False)
    said = [each.getMessage() for each in caplog.records if "stays uncompiled" in each.getMessage()]
    assert said
    assert all(reason in each for each in said)
    assert not graphs()


@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_a_model_that_is_no_graph_computes_uncompiled_and_says_why(
    ranks: Simulator, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "accel.parallel"):
        check(ranks, CASES["Unsupported method call"], {"x": X}, fullgraph=False, regions=None)
    said = [each.getMessage() for each in caplog.records if "uncompiled" in each.getMessage()]
    assert said == ["Stack: a module that computes with parts of tensors stays uncompiled: Unsupported method call"] * 2
    assert not graphs()


@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_a_model_that_is_compiled_before_prepare_computes_uncompiled(
    ranks: Simulator, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(2, LENGTH, 4, dtype=torch.double, generator=torch.Generator().manual_seed(0))

    def rank(ctx: accel.DistContext, mesh: str) -> Tensor:
        torch.manual_seed(0)
        ctx = accel.replace(ctx, mesh=mesh)
        model: Any = nn.Sequential(Mixing(masked), Mixing(by_torch)).double()
        if mesh:
            model = torch.compile(model, backend="aot_eager")
        model = accel.prepare_model(ctx, model)
        out = model(accel.parallel.split_sequence(ctx, {"x": x})["x"])
        return accel.reduce(ctx, out.detach().square().sum())

    want = rank(accel.single(), "")
    for got in ranks.run(lambda ctx: rank(ctx, "cp=2"), 2, default_group=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    assert "uncompiled, along cp=2" in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_a_compiled_model_of_sharded_blocks_computes_uncompiled(
    ranks: Simulator, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Stack(Mixing(causal), Mixing(causal)).double()

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp=2,cp=2", strategy="fsdp")
        model = accel.compile_model(accel.prepare_model(ctx, copy.deepcopy(plain)), backend="aot_eager")
        for _ in range(2):
            out = model(cut(ctx, {"x": X})["x"])
        torch.testing.assert_close(out, own_of(ctx, plain(X), out), rtol=0, atol=1e-12)

    ranks.run(rank, 4, default_group=True)
    assert "uncompiled, along cp=2: compile its blocks alone" in caplog.text
