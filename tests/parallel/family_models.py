# SPDX-License-Identifier: Apache-2.0
"""Tiny models of many families, by their classes and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99, "pad_token_id": 0}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
ENCODER = LAYERS | SPECIAL | {"intermediate_size": 64}
GATED = ENCODER | {"num_key_value_heads": 2, "use_cache": False, "head_dim": 8}
IMAGE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
SEQ2SEQ = SPECIAL | {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "use_cache": False, "pad_token_id": 0,
    "decoder_start_token_id": 1, "max_position_embeddings": 32,
}  # fmt: skip
T5 = {
    "vocab_size": 99, "d_model": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64,
    "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
GPT = SPECIAL | {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 32, "use_cache": False}
MIXTURE = GATED | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
CLIP = {
    "text_config": ENCODER | {"projection_dim": 16, "max_position_embeddings": 32},
    "vision_config": IMAGE,
    "projection_dim": 16,
}
LLAVA = {
    "text_config": GATED | {"model_type": "llama"},
    "vision_config": IMAGE | {"model_type": "clip_vision_model"},
    "image_token_id": 98,
    "image_seq_length": 16,
    "vision_feature_layer": -1,
}
LLAMA4 = GATED | {
    "intermediate_size_mlp": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "interleave_moe_layer_step": 1,
    "attention_chunk_size": 8,
}  # fmt: skip
DEEPSEEK = GATED | {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "first_k_dense_replace": 1, "topk_group": 1, "experts_implementation": "batched_mm",
}  # fmt: skip


class Family(NamedTuple):
    """A tiny model.

    Attributes:
        model: class of transformers by name, or a function that makes the module.
        config: class of its config; "" for a module of a function.
        settings: of the config.
        kind: "words" for logits of tokens, "classes" for those of rows, "vectors" for embeddings of texts and images,
            "captions" for logits of tokens among images, "speech", "translation", or "features"; "sound" and
            "spectrum" for classes of sounds.
        casts: whether its forward computes in fp32 what `Wide` makes float64.
        leaves: whether its forward leaves out modules that no token of a rank asks for.
    """

    model: str | Callable[[], nn.Module]
    config: str = ""
    settings: Mapping[str, Any] = {}
    kind: str = "words"
    casts: bool = True
    leaves: bool = False


class Transformer(nn.Module):
    """An nn.Transformer of torch on features."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(32, 4, 2, 2, 64, 0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.inner(source, target)


