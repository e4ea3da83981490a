# SPDX-License-Identifier: Apache-2.0
"""A small model that tests stream, and maps of it by home and number of slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from accel.bigmodel import DeviceMap, describe

DEVICE = "cpu:0"  # another name for the host: what has its home in "cpu" and runs here streams
VOCABULARY, WIDTH = 50, 16


class Block(nn.Module):
    """A residual layer, with a parameter of its own and a switch that makes it fail."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.rand(width))
        self.error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return x + self.scale * self.down(functional.gelu(self.up(x)))


class Net(nn.Module):
    """Blocks that run in any order; a convolution and a head of which the weights alone are used."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(blocks))
        self.beside = nn.ModuleList([nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Identity())])
        self.order: Sequence[int] = range(blocks)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for at in self.order:
            x = self.blocks[at](x)
        conv = self.beside[0][0]
        x = functional.conv1d(x.transpose(1, 2), conv.weight, conv.bias, padding=1).transpose(1, 2)
        return functional.linear(x, self.embed.weight)


def make_net(seed: int = 0, **options: int) -> Net:
    """Return a net of random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(**options).eval()


def token_ids() -> torch.Tensor:
    """Return ids of shape [2, 5]."""
    return torch.arange(10).reshape(2, 5) * 4


def streamed_map(model: nn.Module, home: str, slots: int = 2, keep: Sequence[str] = ()) -> DeviceMap:
    """Return a map in which every segment that may move has its home elsewhere, except those named."""
    skeleton = describe(model)
    homes = {
        segment.name: home if segment.movable and segment.name not in keep else DEVICE for segment in skeleton.segments
    }
    return DeviceMap(skeleton=skeleton, home=homes, runs=dict.fromkeys(homes, DEVICE), slots=slots)
