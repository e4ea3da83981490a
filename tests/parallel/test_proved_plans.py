# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel plans that are found in a forward: what is found, that it trains alike, and wrong ones."""

from __future__ import annotations

import copy
import functools
import logging
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import tensor_models
import torch
from planned_parts import found_plan, rules_of, verdict_of
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import accel
from accel.comm import run_in_threads, summed
from accel.errors import PrepareError

WIDTH = 24


class Attention(nn.Module):
    """Takes the number of heads from its attribute, and the size of a head from what is there."""

    def __init__(self, heads: int = 4, *, fused: str = "", normed: bool = False) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH // heads) if normed else nn.Identity()

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        if self.fused == "by head":
            parts = self.qkv(x).unflatten(-1, (self.heads, 3, -1)).unbind(-2)
        elif self.fused:
            parts = [each.unflatten(-1, (self.heads, -1)) for each in self.qkv(x).chunk(3, -1)]
        else:
            keys = x if other is None else other
            parts = [each.unflatten(-1, (self.heads, -1)) for each in (self.q(x), self.k(keys), self.v(keys))]
        q, k, v = (each.transpose(1, 2) for each in parts)
        return self.o(functional.scaled_dot_product_attention(self.norm(q), k, v).transpose(1, 2).flatten(2))


class Shifted(nn.Linear):
    """A layer that adds what no parameter is."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1.0


class Mlp(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(8, 32 if kind == "gated" else 16)
        self.down = (Shifted if kind == "shifted" else nn.Linear)(16, 8)
        self.norm = nn.RMSNorm(16) if kind == "normed" else nn.Identity()
        if kind == "scaled":
            self.scale = nn.Parameter(torch.ones(()))
        if kind == "adapted":
            self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 16, bias=False)
            _ = nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        if self.kind == "gated":
            gate, hidden = hidden.chunk(2, -1)
            hidden = hidden * functional.silu(gate)
        if self.kind == "adapted":
            hidden = hidden + self.b(self.a(x))
        hidden = self.norm(functional.gelu(hidden))
        if self.kind == "scaled":
            hidden = hidden * self.scale
        if self.kind == "flipped":
            hidden = hidden.flip(-1)
        if self.kind == "softmax":
            hidden = hidden.softmax(-1)
        return self.down(hidden) + (hidden.mean(-1, keepdim=True) if self.kind == "read" else 0)


@dataclass
class States:
    """A module's output, in a dataclass."""

    hidden: torch.Tensor


