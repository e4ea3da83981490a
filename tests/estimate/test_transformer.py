# SPDX-License-Identifier: Apache-2.0
"""Sizes of a transformer from its configuration: the parameters of transformers' own model, and refused fields."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from estimates import kept_by_forward, memory_by_moment, read_config
from hypothesis import given, strategies as st
from model_configs import transformer_of
from tables import rows
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import accel
from accel.estimate import EstimatedStep, Hosts, Input, Transformer, measure, read_transformer, step_time
from accel.topology import Axes, Plan

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "vocab_size": 100,
}  # fmt: skip
LATENTS = {
    **{name: size for name, size in SIZES.items() if name != "head_dim"},
    "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 24, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 1,
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
    "DeepseekV2ForCausalLM": {"model_type": "deepseek_v2", **LATENTS, "q_lora_rank": None},
    "DeepseekV3ForCausalLM": {"model_type": "deepseek_v3", **LATENTS, "q_lora_rank": 24},
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    fields = CONFIGS[name]
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(**fields))
    sizes = transformer_of(fields)
    listed = sizes.parameters

    def by_size(counts: list[int]) -> Counter[int]:
        """Elements of parameters; GPT-2 stores queries, keys and values together."""
        return Counter({0: sum(counts)}) if name.startswith("GPT2") else Counter(counts)

    assert by_size([each.count for each in listed]) == by_size([each.numel() for each in model.parameters()])
    assert sizes.count == sum(each.numel() for each in model.parameters())
    stored = [each for each in model.state_dict() if each not in dict(model.named_parameters(remove_duplicate=False))]
    assert sum(each.count for each in sizes.buffers) == sum(model.state_dict()[each].numel() for each in stored)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure-bf16"])
@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "DeepseekV2ForCausalLM", "GPT2LMHeadModel"]
)
def test_activations_are_those_of_the_model_of_transformers(name: str, precision: Any, tmp_path: Path) -> None:
    _ = pytest.importorskip("transformers")
    larger = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "head_dim": 64, "vocab_size": 8000}
    if name[0] == "D":  # blocks without experts, which torch's grouped products compute in fp32 under autocast
        del larger["head_dim"]
        larger |= {"first_k_dense_replace": 4, "num_key_value_heads": 8, "kv_lora_rank": 128, "q_lora_rank": 192}
        larger |= {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64}
    fields = CONFIGS[name] | (larger | {"intermediate_size": 1408} if name[0] != "G" else {"n_embd": 512, "n_head": 8})
    (tmp_path / "config.json").write_text(json.dumps(fields | {"architectures": [name]}))
    described = read_config(tmp_path / "config.json")
    measured = measure(described.make, name, [Input((2, 512), "int64")], labelled=True)
    step = EstimatedStep(rows=2, tokens=512, precision=precision)
    loss = next(each for each in memory_by_moment(read_transformer(tmp_path), Axes(), step, Plan(), 0))
    assert loss.moment == "loss"
    assert loss.activations == pytest.approx(measured.activations[precision].saved, rel=0.1)
    assert loss.gathered == measured.activations[precision].copies


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_operations_are_those_of_the_model_of_transformers(name: str) -> None:
    """Of a step of two sequences, forward and backward; planned attention is causal, counted attention whole."""
    transformers = pytest.importorskip("transformers")
    fields, tokens = CONFIGS[name], 12
    config = transformers.AutoConfig.for_model(**fields)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model = getattr(transformers, name)(config)
    ids = torch.randint(100, (2, tokens))
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids, labels=ids).loss.backward()
    operations = counted.get_flop_counts()["Global"]
    sizes = transformer_of(fields)
    step = EstimatedStep(tokens=tokens, rows=2, precision="fp32")
    time = step_time(sizes, Axes(), step, Plan(), Hosts(flops=1.0))
    assert sum(operations.values()) == time.products + operations[torch.ops.aten.bmm]
    rotated = operations[torch.ops.aten.bmm] - whole_attention(sizes, tokens)  # Llamas make rotations by a product
    assert 0 <= rotated <= 2 * 2 * tokens * sizes.head_width
    assert time.attention == pytest.approx(whole_attention(sizes, tokens) * sizes.seen(tokens) / tokens**2)


def whole_attention(sizes: Transformer, tokens: int) -> int:
    """Operations of two sequences in which each token sees all, forward and backward."""
    return 3 * 2 * 2 * sizes.layers * sizes.heads * tokens**2 * (sizes.head_width + sizes.value_width)


def test_a_token_meets_only_its_own_experts() -> None:
    sizes = transformer_of(CONFIGS["MixtralForCausalLM"])
    dense = transformer_of(CONFIGS["LlamaForCausalLM"])
    gates = sizes.layers * sizes.experts * sizes.width
    experts = (sizes.experts_per_token - 1) * sizes.layers * 3 * sizes.width * sizes.inner
    assert sizes.active_count == dense.active_count + gates + experts


PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    # DeepSeek-AI 2024, arXiv:2405.04434, and DeepSeek-AI 2024, arXiv:2412.19437: parameters, and those of a token
    "deepseek_v2": ({
        "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 60,
        "num_attention_heads": 128, "n_routed_experts": 160, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "vocab_size": 102400,
    }, 236e9, 21e9),
    "deepseek_v3": ({
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "vocab_size": 129280,
    }, 671e9, 37e9),
}  # fmt: skip


@pytest.mark.parametrize("kind", PUBLISHED)
def test_parameters_are_those_published(kind: str) -> None:
    fields, count, active = PUBLISHED[kind]
    sizes = transformer_of({"model_type": kind, **fields})
    assert sizes.count == pytest.approx(count, rel=0.005)
    assert sizes.active_count == pytest.approx(active, rel=0.03)


@rows(
    "changes, told",
    [
        ({"model_type": "bert"}, {"problem": "the blocks of this kind of model are not known"}),
        ({"model_type": None}, {"problem": "the file is not a configuration of a model"}),
        ({"hidden_size": None}, {"where": "hidden_size"}),
        ({"vocab_size": -1}, {"where": "vocab_size"}),
        ({"num_hidden_layers": 2.5}, {"where": "num_hidden_layers"}),
        ({"num_hidden_layers": True}, {"where": "num_hidden_layers"}),
        ({"head_dim": None, "hidden_size": 30}, {"problem": "heads of no size"}),
        ({"attention_bias": True}, {"got": "attention_bias"}),
        ({"mlp_bias": True}, {"got": "mlp_bias"}),
        ({"moe_layer_freq": 2}, {"got": "moe_layer_freq"}),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": -1}, {"problem": "the size of the model is not valid"}),
        (
            {"model_type": "deepseek_v3", **LATENTS, "first_k_dense_replace": -1},
            {"problem": "the number of blocks is not valid"},
        ),
        ({"model_type": "deepseek_v3", **LATENTS, "q_lora_rank": 0}, {"where": "q_lora_rank"}),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            {"problem": "the model is not a causal language model"},
        ),
    ],
)
def test_fields_that_say_no_sizes_are_refused(changes: dict[str, Any], told: dict[str, str]) -> None:
    fields = {**CONFIGS["LlamaForCausalLM"], **changes}
    with assert_raises(accel.errors.ConfigError, **told):
        _ = transformer_of(fields)


def test_what_is_left_out_is_as_transformers_has_it() -> None:
    sizes = transformer_of({"model_type": "gpt2", **CONFIGS["GPT2LMHeadModel"]})
    assert (sizes.inner, sizes.positions, sizes.tied, sizes.kv_heads) == (128, 1024, True, 4)
    fields = {name: size for name, size in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
    llama = transformer_of({"model_type": "llama", **fields})
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
    sizes = transformer_of(SIZES | fields)
    assert (sizes.window, sizes.windowed) == expected


@pytest.mark.slow
def test_windows_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for kind in ("mistral", "qwen2", "qwen3"):
        more = {} if kind == "mistral" else {"use_sliding_window": True, "max_window_layers": 3}
        config = transformers.AutoConfig.for_model(kind, num_hidden_layers=5, **more)
        sizes = transformer_of(config.to_dict())
        layers = config.to_dict().get("layer_types") or ["sliding_attention"] * 5
        assert (sizes.window, sizes.windowed) == (config.sliding_window, layers.count("sliding_attention"))


def test_a_window_that_is_no_size_is_refused() -> None:
    with assert_raises(accel.errors.ConfigError, where="sliding_window"):
        _ = transformer_of(SIZES | {"model_type": "mistral", "sliding_window": "wide"})


def test_experts_have_either_name() -> None:
    fields = CONFIGS["Qwen3MoeForCausalLM"]
    renamed = {"num_local_experts" if name == "num_experts" else name: value for name, value in fields.items()}
    assert transformer_of(renamed) == transformer_of(fields)


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
