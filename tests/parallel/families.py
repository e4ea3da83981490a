# SPDX-License-Identifier: Apache-2.0
"""Tiny models of many families, and the law of a cell: on a mesh they train as in a plain loop of one process.

A cell is a family on a mesh. Its loop has AdamW, clipping, windows of micro-batches, a ragged last batch and uneven
token weights; parameters, losses and norms are compared.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from steps import ByState
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

import accel
from accel.testing import Simulator

WORDS, TOKENS, ROWS, IGNORED = 95, 12, 10, -100
TOLERANCE = 1e-10
UNUSED = (
    "logit_scale",
    "logit_bias",
    "mask_token",
    "tower.post_layernorm.weight",
    "tower.post_layernorm.bias",
)  # by the losses
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
            "captions" for logits of tokens among images, "speech", "translation", or "features".
        casts: whether its forward computes in fp32 what `Wide` makes float64.
    """

    model: str | Callable[[], nn.Module]
    config: str = ""
    settings: Mapping[str, Any] = {}
    kind: str = "words"
    casts: bool = True


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
    "CodeGen": Family("CodeGenForCausalLM", "CodeGenConfig", GPT | {"rotary_dim": 4, "n_ctx": 32}),
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


class Mesh(NamedTuple):
    """A mesh of a cell, and the way to prepare a model on it.

    Attributes:
        axes: sizes by name.
        strategy: of data parallelism.
        prepare: from context, model, optimizer and a batch of one row to the prepared model and optimizer; None for
            `accel.prepare`.
        cuts: ways to cut the model into pipeline stages, the first that takes it; empty without a pipeline.
        plan: further options of the stages.
    """

    axes: str
    strategy: str = "fsdp"
    prepare: Callable[[accel.DistContext, nn.Module, Any, Mapping[str, Tensor]], tuple[nn.Module, Any]] | None = None
    cuts: tuple[Any, ...] = ()
    plan: Mapping[str, Any] = {}

    @property
    def size(self) -> int:
        """Number of ranks; those along ep are ranks of the other axes."""
        sizes = [each.split("=") for each in self.axes.split(",")]
        return torch.Size(int(size) for name, size in sizes if name != "ep").numel()


MESHES: Mapping[str, Mesh] = {  # columns of the table
    "tp=2": Mesh("tp=2"),
    "dp=2,tp=2": Mesh("dp=2,tp=2"),
    "cp=2": Mesh("cp=2"),
    "pp=2": Mesh("pp=2", cuts=("chain", "trace")),
    "pp=2,tp=2": Mesh("pp=2,tp=2", cuts=("chain", "trace")),
}


class Wide(TorchFunctionMode):
    """Lets a forward that computes in fp32 compute in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "float":
            return args[0].double()
        named = {name: _wide(each) for name, each in (kwargs or {}).items()}
        return func(*map(_wide, args), **named)


def _wider(name: str) -> contextlib.AbstractContextManager[object]:
    return Wide() if FAMILIES[name].casts else contextlib.nullcontext()


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value is torch.float32 else value


def make(name: str) -> nn.Module:
    """Return a family's model in float64 and train, without dropout, its parameters moved off initial zeros."""
    family = FAMILIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if isinstance(family.model, str):
            transformers: Any = importlib.import_module("transformers")
            model = getattr(transformers, family.model)(getattr(transformers, family.config)(**family.settings))
        else:
            model = family.model()
        model = model.double().train()
        with torch.no_grad():
            for each in model.parameters():
                _ = each.add_(torch.randn_like(each) * 0.02)
    for key, each in model.named_parameters():
        if key.endswith(UNUSED):
            _ = each.requires_grad_(False)
    for module in model.modules():
        if type(module).__name__ == "PhimoeTopKRouter":
            _ = module.eval()  # it draws experts in training
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key, value in list(vars(module).items()):
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
    if hasattr(getattr(model, "config", None), "layerdrop"):  # where forwards of sounds read it
        cast(Any, model).config.layerdrop = 0.0
    return model


