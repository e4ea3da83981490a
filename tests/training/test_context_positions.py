# SPDX-License-Identifier: Apache-2.0
"""Models of transformers that compute more from positions than masks and rotations equal one process along cp."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import Tensor

import accel
from accel.errors import ConfigError
from accel.testing import Simulator

transformers: Any = pytest.importorskip("transformers")

LENGTH = 16
IDS = torch.randint(1, 32, (2, LENGTH), generator=torch.Generator().manual_seed(2))
IDS[:, 1:4] = 5
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.5, "use_cache": False,
}  # fmt: skip


def make_dynamic() -> Any:
    """Frequencies follow from the largest position, from 9 positions on."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=8, rope_parameters=rope)
    return transformers.LlamaForCausalLM(config)


def make_longrope() -> Any:
    """Long sequences have other frequencies: of 16 positions, not of the 12 first ones that the second rank has."""
    rope = {
        "rope_type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [3.0, 2.0], "rope_theta": 10000.0,
        "original_max_position_embeddings": 13,
    }  # fmt: skip
    config = transformers.Phi3Config(**SIZES, max_position_embeddings=LENGTH, rope_parameters=rope, pad_token_id=0)
    return transformers.Phi3ForCausalLM(config)


def make_scaled() -> Any:
    """Queries of layers without rotations are scaled by their places."""
    config = transformers.Llama4TextConfig(
        **SIZES, intermediate_size_mlp=24, head_dim=4, num_local_experts=2, moe_layers=[], no_rope_layers=[1, 0],
        layer_types=["full_attention", "full_attention"], max_position_embeddings=LENGTH, floor_scale=4, attn_scale=0.5,
    )  # fmt: skip
    return transformers.Llama4ForCausalLM(config)


def make_windowed() -> Any:
    """Masks alone have a window: attentions do not pass it."""
    config = transformers.Qwen2MoeConfig(
        **SIZES, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        use_sliding_window=True, sliding_window=5, max_window_layers=1, max_position_embeddings=LENGTH,
        experts_implementation="eager",
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config)


def make_switch() -> Any:
    """Experts take 5 tokens of a sequence, the first ones that ask for them."""
    config = transformers.SwitchTransformersConfig(
        vocab_size=32, d_model=16, d_ff=16, d_kv=4, num_heads=4, num_layers=2, num_decoder_layers=2, num_experts=2,
        expert_capacity=5, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, dropout_rate=0.0, use_cache=False,
    )  # fmt: skip
    made = transformers.SwitchTransformersForConditionalGeneration(config)
    for name, each in made.named_parameters():
        if "classifier" in name or each.dim() == 3:  # large enough to choose both experts
            torch.nn.init.normal_(each, std=0.7)
    for each in made.modules():
        if hasattr(each, "expert_capacity"):
            each.dtype = torch.float64
    return made


def make_esm() -> Any:
    """Embeddings are scaled by the share of masked tokens: those of token 5, more of them on one rank."""
    sizes = {name: each for name, each in SIZES.items() if name not in ("num_key_value_heads", "use_cache")}
    config = transformers.EsmConfig(
        **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0, mask_token_id=5,
        token_dropout=True, max_position_embeddings=LENGTH + 1,
    )  # fmt: skip
    return transformers.EsmForMaskedLM(config)


def make_stable() -> Any:
    """Blocks do not pass their keywords to their attention."""
    return transformers.StableLmForCausalLM(transformers.StableLmConfig(**SIZES, max_position_embeddings=LENGTH))


def make_doge() -> Any:
    """Attentions make masks of values."""
    config = transformers.DogeConfig(**SIZES, max_position_embeddings=LENGTH, keep_window_size=6, sliding_window=9)
    return transformers.DogeForCausalLM(config)


def make_bigbird() -> Any:
    """Attentions of the encoder compute their scores, and those of the decoder do not."""
    config = transformers.BigBirdPegasusConfig(
        vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=LENGTH,
        attention_type="original_full", use_cache=False, init_std=0.5,
    )  # fmt: skip
    return transformers.BigBirdPegasusForConditionalGeneration(config)


def made_by(make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double().eval()


def logits_of(model: Any, ids: Tensor, position_ids: Tensor) -> Tensor:
    if model.config.is_encoder_decoder:
        return model(input_ids=ids, decoder_input_ids=(ids + 7) % 32).logits
    return model(ids, position_ids=position_ids + model.config.model_type.startswith("esm")).logits


CASES = (make_dynamic, make_longrope, make_scaled, make_windowed, make_switch, make_esm, make_doge, make_bigbird)


@pytest.mark.parametrize(
    ("make", "mesh"),
    [
        *((each, "cp=2") for each in CASES),
        *(pytest.param(each, "cp=4", marks=pytest.mark.slow) for each in CASES),
        (make_stable, "cp=2"),
    ],
)
def test_what_follows_from_all_positions_is_that_of_the_sequence(
    ranks: Simulator, make: Callable[[], Any], mesh: str
) -> None:
    alone = made_by(make)
    expected: Any = logits_of(alone, IDS, torch.arange(LENGTH).expand(2, -1))
    expected.square().sum().backward()

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh=mesh)
        model: Any = accel.unwrap_model(accel.prepare_model(ctx, made_by(make)))
        if make is make_stable:
            model = accel.checkpoint_activations(model)
        part = accel.parallel.split_sequence(ctx, {"ids": IDS, "out": expected.detach()})
        out: Any = logits_of(model, part["ids"], part["position_ids"])
        out.square().sum().backward()
        off = [float((out.detach() - part["out"]).abs().max() / expected.detach().abs().max())]
        for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
            if whole.grad is not None:
                total = accel.reduce(ctx, torch.zeros_like(mine) if mine.grad is None else mine.grad)
                off.append(float((total - whole.grad).abs().max() / whole.grad.abs().max().clamp(min=1)))
        return max(off)

    assert max(ranks.run(rank, int(mesh[-1]), default_group=True)) < 1e-6  # rotary tables are float32


def test_an_order_that_only_the_mask_has_is_refused(ranks: Simulator) -> None:
    """Attentions of this decoder do not say that they are causal, and it makes two kinds of masks."""
    made = transformers.BigBirdPegasusForCausalLM(make_bigbird().config)

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        model: Any = accel.prepare_model(ctx, copy.deepcopy(made).eval())
        with assert_raises(ConfigError, problem="say different orders"):
            model(accel.parallel.split_sequence(ctx, {"ids": IDS})["ids"])

    ranks.run(rank, 2, default_group=True)
