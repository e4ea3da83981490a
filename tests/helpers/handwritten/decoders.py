# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N806
"""Decoders of words in the manner of the repositories that people begin from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ._entry import LENGTH, WIDTH, WORDS, Handwritten, cross_entropy, entry


@dataclass
class GPTConfig:
    block_size: int = LENGTH
    vocab_size: int = WORDS
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = WIDTH
    dropout: float = 0.0
    bias: bool = True


class CausalSelfAttention(nn.Module):
    """nanoGPT's manner: one projection, split by the number of features, views of counts."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 2 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(2 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class GPTBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn: nn.Module = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Tied words, learned positions, blocks in a ModuleList of a ModuleDict."""

    def __init__(self, config: GPTConfig, *, tied: bool = True) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "drop": nn.Dropout(config.dropout),
            "h": nn.ModuleList([GPTBlock(config) for _ in range(config.n_layer)]),
            "ln_f": nn.LayerNorm(config.n_embd),
        })  # fmt: skip
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        _, t = idx.size()
        assert t <= self.config.block_size
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class MaskedAttention(nn.Module):
    """minGPT's manner: scores by hand and a mask as a buffer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.key = nn.Linear(config.n_embd, config.n_embd)
        self.query = nn.Linear(config.n_embd, config.n_embd)
        self.value = nn.Linear(config.n_embd, config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.attn_drop = nn.Dropout(config.dropout)
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("mask", mask.view(1, 1, config.block_size, config.block_size))
        self.n_head = config.n_head

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        k = self.key(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = self.query(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = self.value(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_drop(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.proj(y)


class MinBlock(nn.Module):
    """The MLP is a closure over a ModuleDict."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = MaskedAttention(config)
        self.mlp = nn.ModuleDict({
            "c_fc": nn.Linear(config.n_embd, 2 * config.n_embd),
            "act": nn.GELU(approximate="tanh"),
            "c_proj": nn.Linear(2 * config.n_embd, config.n_embd),
        })  # fmt: skip
        m = self.mlp
        self.mlpf = lambda x: m.c_proj(m.act(m.c_fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class MinGPT(nn.Module):
    """Positions are a free parameter, blocks a Sequential."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(config.vocab_size, config.n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, config.block_size, config.n_embd))
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(*[MinBlock(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.block_size = config.block_size

    def forward(self, idx: Tensor) -> Tensor:
        _, t = idx.size()
        x = self.drop(self.tok_emb(idx) + self.pos_emb[:, :t, :])
        return self.head(self.ln_f(self.blocks(x)))


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) * self.weight


@dataclass
class ModelArgs:
    dim: int = WIDTH
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 2
    vocab_size: int = WORDS
    max_seq_len: int = LENGTH


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> Tensor:
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: dim // 2].double() / dim))
    freqs = torch.outer(torch.arange(end).double(), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    xq_ = torch.view_as_complex(xq.reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, xq_.shape[1], 1, xq_.shape[-1])
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    bs, slen, n_kv_heads, head_dim = x.shape
    if n_rep == 1:
        return x
    x = x[:, :, :, None, :].expand(bs, slen, n_kv_heads, n_rep, head_dim)
    return x.reshape(bs, slen, n_kv_heads * n_rep, head_dim)


class LlamaAttention(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = args.n_heads, args.n_kv_heads
        self.n_rep = self.n_heads // self.n_kv_heads
        self.head_dim = args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, args.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * self.head_dim, args.dim, bias=False)

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = xk.view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xv = xv.view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis)
        xk, xv = repeat_kv(xk, self.n_rep), repeat_kv(xv, self.n_rep)
        xq, xk, xv = xq.transpose(1, 2), xk.transpose(1, 2), xv.transpose(1, 2)
        scores = torch.matmul(xq, xk.transpose(2, 3)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        output = torch.matmul(F.softmax(scores, dim=-1), xv)
        return self.wo(output.transpose(1, 2).contiguous().view(bsz, seqlen, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, layer_id: int, args: ModelArgs) -> None:
        super().__init__()
        self.attention = LlamaAttention(args)
        self.feed_forward = FeedForward(args.dim, 2 * args.dim)
        self.layer_id = layer_id
        self.attention_norm, self.ffn_norm = RMSNorm(args.dim), RMSNorm(args.dim)

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """Complex rotary factors, a plain attribute here and no buffer; a mask made of the tokens' number."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.params = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList()
        for layer_id in range(args.n_layers):
            self.layers.append(LlamaBlock(layer_id, args))
        self.norm = RMSNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.freqs_cis = precompute_freqs_cis(args.dim // args.n_heads, args.max_seq_len * 2)

    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        _, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        freqs_cis = self.freqs_cis.to(h.device)[start_pos : start_pos + seqlen]
        mask = None
        if seqlen > 1:
            mask = torch.full((seqlen, seqlen), float("-inf"), device=tokens.device)
            mask = torch.triu(mask, diagonal=1).type_as(h)
        for layer in self.layers:
            h = layer(h, freqs_cis, mask)
        return self.output(self.norm(h))


@dataclass
class Config:
    n_embd: int = WIDTH
    n_head: int = 4
    n_query_groups: int = 2
    head_size: int = 4
    n_layer: int = 3
    padded_vocab_size: int = WORDS
    intermediate_size: int = 24
    parallel_residual: bool = True


class GroupedAttention(nn.Module):
    """LitGPT's manner: all counts come from a config, one projection of queries, keys and values of groups."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        shape = (config.n_head + 2 * config.n_query_groups) * config.head_size
        self.attn = nn.Linear(config.n_embd, shape)
        self.proj = nn.Linear(config.head_size * config.n_head, config.n_embd)
        self.config = config

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.size()
        c = self.config
        q_per_kv = c.n_head // c.n_query_groups
        qkv = self.attn(x).view(B, T, c.n_query_groups, q_per_kv + 2, c.head_size).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((q_per_kv, 1, 1), dim=2)
        k = k.expand(B, c.n_query_groups, q_per_kv, T, c.head_size).reshape(B, -1, T, c.head_size)
        v = v.expand(B, c.n_query_groups, q_per_kv, T, c.head_size).reshape(B, -1, T, c.head_size)
        q = q.reshape(B, -1, T, c.head_size)
        q, k = self.rope(q, cos, sin), self.rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0 / math.sqrt(c.head_size))
        return self.proj(y.transpose(1, 2).reshape(B, T, c.head_size * c.n_head))

    @staticmethod
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.size(-1) // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class GroupedBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.n_embd)
        self.attn = GroupedAttention(config)
        self.norm_2 = None if config.parallel_residual else nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, config.intermediate_size),
            nn.GELU(),
            nn.Linear(config.intermediate_size, config.n_embd),
        )
        self.config = config

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n_1 = self.norm_1(x)
        h = self.attn(n_1, cos, sin)
        if self.config.parallel_residual:
            return self.mlp(n_1) + h + x
        x = h + x
        return self.mlp(self.norm_2(x)) + x


class GroupedGPT(nn.Module):
    """The head is registered first, though it is called last."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size)
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
            "h": nn.ModuleList(GroupedBlock(config) for _ in range(config.n_layer)),
            "ln_f": nn.LayerNorm(config.n_embd),
        })  # fmt: skip
        theta = 1.0 / (10000 ** (torch.arange(0, config.head_size, 2).double() / config.head_size))
        angles = torch.outer(torch.arange(LENGTH).double(), theta).repeat(1, 2)
        self.register_buffer("cos", torch.cos(angles), persistent=False)
        self.register_buffer("sin", torch.sin(angles), persistent=False)

    def forward(self, idx: Tensor) -> Tensor:
        T = idx.size(1)
        cos, sin = self.cos[:T], self.sin[:T]
        x = self.transformer.wte(idx) * (self.config.n_embd**0.5)
        for block in self.transformer.h:
            x = block(x, cos, sin)
        x = self.transformer.ln_f(x)
        return torch.tanh(self.lm_head(x) / 30.0) * 30.0  # soft-capped logits


class Lambdas(nn.Module):
    """Gains of residuals as free parameters of the model, the embedding mixed in again, skips of the first half."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.value_embeds = nn.ModuleList([nn.Embedding(config.vocab_size, config.n_embd) for _ in range(2)])
        self.blocks = nn.ModuleList([GPTBlock(config) for _ in range(config.n_layer)])
        self.resid_lambdas = nn.Parameter(torch.ones(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.full((config.n_layer,), 0.1))
        self.skip_weights = nn.Parameter(torch.ones(config.n_layer // 2))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        x = x0 = F.rms_norm(self.wte(idx), (self.wte.embedding_dim,))
        ve = [embed(idx) for embed in self.value_embeds]
        ve = [ve[0], *[None] * (len(self.blocks) - 2), ve[1]]
        skips = []
        half = len(self.blocks) // 2
        for i, block in enumerate(self.blocks):
            if i >= half:
                x = x + self.skip_weights[i - half] * skips.pop()
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            if ve[i] is not None:
                x = x + 0.5 * ve[i]
            x = block(x)
            if i < half:
                skips.append(x)
        return self.lm_head(F.rms_norm(x, (x.size(-1),)))


class SharedBlock(nn.Module):
    """ALBERT's manner: one block, as many times as the config says, and a factorized embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, 8)
        self.embedding_hidden_mapping_in = nn.Linear(8, config.n_embd)
        self.layer = GPTBlock(config)
        self.decoder = nn.Linear(config.n_embd, 8)
        self.n_layer = config.n_layer
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embedding_hidden_mapping_in(self.word_embeddings(idx))
        for _ in range(self.n_layer):
            x = self.layer(x)
        return F.linear(self.decoder(x), self.word_embeddings.weight, self.bias)


class FunctionalHead(nn.Module):
    """The head is a function of the embedding's weight, and a gain that belongs to no module."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Parameter(torch.zeros(config.block_size, config.n_embd))
        self.layers = nn.ModuleList([GPTBlock(config) for _ in range(config.n_layer)])
        self.final_gain = nn.Parameter(torch.ones(config.n_embd))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embed(idx) + self.positions[: idx.shape[1]]
        for layer in self.layers:
            x = layer(x)
        x = F.layer_norm(x, x.shape[-1:]) * self.final_gain
        return F.linear(x, self.embed.weight)


def _gpt(**changes: Any) -> NanoGPT:
    return NanoGPT(GPTConfig(**changes))


DECODERS: tuple[Handwritten, ...] = (
    entry("nano_gpt", _gpt, loss=cross_entropy, tags="language causal"),
    entry("nano_gpt_dropout", lambda: _gpt(dropout=0.2), loss=cross_entropy, tags="language causal random"),
    entry("min_gpt", lambda: MinGPT(GPTConfig()), loss=cross_entropy, tags="language causal free"),
    entry("llama", lambda: Llama(ModelArgs()), loss=cross_entropy, tags="language causal"),
    entry("grouped_gpt", lambda: GroupedGPT(Config()), loss=cross_entropy, tags="language causal"),
    entry("lambdas", lambda: Lambdas(GPTConfig()), loss=cross_entropy, tags="language causal free"),
    entry("shared_block", lambda: SharedBlock(GPTConfig()), loss=cross_entropy, tags="language causal free shared"),
    entry("functional_head", lambda: FunctionalHead(GPTConfig()), loss=cross_entropy, tags="language causal free"),
)
