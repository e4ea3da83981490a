# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel plans as values: what is known of a model, what is wrong with a plan, which rows ranks exchange."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from catching import assert_raises
from hypothesis import given, strategies as st
from planned_parts import rules_of
from tensor_models import made, plans
from torch import nn

import accel
from accel.comm import ThreadGroup, run_in_threads
from accel.errors import ConfigError, PrepareError
from accel.parallel.axes.tensor._layers import needed_rows
from accel.parallel.axes.tensor._rules import match
from accel.parallel.axes.tensor._styles import STYLES, row_exchange
from accel.parallel.parts import RowCut, rows_of
from accel.tensors import full_tensor
from accel.testing import Simulator


@given(size=st.integers(2, 6), packs=st.integers(1, 4), part=st.integers(1, 3), heads=st.integers(1, 6))
def test_ranks_exchange_the_rows_that_they_need_in_one_message(size: int, packs: int, part: int, heads: int) -> None:
    ways = heads if size % heads == 0 else size  # fewer heads than ranks are shared by neighbours
    cut = RowCut(packs, ((size * part, ways),))
    weight = torch.arange(2.0 * cut.total).view(2, -1)  # rows along its second dimension
    bias = torch.arange(1.0 * cut.total)

    def work(group: ThreadGroup) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        rank = group.rank()
        own = [each.chunk(size, dim)[rank].clone().requires_grad_() for each, dim in ((weight, 1), (bias, 0))]
        layer: Any = SimpleNamespace(rank=rank, size=size, group=group)
        needed = needed_rows(own, [1, 0], [row_exchange(cut, rank, size)] * 2, layer)
        torch.autograd.backward(needed, [each.detach() for each in needed])
        return [each.detach() for each in needed], [cast(torch.Tensor, each.grad) for each in own]

    held = [rows_of(cut, rank, size) for rank in range(size)]
    times = torch.bincount(torch.tensor([row for rows in held for row in rows]), minlength=cut.total)
    for rank, (needed, gradients) in enumerate(run_in_threads(size, work)):
        rows = torch.tensor(held[rank])
        assert torch.equal(needed[0], weight[:, rows])
        assert torch.equal(needed[1], bias[rows])
        assert torch.equal(gradients[0], (weight * times).chunk(size, 1)[rank])
        assert torch.equal(gradients[1], (bias * times).chunk(size)[rank])


_LAYER = nn.Linear(4, 4)
_ATTENTION = {"self_attn": "multihead_attention", "self_attn.out_proj": "rowwise"}
_FEEDING = {**_ATTENTION, "linear1": "colwise", "linear2": "rowwise"}


class _Normed(nn.Identity):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input / input.norm(dim=-1, keepdim=True)


class _Renamed(nn.GELU):
    pass


def _patched() -> nn.Sequential:
    sequence = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    sequence[1].forward = partial(torch.softmax, dim=-1)
    return sequence


class _OwnFeeding(nn.TransformerEncoderLayer):
    def _ff_block(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.linear1(x).softmax(-1))


