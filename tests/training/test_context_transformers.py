# SPDX-License-Identifier: Apache-2.0
"""Models of transformers train on a mesh with cp as on one process, by `prepare` alone."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import begin_batch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import accel
from accel.errors import ConfigError, PrepareError
from accel.testing import Simulator

transformers: Any = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 32, 16


def make_llama(**changes: Any) -> Any:
    """Return a Llama with grouped keys, in float64 throughout but for what transformers computes in float32."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        **{"tie_word_embeddings": True, "num_hidden_layers": 1, **changes},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).double()


def make_gpt2(**changes: Any) -> Any:
    sizes = {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    config = transformers.GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config).double()


def make_mistral(window: int = 5) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=LENGTH, sliding_window=window, **sizes
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.MistralForCausalLM(config).double()


def make_gemma2() -> Any:
    """Return a Gemma 2 with soft caps, whose layers have a window in turn."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=4, max_position_embeddings=LENGTH, sliding_window=4,
        attn_logit_softcapping=2.0, query_pre_attn_scalar=4, attn_implementation="eager", **sizes,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.Gemma2ForCausalLM(config).double()


def make_gpt_oss() -> Any:
    """Return a gpt-oss, whose attention has sinks and a window in turn."""
    config = transformers.GptOssConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=LENGTH,
        sliding_window=5, attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GptOssForCausalLM(config).double()
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
        return model


def make_bert(kind: str = "bert") -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "modernbert":  # whose windows are around each position
        dropout = {"local_attention": 6, "global_attn_every_n_layers": 2, "pad_token_id": 0}
    config = {"bert": transformers.BertConfig, "modernbert": transformers.ModernBertConfig}[kind](
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes, **dropout
    )
    model = {"bert": transformers.BertForMaskedLM, "modernbert": transformers.ModernBertForMaskedLM}[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model(config).double()


MODELS = {
    "llama": lambda: make_llama(num_hidden_layers=2),
    "gpt2": make_gpt2,
    "mistral": make_mistral,
    "gemma2": make_gemma2,
    "gpt_oss": make_gpt_oss,
}
IDS = torch.randint(VOCABULARY, (3, 4, LENGTH), generator=torch.Generator().manual_seed(2))
PACKED = torch.cat([torch.arange(5), torch.arange(8), torch.arange(3)]).expand(4, -1)


def train(
    ctx: accel.DistContext,
    mesh: str,
    *,
    kind: str = "llama",
    method: Any = "gather",
    strategy: Any = "ddp",
    packed: bool = False,
    sequence: bool = False,
) -> dict[str, Tensor]:
    """Parameters after three clipped steps; one line of the script knows of the mesh."""
    ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
    model: nn.Module = MODELS[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    index, count = ctx.data_parallel
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=accel.parallel.Plan(context=method, sequence=sequence))
    state = accel.train_state(ctx)
    for ids in IDS:
        rows = ids.chunk(count)[index]
        batch = {"ids": rows, "labels": rows}
        if packed:
            batch["position_ids"] = PACKED[: len(rows)]
        part = accel.parallel.split_sequence(ctx, batch, multiple_of=ctx.axis("tp").size)
        tokens = (part["labels"] != -100).sum()
        state = begin_batch(ctx, state)
        with accel.accumulate(ctx, state, model):
            logits = model(input_ids=part["ids"], position_ids=part["position_ids"], use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum") / tokens
            state = accel.backward(ctx, loss, state, weight=tokens)
        state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
    return {name: each.clone() for name, each in accel.get_state_dict(ctx, model, dst=None).items()}


def largest_difference(ranks: Simulator, size: int, mesh: str, **options: Any) -> float:
    alone = {name: each for name, each in options.items() if name in ("kind", "packed")}
    expected = ranks.run(lambda ctx: train(ctx, "dp=1", **alone), 1, default_group=True)[0]
    found = ranks.run(lambda ctx: train(ctx, mesh, **options), size, default_group=True)
    return max((got[name] - each).abs().max().item() for got in found for name, each in expected.items())


@pytest.mark.parametrize(
    ("size", "mesh", "options"),
    [
        (2, "cp=2", {"method": "ring"}),
        (4, "cp=4", {"method": "heads", "kind": "gpt2"}),
        (4, "dp=2,cp=2", {"strategy": "fsdp", "method": "ring"}),
        (2, "cp=2", {"packed": True}),
        pytest.param(4, "cp=2,tp=2", {"method": "ring", "sequence": True}, marks=pytest.mark.slow),
        pytest.param(4, "dp=2,cp=2", {"packed": True, "method": "ring", "kind": "gpt2"}, marks=pytest.mark.slow),
        pytest.param(4, "dp=2,cp=2", {"strategy": "fsdp", "method": "heads", "kind": "gpt2"}, marks=pytest.mark.slow),
        pytest.param(8, "dp=2,cp=2,tp=2", {"method": "heads", "kind": "gpt2"}, marks=pytest.mark.slow),
        pytest.param(8, "dp=2,cp=2,tp=2", {"sequence": True, "strategy": "fsdp"}, marks=pytest.mark.slow),
    ],
)
def test_training_equals_one_process(ranks: Simulator, size: int, mesh: str, options: dict[str, Any]) -> None:
    assert largest_difference(ranks, size, mesh, **options) < 1e-10


@pytest.mark.parametrize(
    ("kind", "method", "tolerance"),
    [
        ("mistral", "gather", 1e-10),
        ("mistral", "ring", 1e-10),
        ("mistral", "heads", 1e-10),
        ("gemma2", "gather", 1e-5),  # whose own attention takes its softmax in float32
        ("gemma2", "ring", 1e-5),
        ("gpt_oss", "gather", 1e-5),
        ("gpt_oss", "ring", 1e-5),
    ],
)
def test_windows_soft_caps_and_sinks_cross_the_ranks(
    ranks: Simulator, kind: str, method: str, tolerance: float
) -> None:
    assert largest_difference(ranks, 2, "cp=2", kind=kind, method=method) < tolerance


def logits_of(ctx: accel.DistContext, model: Any, **changes: Any) -> Any:
    part = accel.parallel.split_sequence(ctx, {"ids": IDS[0], "labels": IDS[0]})
    inputs = {"input_ids": part["ids"], "position_ids": part["position_ids"], **changes}
    if "labels" in inputs:
        inputs["labels"] = part["labels"]
    return model(**{name: each for name, each in inputs.items() if each is not None})


def test_the_last_logits_are_those_of_the_sequence(ranks: Simulator) -> None:
    expected = make_llama()(IDS[0], logits_to_keep=3).logits.detach()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        found = logits_of(ctx, accel.prepare_model(ctx, make_llama()), logits_to_keep=3).logits
        return float((found - expected).detach().abs().max())

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-6  # norms and rotations are float32 inside


def test_positional_inputs_and_copies_cross_the_ranks_too(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        with torch.no_grad():
            expected = accel.parallel.split_sequence(ctx, {"x": make_llama()(IDS[0]).logits})["x"]
        model = accel.unwrap_model(accel.prepare_model(ctx, make_llama()))
        part = accel.parallel.split_sequence(ctx, {"ids": IDS[0]})
        with torch.no_grad():
            first = model(part["ids"], None, part["position_ids"]).logits
            second = logits_of(ctx, copy.deepcopy(model)).logits
        return max((each - expected).abs().max().item() for each in (first, second))

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-6  # norms and rotations are float32 inside


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (make_llama, {"use_cache": False}),
        (make_llama, {}),  # next to a cache of keys transformers sees one document
        (make_gpt_oss, {"use_cache": False}),  # which makes its masks without positions
    ],
)
def test_positions_that_restart_mean_what_they_do_in_one_process(
    ranks: Simulator, make: Any, given: dict[str, Any]
) -> None:
    expected = make()(IDS[0], position_ids=PACKED, **given).logits.detach()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, make())
        part = accel.parallel.split_sequence(ctx, {"ids": IDS[0], "position_ids": PACKED, "out": expected})
        one_row = part["position_ids"][:1]  # as transformers makes them itself
        found = [model(part["ids"], position_ids=at, **given).logits for at in (part["position_ids"], one_row)]
        return max(float((each - part["out"]).detach().abs().max()) for each in found)

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-6  # norms and rotations are float32 inside


def test_the_models_own_loss_takes_labels_that_are_shifted(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> tuple[float, float]:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.unwrap_model(accel.prepare_model(ctx, make_llama()))
        part = accel.parallel.split_sequence(ctx, {"ids": IDS[0], "labels": IDS[0]})
        labels = part["labels"]
        out = model(part["ids"], position_ids=part["position_ids"], labels=labels, shift_labels=labels)
        return out.loss.item(), cross_entropy(out.logits.flatten(0, 1), labels.flatten()).item()

    for own, expected in ranks.run(rank, 2, default_group=True):
        assert own == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_mask": torch.ones(4, LENGTH)}, "a mask of other positions"),
        ({"attention_mask": torch.zeros(4, 1, LENGTH // 2, LENGTH // 2)}, "a mask of other positions"),
        ({"labels": True}, "shift_labels=part"),
    ],
)
def test_inputs_that_cannot_follow_a_cut_are_refused(ranks: Simulator, changes: Any, words: str) -> None:
    def rank(ctx: accel.DistContext) -> str:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, make_llama())
        with pytest.raises(ConfigError) as caught:
            logits_of(ctx, model, **changes)
        return str(caught.value)

    assert all(words in said for said in ranks.run(rank, 2, default_group=True))


def test_a_window_that_is_longer_than_the_sequence_is_none(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> bool:
        ctx = accel.replace(ctx, mesh="cp=2")
        return bool(logits_of(ctx, accel.prepare_model(ctx, make_mistral(LENGTH))).logits.isfinite().all())

    assert all(ranks.run(rank, 2, default_group=True))


def test_generation_is_refused_with_the_way_out(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.unwrap_model(accel.prepare_model(ctx, make_llama()))
        with assert_raises(ConfigError, fix="Generate on a mesh without cp"):
            model.generate(IDS[0], attention_mask=torch.ones_like(IDS[0]), max_new_tokens=2)
        part = accel.parallel.split_sequence(ctx, {"ids": IDS[0]})
        with torch.no_grad():
            cache = model(part["ids"], position_ids=part["position_ids"], use_cache=True).past_key_values
            with assert_raises(ConfigError, fix="Generate on a mesh without cp"):
                model(part["ids"], position_ids=part["position_ids"], past_key_values=cache)

    ranks.run(rank, 2, default_group=True)


SMALL = {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
HEADS = {"num_attention_heads": 2}
SOUND = {"conv_dim": [8], "conv_stride": [4], "conv_kernel": [8], "layerdrop": 0.1}  # which the forward reads there
SEQ2SEQ = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "config", "sizes", "fields"),
    [
        (
            "M2M100Model",
            "M2M100Config",
            {**SEQ2SEQ, "encoder_layerdrop": 0.1},
            {"expected": "layerdrop=0", "got": "0.1 at encoder"},
        ),
        (
            "BartModel",
            "BartConfig",
            {**SEQ2SEQ, "decoder_layerdrop": 0.1},
            {"expected": "layerdrop=0", "got": "0.1 at decoder"},
        ),
        (
            "HubertModel",
            "HubertConfig",
            {**SMALL, **HEADS, **SOUND},
            {"expected": "layerdrop=0", "got": "0.1 at encoder"},
        ),
        (
            "ConvNextModel",
            "ConvNextConfig",
            {"hidden_sizes": [4, 4, 4, 4], "depths": [1, 1, 1, 1]},
            {"expected": "attention module", "fix": "Leave cp out of the mesh"},
        ),
        (
            "SwinModel",
            "SwinConfig",
            {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]},
            {"got": "in each module of", "fix": "Leave cp out of the mesh"},
        ),
    ],
)
def test_models_that_cannot_be_cut_are_refused_with_the_module(
    ranks: Simulator, model: str, config: str, sizes: dict[str, Any], fields: dict[str, str]
) -> None:
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes))

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        with assert_raises(PrepareError, **fields):
            accel.prepare_model(ctx, copy.deepcopy(made))

    ranks.run(rank, 2, default_group=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "config", "sizes"),
    [
        ("MambaForCausalLM", "MambaConfig", {**SMALL, "use_cache": False}),
        ("RwkvForCausalLM", "RwkvConfig", {**SMALL, "use_cache": False, "num_hidden_layers": 2}),
        ("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", {**SMALL, **HEADS, "lru_width": 16, "use_cache": False}),
        ("BertModel", "BertConfig", {**SMALL, **HEADS}),
        (
            "MobileBertForMaskedLM", "MobileBertConfig",
            {**SMALL, **HEADS, "embedding_size": 8, "intra_bottleneck_size": 16},
        ),
        ("LlamaForSequenceClassification", "LlamaConfig", {**SMALL, **HEADS, "pad_token_id": 0, "use_cache": False}),
    ],
)  # fmt: skip
def test_models_that_read_other_positions_compute_as_written(
    ranks: Simulator, model: str, config: str, sizes: dict[str, Any]
) -> None:
    def make() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return getattr(transformers, model)(getattr(transformers, config)(**sizes)).double().eval()

    made = make()
    ids = IDS[0].clamp(min=1)
    expected = made(ids)[0]
    expected.square().sum().backward()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        own = accel.parallel.split_sequence(ctx, {"ids": ids})
        copied = make()
        found = accel.unwrap_model(accel.prepare_model(ctx, copied))(own["ids"])[0]
        is_cut = found.shape != expected.shape
        wanted = accel.parallel.split_sequence(ctx, {"out": expected.detach()})["out"] if is_cut else expected
        (found.square().sum() if is_cut else found.square().sum() / 2).backward()
        off = [float((found - wanted).detach().abs().max() / wanted.abs().max())]
        for mine, whole in zip(copied.parameters(), made.parameters(), strict=True):
            if whole.grad is not None:
                total = accel.reduce(ctx, torch.zeros_like(mine) if mine.grad is None else mine.grad)
                off.append(float((total - whole.grad).abs().max() / max(1.0, float(whole.grad.abs().max()))))
        return max(off)

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-5  # some norms are float32 inside


class Recurrent(nn.Module):
    """Layers with a state along the tokens, and a convolution along them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.gru = nn.GRU(4, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.conv(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        hidden = self.lstm(hidden)[0]
        return self.gru(hidden.transpose(0, 1))[0].transpose(0, 1)


def test_modules_of_torch_that_mix_tokens_see_those_of_other_ranks(ranks: Simulator) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Recurrent().double()
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % VOCABULARY
    out = made(ids)
    out.square().sum().backward()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        part = accel.parallel.split_sequence(ctx, {"ids": ids, "out": out.detach()})
        model = accel.prepare_model(ctx, copy.deepcopy(made))
        own = model(part["ids"])
        off = float((own.detach() - part["out"]).abs().max())
        model.zero_grad()
        own.square().sum().backward()
        for mine, whole in zip(model.parameters(), made.parameters(), strict=True):
            summed = accel.reduce(ctx, mine.grad)
            off = max(off, float((summed - whole.grad).abs().max()))
        _ = accel.prepare_model(accel.replace(ctx, mesh=ctx.mesh), Recurrent())
        return off

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-12


def make_llama4() -> Any:
    """Return a Llama 4 whose first layer attends within chunks of 5 tokens."""
    config = transformers.Llama4TextConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, intermediate_size_mlp=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_local_experts=2, attention_chunk_size=5,
        layer_types=["chunked_attention", "full_attention"], moe_layers=[], max_position_embeddings=LENGTH,
        use_cache=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.Llama4ForCausalLM(config).double()


def block_mask(kind: str) -> Any:
    """A mask of pairs: causal, but that the first 6 tokens see each other."""
    if kind == "flex":
        flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
        size = (None, None, LENGTH, LENGTH)
        return flex.create_block_mask(lambda b, h, i, j: (i >= j) | ((i < 6) & (j < 6)), *size, device="cpu")
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[:6, :6] = True
    mask = mask.expand(4, 1, -1, -1)
    return mask if kind == "bool" else torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e9)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (make_llama4, {}),
        (make_llama4, {"position_ids": PACKED}),
        (make_llama4, {"attention_mask": (torch.arange(LENGTH) >= torch.tensor([[0], [3], [1], [9]])).long()}),
        (make_llama, {"attention_mask": torch.ones(4, LENGTH), "position_ids": PACKED}),  # one document, beside a mask
        (make_bert, {"position_ids": PACKED}),  # one document, without an order
        (make_llama, {"attention_mask": block_mask("bool")}),
        (make_llama, {"attention_mask": block_mask("scores"), "position_ids": PACKED}),
        (make_llama, {"attention_mask": "flex"}),
        (make_mistral, {"attention_mask": (torch.arange(LENGTH) < torch.tensor([[16], [9], [3], [12]])).long()}),
        (make_bert, {"attention_mask": (torch.arange(LENGTH) % 5 < torch.tensor([[5], [3], [4], [1]])).long()}),
    ],
)  # fmt: skip
def test_chunks_masks_and_padding_are_those_of_the_sequence(ranks: Simulator, make: Any, given: dict[str, Any]) -> None:
    is_flex = isinstance(given.get("attention_mask"), str)
    given = {"attention_mask": block_mask("flex")} if is_flex else given
    seen = given.get("attention_mask", torch.ones(4, LENGTH))
    counts = seen.bool() if len(seen.shape) == 2 else torch.ones(4, LENGTH, dtype=torch.bool)
    targets = IDS[0].where(counts, torch.tensor(-100))
    alone = make()
    plain = {"attention_mask": block_mask("bool")} if is_flex else given  # flex has no backward on CPUs
    cross_entropy(alone(IDS[0], **plain).logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.unwrap_model(accel.prepare_model(ctx, make()))
        tokens = {name: each for name, each in given.items() if len(each.shape) == 2}
        part = accel.parallel.split_sequence(ctx, {"input_ids": IDS[0], "targets": targets, **tokens}, shift=())
        pairs = {name: each for name, each in given.items() if isinstance(each, Tensor) and each.ndim == 4}
        part |= {name: accel.parallel.split_sequence(ctx, {name: each}, dim=2)[name] for name, each in pairs.items()}
        own = part.pop("targets")
        part |= given if is_flex else {}
        cross_entropy(model(**part).logits.flatten(0, 1), own.flatten(), reduction="sum").backward()
        worst = 0.0
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            total = accel.reduce(ctx, mine.grad)
            worst = max(worst, (total - theirs.grad).abs().max().item())
        return worst

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-10


def test_an_encoder_decoder_needs_its_decoders_tokens(ranks: Simulator) -> None:
    config = transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=VOCABULARY)
    made = transformers.T5ForConditionalGeneration(config)

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, copy.deepcopy(made).eval())
        part = accel.parallel.split_sequence(ctx, {"input_ids": IDS[0]})
        with assert_raises(ConfigError, fix="decoder_input_ids="):
            model(input_ids=part["input_ids"], labels=part["input_ids"])

    ranks.run(rank, 2, default_group=True)


