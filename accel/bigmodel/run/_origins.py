# SPDX-License-Identifier: Apache-2.0
"""Origins of absent weights: of one that streams with its block, and of a table of which rows alone move."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import nn

from accel.bigmodel.run._errors import closed_model
from accel.bigmodel.run._slots import Block
from accel.bigmodel.run._stream import Stream
from accel.bigmodel.run._supply import Supply


@dataclass(eq=False, slots=True)
class Fetches:
    """Counts of what a segment's weights moved outside of calls of blocks.

    Attributes:
        fetches: number of whole weights.
        fetched_bytes: bytes of them.
        rows: number of rows.
        rows_bytes: bytes of them.
    """

    fetches: int = 0
    fetched_bytes: int = 0
    rows: int = 0
    rows_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fetched(self, nbytes: int) -> None:
        """Count a whole weight."""
        with self._lock:
            self.fetches += 1
            self.fetched_bytes += nbytes

    def gathered(self, rows: torch.Tensor, count: int) -> None:
        """Count rows."""
        with self._lock:
            self.rows += count
            self.rows_bytes += rows.nbytes


class BlockOrigin:
    """A weight of a streamed block: on the block's slot if one holds it, else fetched for this use."""

    def __init__(self, name: str, block: Block, weight: int, stream: Stream, fetches: Fetches, device: torch.device):
        self.name = name
        self._block = block
        self._weight = weight
        self._stream = stream
        self._fetches = fetches
        self._device = device

    @property
    def is_closed(self) -> bool:
        """Whether the model is no longer dispatched."""
        return self._stream.is_closed

    def values(self) -> torch.Tensor:
        """Return the values on the computing device."""
        found = self._stream.here(self._block, self._weight)
        if found is not None:
            return found
        supply = self._block.weights[self._weight].supply
        self._fetches.fetched(supply.nbytes)
        return supply.fetch(self._device)

    def rows(self, index: torch.Tensor) -> torch.Tensor | None:
        """Return rows from the host's memory; None where the slot has all, or a file must be read."""
        if self._stream.is_in_call(self._block):
            return None
        self._stream.check_open(self.name)
        return _gather(self._block.weights[self._weight].supply, index, self._device, self._fetches)

    def stored(self) -> torch.Tensor:
        """Return the values on the host."""
        self._stream.check_open(self.name)
        return _stored(self._block.weights[self._weight].supply)


class TableOrigin:
    """A table of which rows move alone: an embedding away from its device."""

    def __init__(self, name: str, supply: Supply, fetches: Fetches, device: torch.device):
        self.name = name
        self.is_closed = False
        self._supply = supply
        self._fetches = fetches
        self._device = device

    def values(self) -> torch.Tensor:
        """Return the whole table on the computing device."""
        self._check_open()
        self._fetches.fetched(self._supply.nbytes)
        return self._supply.fetch(self._device)

    def rows(self, index: torch.Tensor) -> torch.Tensor | None:
        """Return rows; None where only the whole table can be read."""
        self._check_open()
        return _gather(self._supply, index, self._device, self._fetches)

    def stored(self) -> torch.Tensor:
        """Return the values on the host."""
        self._check_open()
        return _stored(self._supply)

    def close(self) -> None:
        """Refuse every use from now on."""
        self.is_closed = True

    def _check_open(self) -> None:
        if self.is_closed:
            raise closed_model(self.name)


def _gather(supply: Supply, index: torch.Tensor, device: torch.device, fetches: Fetches) -> torch.Tensor | None:
    table = supply.tensor
    if table is None or table.device.type != "cpu":
        return None
    with torch.no_grad():
        rows = nn.functional.embedding(index.to("cpu"), table).to(supply.dtype)
    fetches.gathered(rows, index.numel())
    return rows.to(device)


def _stored(supply: Supply) -> torch.Tensor:
    tensor = supply.tensor if supply.tensor is not None else supply.mapped()
    return tensor if tensor is not None and tensor.dtype == supply.dtype else supply.fetch(torch.device("cpu"))
