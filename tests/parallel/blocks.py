# SPDX-License-Identifier: Apache-2.0
"""A model of equal blocks."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(8, 32), nn.Linear(32, 8)
        self.drop = nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.drop(self.out(torch.tanh(self.linear(inputs))))


class Stack(nn.Module):
    """Blocks between two layers, in float64, the same at each making."""

    def __init__(self, depth: int, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Linear(8, 8)
            self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))
            self.last = nn.Linear(8, 2)
        self.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)