def test_windows_around_a_position_and_padding_are_those_of_the_models_masks(ranks: Simulator) -> None:
    """T5Gemma's encoder passes the largest distance as its window, and its decoder finds padding by its tokens."""
    side = {**SMALL, **HEADS, "num_key_value_heads": 1, "head_dim": 8, "use_cache": False, "sliding_window": 3}
    config = transformers.T5GemmaConfig(encoder=side, decoder=side, vocab_size=SMALL["vocab_size"])
    made = transformers.T5GemmaForConditionalGeneration(config).double().eval()
    ids, goal = IDS[0].clamp(min=1), IDS[0].clamp(min=1).flip(1)
    padded = goal.clone()
    padded[:, [1, 6]] = config.decoder.pad_token_id  # on both ranks
    plain = [made(ids, decoder_input_ids=each, use_cache=False).logits.detach() for each in (goal, padded)]

    def rank(ctx: accel.DistContext) -> list[float]:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.unwrap_model(accel.prepare_model(ctx, copy.deepcopy(made)))
        whole = {"ids": ids, "goal": goal, "padded": padded, "seen": padded != config.decoder.pad_token_id}
        part = accel.parallel.split_sequence(ctx, {**whole, "one": plain[0], "two": plain[1]})
        at = part["position_ids"]
        given = {"position_ids": at, "decoder_position_ids": at, "use_cache": False}
        one = model(part["ids"], decoder_input_ids=part["goal"], **given).logits
        two = model(part["ids"], decoder_input_ids=part["padded"], **given).logits
        three = model(
            part["ids"], decoder_input_ids=part["padded"], decoder_attention_mask=part["seen"], **given
        ).logits
        off = [one - part["one"], *((each - part["two"]) * part["seen"][..., None] for each in (two, three))]
        return [float(each.detach().abs().max()) for each in off]

    for found in ranks.run(rank, 2, default_group=True):
        assert max(found) < 1e-6  # rotary tables are fp32