def rows(name: str) -> list[Mapping[str, Tensor]]:
    """Return samples: inputs of the forward, and "target" with some tokens that do not count."""
    draw = torch.Generator().manual_seed(7)
    kind = FAMILIES[name].kind
    found: list[Mapping[str, Tensor]] = []
    for at in range(ROWS):
        ids = torch.randint(3, WORDS, (TOKENS,), generator=draw)
        mask = (torch.arange(TOKENS) < TOKENS - at % 4).long()
        target = ids.roll(-1).where(mask.bool(), torch.tensor(IGNORED))
        if kind in ("translation", "speech"):
            goal = torch.randint(3, WORDS, (9,), generator=draw)
            given = goal.roll(1)
            target = goal.where(torch.arange(9) < 9 - at % 5, torch.tensor(IGNORED))
            source = {"input_ids": ids, "attention_mask": mask}
            if kind == "speech":
                source = {"input_features": torch.randn(8, 16, generator=draw, dtype=torch.float64)}
            found.append({**source, "decoder_input_ids": given, "target": target})
        elif kind == "captions":
            ids = torch.cat([ids[:5], torch.full((16,), 98), ids[5:]])
            mask = (torch.arange(len(ids)) < len(ids) - at % 4).long()
            target = ids.roll(-1).where(mask.bool() & (ids.roll(-1) != 98), torch.tensor(IGNORED))
            image = torch.randn(3, 16, 16, generator=draw, dtype=torch.float64)
            found.append({"input_ids": ids, "attention_mask": mask, "pixel_values": image, "target": target})
        elif kind in ("classes", "vectors"):
            image = torch.randn(3, 16, 16, generator=draw, dtype=torch.float64)
            text = {} if kind == "classes" else {"input_ids": ids, "attention_mask": mask}
            found.append({**text, "pixel_values": image, "target": torch.tensor(at % 2)})
        elif kind == "features":
            source, target = (torch.randn(n, 32, generator=draw, dtype=torch.float64) for n in (TOKENS, 8))
            found.append({"source": source, "target": target})
        else:
            found.append({"input_ids": ids, "attention_mask": mask, "target": target})
    return found