class Boxed(nn.Module):
    """Keeps an output where a comparison may not look."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind, self.kept = inner, kind, torch.zeros(())

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.inner(x)
        if self.kind == "none":
            self.kept = hidden
            return None
        return States(hidden) if self.kind == "dataclass" else (1, [{"states": States(hidden)}])


class Holder(nn.Module):
    """A module whose input needs a gradient, as in a block."""

    def __init__(self, inner: nn.Module, width: int, *, crosses: bool = False) -> None:
        super().__init__()
        self.first, self.inner, self.crosses = nn.Linear(3, width), inner, crosses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        return self.inner(first, first.tanh()) if self.crosses else self.inner(first)


PAIR: Any = {"up": "colwise", "down": "rowwise"}
BOXED: Any = {"inner.up": "colwise", "inner.down": "rowwise"}
PROJECTIONS: Any = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
WRONG: dict[str, tuple[nn.Module, Any]] = {
    "three heads on two ranks": (Attention(3), PROJECTIONS),
    "a fused projection cut as one layer": (Attention(fused="packs"), {"qkv": "colwise", "o": "rowwise"}),
    "a projection of each head cut as three": (Attention(fused="by head"), {"qkv": "packed_colwise_3", "o": "rowwise"}),
    "a fused gate cut as one layer": (Mlp("gated"), PAIR),
    "a softmax over divided features": (Mlp("softmax"), PAIR),
    "a dataclass of a softmax": (Boxed(Mlp("softmax"), "dataclass"), BOXED),
    "a nested dataclass of a softmax": (Boxed(Mlp("softmax"), "nested"), BOXED),
    "no output": (Boxed(Mlp("softmax"), "none"), BOXED),
}
# Plans that are right only because tensors report their full shapes, and plain ones have complete gradients.
RIGHT: dict[str, tuple[nn.Module, Any]] = {
    "a hidden value that is read elsewhere": (Mlp("read"), PAIR),
    "a constant that is added before the sum": (Mlp("shifted"), PAIR),
    "a norm that heads share": (Attention(normed=True), PROJECTIONS),
    "a low-rank correction that is divided too": (Mlp("adapted"), {"b": "colwise", **PAIR}),
    "a low-rank correction that stays whole": (Mlp("adapted"), PAIR),
    "a second input": (Attention(), {"": "copy_input", **PROJECTIONS}),
    "the second layer divided alone": (Mlp(), {"down": "rowwise"}),
    "a norm over divided features": (Mlp("normed"), PAIR),
}


def _verdict(module: nn.Module, styles: Any, *, crosses: bool = False) -> Any:
    width = WIDTH if isinstance(module, Attention) else 8
    holder = Holder(copy.deepcopy(module), width, crosses=crosses)
    return verdict_of(holder, [torch.randn(2, 5, 3)], "inner", styles, 2)


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_plan_is_found(what: str) -> None:
    module, styles = WRONG[what]
    assert _verdict(module, styles).problem


@pytest.mark.parametrize("what", RIGHT)
def test_a_right_plan_is_proved_as_it_is(what: str) -> None:
    module, styles = RIGHT[what]
    verdict = _verdict(module, styles, crosses="second input" in what)
    assert verdict.problem == ""
    assert verdict.styles == styles


def test_a_scale_that_the_module_itself_holds_is_refused_where_its_input_is_copied() -> None:
    assert _verdict(Mlp("scaled"), {"": "copy_input", **PAIR}).problem


@pytest.mark.parametrize(
    ("module", "styles"),
    [
        (Mlp(), PAIR),
        (Mlp("gated"), {"up": "packed_colwise_2", "down": "rowwise"}),
        (Mlp("adapted"), {"b": "colwise", **PAIR}),
        (Attention(), {"": "copy_input", **PROJECTIONS}),
        (Attention(fused="packs"), {"qkv": "packed_colwise_3", "o": "rowwise"}),
        (Attention(fused="by head"), {"qkv": "colwise", "o": "rowwise"}),
    ],
)
def test_a_right_plan_is_proved(module: nn.Module, styles: Any) -> None:
    verdict = _verdict(module, styles)
    assert (verdict.problem, verdict.styles) == ("", styles)


class Narrow(Mlp):
    """Computes in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float().square()


class Again(Mlp):
    """Computes in fp32, and again in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: super(Again, self).forward(x).float().square(), x, use_reentrant=False)


class Failing(Mlp):
    """Refuses values that are drawn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor and x.abs().max() > 0:
            raise ValueError("no values like these")
        return super().forward(x)


def test_a_module_that_is_recomputed_is_proved() -> None:
    for module, is_right in ((Narrow(), True), (Narrow("softmax"), False)):
        model = accel.checkpoint_activations(nn.ModuleList([module, Narrow()]))
        assert (_verdict(model[0], PAIR).problem == "") == is_right


def test_a_module_that_fails_with_drawn_values_stays_whole() -> None:
    for module, error in ((Failing(), "ValueError: no values"), (Again(), "CheckpointError")):
        assert _verdict(module, PAIR).problem.startswith(f"the whole module alone, with drawn values: {error}")


class Drawing(Attention):
    """Scales values in training by numbers of a stream of the host, one for each head or one for all."""

    draw: ClassVar[Callable[[], float]]
    for_each = False

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        heads = [each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q(x), self.k(x), self.v(x))]
        drawn = [type(self).draw() for _ in range(self.heads if self.for_each else 1)]
        q, k, v = heads[0], heads[1], heads[2] * torch.tensor(drawn, dtype=x.dtype)[:, None, None]
        return self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_a_module_draws_for_all_heads_from_a_stream_of_the_host(draw: Callable[[], float]) -> None:
    """In training alone, as proofs compare values in eval: each rank counts all heads, and takes the numbers of its."""
    before = random.getstate(), numpy.random.get_state()[1:3]
    once = type("Once", (Drawing,), {"draw": staticmethod(draw)})()
    each = type("Each", (Drawing,), {"draw": staticmethod(draw), "for_each": True})()
    styles = {"": "copy_input", **PROJECTIONS}
    assert _verdict(once, styles).problem == ""
    assert _verdict(each, styles).problem == ""
    assert repr((random.getstate(), numpy.random.get_state()[1:3])) == repr(before)