FAMILIES: Mapping[str, Family] = {
    "ALBERT": Family("AlbertForMaskedLM", "AlbertConfig", ENCODER | {"embedding_size": 16}),
    "BART": Family("BartForConditionalGeneration", "BartConfig", SEQ2SEQ, "translation"),
    "BERT": Family("BertForMaskedLM", "BertConfig", ENCODER | {"max_position_embeddings": 32}),
    "BioGPT": Family("BioGptForCausalLM", "BioGptConfig", ENCODER | {"use_cache": False}),
    "Blenderbot": Family("BlenderbotForConditionalGeneration", "BlenderbotConfig", SEQ2SEQ, "translation"),
    "BLOOM": Family(
        "BloomForCausalLM", "BloomConfig", LAYERS | SPECIAL | {"n_layer": 2, "n_head": 4, "use_cache": False}
    ),
    "CLIP": Family("CLIPModel", "CLIPConfig", CLIP, "vectors"),
    "CodeGen": Family("CodeGenForCausalLM", "CodeGenConfig", GPT | {"n_head": 8, "rotary_dim": 4, "n_ctx": 32}),
    "Cohere": Family("CohereForCausalLM", "CohereConfig", GATED),
    "ConvNeXt": Family(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 2, 1], "image_size": 16, "patch_size": 1},
        "classes",
    ),
    "DeBERTa-v2": Family(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        casts=False,  # constants alone, in scripted functions
    ),
    "DeepSeek-V2": Family("DeepseekV2ForCausalLM", "DeepseekV2Config", DEEPSEEK),
    "DeiT": Family("DeiTForImageClassification", "DeiTConfig", IMAGE, "classes"),
    "DINOv2": Family("Dinov2ForImageClassification", "Dinov2Config", IMAGE, "classes"),
    "DistilBERT": Family(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "pad_token_id": 0},
    ),
    "ELECTRA": Family("ElectraForMaskedLM", "ElectraConfig", ENCODER | {"embedding_size": 16}),
    "ERNIE": Family("ErnieForMaskedLM", "ErnieConfig", ENCODER),
    "Falcon, ALiBi": Family(
        "FalconForCausalLM", "FalconConfig", LAYERS | {"use_cache": False, "alibi": True, "multi_query": False}
    ),
    "Falcon, grouped": Family(
        "FalconForCausalLM",
        "FalconConfig",
        LAYERS | {"use_cache": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "Falcon, multi-query": Family(
        "FalconForCausalLM", "FalconConfig", LAYERS | {"use_cache": False, "multi_query": True}
    ),
    "Falcon, multi-query ALiBi": Family(
        "FalconForCausalLM", "FalconConfig", LAYERS | {"use_cache": False, "alibi": True, "multi_query": True}
    ),
    "Gemma": Family("GemmaForCausalLM", "GemmaConfig", GATED),
    "Gemma 2": Family("Gemma2ForCausalLM", "Gemma2Config", GATED | {"sliding_window": 8}),
    "Gemma 3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", GATED | {"sliding_window": 8}),
    "GLM-4": Family("Glm4ForCausalLM", "Glm4Config", GATED),
    "GPT-2": Family("GPT2LMHeadModel", "GPT2Config", GPT),
    "GPT-BigCode": Family("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT),
    "GPT-J": Family("GPTJForCausalLM", "GPTJConfig", GPT | {"rotary_dim": 4}),
    "GPT-Neo": Family(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        SPECIAL
        | {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 99,
            "window_size": 8,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
            "use_cache": False,
        },
    ),
    "GPT-NeoX": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", ENCODER | {"use_cache": False}),
    "gpt-oss": Family(
        "GptOssForCausalLM", "GptOssConfig", MIXTURE | {"sliding_window": 8, "attn_implementation": "eager"}
    ),
    "Granite": Family("GraniteForCausalLM", "GraniteConfig", GATED),
    "Llama": Family("LlamaForCausalLM", "LlamaConfig", GATED),
    "Llama 4": Family("Llama4ForCausalLM", "Llama4TextConfig", LLAMA4),
    "LLaVA": Family("LlavaForConditionalGeneration", "LlavaConfig", LLAVA, "captions"),
    "M2M100": Family("M2M100ForConditionalGeneration", "M2M100Config", SEQ2SEQ, "translation"),
    "Mamba": Family(
        "MambaForCausalLM",
        "MambaConfig",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
            "use_cache": False,
            "pad_token_id": 0,
        },
    ),
    "Marian": Family("MarianMTModel", "MarianConfig", SEQ2SEQ | {"decoder_vocab_size": 99}, "translation"),
    "mBART": Family("MBartForConditionalGeneration", "MBartConfig", SEQ2SEQ, "translation"),
    "Mistral": Family("MistralForCausalLM", "MistralConfig", GATED | {"sliding_window": 8}),
    "Mixtral": Family("MixtralForCausalLM", "MixtralConfig", MIXTURE),
    "ModernBERT": Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        ENCODER | {"global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "MPNet": Family("MPNetForMaskedLM", "MPNetConfig", ENCODER),
    "MPT": Family(
        "MptForCausalLM",
        "MptConfig",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 99, "use_cache": False, "max_seq_len": 32},
    ),
    "mT5": Family("MT5ForConditionalGeneration", "MT5Config", T5 | {"feed_forward_proj": "gated-gelu"}, "translation"),
    "nn.Transformer": Family(Transformer, kind="features"),
    "OLMo 2": Family("Olmo2ForCausalLM", "Olmo2Config", GATED),
    "OPT": Family(
        "OPTForCausalLM",
        "OPTConfig",
        LAYERS | {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 32, "use_cache": False},
    ),
    "Pegasus": Family("PegasusForConditionalGeneration", "PegasusConfig", SEQ2SEQ, "translation"),
    "Persimmon": Family("PersimmonForCausalLM", "PersimmonConfig", ENCODER | {"use_cache": False}),
    "Phi": Family("PhiForCausalLM", "PhiConfig", ENCODER | {"use_cache": False}),
    "Phi-3": Family("Phi3ForCausalLM", "Phi3Config", GATED),
    "Phi-MoE": Family("PhimoeForCausalLM", "PhimoeConfig", MIXTURE),
    "Qwen 2": Family("Qwen2ForCausalLM", "Qwen2Config", GATED),
    "Qwen 3": Family("Qwen3ForCausalLM", "Qwen3Config", GATED),
    "RoBERTa": Family("RobertaForMaskedLM", "RobertaConfig", ENCODER | {"max_position_embeddings": 40}),
    "SigLIP": Family("SiglipModel", "SiglipConfig", CLIP, "vectors"),
    "StableLM": Family("StableLmForCausalLM", "StableLmConfig", GATED),
    "Starcoder 2": Family("Starcoder2ForCausalLM", "Starcoder2Config", GATED),
    "Swin": Family(
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        "classes",
    ),
    "T5": Family("T5ForConditionalGeneration", "T5Config", T5, "translation"),
    "ViT": Family("ViTForImageClassification", "ViTConfig", IMAGE, "classes"),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
        "speech",
    ),
    "XLM-RoBERTa": Family("XLMRobertaForMaskedLM", "XLMRobertaConfig", ENCODER | {"max_position_embeddings": 40}),
}
