# SPDX-License-Identifier: Apache-2.0
"""Found tensor plans beside pipelines, experts, compiled or recomputed blocks, dropout, checkpoints of other meshes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from families import FAMILIES, TOLERANCE, Family, Mesh, cell, loss_of, make, rows
from steps import begin_batch, two_steps
from torch import Tensor, nn
from torch.nn import functional

import accel
from accel.parallel.parts import leave
from accel.tensors import full_tensor
from accel.testing import Simulator

WORDS, WIDTH, HEADS = 99, 32, 4
pytestmark = pytest.mark.filterwarnings("ignore")


class Logits(NamedTuple):
    logits: Tensor


class Attention(nn.Module):
    """Three projections of one input, a norm that heads share, and dropout of the weights."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.heads, self.drop = HEADS, drop
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.RMSNorm(WIDTH // HEADS)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        drop = self.drop if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(self.norm(q), k, v, mask, drop)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Fused(Attention):
    """The same with one projection in packs."""

    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        self.q = nn.Linear(WIDTH, 3 * WIDTH)
        del self.k, self.v

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.q(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(self.norm(q), k, v, mask)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """A gate in one layer with the hidden features."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 96), nn.Linear(48, WIDTH), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        gate, hidden = self.up(x).chunk(2, -1)
        return self.down(self.drop(functional.silu(gate) * hidden))


class Block(nn.Module):
    def __init__(self, attention: type[Attention], inside: float, behind: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.mlp = attention(inside), Mlp(inside)
        self.drop = nn.Dropout(behind)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norms[0](x), mask))
        return x + self.drop(self.mlp(self.norms[1](x)))


class Words(nn.Module):
    """A language model without a plan of its own; its head is tied to its embedding."""

    def __init__(self, attention: type[Attention] = Attention, inside: float = 0.0, behind: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(attention, inside, behind) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Logits:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask[:, None, None].bool())
        return Logits(self.head(self.norm(x)))


def _styles(model: nn.Module) -> Any:
    inputs = {key: torch.zeros(2, 12, dtype=torch.long) for key in ("input_ids", "attention_mask")}
    return accel.parallel.tensor_plan(model, example=inputs)


STYLES = {
    Attention: {"blocks.*.attention.q": "colwise"},
    Fused: {"blocks.*.attention.q": "packed_colwise_3"},
}
ENDS = {"embed": "embedding_rowwise", "head": "colwise_gather_output", "blocks.*.mlp.up": "packed_colwise_2"}


def _plain(ctx: accel.DistContext, model: nn.Module, optimizer: Any, _example: Any) -> Any:
    return accel.prepare(ctx, model, optimizer, plan=accel.parallel.Plan(tensor=_styles(model)))


def _compiled(ctx: accel.DistContext, model: nn.Module, optimizer: Any, example: Any) -> Any:
    model, optimizer = _plain(ctx, model, optimizer, example)
    return accel.compile_model(model, "repeated", backend="aot_eager"), optimizer


def _recomputed(ctx: accel.DistContext, model: nn.Module, optimizer: Any, example: Any) -> Any:
    model, optimizer = _plain(ctx, model, optimizer, example)
    return accel.checkpoint_activations(model), optimizer


@pytest.mark.parametrize("attention", [Attention, pytest.param(Fused, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mesh",
    [
        Mesh("pp=2,tp=2"),
        pytest.param(Mesh("pp=2,dp=2,tp=2"), marks=pytest.mark.slow),
        Mesh("tp=2", prepare=_recomputed),
        pytest.param(Mesh("tp=2", prepare=_compiled), marks=pytest.mark.slow),
    ],
    ids=["stages", "stages beside dp", "recomputed", "compiled"],
)
def test_a_found_plan_trains_as_one_process(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch, mesh: Mesh, attention: type[Attention]
) -> None:
    monkeypatch.setitem(FAMILIES, "own", Family(lambda: Words(attention)))
    styles = _styles(make("own"))
    assert {**styles, **STYLES[attention], **ENDS} == styles
    torch.compiler.reset()
    mesh = mesh._replace(plan={"tensor": styles}) if mesh.has_stages else mesh
    assert cell(ranks, "own", mesh, accumulations=(3,)) <= TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "how"),
    [("BERT", "stages"), ("DeepSeek-V2", "stages"), ("BART", "recomputed"), ("Falcon, multi-query", "compiled")],
)
def test_a_family_of_each_mechanism_trains_as_one_process(ranks: Simulator, name: str, how: str) -> None:
    """A bias that two modules name, latents, attention across, one head of keys."""
    pytest.importorskip("transformers", reason="transformers is not installed")

    def prepare(ctx: accel.DistContext, model: nn.Module, optimizer: Any, _example: Any) -> Any:
        model, optimizer = accel.prepare(ctx, model, optimizer)
        if how == "recomputed":
            return accel.checkpoint_activations(model), optimizer
        return accel.compile_model(model, "repeated", backend="aot_eager"), optimizer

    torch.compiler.reset()
    mesh = Mesh("pp=2,tp=2") if how == "stages" else Mesh("tp=2", prepare=prepare)
    assert cell(ranks, name, mesh, accumulations=(3,)) <= TOLERANCE


def _step(ctx: accel.DistContext, model: nn.Module, *, compiles: bool = False) -> dict[str, Tensor]:
    """Gradients of a step whose streams are those of one process."""
    plan = accel.parallel.Plan(tensor=_styles(model))
    model = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), model, plan=plan) if ctx.world_size > 1 else model
    if compiles:
        _ = accel.compile_model(model, Mlp, backend="aot_eager")
    accel.seeding.set_seed(ctx, 0, data_rank=0)
    batch = torch.utils.data.default_collate(rows("own")[:4])
    loss, count = loss_of("own", model, batch)
    (loss / count).backward()
    named = accel.unwrap_model(model).named_parameters()
    return {"loss": loss.detach(), "next": torch.rand(3)} | {name: full_tensor(each.grad) for name, each in named}


def _dropping(inside: float, behind: float) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Words(Attention, inside, behind).double().train()

    return made


@pytest.mark.slow
def test_compiled_blocks_have_the_gradients_of_one_process(ranks: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "own", Family(Words))
    model = _dropping(0.0, 0.0)
    expected = _step(accel.single(), model())
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for found in ranks.run(lambda ctx: _step(ctx, model(), compiles=True), 2, default_group=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.compiler.reset()


def test_dropout_behind_divided_layers_is_that_of_one_process(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "own", Family(Words))
    model = _dropping(0.0, 0.3)
    expected = _step(accel.single(), model())
    for found in ranks.run(lambda ctx: _step(ctx, model()), 2, default_group=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_dropout_inside_of_divided_layers_is_drawn_for_full_tensors(ranks: Simulator) -> None:
    """Ranks drop their parts of the same places, and their streams are alike in the end."""

    def rank(ctx: accel.DistContext) -> tuple[dict[str, Tensor], Tensor]:
        model: Any = _dropping(0.3, 0.3)()
        plan = accel.parallel.Plan(tensor=_styles(model))
        model = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), model, plan=plan)
        masks: dict[str, Tensor] = {}
        for name in ("mlp.drop", "drop"):
            dropout = model.blocks[0].get_submodule(name)
            _ = dropout.register_forward_hook(lambda *given, name=name: masks.update({name: leave(given[2]) == 0}))
        accel.seeding.set_seed(ctx, 0, data_rank=0)
        _ = model(torch.arange(24).view(2, 12), torch.ones(2, 12, dtype=torch.long))
        return masks, torch.rand(4)

    (one, after), (other, after_other) = ranks.run(rank, 2, default_group=True)
    assert torch.equal(one["drop"], other["drop"])
    assert torch.equal(one["mlp.drop"], other["mlp.drop"])
    assert one["mlp.drop"].any()
    assert torch.equal(after, after_other)


def _trained(ctx: accel.DistContext, mesh: str, folder: Path, *, loads: bool) -> dict[str, Tensor]:
    """Parameters after a step: a first one, which is saved, or one behind the load."""
    ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp") if mesh else ctx
    model: Any = make("own")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = accel.parallel.Plan(tensor=_styles(model)) if "tp" in mesh else None
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan)
    items = {"model": model, "optimizer": optimizer}
    if loads:
        with torch.no_grad():
            for each in model.parameters():
                _ = each.zero_()
        _ = accel.load_state(ctx, folder, items)
    share, shares = ctx.data_parallel
    own = rows("own")[:8] if not loads else rows("own")[2:]
    loss, count = loss_of("own", model, torch.utils.data.default_collate(own[share::shares]))
    state = begin_batch(ctx)
    state = accel.backward(ctx, loss / count, state, weight=count)
    _ = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
    if not loads:
        assert accel.save_state(ctx, folder, items, step=1)
    return accel.get_state_dict(ctx, model, dst=None)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("tp=2", ""), ("tp=2", "dp=2"), pytest.param("", "tp=2", marks=pytest.mark.slow)],
)
def test_checkpoints_of_a_found_plan_go_on_on_other_meshes(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saved: str, loaded: str
) -> None:
    monkeypatch.setitem(FAMILIES, "own", Family(Words))

    def run(mesh: str, folder: Path, *, loads: bool) -> list[dict[str, Tensor]]:
        size = 2 if mesh else 1
        return ranks.run(lambda ctx: _trained(ctx, mesh, folder, loads=loads), size, default_group=size > 1)

    first = run(saved, tmp_path / "other", loads=False)
    (alone,) = run("", tmp_path / "alone", loads=False)
    for each in first:
        torch.testing.assert_close(dict(each), dict(alone), rtol=0, atol=1e-10)
    (expected,) = run("", tmp_path / "alone", loads=True)
    for each in run(loaded, tmp_path / "other", loads=True):
        torch.testing.assert_close(dict(each), dict(expected), rtol=0, atol=1e-10)


class Stacked(nn.Module):
    """Experts in two parameters, which get the rows of all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 16, 8) / 4)
        self.down = nn.Parameter(torch.randn(4, 8, 16) / 4)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = functional.silu(rows.view(self.up.shape[0], -1, 8) @ self.up.mT)
        return (hidden @ self.down.mT).reshape(-1, 8)


