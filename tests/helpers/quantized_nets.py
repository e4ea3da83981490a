# SPDX-License-Identifier: Apache-2.0
"""A small model that tests quantize, and a source of weights that counts what lives while it is read."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from accel.bigmodel import StoredTensor
from accel.storage import torch_dtypes

WIDTH = 64


class Block(nn.Module):
    """A residual layer of two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 50, bias=False)
        self.register_buffer("positions", torch.ones(width), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_net(seed: int = 0, **options: int) -> Net:
    """Return a net of random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(**options).eval()


def token_ids() -> torch.Tensor:
    """Return ids of shape [2, 5]."""
    return torch.arange(10).reshape(2, 5) * 4


class TensorSource:
    """A mapping of tensors as a source of weights."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        names = {kind: name for name, kind in torch_dtypes().items()}
        self.entries: Mapping[str, StoredTensor] = {
            name: StoredTensor(shape=tuple(each.shape), dtype=names[each.dtype], nbytes=each.nbytes)
            for name, each in tensors.items()
        }

    def read(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, target in targets:
            target.copy_(self._tensors[name])

    def close(self) -> None:
        """Do nothing."""


class CountingSource:
    """Weights made when they are read, and the most bytes of large floating-point tensors that lived meanwhile."""

    def __init__(self, model: nn.Module, large: int) -> None:
        self.entries: Mapping[str, StoredTensor] = {
            name: StoredTensor(shape=tuple(each.shape), dtype="F32", nbytes=each.nbytes)
            for name, each in model.state_dict().items()
        }
        self.most = 0
        self._large = large

    def read(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, target in targets:
            torch.nn.init.normal_(target, std=0.02, generator=torch.Generator().manual_seed(len(name)))
        found: dict[int, int] = {}
        for each in gc.get_objects():
            if type(each) in (torch.Tensor, nn.Parameter) and each.is_floating_point() and not each.is_meta:
                storage = each.untyped_storage()
                if storage.nbytes() >= self._large:
                    found[storage.data_ptr()] = storage.nbytes()
        self.most = max(self.most, sum(found.values()))

    def close(self) -> None:
        """Do nothing."""
