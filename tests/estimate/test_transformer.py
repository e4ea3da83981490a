# SPDX-License-Identifier: Apache-2.0
"""Sizes of a transformer from its configuration: the parameters of transformers' own model, and refused fields."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import accel
from accel.estimate import Transformer
from accel.estimate._transformer import transformer_from

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
    ],
)
def test_fields_that_say_no_sizes_are_refused(changes: dict[str, Any], told: str) -> None:
    fields = {**CONFIGS["LlamaForCausalLM"], **changes}
    with pytest.raises(accel.ConfigError, match=told):
        _ = transformer_from(fields, where="config.json")


def test_what_is_left_out_is_as_transformers_has_it() -> None:
    sizes = transformer_from({"model_type": "gpt2", **CONFIGS["GPT2LMHeadModel"]}, where="")
    assert (sizes.inner, sizes.positions, sizes.tied, sizes.kv_heads) == (128, 1024, True, 4)
    fields = {name: size for name, size in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
    llama = transformer_from({"model_type": "llama", **fields}, where="")
    assert llama == Transformer(layers=2, width=32, heads=4, kv_heads=4, head_width=8, inner=48, vocabulary=100)