def test_positions_that_a_model_keeps_for_padding_are_refused(ranks: Simulator) -> None:
    config = transformers.RobertaConfig(**SMALL, **HEADS, pad_token_id=1, max_position_embeddings=LENGTH + 2)
    made = transformers.RobertaForMaskedLM(config).eval().double()
    expected = made(IDS[0].clamp(min=2)).logits

    def rank(ctx: accel.DistContext) -> bool:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.unwrap_model(accel.prepare_model(ctx, copy.deepcopy(made)))
        part = accel.parallel.split_sequence(ctx, {"ids": IDS[0].clamp(min=2), "out": expected})
        with assert_raises(ConfigError, fix=r"position_ids=part\['position_ids'\] \+ 2"):
            model(part["ids"], position_ids=part["position_ids"])
        found = [model(part["ids"], position_ids=part["position_ids"] + 2).logits, model(part["ids"]).logits]
        return all(bool((each - part["out"]).abs().max() < 1e-10) for each in found)

    assert all(ranks.run(rank, 2, default_group=True))


def make_opt() -> Any:
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2, dropout=0.0,
        word_embed_proj_dim=16, max_position_embeddings=LENGTH,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.OPTForCausalLM(config).double().eval()


def make_xlm_roberta() -> Any:
    config = transformers.XLMRobertaConfig(**SMALL, **HEADS, pad_token_id=1, max_position_embeddings=LENGTH + 2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.XLMRobertaForMaskedLM(config).double().eval()


LEFT = (torch.arange(LENGTH) >= torch.tensor([[0], [3], [1], [9]])).long()


@pytest.mark.parametrize(
    ("make", "mask"),
    [
        (make_llama, None),
        (make_mistral, LEFT),
        (make_gpt2, LEFT),
        (make_bert, LEFT),
        (make_opt, None),
        (make_opt, LEFT),  # by the mask
        (make_xlm_roberta, LEFT),  # by tokens, some of which are of padding
    ],
)
def test_a_model_numbers_its_tokens_as_in_one_process(ranks: Simulator, make: Any, mask: Tensor | None) -> None:
    ids = IDS[0].clamp(min=1)
    given = {} if mask is None else {"attention_mask": mask}
    expected = make()(ids, **given).logits.detach()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, make())
        part = accel.parallel.split_sequence(ctx, {"input_ids": ids, **given, "out": expected}, shift=())
        out = model(input_ids=part["input_ids"], **{name: part[name] for name in given}).logits
        seen = part.get("attention_mask", torch.ones_like(part["input_ids"]))
        return float(((out - part["out"]) * seen[..., None]).detach().abs().max())

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-6  # norms and rotations are float32 inside


