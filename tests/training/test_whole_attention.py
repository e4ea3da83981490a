# SPDX-License-Identifier: Apache-2.0
"""Attention that no function reaches: modules that get whole sequences, and what is refused beside them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import accel
from accel.errors import ConfigError, PrepareError
from accel.testing import Simulator

WORDS, LENGTH = 32, 16
IDS = torch.randint(3, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(2))
SPLIT = accel.parallel.split_sequence


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "accel.parallel"):
        yield


def make_bloom() -> Any:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.BloomConfig(vocab_size=WORDS, hidden_size=16, n_layer=2, n_head=2, use_cache=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.BloomForCausalLM(config).double()


def make_vit() -> Any:
    """Return a ViT of 17 positions, which no two ranks share equally."""
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.ViTForImageClassification(config).double()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad.detach().clone() for name, each in model.named_parameters() if each.grad is not None}


def largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def words_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    out = model(input_ids=ids).logits
    return cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recompute", ["accel's", "the model's", ""])
def test_gradients_of_recomputed_blocks_are_those_of_one_process(ranks: Simulator, recompute: str) -> None:
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bloom, vit = make_bloom().train(), make_vit().train()
    words_loss(bloom, IDS, IDS.roll(-1)).backward()
    vit(pixel_values=images).logits.square().sum().backward()
    expected = gradients(bloom), gradients(vit)

    def rank(ctx: accel.DistContext) -> bool:
        ctx = accel.replace(ctx, mesh="cp=2")
        for made, want in zip((make_bloom(), make_vit()), expected, strict=True):
            if recompute == "accel's":
                accel.checkpoint_activations(made)
            elif recompute:
                made.gradient_checkpointing_enable()
            optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
            model, optimizer = accel.prepare(ctx, made.train(), optimizer)
            state = accel.train_state(ctx)
            loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(range(1)))
            for batch in accel.batches(ctx, loader, state):
                state = state.next(batch)
                with accel.accumulate(ctx, state, model):
                    if made.config.model_type == "vit":
                        loss = model(pixel_values=images).logits.square().sum() / 2
                    else:
                        part = SPLIT(ctx, {"ids": IDS, "labels": IDS.roll(-1)}, shift=())
                        loss = words_loss(model, part["ids"], part["labels"])
                    state = accel.backward(ctx, loss, state, weight=1)
                halves = {name: each / 2 for name, each in want.items()}  # a mean over two ranks
                assert largest(gradients(made), halves) < 1e-10
        return True

    assert all(ranks.run(rank, 2, default_group=True))


class Mixed(nn.Module):
    """A layer of a block that mixes positions, by a shift."""

    def __init__(self, inner: nn.Module, by: int) -> None:
        super().__init__()
        self.inner, self.by = inner, by

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.inner(hidden.roll(self.by, 1) if self.by else hidden[:, : LENGTH // 2 + 1], residual)


def test_a_layer_that_shifts_positions_sees_those_of_other_ranks(ranks: Simulator) -> None:
    made = make_bloom()
    made.transformer.h[1].mlp = Mixed(made.transformer.h[1].mlp, 1)
    expected = made(IDS).logits.detach()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, copy.deepcopy(made))
        part = SPLIT(ctx, {"ids": IDS, "places": torch.arange(LENGTH).expand(2, -1)}, shift=())
        own = model(input_ids=part["ids"]).logits.detach()
        return float((own - expected[:, part["places"][0]]).abs().max())

    assert max(ranks.run(rank, 2, default_group=True)) <= 1e-12


def test_a_layer_that_depends_on_the_length_is_found_before_the_first_step(ranks: Simulator) -> None:
    made = make_bloom()
    made.transformer.h[1].mlp = Mixed(made.transformer.h[1].mlp, 0)

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, copy.deepcopy(made))
        with assert_raises(PrepareError, got="size of tensor"):
            model(input_ids=SPLIT(ctx, {"ids": IDS})["ids"])

    ranks.run(rank, 2, default_group=True)


def test_the_proof_leaves_random_streams_and_modes_as_they_were(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> bool:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, make_bloom())
        modes = [each.training for each in model.modules()]
        before = torch.get_rng_state()
        with torch.no_grad():
            out = model(input_ids=SPLIT(ctx, {"ids": IDS})["ids"]).logits
        assert out.shape == (2, LENGTH // 2, WORDS)
        assert modes == [each.training for each in model.modules()]
        return torch.equal(before, torch.get_rng_state())

    assert all(ranks.run(rank, 2, default_group=True))


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        (lambda model, part: model(part["ids"], labels=part["ids"]), {"expected": "the loss outside of the model"}),
        (lambda model, part: model.transformer(part["ids"]), {"problem": "a part of the model was called alone"}),
        (lambda model, part: model(part["ids"], past_key_values=()), {"fix": "Generate on a mesh without cp"}),
        (
            lambda model, part: model(part["ids"], attention_mask=torch.ones(2, LENGTH)),
            {"problem": "a mask of other positions"},
        ),
    ],
)
def test_a_call_that_cannot_follow_a_cut_is_refused(
    ranks: Simulator, call: Callable[..., Any], fields: dict[str, str]
) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.unwrap_model(accel.prepare_model(ctx, make_bloom()))
        with assert_raises(ConfigError, **fields):
            call(model, SPLIT(ctx, {"ids": IDS}))

    ranks.run(rank, 2, default_group=True)


def test_positions_that_a_model_numbers_from_another_one_on_are_told(ranks: Simulator) -> None:
    """Those of Nystromformer begin at 2, and those of `split_sequence` at 0."""
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.NystromformerConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        segment_means_seq_len=LENGTH, num_landmarks=LENGTH, conv_kernel_size=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    made = transformers.NystromformerModel(config).double()
    expected = made(IDS).last_hidden_state.detach()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, copy.deepcopy(made))
        part = SPLIT(ctx, {"ids": IDS, "places": torch.arange(LENGTH).expand(2, -1)}, shift=())
        with assert_raises(
            ConfigError, expected="positions from 2 on", got="from 0 on", fix=r"part\['position_ids'\] \+ 2"
        ):
            model(part["ids"], position_ids=part["position_ids"])
        own = (model(part["ids"]), model(part["ids"], position_ids=part["position_ids"] + 2))
        wanted = expected[:, part["places"][0]]
        return max(float((each.last_hidden_state.detach() - wanted).abs().max()) for each in own)

    assert max(ranks.run(rank, 2, default_group=True)) <= 1e-10


def test_images_are_alike_on_the_ranks_that_share_their_positions(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, make_vit())
        with assert_raises(ConfigError, fix="Leave split_sequence out for this model"):
            model(pixel_values=torch.full((1, 3, 16, 16), float(ctx.rank), dtype=torch.float64))

    ranks.run(rank, 2, default_group=True)


def test_other_methods_are_refused(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        for method in ("ring", "heads"):
            plan = accel.parallel.Plan(context=method)
            with assert_raises(PrepareError, fix=r'Use Plan\(context="gather"\)'):
                accel.prepare_model(accel.replace(ctx, mesh="cp=2"), make_bloom(), plan=plan)

    ranks.run(rank, 2, default_group=True)


def test_weights_of_attention_are_those_of_the_own_queries(ranks: Simulator) -> None:
    made = make_bloom()
    made.set_attn_implementation("eager")
    expected = made(IDS, output_attentions=True).attentions

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, copy.deepcopy(made))
        part = SPLIT(ctx, {"ids": IDS, "places": torch.arange(LENGTH).expand(2, -1)}, shift=())
        own = model(part["ids"], output_attentions=True).attentions
        places = part["places"][0]
        return max(float((a - b[:, :, places]).detach().abs().max()) for a, b in zip(own, expected, strict=True))

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-12


class Torch(nn.Module):
    """torch's encoder and decoder layers, with masks."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        options = {"dim_feedforward": 8, "dropout": 0.0, "batch_first": first}
        layer = nn.TransformerEncoderLayer(4, 2, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=first)
        self.decoder = nn.TransformerDecoderLayer(4, 2, **options)

    def forward(self, source: Tensor, target: Tensor, hidden: Tensor, order: Tensor) -> Tensor:
        memory = self.encoder(source, src_key_padding_mask=hidden)
        out: Tensor = self.decoder(target, memory, tgt_mask=order, tgt_is_causal=True, memory_key_padding_mask=hidden)
        return out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_modules_of_torch_see_all_keys(ranks: Simulator, first: bool, training: bool, size: int) -> None:
    draw = torch.Generator().manual_seed(0)
    source, target = (torch.randn(2, n, 4, generator=draw, dtype=torch.float64) for n in (12, 24))
    hidden = torch.arange(12) >= torch.tensor([12, 9])[:, None]
    order = torch.ones(24, 24, dtype=torch.bool).triu(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Torch(first=first).double().train(training)

    def run(model: nn.Module, source: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
        pair = (source, target) if first else (source.transpose(0, 1), target.transpose(0, 1))
        with torch.set_grad_enabled(training):
            out: Tensor = model(*pair, hidden, order)
        return out if first else out.transpose(0, 1)

    expected = run(copy.deepcopy(made), source, target, hidden)

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh=f"cp={size}")
        model = accel.prepare_model(ctx, copy.deepcopy(made))
        part = SPLIT(ctx, {"source": source, "hidden": hidden}, shift=())
        goal = SPLIT(ctx, {"target": target, "out": expected.detach()}, shift=())
        found = run(model, part["source"], goal["target"], part["hidden"])
        return float((found - goal["out"]).abs().max())

    assert max(ranks.run(rank, size, default_group=True)) < 1e-12


class Counted(nn.Module):
    """An encoder that counts its positions from 0, or adds those that a call passes."""

    def __init__(self, *, has_loss: bool = False) -> None:
        super().__init__()
        self.places = nn.Embedding(LENGTH, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.has_loss = has_loss

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        out: Tensor = self.encoder(x + self.places(batch.get("places", torch.arange(x.shape[1]))))
        return out[..., 0].square().mean() if self.has_loss else out


@pytest.mark.parametrize("has_loss", [False, True])
def test_positions_that_a_model_counts_from_0_are_those_of_the_sequence(ranks: Simulator, has_loss: bool) -> None:
    x = torch.randn(2, LENGTH, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Counted(has_loss=has_loss).double()
    expected = made({"x": x}).detach()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, copy.deepcopy(made))
        part = SPLIT(ctx, {"x": x})
        want = expected if has_loss else SPLIT(ctx, {"out": expected})["out"]
        counted, passed = model({"x": part["x"]}), model({"x": part["x"], "places": part["position_ids"]})
        return float(torch.maximum((counted - want).abs().max(), (passed - want).abs().max()).detach())

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-12


class Attending(nn.Module):
    """An attention that calls torch's function, causal, by a mask, or along the heads' own dimension too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (each.unflatten(2, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, 2))
        attention = nn.functional.scaled_dot_product_attention
        if self.kind == "heads":  # within each position
            rows = (each.transpose(1, 2).contiguous() for each in (q, k, v))
            return x + self.out(attention(*rows).flatten(2))
        mixed = attention(q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=0.5 * (self.kind == "dropout"))
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Gpt(nn.Module):
    """Layers with torch's function, as scripts without a library have them."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, 8), nn.Embedding(LENGTH, 8)
        self.layers = nn.ModuleList(map(Attending, kinds))
        self.head = nn.Linear(8, WORDS)

    def forward(self, ids: Tensor, places: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1]) if places is None else places)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        logits: Tensor = self.head(hidden)
        return logits