class Replacing(nn.Module):
    """Puts a module without the heads' noise in the place of its attention, for a sequence as short as `most`."""

    main_input_name = "input_ids"

    def __init__(self, most: int) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.most = most
        self.words = nn.Embedding(11, WIDTH)
        self.attention: nn.Module = type("Own", (Drawing,), {"draw": staticmethod(random.random), "for_each": True})()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] <= self.most:
            plain = Attention()
            plain.q, plain.k, plain.v, plain.o = (getattr(self.attention, name) for name in PROJECTIONS)
            self.attention = plain
        return self.attention(self.words(input_ids))


def test_a_plan_of_a_module_that_short_inputs_replace_is_not_that_of_the_replacement() -> None:
    """As BigBird's sparse attention, which short sequences turn into a full one."""
    kept, replaced = (accel.parallel.tensor_plan(Replacing(most)) for most in (0, 8))
    assert kept == replaced
    assert any(path.startswith("attention") for path in replaced)


class MakingLater(nn.Module):
    """Makes a module without parameters in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "act"):
            self.act = nn.GELU()
        return self.attention(self.act(x))


def test_a_forward_may_make_modules_and_one_that_always_replaces_its_own_is_named() -> None:
    made = found_plan(MakingLater(), 2, [torch.empty(2, 5, WIDTH)])
    assert {name for each in made.regions.values() for name in each} >= {"attention.q.weight", "attention.o.weight"}
    always = found_plan(Replacing(10**6), 2)
    assert "it replaces attention" in always.left[""]


class Stacked(nn.Module):
    """A hidden layer and attention, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH), Attention()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.layers:
            x = each(x)
        return x


class Trying(Stacked):
    """Calls the same modules without a keyword, if they do not take it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.layers:
            try:
                x = each(x, lengths=None)
            except TypeError:
                x = each(x)
        return x


def test_calls_that_a_forward_tries_do_not_hide_the_calls_around_them() -> None:
    inputs = [torch.empty(2, 5, WIDTH)]
    plan = found_plan(Trying(), 2, inputs)
    assert plan.regions
    assert plan == found_plan(Stacked(), 2, inputs)


class Model(nn.Module):
    """Attention, a hidden layer and buffers, in blocks of one shape but the last."""

    def __init__(self, heads: tuple[int, ...] = (4, 4, 3)) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.ModuleDict({"attention": Attention(each), "mlp": self._mlp()}) for each in heads)
        self.register_buffer("seen", torch.zeros(()))

    def _mlp(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.words(ids)
        for block in self.blocks:
            x = x + block["attention"](functional.layer_norm(x, [WIDTH]))
            x = x + block["mlp"](functional.layer_norm(x, [WIDTH]))
        return functional.linear(x, self.words.weight)


def test_a_plan_of_any_model_is_found_by_an_example_and_changes_nothing() -> None:
    model = Model()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    stream = torch.get_rng_state()
    ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(1))
    plan = accel.parallel.tensor_plan(model, example=[ids])
    assert plan == {
        **{f"blocks.{at}.attention.{name}": style for at in range(2) for name, style in PROJECTIONS.items()},
        **{f"blocks.2.attention.{name}": "colwise_gather_output" for name in PROJECTIONS},
        **{f"blocks.{at}.mlp.{layer}": style for at in range(3) for layer, style in ((0, "colwise"), (3, "rowwise"))},
    }
    assert torch.equal(stream, torch.get_rng_state())
    assert model.training
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def _passed(model: nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """The output of a model, and the gradients of its parameters."""
    output = model(inputs)
    output.square().sum().backward()
    return output.detach(), {name: each.grad for name, each in accel.unwrap_model(model).named_parameters()}


def _whole(grads: dict[str, Any]) -> dict[str, Any]:
    """Gradients without their division among ranks."""
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in grads.items()}


def test_a_model_with_a_plan_by_example_computes_as_in_one_process(ranks: Any) -> None:
    ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(1))

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="tp=2") if ctx.world_size > 1 else ctx
        torch.manual_seed(4)
        model = Model().double().eval()
        plan = accel.parallel.Plan(tensor=accel.parallel.tensor_plan(model, example={"ids": ids}))
        model = accel.prepare(ctx, model, plan=plan)
        output, grads = _passed(model, ids)
        return output, {name: each for name, each in _whole(grads).items() if each is not None}

    expected = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


class Experts(nn.Module):
    """Experts that are asked for by value, and a router that its caller converts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, choice = self.router.to(x.dtype)(x).softmax(-1).max(-1)
        found = torch.zeros_like(x)
        for at in choice.unique():
            found[choice == at] = self.experts[int(at)](x[choice == at])
        return found * scores[..., None]


