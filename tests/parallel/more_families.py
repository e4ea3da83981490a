# SPDX-License-Identifier: Apache-2.0
"""Tiny models of further families, as of `family_models`."""

from __future__ import annotations

from collections.abc import Mapping

from family_models import DEEPSEEK, ENCODER, GATED, IMAGE, MIXTURE, SEQ2SEQ, SPECIAL, T5, Family

MOE = GATED | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "experts_implementation": "batched_mm",
}
SPEECH = ENCODER | {
    "conv_dim": [16, 16],
    "conv_stride": [4, 2],
    "conv_kernel": [8, 4],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "classifier_proj_size": 16,
    "apply_spec_augment": False,
}
E32 = ENCODER | {"max_position_embeddings": 40}
MORE: Mapping[str, Family] = {
    "GraniteMoE": Family("GraniteMoeForCausalLM", "GraniteMoeConfig", MIXTURE),
    "SmolLM3": Family("SmolLM3ForCausalLM", "SmolLM3Config", GATED),
    "ERNIE 4.5": Family("Ernie4_5ForCausalLM", "Ernie4_5Config", GATED),
    "ERNIE 4.5 MoE": Family(
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        GATED
        | {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 1,
            "experts_implementation": "batched_mm",
        },
    ),
    "GLM-4 MoE": Family(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        GATED
        | {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "experts_implementation": "batched_mm",
        },
    ),
    "Nemotron": Family("NemotronForCausalLM", "NemotronConfig", GATED),
    "Hunyuan": Family("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", GATED),
    "Hunyuan MoE": Family(
        "HunYuanMoEV1ForCausalLM",
        "HunYuanMoEV1Config",
        GATED | {"num_experts": 4, "moe_topk": 2, "experts_implementation": "batched_mm"},
    ),
    "Jamba": Family(
        "JambaForCausalLM",
        "JambaConfig",
        GATED
        | {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 4,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "experts_implementation": "batched_mm",
        },
    ),
    "Zamba2": Family(
        "Zamba2ForCausalLM",
        "Zamba2Config",
        GATED
        | {
            "num_key_value_heads": 4,
            "mamba_d_state": 4,
            "mamba_expand": 2,
            "n_mamba_heads": 4,
            "mamba_headdim": 16,
            "mamba_ngroups": 1,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
            "chunk_size": 4,
            "layers_block_type": ["mamba", "hybrid"],
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
        },
    ),
    "Falcon-H1": Family(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        GATED
        | {
            "mamba_d_ssm": 64,
            "mamba_d_state": 4,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 4,
        },
    ),
    "Bamba": Family(
        "BambaForCausalLM",
        "BambaConfig",
        GATED
        | {
            "mamba_d_state": 4,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 4,
            "attn_layer_indices": [1],
        },
    ),
    "Qwen 3 Next": Family(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        MOE
        | {
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "Gemma 3n": Family(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        GATED
        | {
            "sliding_window": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 99,
            "num_kv_shared_layers": 0,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0, 0.0],
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "EXAONE 4": Family(
        "Exaone4ForCausalLM",
        "Exaone4Config",
        GATED | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Seed-OSS": Family("SeedOssForCausalLM", "SeedOssConfig", GATED),
    "MiniMax": Family(
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        MIXTURE | {"block_size": 4, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "LFM2": Family("Lfm2ForCausalLM", "Lfm2Config", GATED | {"layer_types": ["conv", "full_attention"]}),
    "OLMoE": Family("OlmoeForCausalLM", "OlmoeConfig", MOE),
    "DeepSeek-V3": Family(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK | {"n_shared_experts": 1, "head_dim": 4}
    ),
    "Cohere 2": Family(
        "Cohere2ForCausalLM",
        "Cohere2Config",
        GATED | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "OLMo 3": Family(
        "Olmo3ForCausalLM",
        "Olmo3Config",
        GATED | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "DiffLlama": Family("DiffLlamaForCausalLM", "DiffLlamaConfig", GATED),
    "CTRL": Family(
        "CTRLLMHeadModel",
        "CTRLConfig",
        SPECIAL
        | {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 64, "n_positions": 32, "use_cache": False},
    ),
    "RecurrentGemma": Family(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        GATED | {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    ),
    "BigBird": Family("BigBirdForMaskedLM", "BigBirdConfig", E32 | {"attention_type": "original_full"}),
    "BigBird, sparse": Family(
        "BigBirdForMaskedLM",
        "BigBirdConfig",
        E32 | {"attention_type": "block_sparse", "block_size": 1, "num_random_blocks": 1},
    ),
    "Longformer": Family("LongformerForMaskedLM", "LongformerConfig", E32 | {"attention_window": 4}),
    "LED": Family(
        "LEDForConditionalGeneration",
        "LEDConfig",
        {k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"}
        | {"attention_window": 4, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32},
        "translation",
    ),
    "Funnel": Family(
        "FunnelForMaskedLM",
        "FunnelConfig",
        {
            "vocab_size": 99,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 64,
            "pad_token_id": 0,
        },
    ),
    "DeBERTa": Family(
        "DebertaForMaskedLM",
        "DebertaConfig",
        ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_position_embeddings": 32},
    ),
    "LayoutLM": Family("LayoutLMForMaskedLM", "LayoutLMConfig", E32),
    "Data2Vec text": Family("Data2VecTextForMaskedLM", "Data2VecTextConfig", E32),
    "RoFormer": Family("RoFormerForMaskedLM", "RoFormerConfig", E32 | {"embedding_size": 32}),
    "FNet": Family("FNetForMaskedLM", "FNetConfig", E32 | {"tpu_short_seq_length": 12}),
    "ConvBERT": Family("ConvBertForMaskedLM", "ConvBertConfig", E32 | {"embedding_size": 32, "conv_kernel_size": 3}),
    "SqueezeBERT": Family(
        "SqueezeBertForMaskedLM",
        "SqueezeBertConfig",
        E32
        | {
            "embedding_size": 32,
            "q_groups": 2,
            "k_groups": 2,
            "v_groups": 2,
            "post_attention_groups": 1,
            "intermediate_groups": 2,
            "output_groups": 2,
        },
    ),
    "MobileBERT": Family(
        "MobileBertForMaskedLM",
        "MobileBertConfig",
        E32
        | {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16, "num_feedforward_networks": 2},
    ),
    "XLNet": Family(
        "XLNetLMHeadModel",
        "XLNetConfig",
        {
            "vocab_size": 99,
            "d_model": 32,
            "n_layer": 2,
            "n_head": 4,
            "d_inner": 64,
            "use_mems_train": False,
            "use_mems_eval": False,
        },
    ),
    "EuroBERT": Family("EuroBertForMaskedLM", "EuroBertConfig", GATED),
    "XLM": Family(
        "XLMWithLMHeadModel",
        "XLMConfig",
        {
            "vocab_size": 99,
            "emb_dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 32,
            "pad_index": 0,
            "pad_token_id": 0,
        },
    ),
    "Switch Transformers": Family(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        T5
        | {
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_experts": 4,
            "router_jitter_noise": 0.0,
        },
        "translation",
        leaves=True,
    ),
    "LongT5": Family(
        "LongT5ForConditionalGeneration",
        "LongT5Config",
        T5 | {"encoder_attention_type": "local", "local_radius": 4},
        "translation",
    ),
    "BEiT": Family("BeitForImageClassification", "BeitConfig", IMAGE | {"use_relative_position_bias": True}, "classes"),
    "SegFormer": Family(
        "SegformerForImageClassification",
        "SegformerConfig",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2],
        },
        "classes",
    ),
    "ResNet": Family(
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        "classes",
    ),
    "PoolFormer": Family(
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        {
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "padding": [1, 1],
            "num_encoder_blocks": 2,
        },
        "classes",
    ),
    "ViT-MSN": Family("ViTMSNForImageClassification", "ViTMSNConfig", IMAGE, "classes"),
    "Hiera": Family(
        "HieraForImageClassification",
        "HieraConfig",
        {
            "embed_dim": 16,
            "image_size": [16, 16],
            "patch_size": [3, 3],
            "patch_stride": [2, 2],
            "patch_padding": [1, 1],
            "depths": [1, 1],
            "num_heads": [2, 4],
            "embed_dim_multiplier": 2.0,
            "num_query_pool": 1,
            "query_stride": [2, 2],
            "masked_unit_size": [4, 4],
            "masked_unit_attention": [True, False],
        },
        "classes",
    ),
    "Wav2Vec2": Family(
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        SPEECH,
        "sound",
    ),
    "HuBERT": Family(
        "HubertForSequenceClassification",
        "HubertConfig",
        SPEECH,
        "sound",
    ),
    "WavLM": Family(
        "WavLMForSequenceClassification",
        "WavLMConfig",
        SPEECH,
        "sound",
    ),
    "AST": Family(
        "ASTForAudioClassification",
        "ASTConfig",
        {k: v for k, v in IMAGE.items() if k != "image_size"}
        | {"num_mel_bins": 8, "max_length": 16, "frequency_stride": 4, "time_stride": 4},
        "spectrum",
    ),
    "PaliGemma": Family(
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        {
            "text_config": GATED | {"model_type": "gemma"},
            "vision_config": IMAGE | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "image_token_id": 98,
            "projection_dim": 32,
        },
        "captions",
    ),
    "Mamba 2": Family(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 4,
            "use_cache": False,
            "pad_token_id": 0,
        }
        | SPECIAL,
    ),
    "RWKV": Family(
        "RwkvForCausalLM",
        "RwkvConfig",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "attention_hidden_size": 32,
            "intermediate_size": 64,
            "use_cache": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "NomicBERT": Family("NomicBertForMaskedLM", "NomicBertConfig", E32),
    "Apertus": Family("ApertusForCausalLM", "ApertusConfig", GATED),
    "JetMoE": Family(
        "JetMoeForCausalLM",
        "JetMoeConfig",
        GATED | {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8, "num_key_value_heads": 2},
    ),
    "Doge": Family("DogeForCausalLM", "DogeConfig", GATED | {"keep_window_size": 64}),
    "Qwen 3.5": Family(
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        GATED
        | {
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "Gemma 4": Family(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        GATED
        | {
            "initializer_range": 0.2,  # at 0.02 rounding grows a hundredfold in each step
            "sliding_window": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 99,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "MiniMax-M2": Family("MiniMaxM2ForCausalLM", "MiniMaxM2Config", MIXTURE),
    "Qwen 2 MoE": Family("Qwen2MoeForCausalLM", "Qwen2MoeConfig", MOE | {"shared_expert_intermediate_size": 16}),
    "Qwen 3 MoE": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", MOE),
    "ESM": Family(
        "EsmForMaskedLM",
        "EsmConfig",
        E32 | {"mask_token_id": 98, "position_embedding_type": "rotary", "token_dropout": False},
    ),
    "Nemotron-H": Family(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {k: v for k, v in GATED.items() if k != "num_hidden_layers"}
        | {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "ssm_state_size": 4,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "chunk_size": 4,
        },
    ),
    "DeepSeek-V3.2": Family(
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        DEEPSEEK | {"n_shared_experts": 1, "head_dim": 4, "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2},
    ),
    "Mistral 4": Family("Mistral4ForCausalLM", "Mistral4Config", DEEPSEEK | {"n_shared_experts": 1}),
    "Ministral 3": Family("Ministral3ForCausalLM", "Ministral3Config", GATED),
    "nanochat": Family("NanoChatForCausalLM", "NanoChatConfig", GATED),
    "Kimi Linear": Family(
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {
            k: v
            for k, v in DEEPSEEK.items()
            if k not in ("q_lora_rank", "first_k_dense_replace", "n_routed_experts", "head_dim")
        }
        | {
            "n_shared_experts": 1,
            "num_local_experts": 4,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "ModernBERT decoder": Family(
        "ModernBertDecoderForCausalLM",
        "ModernBertDecoderConfig",
        ENCODER
        | {
            "global_attn_every_n_layers": 2,
            "local_attention": 8,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "use_cache": False,
        },
    ),
    "T5Gemma": Family(
        "T5GemmaForConditionalGeneration",
        "T5GemmaConfig",
        {"encoder": GATED | {"sliding_window": 8}, "decoder": GATED | {"sliding_window": 8}, "vocab_size": 99},
        "translation",
    ),
    "InternVL": Family(
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        {
            "text_config": GATED | {"model_type": "qwen2"},
            "vision_config": IMAGE | {"image_size": [16, 16], "patch_size": [2, 2]},
            "image_token_id": 98,
            "image_seq_length": 16,
        },
        "captions",
    ),
    "LongCat Flash": Family(
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        {k: v for k, v in DEEPSEEK.items() if k != "num_hidden_layers"}
        | {
            "num_layers": 2,
            "ffn_hidden_size": 64,
            "head_dim": 4,
            "moe_topk": 2,
            "zero_expert_num": 1,
            "expert_ffn_hidden_size": 16,
        },
    ),
    "DeepSeek-V4": Family(
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        GATED
        | {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "sliding_window": 8,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 4,
            "experts_implementation": "batched_mm",
        },
    ),
}
