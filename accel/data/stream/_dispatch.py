# SPDX-License-Identifier: Apache-2.0
"""Dispatch: ranks that read the whole stream send the others their batches, several steps to a message."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from accel.comm import Call, broadcast_bytes, exchange, inline_bytes, receive_flat, send_flat, shared_failure
from accel.context import DistContext
from accel.data.stream._packing import BatchPacker, BatchUnpacker, PackedBatches
from accel.data.stream._prefetch import AgreedStep, ReadStep
from accel.data.stream._reader import LocalBatch
from accel.errors import DataError

_ALIGN = 16


class _StepHeader(msgspec.Struct, frozen=True, array_like=True):
    """A reader's facts of one step.

    Attributes:
        counts: real samples by data-parallel rank.
        more: whether another step follows.
        rows: samples of each served rank's batch, stand-ins included.
    """

    counts: list[int]
    more: bool
    rows: list[int]


class _MessageHeader(msgspec.Struct, frozen=True, array_like=True):
    """A reader's facts of the next steps; lists by served rank hold 0 for the reader itself.

    Attributes:
        steps: none at the end of an empty stream.
        header_sizes: bytes before the tensors, of each rank's packed batches.
        sizes: bytes of the buffer, which holds the batches of all these steps.
        large: bytes of each tensor beside the buffer.
        inline: whether the packed batches follow in this message.
    """

    steps: list[_StepHeader]
    header_sizes: list[int]
    sizes: list[int]
    large: list[list[int]]
    inline: bool


class Dispatcher:
    """Assigns a reader to each rank, and sends its batches.

    Attributes:
        step_bytes: bytes that readers packed for a step of the last message.

    Args:
        ctx: the context.
        call: each message, as all ranks name it.
        groups: a number by rank; ranks of one number share a reader, the lowest of them.
        data_ranks: data-parallel rank by rank.
    """

    def __init__(self, ctx: DistContext, call: Call, groups: list[int], data_ranks: list[int]) -> None:
        self._ctx = ctx
        self._call = call
        self._data_ranks = data_ranks
        self._readers = [groups.index(group) for group in groups]
        self._only = self._readers[0] if len(set(self._readers)) == 1 else None
        self._served = [rank for rank, reader in enumerate(self._readers) if reader == ctx.rank]
        self._packers = {rank: BatchPacker() for rank in self._served if rank != ctx.rank}
        self._unpacker = BatchUnpacker()
        self.step_bytes = 0

    @property
    def readers(self) -> list[int]:
        """The reader of each rank."""
        return self._readers

    @property
    def reads(self) -> bool:
        """Whether this rank reads."""
        return bool(self._served)

    @property
    def mine(self) -> tuple[int, ...]:
        """The data-parallel ranks that this rank reads for, itself included."""
        return tuple(sorted({self._data_ranks[rank] for rank in self._served}))

    def agree(self, steps: list[ReadStep]) -> list[AgreedStep]:
        """Send and receive the next steps, as many as all readers have read. A collective.

        A reader that has read fewer steps reports its error in the next message.

        Args:
            steps: this rank's, if it reads; none at the end.

        Returns:
            This rank's batches; none at the end of an empty stream.

        Raises:
            TreeError: a batch that cannot be sent; on every rank.
            DataError: readers have read different streams; on every rank.
        """
        ctx = self._ctx
        with shared_failure(ctx.comm, Call("batches")):
            packed = {rank: packer.pack(self._data(steps, rank)) for rank, packer in self._packers.items()}
        messages = self._exchange(self._message(steps, packed))
        headers = {reader: _read_header(messages[reader]) for reader in sorted(set(self._readers))}
        known = _known_steps({reader: header.steps for reader, (header, _) in headers.items()})
        reader = self._readers[ctx.rank]
        header, end = headers[reader]
        at = [rank for rank, its in enumerate(self._readers) if its == reader].index(ctx.rank)
        if self.reads:
            if not header.inline:
                send_flat(ctx.comm, {rank: [each.buffer, *each.large] for rank, each in packed.items()})
            batches = self._data(steps, ctx.rank)
        else:
            batches = self._unpacker.unpack(self._receive(header, at, messages[reader][end:], reader))
        self.step_bytes = max(_bytes_sent(each) // max(len(each.steps), 1) for each, _ in headers.values())
        return [
            AgreedStep(
                LocalBatch(batches[i], step.rows[at]),
                samples=step.counts[self._data_ranks[ctx.rank]],
                total=sum(step.counts),
                is_last=not step.more,
                position=steps[i].position if self.reads else None,
            )
            for i, step in enumerate(header.steps[:known])
        ]

    def _exchange(self, mine: torch.Tensor) -> Mapping[int, torch.Tensor]:
        """Send the readers' messages to all ranks; return them by reader. A collective."""
        if self._only is not None:
            return {self._only: broadcast_bytes(self._ctx.comm, self._call, mine, source=self._only)}
        return dict(enumerate(exchange(self._ctx.comm, self._call, mine)))

    def _data(self, steps: list[ReadStep], rank: int) -> list[Any]:
        return [step.batches[self._data_ranks[rank]].data for step in steps]

    def _message(self, steps: list[ReadStep], packed: dict[int, PackedBatches]) -> torch.Tensor:
        """Return the header, and the packed batches if they fit."""
        if not self.reads:
            return torch.empty(0, dtype=torch.uint8)
        rows = [[step.batches[self._data_ranks[rank]].rows for rank in self._served] for step in steps]
        step_headers = [_StepHeader(step.counts, step.more, own) for step, own in zip(steps, rows, strict=True)]
        header_sizes = [packed[rank].header_bytes if rank in packed else 0 for rank in self._served]
        sizes = [packed[rank].buffer.numel() if rank in packed else 0 for rank in self._served]
        large = [[each.numel() for each in packed[rank].large] if rank in packed else [] for rank in self._served]
        head = _aligned_bytes(_MessageHeader(step_headers, header_sizes, sizes, large, inline=True))
        if any(large) or head.numel() + sum(sizes) > inline_bytes(self._ctx.comm):
            return _aligned_bytes(_MessageHeader(step_headers, header_sizes, sizes, large, inline=False))
        return torch.cat([head, *(each.buffer for each in packed.values())])

    def _receive(self, header: _MessageHeader, at: int, inline: torch.Tensor, reader: int) -> PackedBatches:
        """Return this rank's packed batches, number `at` of the reader's."""
        if header.inline:
            begin = sum(header.sizes[:at])
            return PackedBatches(header.header_sizes[at], inline[begin : begin + header.sizes[at]].clone())
        pinned = self._ctx.device.type == "cuda"
        sizes = [header.sizes[at], *header.large[at]]
        buffer, *large = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        receive_flat(self._ctx.comm, [buffer, *large], source=reader)
        return PackedBatches(header.header_sizes[at], buffer, large)