class Mixture(Model):
    """Attention beside experts."""

    def _mlp(self) -> nn.Module:
        return Experts()


def test_a_module_that_asks_for_values_of_whole_tensors_divides_too(ranks: Any) -> None:
    ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(1))
    found = accel.parallel.tensor_plan(Mixture((4, 4)), example=[ids])
    assert {name.rpartition(".")[2] for name, style in found.items() if style == "colwise"} == {"q", "k", "v"}
    assert {style for name, style in found.items() if "mlp" in name} == {"rowwise"}

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="tp=2") if ctx.world_size > 1 else ctx
        torch.manual_seed(4)
        model = accel.prepare(ctx, Mixture((4, 4)).double(), example=ids)
        output, grads = _passed(model, ids)
        return output, {name: each for name, each in _whole(grads).items() if each is not None}

    expected = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


class Sorted(nn.Module):
    """Experts by sizes that a router returns as numbers, so that its caller has no tensor to guess."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Sizes()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, sizes = self.router(x)
        assert sum(sizes) == x.shape[0] * x.shape[1]
        return self.down(functional.gelu(self.up(x))) * first


class Sizes(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        chosen = x[..., 0] > 0
        return chosen[..., None].to(x.dtype), torch.bincount(chosen.flatten().long(), minlength=2).tolist()


class Counted(Model):
    """Attention beside experts of counted sizes."""

    def _mlp(self) -> nn.Module:
        return Sorted()


def test_a_forward_that_hands_on_values_is_recorded_with_them_and_leaves_the_model_as_it_was() -> None:
    model = Counted((4, 4))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    stream = torch.get_rng_state()
    ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(1))
    found = accel.parallel.tensor_plan(model, example=[ids])
    assert {name.rpartition(".")[2] for name, style in found.items() if style == "rowwise"} == {"o", "down"}
    assert torch.equal(stream, torch.get_rng_state())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert "blocks.*.mlp.up" not in accel.parallel.tensor_plan(Counted((4, 4)).to("meta"), example=[ids])


class Messages(nn.Module):
    """Adds messages along the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, nodes: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nodes.index_add(0, target, self.down(functional.gelu(self.up(nodes[source]))))


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 8), Messages()

    def forward(self, nodes: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(nodes), source, target)


def test_integers_of_the_example_keep_their_values() -> None:
    """More edges than nodes, so that the number of an edge is no node."""
    source, target = torch.tensor([[0, 2, 1, 0, 2, 2, 1], [1, 0, 0, 2, 1, 1, 2]])
    example = [torch.ones(3, 3), source, target]
    found = accel.parallel.tensor_plan(Graph(), example=example)
    assert found == {"first": "colwise_gather_output", "inner.up": "colwise", "inner.down": "rowwise"}
    assert torch.equal(source, torch.tensor([0, 2, 1, 0, 2, 2, 1]))


