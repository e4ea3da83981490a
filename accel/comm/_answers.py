# SPDX-License-Identifier: Apache-2.0
"""All ranks' first messages, and views of the payloads in them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.comm._header import HEADER_BYTES


class Answers(NamedTuple):
    """All ranks' first messages.

    Attributes:
        same: whether all ranks sent one variant and payloads of one size.
        most: bytes of the largest payload.
        sizes: bytes of each rank's payload; empty in a large group where they differ.
        received: the messages, of equal length, one after another; a payload begins at HEADER_BYTES. Empty in a large
            group. Read-only, as ranks of one process share it.
        reduced: bytes of the payloads, reduced; uint8, shape [reduced_bytes(comm)]. None in a small group. Read-only.
    """

    same: bool
    most: int
    sizes: list[int]
    received: bytearray
    reduced: torch.Tensor | None = None

    @property
    def inline(self) -> torch.Tensor:
        """The inline payloads: uint8, shape [size, inline_bytes(comm)], on the CPU."""
        return torch.frombuffer(self.received, dtype=torch.uint8).view(len(self.sizes), -1)[:, HEADER_BYTES:]

    def payload(self, rank: int) -> bytes:
        """Copy the inline payload of one rank."""
        begin = len(self.received) // len(self.sizes) * rank + HEADER_BYTES
        return bytes(self.received[begin : begin + self.sizes[rank]])

    def elements(self, dtype: torch.dtype, start: int, count: int) -> torch.Tensor:
        """View the elements at one offset of all payloads.

        Args:
            dtype: of the elements.
            start: offset in each payload, in bytes; a multiple of 16.
            count: number of elements in each payload.

        Returns:
            Shape [size, count], on the CPU.
        """
        ranks = len(self.sizes)
        size = dtype.itemsize
        stride = len(self.received) // ranks
        return torch.frombuffer(self.received, dtype=dtype).as_strided(
            (ranks, count), (stride // size, 1), (HEADER_BYTES + start) // size
        )
