# SPDX-License-Identifier: Apache-2.0
"""Blocks as well-known repositories write them: norms between two layers, fused layers, mixers and experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ._entry import WIDTH, WORDS, Handwritten, cross_entropy, entry

HEADS = 4


class Model(nn.Module):
    """An embedding, blocks with residuals, and a head behind a soft bound."""

    def __init__(self, mixer: Callable[[], nn.Module], inner: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block(mixer(), inner and inner()) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return 30 * torch.tanh(self.head(self.norm(x)) / 30)


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, inner: nn.Module | None) -> None:
        super().__init__()
        self.norm, self.mixer, self.inner = nn.LayerNorm(WIDTH), mixer, inner

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))
        return x if self.inner is None else x + self.inner(x)


class Rms(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    def __init__(self, layer: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.qkv, self.out = layer(WIDTH, 3 * WIDTH), layer(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = (each.view(rows, tokens, HEADS, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))


class GatedNormed(nn.Module):
    """An MLP with a norm of its hidden features."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.norm, self.out = nn.Linear(WIDTH, 96), nn.LayerNorm(48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return self.out(self.norm(x * F.gelu(gate)))


class Parallel(nn.Module):
    """An attention with one head of keys and values, and an MLP, both from one fused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = (WIDTH, WIDTH // HEADS, WIDTH // HEADS, 96)
        self.fused = nn.Linear(WIDTH, sum(self.sizes), bias=False)
        self.attn_out, self.ff_out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(48, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v, hidden = self.fused(x).split(self.sizes, dim=-1)
        scores = torch.einsum("bhid,bjd->bhij", q.view(rows, tokens, HEADS, -1).transpose(1, 2), k)
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.finfo(x.dtype).max)
        mixed = torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v).transpose(1, 2).flatten(2)
        value, gate = hidden.chunk(2, -1)
        return self.attn_out(mixed) + self.ff_out(value * F.silu(gate))


class StateSpace(nn.Module):
    """A fused layer of gates, values, states shared by heads, and steps; a norm in front of the last layer."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        inner = 2 * WIDTH
        self.sizes = (inner, inner + 2 * states, HEADS)
        self.states = states
        self.into = nn.Linear(WIDTH, sum(self.sizes), bias=False)
        self.conv = nn.Conv1d(self.sizes[1], self.sizes[1], 3, groups=self.sizes[1], padding=2)
        self.dt_bias, self.decay = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.zeros(HEADS))
        self.norm, self.out = Rms(inner), nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        gate, hidden, steps = torch.split(self.into(x), self.sizes, dim=-1)
        steps = F.softplus(steps + self.dt_bias)
        hidden = F.silu(self.conv(hidden.transpose(1, 2)).transpose(1, 2)[:, :tokens])
        values, b, c = torch.split(hidden, [2 * WIDTH, self.states, self.states], dim=-1)
        values = values.view(rows, tokens, HEADS, -1)
        past = (steps * -self.decay.exp()).cumsum(1)
        future = ~torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, :, :, None]
        weights = (past[:, :, None] - past[:, None]).masked_fill(future, -torch.inf).exp()
        mixed = torch.einsum("bin,bjn,bijh,bjh,bjhp->bihp", c, b, weights, steps, values)
        return self.out(self.norm(mixed.reshape(rows, tokens, -1) * F.silu(gate)))


