# SPDX-License-Identifier: Apache-2.0
"""Streams for tests, and contexts of several nodes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import accel


class Stream(IterableDataset):
    """Numbers from 0, each with what the global streams give; divided by `shard` and among workers."""

    def __init__(self, n: int, parts: tuple[tuple[int, int], ...] = ()) -> None:
        self.n = n
        self.parts = parts

    def numbers(self) -> list[int]:
        """What is left of the numbers in this part and this worker."""
        info = get_worker_info()
        numbers = list(range(self.n))
        for count, index in (*self.parts, *([(info.num_workers, info.id)] if info is not None else [])):
            numbers = numbers[index::count]
        return numbers

    def shard(self, num_shards: int, index: int) -> Stream:
        return type(self)(self.n, (*self.parts, (num_shards, index)))

    def __iter__(self) -> Iterator[tuple[int, float, float]]:
        return ((number, random.random(), torch.rand(()).item()) for number in self.numbers())


class Stateful(Stream):
    """Says where it stands; what it says goes on changing with it."""

    def __init__(self, n: int, parts: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__(n, parts)
        self.at = 0
        self.read: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, float, float]]:
        numbers = self.numbers()
        self.read = self.read if self.at else []
        while self.at < len(numbers):
            self.read.append(numbers[self.at])
            self.at += 1
            yield numbers[self.at - 1], random.random(), torch.rand(()).item()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "read": self.read, "tensor": torch.tensor([self.at, -1]), 3: (b"bytes", None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["tensor"].tolist() == [state["at"], -1]
        assert state[3] == (b"bytes", None)
        assert state["read"] == self.numbers()[: state["at"]]
        self.at, self.read = state["at"], state["read"]


def on_nodes(ctx: accel.DistContext, per_node: int) -> accel.DistContext:
    """The context as if every so many ranks had a node of their own."""
    return dataclasses.replace(ctx, node_rank=ctx.rank // per_node, local_rank=ctx.rank % per_node)


def make_loader(ctx: accel.DistContext, stream: Any, mode: str, size: int, **options: Any) -> accel.data.StreamLoader:
    """A prepared loader; what is for torch's DataLoader goes there."""
    names = ("global_batch", "tail", "data_parallel", "replay", "steps_per_message")
    ours = {name: options.pop(name) for name in names if name in options}
    return accel.prepare_loader(ctx, DataLoader(stream, batch_size=size, **options), stream=mode, **ours)


def seen(batch: accel.Batch) -> tuple[Any, ...]:
    """What a batch is, in plain values, draws from the random streams included."""
    data = [column.tolist() for column in batch.data]
    return data, int(batch.valid), batch.valid.world, batch.rows, batch.is_last, batch.next.consumed
