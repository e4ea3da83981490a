# SPDX-License-Identifier: Apache-2.0
"""Tiny models that are no chains of modules, with batches and losses, and their training by torch alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from pipelines import Trained, whole_of
from steps import begin_batch
from torch import nn
from torch.nn.functional import cross_entropy, relu

import accel

WORDS, TOKENS = 60, 8
SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": WORDS, "pad_token_id": 0}
GATED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 64, "use_cache": False}
GATED |= {"bos_token_id": 1, "eos_token_id": 2}
PAIR = {"vocab_size": WORDS, "d_model": 32, "use_cache": False, "pad_token_id": 0, "decoder_start_token_id": 1}
LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
LAYERS |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "bos_token_id": 1, "eos_token_id": 2, "dropout": 0.0}

# class, class of its settings, the settings
TRANSFORMERS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", {**SIZES, "intermediate_size": 64}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**PAIR, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64}),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**PAIR, **LAYERS}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", GATED),
    "cohere": ("CohereForCausalLM", "CohereConfig", GATED),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 32, "use_cache": False},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**PAIR, **LAYERS, "num_mel_bins": 6, "max_source_positions": 16, "max_target_positions": 16},
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**SIZES, "intermediate_size": 64, "image_size": 16, "patch_size": 4, "num_labels": 5},
    ),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GATED, "head_dim": 8, "sliding_window": 4}),
}
OFF = {
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "dropout_rate": 0.0,
}  # fmt: skip
FAMILIES = (*TRANSFORMERS, "unet")


class UNet(nn.Module):
    """A skip over the middle, statistics that a forward changes, dropout, and work between modules."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        # no biases before norms: their gradients are rounding, which AdamW would make steps of
        self.down1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.down2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.norm1, self.norm2, self.norm3 = nn.BatchNorm2d(8), nn.BatchNorm2d(16), nn.BatchNorm2d(8)
        self.middle, self.drop = nn.Conv2d(16, 16, 3, padding=1), nn.Dropout(drop)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2, bias=False), nn.Conv2d(16, 5, 1)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        first = relu(self.norm1(self.down1(pixel_values)))
        second = relu(self.norm2(self.down2(first)))
        second = second + self.drop(self.middle(second))
        up = relu(self.norm3(self.up(second)))
        return self.out(torch.cat([first, up], 1)).mean((2, 3))


class Family(NamedTuple):
    """A model and its batches.

    Attributes:
        make: the model of float64, the same at each making; its argument is the dropout.
        batch: inputs and targets of a number of rows, by a seed.
    """

    make: Callable[[float], nn.Module]
    batch: Callable[[int, int], tuple[dict[str, torch.Tensor], torch.Tensor]]


def family(name: str) -> Family:
    kinds = {"t5": _pairs, "bart": _pairs, "whisper": _speech, "vit": _images, "unet": _images}
    return Family(lambda drop=0.0: _model(name, drop), lambda rows, seed: kinds.get(name, _words)(rows, seed))


