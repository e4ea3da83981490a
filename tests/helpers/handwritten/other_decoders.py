# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N806
"""Language models with other layers: recurrences, scans, experts and adapters, and residuals outside of modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ._entry import WIDTH, WORDS, Handwritten, cross_entropy, cross_entropy_and, entry
from .decoders import CausalSelfAttention, FeedForward, GPTConfig, NanoGPT, RMSNorm


class RNNModel(nn.Module):
    """The word language model of torch's examples: returns the hidden state beside the logits."""

    def __init__(self, rnn_type: str, *, tie_weights: bool = False) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.encoder = nn.Embedding(WORDS, WIDTH)
        self.rnn = getattr(nn, rnn_type)(WIDTH, WIDTH, 2, batch_first=True)
        self.decoder = nn.Linear(WIDTH, WORDS)
        if tie_weights:
            self.decoder.weight = self.encoder.weight
        self.rnn_type = rnn_type

    def init_hidden(self, bsz: int) -> Tensor | tuple[Tensor, Tensor]:
        weight = next(self.parameters())
        state = weight.new_zeros(2, bsz, WIDTH)
        return (state, state.clone()) if self.rnn_type == "LSTM" else state

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        emb = self.drop(self.encoder(ids))
        output, hidden = self.rnn(emb, self.init_hidden(len(ids)))
        last = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.decoder(self.drop(output)), last.transpose(0, 1)