def loss_of(name: str, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return the sum of losses of a batch, and the number of those that count."""
    given = {key: each for key, each in batch.items() if key != "target"}
    target = batch["target"]
    kind = FAMILIES[name].kind
    if kind == "features":
        given["target"] = target
    with _wider(name):
        output = model(**given)
    return loss_sum(kind, output, target)


def loss_sum(kind: str, output: Any, target: Tensor) -> tuple[Tensor, int]:
    """Return the sum of losses of an output, and the number of those that count."""
    if kind == "features":
        return output.square().sum(), target.shape[:2].numel()
    if kind == "vectors":
        return (output.text_embeds * output.image_embeds.roll(1, -1)).sum(), len(target)
    logits = output.logits
    if kind == "classes":
        return functional.cross_entropy(logits, target, reduction="sum"), len(target)
    count = int((target != IGNORED).sum())
    return functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum"
    ), count


class Result(NamedTuple):
    """Parameters, losses of optimizer steps, and norms."""

    parameters: Mapping[str, Tensor]
    losses: list[float]
    norms: list[float]


def plain(name: str, accumulation: int, batch: int) -> Result:
    """Train in a plain loop of one process, without accel."""
    model = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = rows(name)
    losses: list[float] = []
    norms: list[float] = []
    micro = [samples[at : at + batch] for at in range(0, len(samples), batch)]
    for at in range(0, len(micro), accumulation):
        window = [torch.utils.data.default_collate(each) for each in micro[at : at + accumulation]]
        parts = [loss_of(name, model, each) for each in window]
        total = sum(count for _, count in parts)
        loss = torch.stack([each for each, _ in parts]).sum() / total
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return Result({key: each.detach() for key, each in model.state_dict().items()}, losses, norms)


def on_mesh(ctx: accel.DistContext, name: str, mesh: Mesh, accumulation: int, batch: int) -> Result:
    """Train on a mesh, `batch` rows of all ranks together."""
    ctx = accel.replace(ctx, mesh=mesh.axes, strategy=mesh.strategy)
    model = make(name)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = rows(name)
    if mesh.prepare is None:
        model, optimizer = accel.prepare(ctx, model, optimizer)
    else:
        model, optimizer = mesh.prepare(ctx, model, optimizer, torch.utils.data.default_collate(samples[:1]))
    loader = accel.prepare_loader(ctx, DataLoader(samples, batch_size=batch // ctx.data_parallel[1]))
    run = ByState(ctx, accumulation)
    losses: list[float] = []
    norms: list[float] = []
    sums: list[Tensor] = []
    for each in run.batches(loader):
        valid = int(each.valid)
        count = 0
        data = cut(ctx, name, model, {key: value[:valid] if valid else value for key, value in each.data.items()})
        with run.accumulate(model):
            if valid:
                summed, count = loss_of(name, model, data)
                loss = summed / max(count, 1)
            else:
                summed, _ = loss_of(name, model, data)
                loss = summed * 0.0
            run.backward(loss, weight=count)
        sums.append(torch.tensor([float(loss.detach()) * count, count], dtype=torch.float64))
        if run.sync:
            run.step(optimizer, max_norm=0.5)
            total = accel.reduce(ctx, torch.stack(sums).sum(0))  # copies along other axes cancel out
            losses.append(float(total[0] / total[1]))
            norms.append(float(run.grad_norm))
            sums = []
    return Result(accel.get_state_dict(ctx, model, dst=None), losses, norms)


def cut(ctx: accel.DistContext, name: str, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return this rank's tokens of a batch on a mesh with cp; all of them on others."""
    kind = FAMILIES[name].kind
    if ctx.axis("cp").size == 1 or kind in ("classes", "vectors"):
        return batch
    part = accel.parallel.split_sequence
    if kind == "features":
        own = part(ctx, {"source": batch["source"]}, shift=())
        goal = part(ctx, {"target": batch["target"]}, shift=())
        return {"source": own["source"], "target": goal["target"]}
    if kind == "speech":  # sounds are not cut
        goal = {key: batch[key] for key in ("decoder_input_ids", "target")}
        filled = part(ctx, goal, shift=(), pad={"decoder_input_ids": 0, "target": IGNORED})
        return {**batch, **{key: filled[key] for key in goal}}
    source = {key: batch[key] for key in ("input_ids", "attention_mask")}
    if kind == "translation":  # two sequences, the second filled up
        goal = {key: batch[key] for key in ("decoder_input_ids", "target")}
        filled = part(ctx, goal, shift=(), pad={"decoder_input_ids": 0, "target": IGNORED})
        own = {**part(ctx, source, shift=()), **{key: filled[key] for key in goal}}
    else:
        own = part(ctx, {**source, "target": batch["target"]}, shift=())
        own |= {key: batch[key] for key in batch if key not in own}  # images are not cut
    if "position_ids" not in inspect.signature(accel.unwrap_model(model).forward).parameters:
        del own["position_ids"]
        return own
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):  # keeps the first positions for padding
            own["position_ids"] = own["position_ids"] + cast(int, module.padding_idx) + 1
    if name == "MPNet":  # as well, and numbers the whole sequence itself
        del own["position_ids"]
    return own