def _model(name: str, drop: float) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "unet":
            return UNet(drop).double()
        import transformers

        kind, settings, given = TRANSFORMERS[name]
        off = dict.fromkeys(OFF, drop)
        config = getattr(transformers, settings)(**{**given, **off})
        config._attn_implementation = "eager" if name == "gemma2" else "sdpa"
        model = getattr(transformers, kind)(config).double()
        with torch.no_grad():
            for each in model.parameters():  # initial zeros hide mistakes
                each.add_(torch.randn_like(each) * 0.02)
    return model


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _words(rows: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    draw = _generator(seed)
    ids = torch.randint(3, WORDS, (rows, TOKENS), generator=draw)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    unequal = torch.rand(rows, TOKENS, generator=draw) < 0.3
    return {"input_ids": ids, "attention_mask": mask}, ids.roll(-1, 1).masked_fill(unequal | (mask == 0), -100)


def _pairs(rows: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    inputs, _ = _words(rows, seed)
    targets = torch.randint(3, WORDS, (rows, 6), generator=_generator(seed + 1))
    targets[:, -1] = -100
    return {**inputs, "labels": targets.clone()}, targets


def _speech(rows: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    _, targets = _pairs(rows, seed)
    sound = torch.randn(rows, 6, 32, generator=_generator(seed), dtype=torch.float64)
    return {"input_features": sound, "labels": targets.clone()}, targets


def _images(rows: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    draw = _generator(seed)
    pixels = torch.randn(rows, 3, 16, 16, generator=draw, dtype=torch.float64)
    return {"pixel_values": pixels}, torch.randint(5, (rows,), generator=draw)


def loss_sum(output: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output["logits"]
    return cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def train(
    ctx: accel.DistContext,
    name: str,
    *,
    mesh: str = "",
    accumulation: int = 1,
    rows: tuple[int, ...] = (4, 4, 3),
    plan: accel.parallel.Plan | None = None,
    change: Callable[[nn.Module], object] = lambda model: None,
    save: str = "",
    resume: str = "",
    begin: int = 0,
) -> Trained:
    """Train by AdamW with clipping, a step for each number of rows; ranks with samples of their own divide the rows.

    `change`: of the prepared model, to plant a mistake. `save`, `resume`: folders of checkpoints behind and before the
    training. `begin`: number of the first step.
    """
    made, batch_of = family(name)
    ctx = accel.replace(ctx, mesh=mesh) if mesh else ctx
    model: Any = made(0.0).train()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = plan or accel.parallel.Plan(micro_batches=2 if "pp=4" not in mesh else 4)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=batch_of(4, 0)[0])
    _ = change(accel.unwrap_model(model))
    items = {"model": model, "optimizer": optimizer}
    if resume:
        _ = accel.load_state(ctx, resume, items)
    share, shares = ctx.data_parallel
    state = accel.train_state(ctx, accumulation=accumulation)
    figures: list[float] = []
    for step, size in enumerate(rows, begin):
        for micro in range(accumulation):
            inputs, targets = batch_of(size * shares, 100 * step + micro)
            inputs = {key: each[share::shares].contiguous() for key, each in inputs.items()}
            targets = targets[share::shares].contiguous()
            state = begin_batch(ctx, state)
            weight = (targets != -100).sum()
            loss, state = accel.forward_backward(
                ctx, model, state, inputs, targets=targets, loss_fn=loss_sum, weight=weight
            )
            figures += [float(loss)] if shares == 1 else []
        state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
        assert state.grad_norm is not None
        figures.append(float(state.grad_norm))
    if save:
        _ = accel.save_state(ctx, save, items, step=begin + len(rows))
    inner = accel.unwrap_model(model)
    named = inner.named_parameters(remove_duplicate=False)
    found = {name: whole_of(each) for name, each in named}
    return Trained(found | {name: each.clone() for name, each in inner.named_buffers()}, figures)


def by_hand(
    name: str, *, accumulation: int = 1, rows: tuple[int, ...] = (4, 4, 3), shares: int = 1, pieces: int = 1
) -> Trained:
    """The same training by torch alone; `pieces`: micro-batches of which a batch is made, for statistics of batches."""
    made, batch_of = family(name)
    model = made(0.0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    figures: list[float] = []
    for step, size in enumerate(rows):
        batches = [batch_of(size * shares, 100 * step + micro) for micro in range(accumulation)]
        weights = [int((targets != -100).sum()) for _, targets in batches]
        for (inputs, targets), weight in zip(batches, weights, strict=True):
            total = torch.zeros((), dtype=torch.float64)
            for piece in range(pieces):
                own = slice(piece * size // pieces, (piece + 1) * size // pieces) if pieces > 1 else slice(None)
                found = loss_sum(model(**{key: each[own] for key, each in inputs.items()}), targets[own])
                (found / sum(weights)).backward()
                total += found.detach()
            figures += [total.item() / weight] if shares == 1 else []
        figures.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    named = model.named_parameters(remove_duplicate=False)
    found = {name: each.detach().clone() for name, each in named}
    return Trained(found | {name: each.clone() for name, each in model.named_buffers()}, figures)


class _Wide:
    """torch, for a module of transformers, with float64 in the place of float32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def widen(patch: Any, name: str) -> None:
    """Let the parts of a family that compute in float32 compute in float64: rounding would hide differences."""
    if name == "unet":
        return
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    patch.setattr(module, "torch", _Wide())
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