class AllExperts(nn.Module):
    """Gives all tokens to all experts, so that a plan along tp is found in them too."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.router = nn.Linear(8, 4, bias=False)
        self.experts: Any = Stacked() if style == "sorted" else nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        if self.style == "sorted":
            return x + self.experts((x * scores.T[..., None]).flatten(0, 1)).view(4, *x.shape).sum(0)
        return x + sum(expert(x) * scores[:, at, None] for at, expert in enumerate(self.experts))


@pytest.mark.parametrize("style", ["sorted", "dispatch"])
def test_a_plan_that_is_found_along_tp_leaves_experts_to_ranks_along_ep(ranks: Simulator, style: Any) -> None:
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(6, 8).sin()

    def trained(ctx: accel.DistContext, plan: accel.parallel.Plan | None = None) -> Any:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        model: Any = nn.Sequential(block, AllExperts(style)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        model, optimizer = accel.prepare(ctx, model, optimizer, example=[x[:3]], plan=plan)
        losses = two_steps(ctx, model, optimizer, lambda: model(x).square().mean())
        return losses, accel.get_state_dict(ctx, model, dst=None)

    want = trained(accel.single())
    plan = accel.parallel.Plan(experts={"1.experts": style})
    for got in ranks.run(lambda ctx: trained(accel.replace(ctx, mesh="tp=2,ep=2"), plan), 2, default_group=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
