# SPDX-License-Identifier: Apache-2.0
"""Encoders, encoder-decoders and a reward model; inputs in mappings and dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ._entry import LENGTH, WIDTH, WORDS, Batch, Handwritten, cross_entropy, cross_entropy_and, entry, ids
from .decoders import GPTConfig, NanoGPT, RMSNorm


class T5Attention(nn.Module):
    """The first block computes a bias of distances and returns it; later blocks are given it."""

    def __init__(self, d: int, heads: int, *, has_bias: bool, is_decoder: bool = False) -> None:
        super().__init__()
        self.n_heads, self.d_kv, self.is_decoder = heads, d // heads, is_decoder
        self.q, self.k = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.v, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        if has_bias:
            self.relative_attention_bias = nn.Embedding(2 * LENGTH, heads)

    def compute_bias(self, query_length: int, key_length: int) -> Tensor:
        device = self.relative_attention_bias.weight.device
        context_position = torch.arange(query_length, dtype=torch.long, device=device)[:, None]
        memory_position = torch.arange(key_length, dtype=torch.long, device=device)[None, :]
        values = self.relative_attention_bias(memory_position - context_position + LENGTH)
        return values.permute([2, 0, 1]).unsqueeze(0)

    def forward(self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        batch_size, length = x.shape[:2]
        source = x if memory is None else memory

        def shape(states: Tensor) -> Tensor:
            return states.view(batch_size, -1, self.n_heads, self.d_kv).transpose(1, 2)

        q, k, v = shape(self.q(x)), shape(self.k(source)), shape(self.v(source))
        scores = torch.matmul(q, k.transpose(3, 2))
        if bias is None:
            if hasattr(self, "relative_attention_bias"):
                bias = self.compute_bias(length, source.shape[1])
            else:
                bias = torch.zeros((1, self.n_heads, length, source.shape[1]), device=x.device, dtype=x.dtype)
            if self.is_decoder:
                bias = bias + torch.full_like(bias, -1e9).triu(1)
        weights = F.softmax(scores + bias, dim=-1)
        out = torch.matmul(weights, v).transpose(1, 2).contiguous().view(batch_size, -1, self.n_heads * self.d_kv)
        return self.o(out), bias


class T5Block(nn.Module):
    def __init__(self, d: int, heads: int, *, has_bias: bool, is_decoder: bool = False) -> None:
        super().__init__()
        self.norm, self.self_attn = RMSNorm(d), T5Attention(d, heads, has_bias=has_bias, is_decoder=is_decoder)
        self.cross = T5Attention(d, heads, has_bias=False) if is_decoder else None
        self.cross_norm = RMSNorm(d) if is_decoder else None
        self.ff = nn.Sequential(RMSNorm(d), nn.Linear(d, 2 * d, bias=False), nn.ReLU(), nn.Linear(2 * d, d, bias=False))

    def forward(self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, bias = self.self_attn(self.norm(x), bias=bias)
        x = x + y
        if self.cross is not None:
            x = x + self.cross(self.cross_norm(x), memory)[0]
        return x + self.ff(x), bias


class T5Stack(nn.Module):
    def __init__(self, embed: nn.Embedding, depth: int, *, is_decoder: bool = False) -> None:
        super().__init__()
        self.embed_tokens = embed
        self.block = nn.ModuleList([T5Block(WIDTH, 4, has_bias=i == 0, is_decoder=is_decoder) for i in range(depth)])
        self.final_layer_norm = RMSNorm(WIDTH)

    def forward(self, input_ids: Tensor, memory: Tensor | None = None) -> Tensor:
        hidden_states, position_bias = self.embed_tokens(input_ids), None
        for layer_module in self.block:
            hidden_states, position_bias = layer_module(hidden_states, memory, position_bias)
        return self.final_layer_norm(hidden_states)


class T5Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = T5Stack(nn.Embedding(WORDS, WIDTH), 4)
        self.classifier = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.classifier(self.encoder(input_ids))


class T5(nn.Module):
    """Encoder and decoder share the embedding, which is the head's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, WIDTH)
        self.encoder = T5Stack(self.shared, 2)
        self.decoder = T5Stack(self.shared, 2, is_decoder=True)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        memory = self.encoder(input_ids)
        return self.lm_head(self.decoder(decoder_input_ids, memory) * (WIDTH**-0.5))


