# SPDX-License-Identifier: Apache-2.0
"""A small language model whose one loop runs on every mesh, and what it ends with."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import accel
from accel.tensors import full_tensor

WIDTH = 16
WORDS = 24
LENGTH = 8

# Styles by pattern for `LanguageModel`, whose head gives each rank the logits of its own words.
STYLES: Any = {
    "embed.tokens": "embedding_rowwise",
    "blocks.*.attention.q": "colwise",
    "blocks.*.attention.k": "colwise",
    "blocks.*.attention.v": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
    "head": "colwise",
}


class Embed(nn.Module):
    """Vectors of tokens and of their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.places(position_ids)


class Attention(nn.Module):
    """Causal attention over positions that ranks may share; as many heads as the projections give this rank."""

    def __init__(self, ctx: accel.DistContext, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.ctx = ctx
        self.head_dim = WIDTH // heads
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, kv_heads * self.head_dim)
        self.v = nn.Linear(WIDTH, kv_heads * self.head_dim)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.out(accel.context_attention(self.ctx, q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two layers around a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    """Attention and a multilayer perceptron, each behind a norm and beside a residual."""

    def __init__(self, ctx: accel.DistContext, kv_heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention(ctx, 4, kv_heads)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nn.Module):
    """Predicts each next token."""

    def __init__(self, ctx: accel.DistContext, *, depth: int = 2, kv_heads: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embed = Embed()
        self.blocks = nn.ModuleList(Block(ctx, kv_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.tokens.weight

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.embed(ids, position_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Run(NamedTuple):
    """Parameters that this rank has a part of, whole and by name; norms of gradients and mean losses, by step."""

    parameters: dict[str, Tensor]
    norms: list[float]
    losses: list[float]


def rows(number: int = 10) -> Tensor:
    """Sequences of tokens."""
    return torch.randint(WORDS, (number, LENGTH), generator=torch.Generator().manual_seed(0))


def make_objects(ctx: accel.DistContext, *, frozen: bool = False, **options: Any) -> tuple[nn.Module, Any]:
    """A model in float64, the same on all ranks of any number, and its optimizer."""
    with accel.seeded(ctx, 0):
        model = LanguageModel(ctx, **options).double()
    if frozen:
        model.blocks[0].mlp.requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2)


def train(
    ctx: accel.DistContext,
    mesh: str,
    *,
    strategy: Any = "ddp",
    accumulation: int = 1,
    epochs: int = 1,
    plan: accel.Plan | None = None,
    **options: Any,
) -> Run:
    """Train on batches of 4 sequences, the last of 2; some tokens do not count."""
    ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
    model, optimizer = make_objects(ctx, **options)
    loader = accel.prepare_loader(ctx, DataLoader(rows(), batch_size=4), global_batch=4)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan or accel.Plan(tensor=STYLES))
    state = accel.train_state(ctx, accumulation=accumulation)
    norms: list[float] = []
    losses: list[float] = []
    while state.epoch < epochs:
        for batch in accel.batches(ctx, loader, state):
            state = state.next(batch)
            labels = batch.data.masked_fill(batch.data == 3, -100)
            labels[int(batch.valid) :] = -100  # stand-ins
            part = accel.split_sequence(ctx, {"ids": batch.data, "labels": labels})
            loss, state = accel.forward_backward(
                ctx,
                model,
                state,
                {"ids": part["ids"], "position_ids": part["position_ids"]},
                targets=part["labels"],
                loss_fn=lambda logits, wanted: accel.vocab_cross_entropy(ctx, logits.flatten(0, 1), wanted.flatten()),
                weight=(part["labels"] != -100).sum(),
            )
            losses.append(loss.item())
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
                norms.append(float(state.grad_norm))
    held = accel.unwrap_model(model).named_parameters(remove_duplicate=False)
    return Run({name: full_tensor(each) for name, each in held}, norms, losses)