def test_a_model_that_keeps_positions_for_padding_numbers_tokens_padded_on_the_left(ranks: Simulator) -> None:
    ids = IDS[0].clamp(min=2).masked_fill(LEFT == 0, 1)
    expected = make_xlm_roberta()(ids, attention_mask=LEFT).logits.detach()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, make_xlm_roberta())
        part = accel.parallel.split_sequence(ctx, {"ids": ids, "mask": LEFT, "out": expected}, shift=())
        out = model(input_ids=part["ids"], attention_mask=part["mask"]).logits
        return float(((out - part["out"]) * part["mask"][..., None]).detach().abs().max())

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-10


def test_tokens_of_no_sequence_that_was_cut_are_refused(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.unwrap_model(accel.prepare_model(ctx, make_opt()))
        for given in ({}, {"position_ids": torch.arange(LENGTH)[None]}):
            with assert_raises(ConfigError, fix="split_sequence", got="16 tokens, of no sequence that was cut"):
                model(IDS[0], **given)

    ranks.run(rank, 2, default_group=True)


def make_gemma(**changes: Any) -> Any:
    config = transformers.GemmaConfig(**SMALL, **HEADS, num_key_value_heads=1, head_dim=8, use_cache=False, **changes)
    return transformers.GemmaForCausalLM(config).double().eval()


@pytest.mark.parametrize("changes", [{"use_bidirectional_attention": False}, {"is_causal": False}])
def test_an_attention_has_the_order_of_its_models_mask(ranks: Simulator, changes: dict[str, Any]) -> None:
    """Gemma says its order twice: in its modules of attention, and in the mask of its model."""
    refused, made = make_gemma(use_bidirectional_attention=True), make_gemma(**changes)
    expected = made(IDS[0]).logits.detach()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        part = accel.parallel.split_sequence(ctx, {"ids": IDS[0], "out": expected})
        model = accel.unwrap_model(accel.prepare_model(ctx, copy.deepcopy(refused)))
        with assert_raises(ConfigError, got="is_causal=False of GemmaAttention, and a mask that is causal"):
            model(part["ids"], position_ids=part["position_ids"])
        model = accel.unwrap_model(accel.prepare_model(ctx, copy.deepcopy(made)))
        found = model(part["ids"], position_ids=part["position_ids"]).logits
        return (found - part["out"]).abs().max().item()

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-10


@pytest.mark.parametrize("is_blank", [False, True])
def test_a_prefix_of_images_needs_its_types_or_its_mask(ranks: Simulator, *, is_blank: bool) -> None:
    """PaliGemma's attention has no order, and its mask the causal one, or by token_type_ids a prefix without one. Its
    images, which may be blank, are as tall as a rank has positions."""
    image = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = {**SMALL, **HEADS, "num_key_value_heads": 1, "head_dim": 8, "use_cache": False, "model_type": "gemma"}
    side = LENGTH // 2
    tower = {**image, "image_size": side, "patch_size": side // 2, "vision_use_head": False}
    tower["model_type"] = "siglip_vision_model"
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=tower, image_token_id=VOCABULARY - 1, projection_dim=16
    )
    made = transformers.PaliGemmaForConditionalGeneration(config).double().eval()
    ids = IDS[0] % (VOCABULARY - 1)
    ids[:, :4] = VOCABULARY - 1
    kinds = (torch.arange(LENGTH) >= 6).long().expand(4, -1)  # 0 in the prefix
    images = torch.randn(4, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    images = images * (not is_blank)
    at = torch.arange(LENGTH)
    mask = ((at[:, None] >= at) | ((at[:, None] < 6) & (at < 6))).expand(4, 1, -1, -1)
    expected = made(ids, images, token_type_ids=kinds).logits.detach()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        part = accel.parallel.split_sequence(ctx, {"ids": ids, "kinds": kinds, "out": expected})
        given = {"input_ids": part["ids"], "pixel_values": images, "position_ids": part["position_ids"]}
        model = accel.unwrap_model(accel.prepare_model(ctx, copy.deepcopy(made)))
        with assert_raises(ConfigError, fix="Pass attention_mask="):
            model(**given)
        own = accel.parallel.split_sequence(ctx, {"mask": mask}, dim=2)["mask"]
        found = [model(**given, token_type_ids=part["kinds"]), model(**given, attention_mask=own)]
        return max((each.logits - part["out"]).abs().max().item() for each in found)

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-6  # Gemma norms in float32


def test_a_layer_that_is_called_alone_is_refused(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.unwrap_model(accel.prepare_model(ctx, make_llama()))
        part = accel.parallel.split_sequence(ctx, {"ids": IDS[0]})
        with assert_raises(ConfigError, problem="a part of the model was called alone"):
            model.model(part["ids"], position_ids=part["position_ids"])

    ranks.run(rank, 2, default_group=True)


def test_a_model_with_the_config_of_a_prepared_one_is_refused(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        config = accel.unwrap_model(accel.prepare_model(ctx, make_llama())).config
        with assert_raises(ConfigError, problem="an attention across ranks of a model that was not prepared"):
            transformers.LlamaForCausalLM(config)(IDS[0])

    ranks.run(rank, 2, default_group=True)


def test_a_new_model_of_the_class_of_a_prepared_one_is_not_prepared(ranks: Simulator) -> None:
    made = make_llama()
    expected = made(IDS[0]).logits.detach()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        kind: Any = type(accel.unwrap_model(accel.prepare_model(ctx, make_llama())))
        again = kind(make_llama().config).double()
        again.load_state_dict(made.state_dict())
        return float((again(IDS[0]).logits - expected).detach().abs().max())

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-6


def masks_of(change: Callable[[Any], Any]) -> Any:
    """Return what a prepared model's masks say, for a mask function that is changed."""
    masking: Any = importlib.import_module("transformers.masking_utils")

    def rank(ctx: accel.DistContext) -> Any:
        model = accel.unwrap_model(accel.prepare_model(accel.replace(ctx, mesh="cp=2"), make_llama()))
        embeds = torch.zeros(1, LENGTH, 16)
        return masking.create_causal_mask(model.config, embeds, None, None, and_mask_function=change(masking))

    return rank


@pytest.mark.parametrize(
    ("change", "is_tensor"),
    [
        (lambda _masking: None, False),
        (lambda masking: masking.sliding_window_overlay(3), False),
        (lambda masking: masking.and_masks(*map(masking.sliding_window_overlay, (3, 4))), True),
        (lambda _masking: lambda _batch, _head, query, key: (query - key) % 2 == 0, True),
    ],
)
def test_masks_that_are_no_spans_are_tensors_of_all_pairs(
    ranks: Simulator, change: Callable[[Any], Any], is_tensor: bool
) -> None:
    masking: Any = importlib.import_module("transformers.masking_utils")
    eager = make_llama().config
    eager._attn_implementation = "sdpa"
    given = {"and_mask_function": change(masking), "allow_is_causal_skip": False}
    wanted = masking.create_causal_mask(eager, torch.zeros(1, LENGTH, 16), None, None, **given)
    for found in ranks.run(masks_of(change), 2, default_group=True):
        assert isinstance(found, Tensor) == is_tensor
        assert tuple(found.shape) == tuple(wanted.shape)
        if is_tensor:
            assert torch.equal(found, wanted)
        else:
            near = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(1 - (found.window or LENGTH))
            assert torch.equal(near, wanted[0, 0])


class Scored(nn.Module):
    """A head of the user's own on a model of transformers."""

    def __init__(self, score: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = make_llama().model
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.head = nn.Linear(16, 3).double()
        self.score = score

    def forward(self, ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.body(ids, position_ids=position_ids).last_hidden_state
        return self.score(self.head, hidden, labels)


def last_position(head: nn.Module, hidden: Tensor, _labels: Tensor) -> Tensor:
    return head(hidden[:, -1])


def each_position(head: nn.Module, hidden: Tensor, _labels: Tensor) -> Tensor:
    return head(hidden)


def mean_of_positions(head: nn.Module, hidden: Tensor, _labels: Tensor) -> Tensor:
    return head(hidden.mean(1))


def last_added(head: nn.Module, hidden: Tensor, _labels: Tensor) -> Tensor:
    return head(hidden + hidden[:, -1:])


def convolved(head: nn.Module, hidden: Tensor, _labels: Tensor) -> Tensor:
    return head(hidden + nn.functional.avg_pool1d(hidden.transpose(1, 2), 3, 1, 1).transpose(1, 2))


def loss_of_positions(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(head(hidden).flatten(0, 1), labels.flatten())


def weighted_positions(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """Weights of a fixed length, which no rank's own positions fit; with plain ones, the last rank fails elsewhere."""
    if type(hidden) is Tensor and bool((labels[:, 0] != IDS[0][:, 0] % 3).any()):
        raise RuntimeError("labels of other positions")
    return head((hidden * torch.linspace(0, 1, LENGTH).to(hidden)[:, None]).sum(1))


SCORES = (last_position, each_position, mean_of_positions, last_added, convolved, loss_of_positions)


@pytest.mark.parametrize(
    ("score", "strategy", "mesh"),
    [
        (last_position, "ddp", "cp=2"),
        (each_position, "ddp", "cp=2"),
        (weighted_positions, "ddp", "cp=2"),
        *(pytest.param(each, "ddp", "cp=2", marks=pytest.mark.slow) for each in SCORES[2:]),
        pytest.param(last_position, "fsdp", "cp=2", marks=pytest.mark.slow),
        *(pytest.param(each, "ddp", "cp=2,tp=2", marks=pytest.mark.slow) for each in SCORES),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_a_head_of_the_users_own_sees_all_positions(ranks: Simulator, score: Any, strategy: Any, mesh: str) -> None:
    ids, labels, at = IDS[0], IDS[0] % 3, torch.arange(LENGTH).expand(4, -1)
    alone = Scored(score)
    expected = alone(ids, at, labels)
    expected.square().sum().backward()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
        model = accel.prepare_model(ctx, Scored(score))
        part = accel.parallel.split_sequence(ctx, {"ids": ids, "labels": labels}, shift=())
        optimizer = accel.prepare_optimizer(ctx, torch.optim.SGD(model.parameters(), lr=1.0))
        state = begin_batch(ctx)
        out = model(part["ids"], part["position_ids"], part["labels"])
        is_cut = out.shape != expected.shape
        wanted = expected.detach()
        if is_cut:
            wanted = accel.parallel.split_sequence(ctx, {"out": wanted}, shift=())["out"]
        total = out.square().sum()
        state = accel.backward(ctx, total * 2 if is_cut else total, state, weight=1)
        _ = accel.optimizer_step(ctx, optimizer, state)
        off = [float((out.detach() - wanted).abs().max())]
        after = accel.get_state_dict(ctx, model, dst=None)
        for name, each in alone.named_parameters():
            assert each.grad is not None
            off.append(
                float((each.detach() - each.grad - after[name]).abs().max() / each.grad.abs().max().clamp(min=1))
            )
        return max(off)

    assert max(ranks.run(rank, 4 if "tp" in mesh else 2, default_group=True)) < 1e-6  # norms are float32 inside


class Returned(nn.Module):
    """Returns what a model of transformers returns, and a score of the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_llama()
        self.scores_last = False

    def forward(self, ids: Tensor, position_ids: Tensor, labels: Tensor) -> Any:
        out = self.body(ids, position_ids=position_ids, labels=labels, shift_labels=labels)
        return (out.loss, out.logits[:, -1]) if self.scores_last else out


@pytest.mark.parametrize("scores_last", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_loss_of_the_own_tokens_is_returned_as_it_is(ranks: Simulator, scores_last: bool) -> None:
    last = make_llama()(IDS[0]).logits[:, -1].detach()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        made = Returned()
        made.scores_last = scores_last
        model = accel.prepare_model(ctx, made)
        part = accel.parallel.split_sequence(ctx, {"ids": IDS[0], "labels": IDS[0]})
        out = model(part["ids"], part["position_ids"], part["labels"])
        alone = accel.unwrap_model(accel.prepare_model(ctx, make_llama()))
        logits = alone(part["ids"], position_ids=part["position_ids"]).logits
        wanted = cross_entropy(logits.flatten(0, 1), part["labels"].flatten())
        off = float((out[0] - wanted).detach().abs())
        return max(off, float((out[1] - last).detach().abs().max())) if scores_last else off

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-5


class OnPair(nn.Module):
    """A score of all positions of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "vocab_size": VOCABULARY}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = transformers.T5Model(transformers.T5Config(**sizes, dropout_rate=0.0)).double()
            self.head = nn.Linear(16, 3).double()

    def forward(self, ids: Tensor, goal: Tensor) -> Tensor:
        hidden = self.body(input_ids=ids, decoder_input_ids=goal).last_hidden_state
        return self.head(hidden[:, -1] + hidden.mean(1))


def test_a_head_on_an_encoder_decoder_sees_all_positions(ranks: Simulator) -> None:
    goal = IDS[1][:, :8]
    expected = OnPair()(IDS[0], goal).detach()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, OnPair())
        own = [accel.parallel.split_sequence(ctx, {"ids": each})["ids"] for each in (IDS[0], goal)]
        return float((model(*own) - expected).detach().abs().max())

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-10


CHOOSING = {
    **SMALL, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4,
    "index_n_heads": 2, "index_head_dim": 8, "use_cache": False,
}  # fmt: skip


def make_choosing(kind: str) -> Any:
    """Return a model with attentions that pass chosen keys, or sinks of values, to transformers' functions."""
    models = importlib.import_module(f"transformers.models.{kind}")
    if kind == "minimax_m3_vl":  # which chooses blocks of keys
        sizes = {"dense_intermediate_size": 16, "rotary_dim": 2, "mlp_layer_types": ["dense"] * 2}
        keys = {"index_block_size": 2, "index_topk_blocks": 1, "layer_types": ["minimax_m3_sparse"] * 2}
        made = models.MiniMaxM3VLForCausalLM, models.MiniMaxM3VLTextConfig(**CHOOSING, **sizes, **keys)
    elif kind == "deepseek_v32":
        ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
        made = (
            models.DeepseekV32ForCausalLM,
            models.DeepseekV32Config(**CHOOSING, **ranks, first_k_dense_replace=2, index_topk=3),
        )
    else:
        sizes = {name: each for name, each in CHOOSING.items() if not name.startswith("index")}
        made = models.Inkling2ForCausalLM, models.Inkling2TextConfig(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = made[0](made[1]).eval()
        for each in model.parameters():
            if each.dim() > 1:
                torch.nn.init.normal_(each, std=0.3)
        return model


@pytest.mark.parametrize(
    "kind",
    [
        "minimax_m3_vl",
        pytest.param("deepseek_v32", marks=pytest.mark.slow),
        pytest.param("inkling2", marks=pytest.mark.slow),
    ],
)
def test_keys_and_sinks_that_attentions_choose_are_those_of_one_process(ranks: Simulator, kind: str) -> None:
    made = make_choosing(kind)
    with torch.no_grad():
        expected = made(IDS[0]).logits

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        with assert_raises(PrepareError, fix='Plan\\(context="gather"\\)'):
            accel.prepare_model(ctx, copy.deepcopy(made), plan=accel.parallel.Plan(context="ring"))
        model = accel.prepare_model(ctx, copy.deepcopy(made))
        part = accel.parallel.split_sequence(ctx, {"ids": IDS[0], "out": expected})
        with torch.no_grad():
            return float((model(part["ids"]).logits - part["out"]).abs().max())

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-4  # float32


def make_gemma4() -> Any:
    """Return a Gemma 4 whose last layers have no keys of their own, and select the queries of their masks."""
    config = transformers.Gemma4TextConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, global_head_dim=8, sliding_window=5, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY, layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2, max_position_embeddings=LENGTH, initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.Gemma4ForCausalLM(config).double().eval()


def test_a_model_may_select_the_last_queries_of_its_masks(ranks: Simulator) -> None:
    made = make_gemma4()
    given = {"input_ids": IDS[0].clamp(min=1), "attention_mask": LEFT}
    with torch.no_grad():
        expected = made(**given).logits

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.unwrap_model(
            accel.prepare_model(ctx, copy.deepcopy(made), plan=accel.parallel.Plan(context="ring"))
        )
        part = accel.parallel.split_sequence(ctx, {**given, "out": expected}, shift=())
        tokens = {name: part[name] for name in given}
        with torch.no_grad():
            own = (model(**tokens).logits - part["out"]) * part["attention_mask"][..., None]
            last = model(**tokens, logits_to_keep=3).logits - expected[:, -3:]
        mask = importlib.import_module("transformers.masking_utils").create_causal_mask(
            model.config, torch.zeros(1, LENGTH, 16), None, None
        )
        assert mask[:, :, :, :LENGTH].shape == mask.shape
        with assert_raises(ConfigError, expected="the last queries"):
            _ = mask[:, :, :3]
        return max(float(each.abs().max()) for each in (own, last))

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-5  # norms and rotations are float32 inside


class OnBloom(nn.Module):
    """A head on a model that computes its own scores."""

    def __init__(self, *, reads_last: bool) -> None:
        super().__init__()
        self.reads_last = reads_last
        config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = transformers.BloomModel(config).double()
            self.head = nn.Linear(16, 3).double()

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.body(ids).last_hidden_state
        return self.head(hidden[:, -1] if self.reads_last else hidden)


@pytest.mark.parametrize("reads_last", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_head_on_scores_of_a_models_own_sees_all_positions(ranks: Simulator, reads_last: bool) -> None:
    alone = OnBloom(reads_last=reads_last)
    expected = alone(IDS[0])
    expected.square().sum().backward()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        part = accel.parallel.split_sequence(ctx, {"ids": IDS[0]})
        inner: Any = accel.unwrap_model(accel.prepare_model(ctx, OnBloom(reads_last=reads_last)))
        assert inner.body(part["ids"]).last_hidden_state.shape == (4, LENGTH // 2, 16)  # may be called alone
        out = inner(part["ids"])
        wanted = expected.detach()
        if not reads_last:
            wanted = accel.parallel.split_sequence(ctx, {"out": wanted}, shift=())["out"]
        (out.square().sum() / (2 if reads_last else 1)).backward()
        off = [float((out.detach() - wanted).abs().max())]
        for mine, whole in zip(inner.parameters(), alone.parameters(), strict=True):
            assert whole.grad is not None
            off.append(float((accel.reduce(ctx, mine.grad) - whole.grad).abs().max()))
        return max(off)

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-9


class Captioner(nn.Module):
    """Blocks of the user's that read what a model of images returns, as keys or before the words."""

    def __init__(self, *, crosses: bool) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = transformers.ViTConfig(image_size=8, patch_size=2, **sizes)
        self.images = transformers.ViTModel(config, add_pooling_layer=False)
        self.crosses = crosses
        self.words, self.keys, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16), nn.Linear(16, VOCABULARY)

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        seen = self.images(pixels).last_hidden_state
        x = self.words(ids) if self.crosses else torch.cat([seen, self.words(ids)], 1)
        keys = self.keys(x)
        x = x + nn.functional.scaled_dot_product_attention(x, keys, keys, is_causal=True)
        x = x + nn.functional.scaled_dot_product_attention(x, seen, seen) if self.crosses else x[:, seen.shape[1] :]
        return self.head(x)


@pytest.mark.parametrize("crosses", [True, False])
def test_code_around_a_model_of_images_sees_all_positions(ranks: Simulator, crosses: bool) -> None:
    """Its images are as tall as a rank has positions."""
    torch.manual_seed(0)
    made = Captioner(crosses=crosses).double()
    ids = IDS[0][:, :16]
    pixels = torch.randn(len(ids), 3, 8, 8, dtype=torch.float64)
    alone = copy.deepcopy(made)
    expected = alone(pixels, ids)
    expected.square().sum().backward()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="cp=2")
        part = accel.parallel.split_sequence(ctx, {"ids": ids, "out": expected.detach()}, shift=())
        model = accel.unwrap_model(accel.prepare_model(ctx, copy.deepcopy(made)))
        out = model(pixels, part["ids"])
        out.square().sum().backward()
        off = [float((out.detach() - part["out"]).abs().max())]
        for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
            assert whole.grad is not None
            off.append(float((accel.reduce(ctx, mine.grad) - whole.grad).abs().max()))
        return max(off)

    assert max(ranks.run(rank, 2, default_group=True)) < 1e-9


@pytest.mark.parametrize("how", ["mean", "sum", "classes"])
def test_losses_and_classes_of_images_are_those_of_one_process(ranks: Simulator, how: str) -> None:
    """Of 17 positions, all ranks hold one."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}

    class Model(transformers.ViTForImageClassification):
        def forward(self, pixel_values: Tensor) -> Any:
            if how == "classes":
                return super().forward(pixel_values).logits
            scores = self.classifier(self.vit(pixel_values).last_hidden_state).flatten(0, 1)
            return nn.functional.cross_entropy(scores, torch.arange(len(scores)) % 5, reduction=how)

    torch.manual_seed(0)
    one = Model(transformers.ViTConfig(image_size=8, patch_size=2, num_labels=5, **sizes)).double()
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    expected = one(pixels).detach()

    def rank(ctx: accel.DistContext) -> Tensor:
        model = accel.prepare_model(accel.replace(ctx, mesh="cp=2"), copy.deepcopy(one))
        return model(pixels).detach()

    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("fails", [True, False])
def test_what_one_rank_computes_else_of_images_is_one_error_on_all(ranks: Simulator, *, fails: bool) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(image_size=8, patch_size=2, **sizes)
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def rank(ctx: accel.DistContext) -> str:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, transformers.ViTModel(config, add_pooling_layer=False))

        def change(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            if type(output) is Tensor or not ctx.rank:
                return output
            if fails:
                raise RuntimeError("fails on one rank")
            return output[:, :-1]

        first = next(each for each in model.modules() if type(each).__name__ == "ViTLayer")
        _ = first.register_forward_hook(change)
        with pytest.raises(accel.errors.AccelError) as caught:
            _ = model(pixels)
        return str(caught.value).split(" - at ")[0]

    first, second = ranks.run(rank, 2, default_group=True)
    assert first == second


def test_models_of_one_context_have_one_method(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        accel.prepare_model(ctx, make_llama(), plan=accel.parallel.Plan(context="ring"))
        accel.prepare_model(ctx, make_gpt2(), plan=accel.parallel.Plan(context="ring"))
        with assert_raises(ConfigError, problem="two methods"):
            accel.prepare_model(ctx, make_llama())
        with assert_raises(ConfigError, problem="unknown method"):
            accel.prepare_model(ctx, make_llama(), plan=accel.parallel.Plan(context="rings"))  # type: ignore[arg-type]

    ranks.run(rank, 2, default_group=True)


def test_ranks_with_other_methods_are_told_of_each_other(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        method: Any = "ring" if ctx.rank else "gather"
        with assert_raises(accel.errors.CollectiveMismatch, got="ring"):
            accel.prepare_model(ctx, nn.Linear(2, 2), plan=accel.parallel.Plan(context=method))

    ranks.run(rank, 2, default_group=True)


def test_a_mesh_of_the_users_keeps_the_models_own_attention(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        opened = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(accel.replace(ctx, mesh=opened.mesh), make_llama())
        return accel.unwrap_model(model)(IDS[0]).logits.shape

    assert ranks.run(rank, 2, default_group=True) == [(4, LENGTH, VOCABULARY)] * 2


def train_stages(ctx: accel.DistContext, mesh: str, plan: accel.parallel.Plan) -> dict[str, Tensor]:
    """Parameters after three steps of `forward_backward`, which runs stages where the mesh has some."""
    ctx = accel.replace(ctx, mesh=mesh)
    model = make_llama(tie_word_embeddings=False, num_hidden_layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    index, count = ctx.data_parallel
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan)
    state = accel.train_state(ctx)
    for ids in IDS:
        rows = ids.chunk(count)[index]
        part = accel.parallel.split_sequence(ctx, {"ids": rows, "labels": rows})
        _, state = accel.forward_backward(
            ctx,
            model,
            begin_batch(ctx, state),
            {"input_ids": part["ids"], "position_ids": part["position_ids"], "use_cache": False},
            loss_fn=lambda out, labels: cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum"),
            targets=part["labels"],
            weight=(part["labels"] != -100).sum(),
        )
        state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
    return {name: each.clone() for name, each in accel.get_state_dict(ctx, model, dst=None).items()}


@pytest.mark.parametrize(
    ("size", "mesh", "plan"),
    [
        (4, "pp=2,cp=2", accel.parallel.Plan(context="ring", micro_batches=2)),
        pytest.param(
            4,
            "pp=2,cp=2",
            accel.parallel.Plan(context="heads", schedule="ZBVZeroBubble", stages_per_rank=2),
            marks=pytest.mark.slow,
        ),
        pytest.param(8, "pp=2,dp=2,cp=2", accel.parallel.Plan(micro_batches=2), marks=pytest.mark.slow),
    ],
)
def test_stages_share_sequences(ranks: Simulator, size: int, mesh: str, plan: accel.parallel.Plan) -> None:
    expected = ranks.run(lambda ctx: train_stages(ctx, "dp=1", accel.parallel.Plan()), 1, default_group=True)[0]
    for got in ranks.run(lambda ctx: train_stages(ctx, mesh, plan), size, default_group=True):
        assert max((got[name] - each).abs().max().item() for name, each in expected.items()) < 1e-10


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_encoders_cross_the_ranks(ranks: Simulator, kind: str) -> None:
    def rank(ctx: accel.DistContext, mesh: str) -> tuple[float, dict[str, Tensor]]:
        ctx = accel.replace(ctx, mesh=mesh)
        model = accel.prepare_model(ctx, make_bert(kind))
        part = accel.parallel.split_sequence(ctx, {"ids": IDS[0], "targets": IDS[0]}, shift=())
        logits = model(input_ids=part["ids"], position_ids=part["position_ids"]).logits
        loss = cross_entropy(logits.flatten(0, 1), part["targets"].flatten(), reduction="sum")
        optimizer = accel.prepare_optimizer(ctx, torch.optim.AdamW(model.parameters()))
        state = begin_batch(ctx)
        weight = part["targets"].numel()
        state = accel.backward(ctx, loss / weight, state, weight=weight)
        _ = accel.optimizer_step(ctx, optimizer, state)
        return float(accel.reduce(ctx, loss.detach())), accel.get_state_dict(ctx, model, dst=None)

    loss, expected = ranks.run(lambda ctx: rank(ctx, "dp=1"), 1, default_group=True)[0]
    for found_loss, found in ranks.run(lambda ctx: rank(ctx, "cp=2"), 2, default_group=True):
        assert found_loss == pytest.approx(loss, abs=1e-9)
        assert max((found[name] - each).abs().max().item() for name, each in expected.items()) < 1e-10
