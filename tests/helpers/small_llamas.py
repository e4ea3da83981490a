# SPDX-License-Identifier: Apache-2.0
"""Llamas of transformers of given sizes, which compute attention as on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.estimate import Transformer


def sizes_of(**changes: Any) -> Transformer:
    sizes = {
        "layers": 4, "width": 1024, "heads": 16, "kv_heads": 4, "head_width": 64, "inner": 2816, "vocabulary": 8000,
    }  # fmt: skip
    return Transformer(**sizes | changes)


def llama(sizes: Transformer) -> Any:
    """A model of transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        tie_word_embeddings=sizes.tied,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def attend_as_on_gpus(model: Any) -> None:
    """Take torch's attention without a mask, as transformers does on GPUs."""
    transformers = pytest.importorskip("transformers")

    def attend(_module: Any, q: Any, k: Any, v: Any, _mask: Any, scaling: float | None = None, **_: Any) -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("without_a_mask", attend)
    model.config._attn_implementation = "without_a_mask"