class LongConvolution(nn.Module):
    """A convolution by torch.fft with kernels that a small network makes."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kernels = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, WIDTH))
        self.skip = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        gate, other, values = self.into(x).transpose(1, 2).split(WIDTH, dim=1)
        times = torch.linspace(0, 1, tokens, dtype=x.dtype)[:, None]
        kernels = self.kernels(torch.cat([times, torch.cos(6 * times), torch.sin(6 * times)], -1)).transpose(0, 1)
        values = values * other
        spectrum = torch.fft.rfft(values, n=2 * tokens) * torch.fft.rfft(kernels, n=2 * tokens)
        mixed = torch.fft.irfft(spectrum, n=2 * tokens)[..., :tokens] + values * self.skip.unsqueeze(-1)
        return self.out((mixed * gate).transpose(1, 2))


class SortedExperts(nn.Module):
    """Experts in one matrix, which compute tokens sorted by expert."""

    def __init__(self, experts: int = 4, width: int = 24) -> None:
        super().__init__()
        self.experts, self.width = experts, width
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.w1, self.w2 = (nn.Parameter(0.2 * torch.randn(experts * width, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        order = chosen.flatten().argsort(stable=True)
        counts: list[int] = chosen.flatten().bincount(minlength=self.experts).tolist()
        w1, w2 = (each.view(self.experts, self.width, -1) for each in (self.w1, self.w2))
        pieces = x[order // 2].split(counts)
        made = torch.cat([F.silu(each @ w1[at].t()) @ w2[at] for at, each in enumerate(pieces)])
        weighted = made * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // 2, weighted).view(shape)


class BatchedExperts(nn.Module):
    """Experts in one tensor each, which all tokens take by baddbmm."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.w1, self.b1 = (
            nn.Parameter(0.2 * torch.randn(experts, WIDTH, 24)),
            nn.Parameter(torch.zeros(experts, 1, 24)),
        )
        self.w2 = nn.Parameter(0.2 * torch.randn(experts, 24, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2).expand(len(self.w1), -1, -1)
        made = torch.bmm(F.gelu(torch.baddbmm(self.b1, tokens, self.w1)), self.w2).view(len(self.w1), *x.shape)
        return torch.einsum("ebtd,bte->btd", made, self.gate(x).softmax(-1))


class Rescaled(nn.Linear):
    """A frozen direction with a low-rank correction, of a trained length."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))
        self.length = nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight = self.weight + self.b @ self.a
        return F.linear(x, (self.length / weight.norm(dim=1).detach()).unsqueeze(1) * weight, self.bias)


class Rounded(nn.Linear):
    """Inputs that are scaled by their greatest value and rounded, with a gradient as if they were not."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = F.rms_norm(x, (x.shape[-1],))
        scale = 127 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
        return F.linear(x + ((x * scale).round() / scale - x).detach(), self.weight, self.bias)


class Named(nn.Module):
    """Weights in a dict of parameters, for addmm and tensordot."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: 0.2 * torch.randn(WIDTH, WIDTH) for name in "qkvo"})
        self.biases = nn.ParameterList([torch.zeros(WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        named = zip("qkv", self.biases, strict=True)
        flat = (torch.addmm(bias, x.reshape(-1, width), self.weights[name]) for name, bias in named)
        q, k, v = (each.view(rows, tokens, HEADS, -1).transpose(1, 2) for each in flat)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return torch.tensordot(mixed, self.weights["o"], dims=1)


class Einsums(nn.Module):
    """Weights with a dimension of heads, and one einsum for values and the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(0.2 * torch.randn(WIDTH, HEADS, 4)) for _ in range(3))
        self.wo = nn.Parameter(0.2 * torch.randn(HEADS, 4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,dhk->bthk", x, each) for each in (self.wq, self.wk, self.wv))
        scores = 50 * torch.tanh(torch.einsum("bthk,bshk->bhts", q, k) / 50)
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return torch.einsum("bhts,bshk,hkd->btd", torch.where(past, scores, -2e38).softmax(-1), v, self.wo)


def _model(name: str, mixer: Callable[[], nn.Module], inner: Any = None, tags: str = "language") -> Handwritten:
    return entry(name, lambda: Model(mixer, inner), loss=cross_entropy, tags=tags)


REPOSITORIES = (
    _model("gated_normed", Attention, GatedNormed, "language causal"),
    _model("parallel_fused", Parallel, tags="language causal"),
    _model("state_space", StateSpace, tags="language causal"),
    _model("long_convolution", LongConvolution),
    _model("sorted_experts", Attention, SortedExperts, "language causal decisions"),
    _model("batched_experts", Attention, BatchedExperts, "language causal"),
    _model("rescaled", lambda: Attention(Rescaled), tags="language causal"),
    _model("rounded", lambda: Attention(Rounded), tags="language causal"),
    _model("named_weights", Named, tags="language causal"),
    _model("einsums", Einsums, tags="language causal"),
)