def _bytes_sent(header: _MessageHeader) -> int:
    return sum(header.sizes) + sum(map(sum, header.large))


def _known_steps(headers: dict[int, list[_StepHeader]]) -> int:
    """Return the number of steps that all readers have read; raise if they differ in one of them."""
    texts = {reader: [_step_text(step) for step in steps] or ["nothing"] for reader, steps in headers.items()}
    first, *others = texts
    for reader in others:
        for mine, theirs in zip(texts[first], texts[reader], strict=False):
            if mine != theirs:
                raise DataError(
                    "nodes read different streams",
                    expected=f"samples by rank as on rank {first}: {mine}",
                    got=f"on rank {reader}: {theirs}",
                    where="batches",
                    fix='Let every node read the same data in the same order, or use stream="dispatch".',
                )
    return min(len(steps) for steps in headers.values())


def _step_text(step: _StepHeader) -> str:
    return f"{step.counts}, {'more follows' if step.more else 'the end'}"


def _aligned_bytes(header: _MessageHeader) -> torch.Tensor:
    """Return a header's length and the header, padded so that tensors may follow."""
    text = msgspec.msgpack.encode(header)
    head = len(text).to_bytes(_ALIGN, "little") + text
    return torch.frombuffer(bytearray(head.ljust(-(-len(head) // _ALIGN) * _ALIGN, b"\0")), dtype=torch.uint8)


def _read_header(message: torch.Tensor) -> tuple[_MessageHeader, int]:
    """Return a reader's header, and its length in the message."""
    start = message.data_ptr()
    length = int.from_bytes(ctypes.string_at(start, _ALIGN), "little")
    header = msgspec.msgpack.decode(ctypes.string_at(start + _ALIGN, length), type=_MessageHeader)
    return header, -(-(_ALIGN + length) // _ALIGN) * _ALIGN
