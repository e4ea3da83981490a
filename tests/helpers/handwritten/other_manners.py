# SPDX-License-Identifier: Apache-2.0
"""Forwards that hand on parts of tensors, containers in attributes, dataclasses and chosen tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ._entry import WIDTH, WORDS, Handwritten, cross_entropy, cross_entropy_and, entry
from .manners import Block, Words


class CarriedStates(Words):
    """Cells over time: each takes a part of the embedding, and its state from an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.GRUCell(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        self.states = [x.new_zeros(x.shape[0], WIDTH) for _ in self.blocks]
        outputs: list[Tensor] = []
        for at in range(x.shape[1]):
            hidden = x[:, at]
            for number, cell in enumerate(self.blocks):
                self.states[number] = hidden = cell(hidden, self.states[number])
            outputs.append(hidden)
        return self.head(self.norm(torch.stack(outputs, 1)))


class StatisticsBlock(Block):
    """Leaves a dictionary of tensors in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.statistics = {"mean": x.mean(1), "norms": (x.norm(dim=-1), x.shape[1])}
        return x


class KeptStatistics(Words):
    """Reads the dictionaries that its blocks leave."""

    kind = StatisticsBlock

    def forward(self, ids: Tensor) -> Any:
        out = super().forward(ids)
        kept: list[dict[str, Any]] = [block.statistics for block in self.blocks]
        return out, torch.stack([each["mean"].sum(-1) + each["norms"][0].sum(-1) for each in kept], 1)


class ChosenTokens(Words):
    """Each block computes half of the tokens, which a router chooses by its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            weights = self.gate(x).squeeze(-1)
            chosen = weights.topk(max(1, x.shape[1] // 2), 1).indices.sort(1).values
            places = chosen[..., None].expand(-1, -1, WIDTH)
            found = block(torch.gather(x, 1, places)) * torch.sigmoid(torch.gather(weights, 1, chosen))[..., None]
            x = x.scatter_add(1, places, found)
        return self.head(self.norm(x))


class Halting(Words):
    """Two blocks called in turn, with a mean of their results by weights that sum to 1."""

    def __init__(self) -> None:
        super().__init__(2)
        self.steps = nn.Embedding(4, WIDTH)
        self.halt = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        total, left = torch.zeros_like(x), torch.ones_like(x[..., :1])
        for at in range(4):
            x = self.blocks[at % 2](x + self.steps.weight[at])
            share = torch.sigmoid(self.halt(x)) * left
            total = total + share * x
            left = left - share
        return self.head(self.norm(total + left * x))


@dataclasses.dataclass
class Carried:
    """What blocks take and return."""

    x: Tensor
    mask: Tensor
    depth: int = 0


class CarriedBlock(Block):
    def forward(self, carried: Carried) -> Carried:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = super().forward(carried.x) * carried.mask
        return dataclasses.replace(carried, x=x, depth=carried.depth + 1)


class CarriedDataclass(Words):
    kind = CarriedBlock

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        carried = Carried(x, (ids > 3).to(x)[..., None])
        for block in self.blocks:
            carried = block(carried)
        return self.head(self.norm(carried.x)) / carried.depth


class CodebookBlock(Block):
    """Counts the nearest codes in a buffer, and adds them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 6)[:, None].repeat(1, WIDTH))
        self.register_buffer("counts", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        nearest = torch.cdist(x.detach().flatten(0, 1), self.codes).argmin(-1)
        if self.training:
            self.counts.mul_(0.9).add_(torch.bincount(nearest, minlength=6).to(self.counts), alpha=0.1)
        return x + 0.1 * (self.codes[nearest].view_as(x) - x).detach()


class Codebooks(Words):
    kind = CodebookBlock


class Exits(Words):
    """A head at each second block, in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.exits = nn.ModuleDict({f"exit_{at}": nn.Linear(WIDTH, WORDS) for at in (1, 3)})

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        found: dict[str, Tensor] = {}
        for at, block in enumerate(self.blocks):
            x = block(x)
            if f"exit_{at}" in self.exits:
                found[f"exit_{at}"] = self.exits[f"exit_{at}"](x)
        return {"logits": self.head(self.norm(x)), **found}


class MethodsBlock(nn.Module):
    """Recomputes methods, one of which reads parameters of the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.up = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def gated(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(x)) * functional.linear(x, self.up)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.gated, self.norm(x), use_reentrant=False)


class CheckpointedMethods(Words):
    """Blocks that recompute one of their methods."""

    kind = MethodsBlock


class ListedBlock(nn.Module):
    """Attention by the entries of a dictionary of parameters, and pairs from lists of them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ParameterDict({name: torch.randn(WIDTH, WIDTH) / 4 for name in "qkvo"})
        self.up, self.down = (nn.ParameterList([torch.randn(WIDTH, WIDTH) / 4 for _ in range(2)]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (functional.linear(x, self.heads[name]).unflatten(-1, (4, -1)).transpose(1, 2) for name in "qkv")
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2) @ self.heads["o"].T
        for up, down in zip(self.up, self.down, strict=True):
            x = x + functional.gelu(x @ up.T) @ down.T
        return x


class ListedParameters(Words):
    """Blocks that hold their parameters in dictionaries and lists."""

    kind = ListedBlock


OTHER_MANNERS: tuple[Handwritten, ...] = (
    entry("carried_states", CarriedStates, loss=cross_entropy, tags="language causal shared"),
    entry("kept_statistics", KeptStatistics, loss=cross_entropy_and, tags="causal side"),
    entry("chosen_tokens", ChosenTokens, loss=cross_entropy, tags="language"),
    entry("halting", Halting, loss=cross_entropy, tags="language causal shared free"),
    entry("carried_dataclass", CarriedDataclass, loss=cross_entropy, tags="language causal"),
    entry("codebooks", Codebooks, loss=cross_entropy, tags="language causal buffers"),
    entry("exits", Exits, loss=cross_entropy_and, tags="causal"),
    entry("checkpointed_methods", CheckpointedMethods, loss=cross_entropy, tags="language causal checkpoint"),
    entry("listed_parameters", ListedParameters, loss=cross_entropy, tags="language causal"),
)