class TorchTransformer(nn.Module):
    """torch's own encoder-decoder, with a causal mask and masks of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.src_tok_emb, self.tgt_tok_emb = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.positional = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, 0.0, batch_first=True)
        self.generator = nn.Linear(WIDTH, WORDS)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool, device=tgt.device), diagonal=1)
        src_emb = self.src_tok_emb(src) + self.positional[: src.size(1)]
        tgt_emb = self.tgt_tok_emb(tgt) + self.positional[: tgt.size(1)]
        padding = src == 0
        outs = self.transformer(
            src_emb, tgt_emb, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding
        )
        return self.generator(outs)


class Bert(nn.Module):
    """Keyword arguments; the mask of padding is extended once for all layers; returns a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({
            "word": nn.Embedding(WORDS, WIDTH), "position": nn.Embedding(LENGTH, WIDTH), "norm": nn.LayerNorm(WIDTH)
        })  # fmt: skip
        self.encoder = nn.ModuleList([BertLayer() for _ in range(4)])
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.cls = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        x = self.embeddings["norm"](self.embeddings["word"](input_ids) + self.embeddings["position"](positions))
        extended = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.encoder:
            x = layer(x, extended)
        return {"logits": self.cls(x), "pooled": torch.tanh(self.pooler(x[:, 0]))}


class BertLayer(nn.Module):
    def __init__(self, hidden_size: int = WIDTH, num_attention_heads: int = 4) -> None:
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.query, self.key, self.value = (nn.Linear(hidden_size, hidden_size) for _ in range(3))
        self.attention_output, self.norm1 = nn.Linear(hidden_size, hidden_size), nn.LayerNorm(hidden_size)
        self.intermediate, self.output = nn.Linear(hidden_size, 24), nn.Linear(24, hidden_size)
        self.norm2 = nn.LayerNorm(hidden_size)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        new_shape = (*x.size()[:-1], self.num_attention_heads, self.attention_head_size)
        return x.view(*new_shape).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (self.transpose_for_scores(each(x)) for each in (self.query, self.key, self.value))
        probs = (torch.matmul(q, k.transpose(-1, -2)) / self.attention_head_size**0.5 + mask).softmax(dim=-1)
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).flatten(2)
        x = self.norm1(self.attention_output(context) + x)
        return self.norm2(self.output(F.gelu(self.intermediate(x))) + x)


@dataclass
class TextBatch:
    tokens: Tensor
    mask: Tensor


@dataclass
class TextOutput:
    logits: Tensor
    hidden: Tensor


class DataclassModel(nn.Module):
    """A dataclass in, another one out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList([
            nn.TransformerEncoderLayer(WIDTH, 4, 24, 0.0, batch_first=True, norm_first=True) for _ in range(4)
        ])  # fmt: skip
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, batch: TextBatch) -> TextOutput:
        x = self.embed(batch.tokens)
        for layer in self.encoder:
            x = layer(x, src_key_padding_mask=~batch.mask)
        x = self.norm(x)
        return TextOutput(logits=self.head(x), hidden=x)


class DictModel(DataclassModel):
    """One argument, which is a mapping."""

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return vars(super().forward(TextBatch(batch["tokens"], batch["mask"])))


class RewardModel(nn.Module):
    """The scalar of the last real token; the backbone is called by its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = NanoGPT(GPTConfig(), tied=False).transformer
        self.v_head = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        position_ids = attention_mask.cumsum(-1) - 1
        x = self.backbone.wte(input_ids) + self.backbone.wpe(position_ids.clamp(min=0))
        for block in self.backbone.h:
            x = block(x)
        values = self.v_head(self.backbone.ln_f(x)).squeeze(-1)
        last = attention_mask.sum(-1) - 1
        return values.gather(1, last[:, None]).squeeze(1)


def _mask(generator: torch.Generator, rows: int, length: int) -> Tensor:
    """Ones for the real tokens of each sample, which come first; one at least."""
    real = torch.randint(1, length + 1, (rows, 1), generator=generator)
    return (torch.arange(length) < real).long()


def _pairs(generator: torch.Generator, rows: int, length: int) -> Batch:
    source = ids(generator, rows, length).inputs
    source[:, 0] = 1  # no sample is all padding
    drawn = ids(generator, rows, length)
    return Batch((source, drawn.inputs), drawn.targets)


def _masked(generator: torch.Generator, rows: int, length: int) -> Batch:
    drawn = ids(generator, rows, length)
    return Batch({"input_ids": drawn.inputs, "attention_mask": _mask(generator, rows, length)}, drawn.targets)


def _dataclass(generator: torch.Generator, rows: int, length: int) -> Batch:
    drawn = ids(generator, rows, length)
    return Batch((TextBatch(drawn.inputs, _mask(generator, rows, length).bool()),), drawn.targets)


def _mapping(generator: torch.Generator, rows: int, length: int) -> Batch:
    drawn = _dataclass(generator, rows, length)
    return Batch((vars(drawn.inputs[0]),), drawn.targets)


ENCODERS: tuple[Handwritten, ...] = (
    entry("t5_encoder", T5Encoder, loss=cross_entropy, tags="language"),
    entry("t5", T5, _pairs, cross_entropy, "shared"),
    entry("torch_transformer", TorchTransformer, _pairs, cross_entropy, "free"),
    entry("bert", Bert, _masked, cross_entropy_and),
    entry("dataclass", DataclassModel, _dataclass, cross_entropy_and),
    entry("mapping", DictModel, _mapping, cross_entropy_and),
    entry("reward", RewardModel, _masked),
)