def on_stages(ctx: accel.DistContext, name: str, mesh: Mesh, accumulation: int, batch: int, way: Any) -> Result:
    """Train on a mesh with stages, which take a batch of all ranks together in micro-batches of two rows."""
    ctx = accel.replace(ctx, mesh=mesh.axes, strategy=mesh.strategy)
    model = make(name)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples, kind = rows(name), FAMILIES[name].kind
    share, shares = ctx.data_parallel
    size = batch // shares
    example = _given(kind, torch.utils.data.default_collate(samples[:4]))
    micro_batches = max(ctx.axis("pp").size * mesh.plan.get("stages_per_rank", 1), size // 2)
    plan = accel.parallel.Plan(**{"cut": way, "micro_batches": micro_batches, **mesh.plan})
    with _wider(name):
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=example)
    starts = range(0, len(samples), batch)
    result = Result({}, [], [])
    scaler, accum = accel.loss_scale(ctx), accel.Accumulation(accumulation)
    sums: list[Tensor] = []
    for at in starts:
        whole = samples[at : at + batch]
        own = whole[share::shares]
        each = torch.utils.data.default_collate(own)
        target = each["target"]
        count = target.shape[:2].numel() if kind == "features" else int((target != IGNORED).sum())
        accum = accum.next(last=at == starts[-1])
        inputs = _given(kind, each)
        with _wider(name):
            loss, accum = accel.forward_backward(
                ctx, model, scaler, accum, inputs, targets=target, loss_fn=_summed(kind), weight=count
            )
        sums.append(torch.stack([loss.double() * count, torch.tensor(float(count), dtype=torch.float64)]))
        if accum.sync:
            step = accel.optimizer_step(ctx, optimizer, scaler, accum, max_norm=0.5)
            accum, scaler = step.accum, step.scaler
            total = accel.reduce(ctx, torch.stack(sums).sum(0))
            result.losses.append(float(total[0] / total[1]))
            result.norms.append(float(cast(Tensor, step.grad_norm)))
            sums = []
    return result._replace(parameters=cast(Any, accel.get_state_dict(ctx, model, dst=None)))


def _given(kind: str, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of the forward among a batch."""
    return {key: each for key, each in batch.items() if key != "target" or kind == "features"}


def _summed(kind: str) -> Callable[[Any, Tensor], Tensor]:
    return lambda output, target: loss_sum(kind, output, target)[0]


def difference(want: Result, got: Result) -> float:
    """Return the largest difference; not a number where one is not."""
    pairs = [(want.parameters[key], got.parameters[key]) for key in want.parameters]
    pairs += [(torch.tensor(a), torch.tensor(b)) for a, b in ((want.losses, got.losses), (want.norms, got.norms))]
    return float(torch.stack([(a.double() - b.double()).abs().max() for a, b in pairs if a.numel()]).max())


class Outcome(NamedTuple):
    """The result of a cell.

    Attributes:
        off: the largest difference between a mesh and a plain loop.
        cut: way in which the model was cut into stages; "" without.
    """

    off: float
    cut: str


def cell(simulator: Simulator, name: str, mesh: Mesh, *, accumulations: Sequence[int] = (1, 3)) -> float:
    """Return the largest difference between a mesh and a plain loop."""
    return compared(simulator, name, mesh, accumulations=accumulations).off


def compared(simulator: Simulator, name: str, mesh: Mesh, *, accumulations: Sequence[int] = (1, 3)) -> Outcome:
    """Compare a mesh and a plain loop. Of several cuts that refuse the model the first one's error is raised."""
    refusal: Exception | None = None
    for way in mesh.cuts or ("",):
        try:
            found = [_difference(simulator, name, mesh, way, each) for each in accumulations]
            return Outcome(float(torch.tensor(found).max()), way)
        except (accel.errors.PrepareError, accel.errors.StageError) as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _difference(simulator: Simulator, name: str, mesh: Mesh, way: str, accumulation: int) -> float:
    def rank(ctx: accel.DistContext) -> Result:
        if way:
            return on_stages(ctx, name, mesh, accumulation, 4, way)
        return on_mesh(ctx, name, mesh, accumulation, 4)

    want = plain(name, accumulation, 4)
    every = simulator.run(rank, mesh.size, default_group=True)
    return float(torch.tensor([difference(want, each) for each in every]).max())