class StackedCells(nn.Module):
    """A GRU cell for each layer, stepped through time by hand."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.cells = nn.ModuleList([nn.GRUCell(WIDTH, WIDTH) for _ in range(depth)])
        self.starts = nn.Parameter(torch.zeros(depth, WIDTH))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        xs = self.embed(ids).unbind(1)
        for cell, start in zip(self.cells, self.starts, strict=True):
            h, ys = start.expand(len(ids), -1), []
            for x in xs:
                h = cell(x, h)
                ys.append(h)
            xs = ys
        return self.out(torch.stack(xs, dim=1))


class MambaBlock(nn.Module):
    """Mamba in plain torch: a depthwise convolution and a selective scan, step by step."""

    def __init__(self, d_model: int = WIDTH, expand: int = 2, n: int = 4, dt_rank: int = 2, d_conv: int = 3) -> None:
        super().__init__()
        self.d_inner, self.n, self.dt_rank = d_model * expand, n, dt_rank
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=False)
        self.conv1d = nn.Conv1d(self.d_inner, self.d_inner, d_conv, groups=self.d_inner, padding=d_conv - 1)
        self.x_proj = nn.Linear(self.d_inner, dt_rank + 2 * n, bias=False)
        self.dt_proj = nn.Linear(dt_rank, self.d_inner)
        A = torch.arange(1, n + 1).float().repeat(self.d_inner, 1)
        self.A_log = nn.Parameter(torch.log(A))
        self.D = nn.Parameter(torch.ones(self.d_inner))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x, res = self.in_proj(x).split(split_size=[self.d_inner, self.d_inner], dim=-1)
        x = self.conv1d(x.transpose(1, 2))[:, :, :length].transpose(1, 2)
        x = F.silu(x)
        return self.out_proj(self.ssm(x) * F.silu(res))

    def ssm(self, x: Tensor) -> Tensor:
        A = -torch.exp(self.A_log)
        delta, B, C = self.x_proj(x).split(split_size=[self.dt_rank, self.n, self.n], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        deltaA = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
        deltaB_u = torch.einsum("bld,bln,bld->bldn", delta, B, x)
        state = torch.zeros((x.shape[0], self.d_inner, self.n), dtype=x.dtype, device=x.device)
        ys = []
        for i in range(x.shape[1]):
            state = deltaA[:, i] * state + deltaB_u[:, i]
            ys.append(torch.einsum("bdn,bn->bd", state, C[:, i]))
        return torch.stack(ys, dim=1) + x * self.D


class MambaLM(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": RMSNorm(WIDTH), "mixer": MambaBlock()}) for _ in range(depth)
        )
        self.norm_f = RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer["mixer"](layer["norm"](x)) + x
        return self.lm_head(self.norm_f(x))


class Expert(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


class SparseMoE(nn.Module):
    """A loop over experts, each with the tokens that chose it; an expert without tokens is skipped."""

    def __init__(self, d: int, n: int = 4, k: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList([Expert(d) for _ in range(n)])
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.size(-1))
        weights, chosen = torch.topk(self.gate(flat), self.k)
        weights = F.softmax(weights, dim=1, dtype=torch.double).type_as(x)
        results = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, nth = torch.where(chosen == i)
            if token.numel() == 0:
                continue
            results[token] += weights[token, nth, None] * expert(flat[token])
        return results.view_as(x)


class MoEBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.moe = SparseMoE(config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.moe(self.ln_2(x))


def moe_gpt() -> nn.Module:
    config = GPTConfig(n_layer=3)
    model = NanoGPT(config, tied=False)
    model.transformer["h"] = nn.ModuleList([MoEBlock(config) for _ in range(config.n_layer)])
    return model


class LoRALinear(nn.Module):
    """A frozen linear layer with a low-rank product beside it."""

    def __init__(self, base: nn.Linear, r: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base = base
        self.scaling = alpha / r
        for p in base.parameters():
            p.requires_grad = False
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) / r)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def lora_gpt(*, blocks: int | None = None) -> nn.Module:
    """All but the adapters is frozen. `blocks`: number of blocks with adapters, from the last one; None for all."""
    model = NanoGPT(GPTConfig(), tied=False)
    for p in model.parameters():
        p.requires_grad = False
    found = list(model.transformer.h)
    for block in found[len(found) - (blocks or len(found)) :]:
        for module, name in (
            (block.attn, "c_attn"),
            (block.attn, "c_proj"),
            (block.mlp, "c_fc"),
            (block.mlp, "c_proj"),
        ):
            setattr(module, name, LoRALinear(getattr(module, name)))
    return model


class AlibiAttention(nn.Module):
    """Multi-query attention; distances times slopes."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim_head = heads, dim // heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * self.dim_head, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.to_q(x).unflatten(-1, (self.heads, self.dim_head)).transpose(1, 2)
        k, v = self.to_kv(x).chunk(2, dim=-1)
        sim = torch.einsum("b h i d, b j d -> b h i j", q * self.dim_head**-0.5, k) + bias
        out = torch.einsum("b h i j, b j d -> b h i d", sim.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


class ResidualsBetween(nn.Module):
    """Residuals are added in the model's forward, so that no module returns the stream."""

    def __init__(self, dim: int = WIDTH, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.token_emb = nn.Embedding(WORDS, dim)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(
                nn.ModuleList([RMSNorm(dim), AlibiAttention(dim, heads), RMSNorm(dim), FeedForward(dim, 2 * dim)])
            )
        self.to_logits = nn.Sequential(RMSNorm(dim), nn.Linear(dim, WORDS, bias=False))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        seq = torch.arange(n, device=ids.device)
        dist = seq[None, :] - seq[:, None]
        bias = (self.slopes[:, None, None] * dist).masked_fill(dist > 0, float("-inf"))
        x = self.token_emb(ids)
        for norm1, attn, norm2, ff in self.layers:
            x = attn(norm1(x), bias) + x
            x = ff(norm2(x)) + x
        return self.to_logits(x)


class LensBlock(nn.Module):
    """A block of TransformerLens: a matrix for each head, and einsum of parameters."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        head = dim // heads
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.randn(heads, dim, head) * 0.2) for _ in range(3))
        self.b_Q, self.b_K, self.b_V = (nn.Parameter(torch.zeros(heads, head)) for _ in range(3))
        self.W_O, self.b_O = nn.Parameter(torch.randn(heads, head, dim) * 0.2), nn.Parameter(torch.zeros(dim))
        self.W_in, self.b_in = nn.Parameter(torch.randn(dim, 4 * dim) * 0.2), nn.Parameter(torch.zeros(4 * dim))
        self.W_out, self.b_out = nn.Parameter(torch.randn(4 * dim, dim) * 0.2), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln1(x)
        q = torch.einsum("bpm,nmh->bpnh", normed, self.W_Q) + self.b_Q
        k = torch.einsum("bpm,nmh->bpnh", normed, self.W_K) + self.b_K
        v = torch.einsum("bpm,nmh->bpnh", normed, self.W_V) + self.b_V
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) / q.shape[-1] ** 0.5
        later = torch.triu(torch.ones(scores.shape[-2:], device=x.device), diagonal=1).bool()
        pattern = scores.masked_fill(later, float("-inf")).softmax(-1)
        z = torch.einsum("bknh,bnqk->bqnh", v, pattern)
        x = x + torch.einsum("bqnh,nhm->bqm", z, self.W_O) + self.b_O
        hidden = F.gelu(torch.einsum("bpm,mf->bpf", self.ln2(x), self.W_in) + self.b_in)
        return x + torch.einsum("bpf,fm->bpm", hidden, self.W_out) + self.b_out


class SingleStream(nn.Module):
    """A block of PaLM, and of FLUX: one layer makes queries, one key, one value and gates; another takes both results
    side by side."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.norm = nn.LayerNorm(dim)
        self.linear1 = nn.Linear(dim, dim + 2 * dim // heads + 4 * dim)
        self.linear2 = nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        head = self.dim // self.heads
        q, k, v, gates = self.linear1(self.norm(x)).split([self.dim, head, head, 4 * self.dim], -1)
        scores = q.view(b, n, self.heads, head).transpose(1, 2) @ k[:, None].transpose(-1, -2) / head**0.5
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        mixed = (scores.masked_fill(later, float("-inf")).softmax(-1) @ v[:, None]).transpose(1, 2).reshape(b, n, -1)
        up, gate = gates.chunk(2, -1)
        return x + self.linear2(torch.cat([mixed, up * F.silu(gate)], -1))


def _words(block: type[nn.Module]) -> nn.Module:
    blocks = [block(WIDTH, 4) for _ in range(2)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


OTHER_DECODERS: tuple[Handwritten, ...] = (
    entry("lens", lambda: _words(LensBlock), loss=cross_entropy, tags="language causal"),
    entry("single_stream", lambda: _words(SingleStream), loss=cross_entropy, tags="language causal"),
    entry("lstm", lambda: RNNModel("LSTM", tie_weights=True), loss=cross_entropy_and, tags="causal"),
    entry("gru", lambda: RNNModel("GRU"), loss=cross_entropy_and, tags="causal"),
    entry("cells", StackedCells, loss=cross_entropy, tags="language causal free"),
    entry("mamba", MambaLM, loss=cross_entropy, tags="language causal"),
    entry("moe", moe_gpt, loss=cross_entropy, tags="language causal decisions"),
    entry("lora", lora_gpt, loss=cross_entropy, tags="language causal frozen"),
    entry("lora_of_last_block", lambda: lora_gpt(blocks=1), loss=cross_entropy, tags="language causal frozen"),
    entry("residuals_between", ResidualsBetween, loss=cross_entropy, tags="language causal"),
)