KNOWN = {
    "a layer in two places": (
        lambda: nn.Sequential(_LAYER, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), _LAYER),
        {},
    ),
    "a layer of two sequences": (
        lambda: nn.ModuleList(nn.Sequential(_LAYER, nn.Linear(4, 4)) for _ in range(2)),
        {},
    ),
    "sequences in two places": (
        lambda: nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))] * 2),
        {"0.0": "colwise", "0.1": "rowwise"},
    ),
    "a weight that is computed": (
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4)),
        {},
    ),
    "an activation with a parameter": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, activation=nn.PReLU()),
        _ATTENTION,
    ),
    "an activation of all features": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, activation=lambda x: x.softmax(-1)),
        _ATTENTION,
    ),
    "an activation by name": (lambda: nn.TransformerEncoderLayer(4, 2, 8, activation="gelu"), _FEEDING),
    "an activation of one's own": (lambda: nn.TransformerEncoderLayer(4, 2, 8, activation=torch.tanh), _FEEDING),
    "a layer with a feed-forward of its own": (lambda: _OwnFeeding(4, 2, 8), _ATTENTION),
    "pairs": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 4), nn.LayerNorm(4)),
        {"0": "colwise", "3": "rowwise"},
    ),
    "two pairs and one that is left": (
        lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))),
        {"0": "colwise", "1": "rowwise", "2": "colwise", "3": "rowwise"},
    ),
    "a softmax needs all features": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 4)), {}),
    "an element-wise layer with a forward of its own": (
        lambda: nn.Sequential(nn.Linear(4, 8), _Normed(), nn.Linear(8, 4)),
        {},
    ),
    "an element-wise layer with a forward set on it": (_patched, {}),
    "an element-wise layer of another name": (
        lambda: nn.Sequential(nn.Linear(4, 8), _Renamed(), nn.Linear(8, 4)),
        {"0": "colwise", "2": "rowwise"},
    ),
    "pairs that are computed again": (
        lambda: accel.checkpoint_activations(
            nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2)), nn.Sequential
        ),
        {"0.0": "colwise", "0.2": "rowwise", "1.0": "colwise", "1.2": "rowwise"},
    ),
    "a forward of one's own": (lambda: made(), {}),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False),
        {
            "layers.*.linear1": "colwise",
            "layers.*.linear2": "rowwise",
            "layers.*.self_attn": "multihead_attention",
            "layers.*.self_attn.out_proj": "rowwise",
        },
    ),
    "attention that adds a key": (
        lambda: nn.ModuleList([nn.MultiheadAttention(4, 2, add_zero_attn=True)]),
        {"0": "multihead_attention", "0.out_proj": "rowwise"},
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_plan_of_layers_that_are_known(name: str) -> None:
    make, expected = KNOWN[name]
    assert accel.parallel.tensor_plan(make()) == expected


class Declared(nn.Module):
    """A model that declares a plan as those of transformers do."""

    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        self.inner = made()
        self._plan = plan

    @property
    def tp_plan(self) -> dict[str, str]:
        return self._plan


def test_the_plan_that_a_model_declares() -> None:
    plan = {f"inner.{pattern}": style for pattern, style in plans(fused=False)["layers"].items()}
    plan["inner.blocks.*.missing"] = "moe_tp_experts"  # of another size of the model
    styles = accel.parallel.tensor_plan(nn.ModuleList([Declared(plan)]))
    assert styles == {f"0.inner.{pattern}": style for pattern, style in plans(fused=False)["layers"].items()}


def test_a_module_with_parameters_that_see_the_whole_input_is_not_fused() -> None:
    model = Declared({"attention.q": "colwise", "attention.k": "colwise", "attention.o": "rowwise"})
    model.attention = made().blocks[0].attention
    assert "copy_input" not in accel.parallel.tensor_plan(model).values()  # v is not divided


def test_styles_that_are_unknown_here_are_named() -> None:
    with assert_raises(PrepareError, got=r"inner\.blocks\.\*\.mlp: strange; inner\.head: odd"):
        accel.parallel.tensor_plan(Declared({"inner.blocks.*.mlp": "strange", "inner.head": "odd"}))


def test_a_row_wise_layer_that_gives_every_rank_values_of_all_heads_is_named() -> None:
    """As the plan that Doge declares, whose ranks have queries of their own heads alone."""
    model = Declared({f"inner.{pattern}": style for pattern, style in plans(fused=False)["layers"].items()})
    assert accel.parallel.tensor_plan(model)
    for block in model.inner.blocks:
        block.attention.step = nn.Linear(4, 2)
    model._plan = {**model._plan, "inner.blocks.*.attention.step": "rowwise"}
    with assert_raises(PrepareError, got=r"blocks\.0\.attention\.step: rowwise, for values of all heads"):
        accel.parallel.tensor_plan(model)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [None, "eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None, "first_k_dense_replace": 0}])
def test_latents_are_found_however_experts_compute(experts: str | None, changes: dict[str, Any]) -> None:
    """DeepSeek-V2 declares styles that are unknown here; a cache is no part of what blocks are proved by."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {
        "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 48, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    }  # fmt: skip
    named = {} if experts is None else {"experts_implementation": experts}
    model = transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**sizes | changes, **named))
    before = model.config._experts_implementation
    ids = torch.zeros(2, 12, dtype=torch.long)
    found = accel.parallel.tensor_plan(model, example={"input_ids": ids, "labels": ids})
    attention = "model.layers.*.self_attn"
    assert found[f"{attention}.kv_b_proj"] == "colwise"
    assert found["model.layers.*.mlp.shared_experts.down_proj" if not changes else f"{attention}.o_proj"] == "rowwise"
    assert accel.parallel.tensor_plan(model) == found
    assert model.config._experts_implementation == before


def test_experts_and_their_parameters_are_left_out() -> None:
    declared = {"inner.blocks.*.mlp": "moe_tp_experts", "inner.blocks.*.mlp.up": "packed_colwise"}
    assert accel.parallel.tensor_plan(Declared(declared | {"inner.head": "colwise"})) == {"inner.head": "colwise"}


class _Mixer(nn.Module):
    """Computes with the weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.act_fn = nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act_fn(self.up(x))) + x @ self.gate.weight


class _Mixers(Declared):
    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__(plan)
        self.inner = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(_Mixer() for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.inner.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


_MIXED = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_gather_output"}


class _ReadTable(nn.Module):
    """Computes logits with the table of its embedding, without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=3)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        return (hidden + self.down(self.up(hidden).relu())) @ self.embed.weight.T


@pytest.mark.parametrize("size", [2, 4])
def test_a_head_may_read_the_table_of_an_embedding_by_rows(ranks: Any, size: int) -> None:
    ids = torch.tensor([[0, 3, 10, 5], [1, 2, 3, 4]])
    styles: Any = {"embed": "embedding_rowwise", "up": "colwise", "down": "rowwise"}

    def rank(ctx: accel.DistContext, mesh: str) -> Any:
        torch.manual_seed(0)
        plan = accel.parallel.Plan(tensor=styles) if mesh else None
        ctx = accel.replace(ctx, mesh=mesh, plan=plan)
        model: Any = accel.prepare_model(ctx, _ReadTable().double())
        output = model(ids)
        output.square().sum().backward()
        return output.detach(), [full_tensor(each.grad) for each in model.parameters()]

    want = rank(accel.single(), "")
    for got in ranks.run(lambda ctx: rank(ctx, f"tp={size}"), size, default_group=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


def test_embeddings_tied_to_the_head_complete_a_declared_plan_and_layers_may_be_read(ranks: Any) -> None:
    styles = accel.parallel.tensor_plan(_Mixers(_MIXED))
    assert styles == {**_MIXED, "inner": "embedding_rowwise"}
    torch.manual_seed(0)
    whole = _Mixers(_MIXED).double()
    ids = torch.arange(6).view(2, 3)
    whole(ids).square().sum().backward()
    values = {name: each.detach().clone() for name, each in whole.state_dict().items()}

    def on_two(ctx: accel.DistContext) -> Any:
        model = _Mixers(_MIXED).double()
        model.load_state_dict(values)
        prepared = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), model)
        output = prepared(ids)
        output.square().sum().backward()
        return output, {name: each.grad.full_tensor() for name, each in prepared.named_parameters()}

    for output, gradients in ranks.run(on_two, 2, default_group=True):
        torch.testing.assert_close(output, whole(ids), rtol=0, atol=1e-10)
        for name, each in whole.named_parameters():
            torch.testing.assert_close(gradients[name], each.grad, rtol=0, atol=1e-10)


def test_patterns_match_one_component_for_a_star() -> None:
    styles, problems = match({"a.*.c": "colwise"}, ["a.0.c", "a.1.c", "a.0.b.c", "xa.0.c", "a.0.c.d"])
    assert (sorted(styles), problems) == (["a.0.c", "a.1.c"], [])


def test_everything_wrong_is_told_at_once() -> None:
    plan: Any = {
        "blocks.*.mlp.up": "colwise",
        "blocks.0.mlp.*": "rowwise",
        "blocks.*.attention.o": "columnwise",
        "blocks.*.attention.q": "colwise",
        "nowhere": "colwise",
        "norm": "colwise",
        "head": "embedding_rowwise",
        "embedding": "colwise_gather_output",
    }
    with pytest.raises(PrepareError) as caught:
        rules_of(made(tied=True), plan, 3)
    for said in (
        "nowhere: matches no module",
        "blocks.0.mlp.up: both 'blocks.*.mlp.up' and 'blocks.0.mlp.*' match it",
        "blocks.*.attention.o: unknown style 'columnwise'",
        "blocks.0.attention.q: 4 heads, not a multiple of tp=3; tp=2 or 4 divides them",
        "norm: colwise is of linear layers",
        "head: embedding_rowwise is of nn.Embedding, and it is a Linear",
        "embedding: colwise_gather_output is of linear layers",
    ):
        assert said in str(caught.value)


ONE_WRONG: dict[str, tuple[Any, Any, int, str]] = {
    "heads": (
        lambda: made(heads_of_keys=2),
        {"blocks.*.attention.k": "colwise"},
        8,
        "2 heads, not a multiple of tp=8; tp=2 divides them",
    ),
    "packs": (lambda: made(fused=True), {"blocks.*.attention.qkv": "packed_colwise_3"}, 32, "3 packs of tp=32"),
    "tied": (lambda: made(tied=True), {"head": "colwise"}, 2, r"tied to embedding\.weight.*dimension 0 instead of"),
    "around": (made, {"norm": "copy_input"}, 2, "without parameters of their own, and it has weight, bias"),
    "recurrent": (lambda: nn.Sequential(nn.LSTM(4, 4)), {"0": "replicated_local"}, 2, "is whole on each rank"),
    "list": (lambda: nn.ParameterList([torch.ones(2)]), {"": "replicated"}, 2, "a container of parameters"),
    "attention heads": (lambda: nn.Sequential(nn.MultiheadAttention(9, 3)), {"0": "multihead_attention"}, 2, "3 heads"),
    "an attention that does not sum its outputs": (
        lambda: nn.Sequential(nn.MultiheadAttention(4, 2)),
        {"0": "multihead_attention", "0.out_proj": "replicated"},
        2,
        r"0\.out_proj: replicated, of an attention with divided heads",
    ),
    "norms of rows": (
        lambda: nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)),
        {"0": "embedding_rowwise"},
        2,
        "max_norm",
    ),
    "rows": (
        lambda: nn.Sequential(nn.Embedding(5, 2)),
        {"0": "embedding_rowwise"},
        4,
        "5 embeddings, too few for the last of tp=4",
    ),
}


@pytest.mark.parametrize("name", ONE_WRONG)
def test_what_cannot_be_divided_is_refused(name: str) -> None:
    make, plan, size, said = ONE_WRONG[name]
    with assert_raises(PrepareError, got=said):
        rules_of(make(), plan, size)


def test_nothing_has_changed_when_a_plan_is_refused(ranks: Any) -> None:
    def rank(ctx: accel.DistContext) -> list[str]:
        ctx = accel.replace(ctx, mesh="tp=2")
        model = made()
        told: list[str] = []
        for plan in (accel.parallel.Plan(), accel.parallel.Plan(tensor={"nowhere": "colwise"})):
            with pytest.raises(PrepareError) as caught:
                accel.prepare(ctx, model, torch.optim.SGD(model.parameters(), 0.1), plan=plan)
            told.append(str(caught.value))
        with assert_raises(ConfigError, where=r"plan\.head"):
            accel.prepare(ctx, model, plan=accel.parallel.Plan(tensor={"head": "colwise"}, head="colwise"))
        assert not any(hasattr(each, "device_mesh") for each in model.parameters())
        assert type(model.head) is nn.Linear
        return told

    for unknown, wrong in ranks.run(rank, 2, default_group=True):
        assert "no tensor-parallel plan is known" in unknown
        assert 'plan=accel.parallel.Plan(tensor={"blocks.0.mlp.gate": "colwise_gather_output"}).' in unknown
        assert "nowhere: matches no module" in wrong


def test_a_plan_says_nothing_of_an_axis_of_one_rank() -> None:
    model = accel.prepare(accel.single(), made(), plan=accel.parallel.Plan(tensor={"nowhere": "colwise"}))
    assert type(model.get_submodule("head")) is nn.Linear


def test_every_style_has_a_page() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "tensor-parallel.md").read_text()
    assert [style for style in STYLES if f"`{style}`" not in text] == []


def test_the_head_gets_its_style_and_the_embedding_tied_to_it() -> None:
    assert accel.parallel.tensor_plan(made(tied=True), head="colwise") == {
        "embedding": "embedding_rowwise",
        "head": "colwise",
    }
    assert accel.parallel.tensor_plan(made(), head="colwise_gather_output") == {"head": "colwise_gather_output"}


@pytest.mark.parametrize(
    ("model", "got"),
    [
        (nn.Sequential(nn.Linear(4, 4)), "^none"),
        (nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), "^1, 2"),
    ],
)
def test_a_head_that_is_not_known_is_refused(model: nn.Module, got: str) -> None:
    with assert_raises(PrepareError, got=got):
        accel.parallel.tensor_plan(model, head="colwise")
    with assert_raises(ConfigError, problem="the style of the head is unknown"):
        accel.parallel.tensor_plan(made(), head="rowwise")  # type: ignore[arg-type]


class _Latent(nn.Module):
    """An attention that a declared plan passes over."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(torch.tanh(self.down(x)))


class _Passed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.first, self.last = _Latent(), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(torch.relu(self.first(x + self.attention(x))))


class _Declares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Passed() for _ in range(2))

    @property
    def tp_plan(self) -> dict[str, str]:
        return {"blocks.*.first": "colwise", "blocks.*.last": "rowwise"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("width", [4, 5])
def test_the_line_of_a_declared_plan_says_why_nothing_was_found_beside_it(
    ranks: Simulator, caplog: pytest.LogCaptureFixture, width: int
) -> None:
    """With the error of a forward that failed on the example."""

    def rank(ctx: accel.DistContext) -> None:
        _ = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), _Declares(), example=[torch.ones(2, 3, width)])

    _ = ranks.run(rank, 2, default_group=True)
    line = next(each for each in caplog.messages if "of the parameters are divided" in each)
    assert ("one in addition that is found and proved" in line) == (width == 4)
    assert ("its forward, run without values, failed" in line) == (width == 5)


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(100, 32, sparse=True), nn.Linear(32, 100)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        return self.head(x + self.down(torch.relu(self.up(x))))


def test_layers_next_to_an_embedding_with_sparse_gradients_have_a_plan() -> None:
    plan = accel.parallel.tensor_plan(_Sparse(), example=[torch.zeros(2, 3, dtype=torch.long)])
    assert plan == {"up": "colwise", "down": "rowwise", "head": "colwise_gather_output"}
