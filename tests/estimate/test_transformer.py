# SPDX-License-Identifier: Apache-2.0
"""Sizes of a transformer from its configuration: the parameters of transformers' own model, and refused fields."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import accel
from accel.estimate import EstimatedStep, Input, Transformer, measure, read_transformer
from accel.estimate._build import kept_by_forward, read_config
from accel.estimate._memory import memory_by_moment
from accel.estimate._model import transformer_from
from accel.topology import Axes, Plan

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "vocab_size": 100,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", **SIZES},
    "MistralForCausalLM": {"model_type": "mistral", **SIZES, "tie_word_embeddings": True},
    "Qwen2ForCausalLM": {"model_type": "qwen2", **SIZES, "head_dim": 8},
    "Qwen3ForCausalLM": {"model_type": "qwen3", **SIZES},
    "MixtralForCausalLM": {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe", **SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    },
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    fields = CONFIGS[name]
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(**fields))
    sizes = transformer_from(fields, where="")
    listed = (*sizes.embedding(), *sizes.block() * sizes.layers, *sizes.head())

    def by_size(counts: list[int]) -> Counter[int]:
        """Elements of parameters; GPT-2 stores queries, keys and values together."""
        return Counter({0: sum(counts)}) if name.startswith("GPT2") else Counter(counts)

    assert by_size([each.count for each in listed]) == by_size([each.numel() for each in model.parameters()])
    assert sizes.count == sum(each.numel() for each in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure-bf16"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel"])
def test_activations_are_those_of_the_model_of_transformers(name: str, precision: Any, tmp_path: Path) -> None:
    _ = pytest.importorskip("transformers")
    larger = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "head_dim": 64, "vocab_size": 8000}
    fields = CONFIGS[name] | (larger | {"intermediate_size": 1408} if name[0] != "G" else {"n_embd": 512, "n_head": 8})
    (tmp_path / "config.json").write_text(json.dumps(fields | {"architectures": [name]}))
    described = read_config(tmp_path / "config.json")
    measured = measure(described.make, name, [Input((2, 512), "int64")], labelled=True)
    step = EstimatedStep(rows=2, tokens=512, precision=precision)
    loss = next(each for each in memory_by_moment(read_transformer(tmp_path), Axes(), step, Plan(), 0))
    assert loss.moment == "loss"
    assert loss.activations == pytest.approx(measured.activations[precision].saved, rel=0.1)
    assert loss.gathered == measured.activations[precision].copies


def test_a_token_meets_only_its_own_experts() -> None:
    sizes = transformer_from(CONFIGS["MixtralForCausalLM"], where="")
    dense = transformer_from(CONFIGS["LlamaForCausalLM"], where="")
    gates = sizes.layers * sizes.experts * sizes.width
    experts = (sizes.experts_per_token - 1) * sizes.layers * 3 * sizes.width * sizes.inner
    assert sizes.active_count == dense.active_count + gates + experts


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "bert"}, "the blocks of this kind of model are not known"),
        ({"model_type": None}, "not a model's configuration"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"head_dim": None, "hidden_size": 30}, "heads of no size"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
    ],
)
def test_fields_that_say_no_sizes_are_refused(changes: dict[str, Any], told: str) -> None:
    fields = {**CONFIGS["LlamaForCausalLM"], **changes}
    with pytest.raises(accel.errors.ConfigError, match=told):
        _ = transformer_from(fields, where="config.json")


def test_what_is_left_out_is_as_transformers_has_it() -> None:
    sizes = transformer_from({"model_type": "gpt2", **CONFIGS["GPT2LMHeadModel"]}, where="")
    assert (sizes.inner, sizes.positions, sizes.tied, sizes.kv_heads) == (128, 1024, True, 4)
    fields = {name: size for name, size in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
    llama = transformer_from({"model_type": "llama", **fields}, where="")
    assert llama == Transformer(layers=2, width=32, heads=4, kv_heads=4, head_width=8, inner=48, vocabulary=100)


WINDOWS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "of mistral by default": ({"model_type": "mistral"}, (4096, 2)),
    "of a mistral without": ({"model_type": "mistral", "sliding_window": None}, (0, 0)),
    "of later blocks": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        (64, 1),
    ),
    "not in use": ({"model_type": "qwen2", "sliding_window": 64}, (0, 0)),
    "of blocks by name": (
        {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
        (4096, 1),
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_those_of_the_configuration(name: str) -> None:
    fields, expected = WINDOWS[name]
    sizes = transformer_from(SIZES | fields, where="")
    assert (sizes.window, sizes.windowed) == expected


@pytest.mark.slow
def test_windows_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for kind in ("mistral", "qwen2", "qwen3"):
        more = {} if kind == "mistral" else {"use_sliding_window": True, "max_window_layers": 3}
        config = transformers.AutoConfig.for_model(kind, num_hidden_layers=5, **more)
        sizes = transformer_from(config.to_dict(), where="")
        layers = config.to_dict().get("layer_types") or ["sliding_attention"] * 5
        assert (sizes.window, sizes.windowed) == (config.sliding_window, layers.count("sliding_attention"))


def test_a_window_that_is_no_size_is_refused() -> None:
    with pytest.raises(accel.errors.ConfigError, match="sliding_window"):
        _ = transformer_from(SIZES | {"model_type": "mistral", "sliding_window": "wide"}, where="")


def test_experts_have_either_name() -> None:
    fields = CONFIGS["Qwen3MoeForCausalLM"]
    renamed = {"num_local_experts" if name == "num_experts" else name: value for name, value in fields.items()}
    assert transformer_from(renamed, where="") == transformer_from(fields, where="")


@given(st.integers(1, 60), st.integers(0, 70), st.integers(0, 4))
def test_queries_see_the_keys_of_their_window(tokens: int, window: int, windowed: int) -> None:
    sizes = Transformer(
        layers=4, width=8, heads=1, kv_heads=1, head_width=8, inner=8, vocabulary=8, window=window,
        windowed=windowed if window else 0,
    )  # fmt: skip
    each = [
        sum(min(at + 1, window) if block < sizes.windowed else at + 1 for at in range(tokens)) for block in range(4)
    ]
    assert sizes.seen(tokens) == pytest.approx(sum(each) / 4)


@pytest.mark.slow
@pytest.mark.engine
def test_products_in_fp8_keep_what_those_in_bf16_keep() -> None:
    float8 = pytest.importorskip("torchao.float8")
    inputs = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)

    def net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128)).bfloat16()

    plain, converted = net(), float8.convert_to_float8_training(net(), config=float8.Float8LinearConfig(emulate=True))
    assert kept_by_forward(plain, [inputs]).saved == kept_by_forward(converted, [inputs]).saved