def make_gpt(*kinds: str) -> Gpt:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Gpt(*kinds).double()


@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
@pytest.mark.parametrize("recompute", [False, True])
def test_attention_by_torchs_function_crosses_the_ranks(ranks: Simulator, method: Any, recompute: bool) -> None:
    places = torch.arange(LENGTH).expand(2, -1)
    whole = make_gpt("causal", "heads", "causal")
    cross_entropy(whole(IDS, places).flatten(0, 1), IDS.flatten(), reduction="sum").backward()
    expected = gradients(whole)

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        made = make_gpt("causal", "heads", "causal")
        if recompute:
            accel.checkpoint_activations(made)
        model = accel.prepare_model(ctx, made, plan=accel.parallel.Plan(context=method))
        part = SPLIT(ctx, {"ids": IDS})
        out = model(part["ids"], part["position_ids"])
        cross_entropy(out.flatten(0, 1), part["ids"].flatten(), reduction="sum").backward()
        return largest(accel.reduce(ctx, gradients(made)), expected)

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-10


def test_masks_of_torchs_function_are_of_all_positions(ranks: Simulator) -> None:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() | (torch.arange(LENGTH) < 3)
    expected = make_gpt("mask")(IDS, torch.arange(LENGTH), mask).detach()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, make_gpt("mask"))
        part = SPLIT(ctx, {"ids": IDS, "out": expected})
        return float((model(part["ids"], part["position_ids"], mask) - part["out"]).detach().abs().max())

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-12


def test_a_second_model_that_gets_whole_sequences_computes_them_alone(ranks: Simulator) -> None:
    expected = make_gpt("causal")(IDS[:, :12]).detach()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        model, teacher = accel.prepare_model(ctx, make_gpt("causal")), accel.prepare_model(ctx, make_gpt("causal"))
        part = SPLIT(ctx, {"ids": IDS})
        _ = model(part["ids"])
        return float((teacher(IDS[:, :12]) - expected).detach().abs().max())

    assert max(ranks.run(rank, 2, default_group=True)) == 0


def test_a_mask_of_the_own_positions_alone_is_refused(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, nn.MultiheadAttention(4, 2, batch_first=True))
        part = SPLIT(ctx, {"x": torch.randn(2, LENGTH, 4)})["x"]
        order = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        square = order[: LENGTH // 2 - 1, : LENGTH // 2 - 1]
        with assert_raises(PrepareError, where="first forward of MultiheadAttention"):
            model(part, part, part, attn_mask=square)
        _ = model(part, part, part, attn_mask=order)

    ranks.run(rank, 2, default_group=True)