class Flat(nn.Module):
    """A block whose attention and MLP have no modules of their own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        q, k, v = (each(y).unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        if self.kind == "chain":
            return self.down(functional.gelu(self.up(self.second(mixed))))
        if self.kind == "side by side":
            return x + mixed + self.down(functional.gelu(self.up(y)))
        x = x + mixed
        return x + self.down(functional.gelu(self.up(self.second(x))))


@pytest.mark.parametrize("kind", ["residual", "chain", "side by side"])
def test_parts_of_a_block_that_are_proved_one_by_one_are_right_together(ranks: Any, kind: str) -> None:
    """The first block's input has no gradient, so a sum of gradients there is right for the attention alone."""
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="tp=2") if ctx.world_size > 1 else ctx
        torch.manual_seed(4)
        known = nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)  # divided without an example, too
        model = accel.prepare(ctx, nn.Sequential(Flat(kind), Flat(kind), *known).double(), example=x)
        output, grads = _passed(model, x)
        divided = {name for name, each in grads.items() if any(not place.is_replicate() for place in _places(each))}
        return divided, output, _whole(grads)

    _, *expected = rank(accel.single())
    for divided, *got in ranks.run(rank, 2, default_group=True):
        assert {"0.q.weight", "0.o.weight", "0.up.weight", "1.down.weight"} <= divided
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_an_example_leaves_no_known_attention_whole() -> None:
    inputs = [torch.empty(2, 5, WIDTH)]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 32), 2, enable_nested_tensor=False)
    assert accel.parallel.tensor_plan(encoder, example=inputs) == accel.parallel.tensor_plan(encoder)
    uneven = nn.TransformerEncoderLayer(WIDTH, 3, 32)
    mlp = {"linear1": "colwise", "linear2": "rowwise"}
    assert accel.parallel.tensor_plan(uneven, example=inputs) == mlp


class Declaring(tensor_models.Model):
    """Declares styles of its MLPs and its head alone."""

    tp_plan: ClassVar[dict[str, str]] = {
        "blocks.*.mlp.gate": "colwise",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise",
        "head": "colwise_gather_output",
    }


@pytest.mark.parametrize("size", [2, 3])
def test_a_plan_is_found_for_what_a_declared_one_passes_over(
    ranks: Any, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    """Three ranks cannot share four heads, so that attention stays whole, and the rest is divided as declared."""
    ids = torch.randint(0, 12, (2, 5), generator=torch.Generator().manual_seed(1))
    declared = accel.parallel.tensor_plan(Declaring())
    found = {**tensor_models.projections(fused=False), "blocks.*.attention.o": "rowwise"} if size == 2 else {}

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh=f"tp={size}") if ctx.world_size > 1 else ctx
        torch.manual_seed(4)
        model = accel.prepare_model(ctx, Declaring().double(), example=[ids])
        output, grads = _passed(model, ids)
        divided = {name for name, each in grads.items() if any(not place.is_replicate() for place in _places(each))}
        return divided, output, _whole(grads)

    _, *expected = rank(accel.single())
    with caplog.at_level("WARNING", "accel.parallel"):
        results = ranks.run(rank, size, default_group=True)
    kept = {path: style for path, style in declared.items() if style in ("colwise", "rowwise", "colwise_gather_output")}
    rules = rules_of(Declaring(), {**kept, **found}, size)
    for divided, *got in results:
        assert divided == {f"{path}.{name}" for path, rule in rules.items() for name in rule.dims}
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    assert declared == kept
    rest = ", and one in addition that is found and proved" if found else "; whole: blocks.0.attention and 1 like it: "
    assert f"by the plan that it declares{rest}" in caplog.text


def _places(tensor: Any) -> Any:
    return getattr(tensor, "placements", ())


def test_a_rank_s_error_ends_the_others_too() -> None:
    def work(group: Any) -> torch.Tensor:
        if group.rank():
            raise ValueError("this rank's own")
        return summed(torch.ones(2), group)

    with pytest.raises(ValueError, match="this rank's own"):
        _ = run_in_threads(2, work)


def test_ranks_that_meet_with_other_shapes_are_told() -> None:
    with pytest.raises(RuntimeError, match=r"other shapes|stack expects"):
        _ = run_in_threads(2, lambda group: summed(torch.ones(2 + group.rank()), group))


