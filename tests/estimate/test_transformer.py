# SPDX-License-Identifier: Apache-2.0
"""Sizes of a transformer from its configuration: the parameters of transformers' own model, and refused fields."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import accel
from accel.estimate import EstimatedStep, Input, Transformer, measure, read_transformer
from accel.estimate._build import read_config
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
