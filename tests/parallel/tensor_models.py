# SPDX-License-Identifier: Apache-2.0
"""A language model with every kind of layer that tensor parallelism divides, its plans, and steps on token data."""

from __future__ import annotations

from typing import Any

import torch
from steps import ByState
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader

import accel
from accel.topology import TensorStyle

CLASSES, WIDTH, HEADS, TOKENS = 12, 16, 4, 8
IGNORED = -100
NORM_AND_MLP: dict[str, Any] = {  # of blocks that are a norm and an MLP
    "blocks.*.mlp": "copy_input",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
}


class Attention(nn.Module):
    """Causal attention whose keys and values may have fewer heads than its queries, or come out of one layer."""

    def __init__(self, heads_of_keys: int, *, fused: bool) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.num_key_value_groups = HEADS // heads_of_keys
        self.fused = fused
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q = nn.Linear(WIDTH, WIDTH)
            self.k = nn.Linear(WIDTH, heads_of_keys * self.head_dim)
            self.v = nn.Linear(WIDTH, heads_of_keys * self.head_dim, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        if not self.fused:
            k, v = (part.repeat_interleave(self.num_key_value_groups, 1) for part in (k, v))
        return self.o(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, hidden), nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, heads_of_keys: int, *, fused: bool, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(heads_of_keys, fused=fused), Mlp(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    def __init__(
        self,
        heads_of_keys: int = HEADS,
        *,
        fused: bool = False,
        tied: bool = False,
        classes: int = CLASSES,
        hidden: int = 24,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, WIDTH, padding_idx=5)
        self.blocks = nn.ModuleList(Block(heads_of_keys, fused=fused, hidden=hidden) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, classes, bias=False)
        self.register_buffer("scale", torch.ones(()))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def made(seed: int = 1, *, frozen: bool = False, **options: Any) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Model(**options).double()
    if frozen:
        for name in ("embedding", "blocks.0.attention.o", "blocks.1.mlp.up"):
            model.get_submodule(name).requires_grad_(False)
    return model


BLOCK: dict[str, TensorStyle] = {"blocks.*.attention.o": "rowwise", "blocks.*.mlp.down": "rowwise"}
UP: dict[str, TensorStyle] = {"blocks.*.mlp.gate": "colwise", "blocks.*.mlp.up": "colwise"}
ENDS: dict[str, TensorStyle] = {"embedding": "embedding_rowwise", "head": "colwise"}
COPIES: dict[str, TensorStyle] = {"blocks.*.attention": "copy_input", "blocks.*.mlp": "copy_input"}
GATHERED: dict[str, TensorStyle] = {
    "blocks.*.mlp.gate": "colwise_gather_output",
    "blocks.*.mlp.up": "colwise_gather_output",
    "blocks.*.mlp.down": "rowwise_split_input",
}


def projections(*, fused: bool) -> dict[str, TensorStyle]:
    if fused:
        return {"blocks.*.attention.qkv": "packed_colwise_3"}
    return {f"blocks.*.attention.{name}": "colwise" for name in "qkv"}


def plans(*, fused: bool) -> dict[str, dict[str, TensorStyle]]:
    """Plans by name; each trains as one process does."""
    layers = BLOCK | UP | projections(fused=fused)
    return {
        "layers": layers,
        "copies": layers | COPIES,
        "ends": layers | COPIES | ENDS,
        "gathered": layers | GATHERED | {"embedding": "embedding_rowwise", "head": "colwise_gather_output"},
        "sequence": layers | COPIES,
        "sequence, ends": layers | COPIES | ENDS,
        "sequence, layers": layers,
        "nothing": {},
    }


def shares_tokens(name: str) -> bool:
    """Whether ranks share the tokens between layers, in a plan of this name."""
    return name.startswith("sequence")


def loader(samples: int, batch: int) -> DataLoader[Any]:
    ids = torch.randint(0, CLASSES - 1, (samples, TOKENS), generator=torch.Generator().manual_seed(4))
    labels = ids.roll(-1, 1)
    labels[:, -1] = IGNORED
    labels[0, :3] = IGNORED
    return DataLoader(list(zip(ids, labels, strict=True)), batch_size=batch)


def train(
    ctx: accel.DistContext,
    model: nn.Module,
    optimizer: Any,
    data: Any,
    steps: int,
    *,
    divided: bool,
    losses: list[torch.Tensor] | None = None,
) -> list[float]:
    """An epoch in windows of micro-batches, weighted by tokens; the norms. `losses` gets those of this rank's
    micro-batches, summed over tokens."""
    run = ByState(ctx, steps)
    norms = list[float]()
    for batch in run.batches(data):
        ids, labels = batch.data
        tokens = int((labels != IGNORED).sum()) if int(batch.valid) else 0
        with run.accumulate(model):
            total = total_loss(ctx, model(ids), labels, divided=divided)
            loss = total / max(tokens, 1)
            run.backward(loss, weight=tokens)
        if losses is not None:
            losses.append(total.detach())
        if run.sync:
            run.step(optimizer, max_norm=0.3)
            norms.append(float(run.grad_norm))
    return norms


def total_loss(ctx: accel.DistContext, logits: torch.Tensor, labels: torch.Tensor, *, divided: bool) -> torch.Tensor:
    if divided:
        return accel.parallel.vocab_cross_entropy(ctx, logits, labels, IGNORED)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a model, a collective for those that are divided."""
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in accel.unwrap_model(model).named_parameters()
    }