def test_prepare_says_what_is_divided_and_what_stays_whole(ranks: Any, caplog: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 20, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 32}

    def rank(ctx: accel.DistContext) -> str:
        config = transformers.BertConfig(**sizes, num_attention_heads=3, max_position_embeddings=8)
        try:
            _ = accel.prepare(accel.replace(ctx, mesh="tp=2"), transformers.BertModel(config))
        except PrepareError as error:
            return str(error)
        return ""

    with caplog.at_level(logging.WARNING, logger="accel.parallel"):
        assert ranks.run(rank, 2, default_group=True) == ["", ""]
    (text,) = [each.getMessage() for each in caplog.records if each.name == "accel.parallel"]
    assert text.startswith("BertModel: 94% of the parameters are divided along tp=2, by a plan that is found and")
    assert "embeddings: no division was found for position_embeddings.weight" in text


@pytest.mark.parametrize("what", ["refuted", "failed"])
def test_a_plan_that_was_refuted_is_not_the_line_to_write(ranks: Any, what: str) -> None:
    def rank(ctx: accel.DistContext) -> str:
        model = nn.Sequential(nn.LayerNorm(8), Mlp("flipped"))
        with pytest.raises(PrepareError) as caught:
            accel.prepare(accel.replace(ctx, mesh="tp=2"), model, example=torch.empty(2, 8 if what == "refuted" else 7))
        return str(caught.value)

    for text in ranks.run(rank, 2, default_group=True):
        said = "1: up.weight: its rows belong to ranks in another order"
        assert (said in text) == (what == "refuted")
        assert ("plan=accel.parallel.Plan(tensor={})" in text) == (what == "refuted")
        assert ('tensor={"1.' in text) == (what == "failed")


def test_the_line_to_write_divides_a_layer_of_the_model(ranks: Any) -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.wide, self.narrow = nn.Linear(8, 8), nn.Linear(8, 12), nn.Linear(12, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.narrow(self.wide(x).cumsum(1) * self.gate(x).sum())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Body()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    torch.manual_seed(0)
    whole, x = Model(), torch.randn(3, 8)

    def rank(ctx: accel.DistContext) -> tuple[str, torch.Tensor]:
        ctx = accel.replace(ctx, mesh="tp=2")
        with pytest.raises(PrepareError) as caught:
            accel.prepare(ctx, copy.deepcopy(whole))
        line = re.search(r"One layer: plan=(accel\.parallel\.Plan\(tensor=.*\))\.$", caught.value.fix)
        assert line is not None
        model = accel.prepare_model(ctx, copy.deepcopy(whole), plan=eval(line[1], {"accel": accel}))
        return line[1], model(x).detach()

    for line, out in ranks.run(rank, 2, default_group=True):
        assert line == 'accel.parallel.Plan(tensor={"body.wide": "colwise_gather_output"})'
        torch.testing.assert_close(out, whole(x).detach())


@functools.lru_cache
def _order(length: int) -> dict[str, torch.Tensor]:
    return {"positions": torch.arange(length).double()}


class Ordered(nn.Sequential):
    """Keeps its positions by a function, as BEiT and DINOv3 do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + _order(x.shape[1])["positions"][:, None])


def _summarized(model: nn.Module, x: torch.Tensor) -> None:
    _ = accel.estimate.summary(model, x)


def _planned(model: nn.Module, x: torch.Tensor) -> None:
    assert accel.parallel.tensor_plan(model, example=[x])


@pytest.mark.parametrize("run", [_summarized, _planned])
def test_forwards_without_values_leave_nothing_in_the_caches_of_functions(
    run: Callable[[nn.Module, torch.Tensor], None],
) -> None:
    model = Ordered(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    x = torch.ones(2, 5, 4, dtype=torch.float64)
    _order.cache_clear()
    run(model, x)
    output = model(x)
    assert type(output) is torch.Tensor
    assert bool(torch.isfinite(output).all())
    kept = _order(5)
    run(model, x)
    assert _order(5) is kept  # with values


class Ensemble(nn.Module):
    """Runs several weights at once, by torch.vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda weight: torch.tanh(x @ weight))(self.weights).mean(0)


def test_modules_next_to_one_with_vmap_are_divided():
    model = nn.Sequential(Ensemble(), nn.Sequential(nn.Linear(WIDTH, 48), nn.ReLU(), nn.Linear(48, WIDTH)))
    plan = found_plan(model, 2, [torch.randn(2, 5, WIDTH)])
    assert set(plan.regions["1"]) == {"1.0.weight", "1.0.bias", "1.2.weight"}
