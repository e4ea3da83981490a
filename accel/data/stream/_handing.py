# SPDX-License-Identifier: Apache-2.0
"""Handing the batches of steps from the ranks that read to the ranks that use them."""

from __future__ import annotations

import ctypes
from typing import Any

import msgspec
import torch

from accel.comm import Call, exchange, inline_bytes, receive_flat, send_flat, shared_failure
from accel.context import DistContext
from accel.data.stream._cut import Part
from accel.data.stream._dispatch import Parcel, Receiver, Sender
from accel.data.stream._read import Step
from accel.errors import DataError

_ALIGN = 16


class StepNote(msgspec.Struct, frozen=True, array_like=True):
    """What a reader says about a step.

    Attributes:
        counts: real samples by part of the data.
        more: whether another step follows.
        rows: samples of each rank's batch, stand-ins included; by rank, of the ranks read for.
    """

    counts: list[int]
    more: bool
    rows: list[int]


class _Note(msgspec.Struct, frozen=True, array_like=True):
    """What a reader says about the next steps.

    Attributes:
        steps: none at the end of an empty stream.
        labels: bytes of each rank's parcel before the tensors; like the next by rank, 0 for the reader itself.
        sizes: bytes of its parcel's buffer, which holds its batches of all these steps.
        large: bytes of each tensor beside it.
        inline: whether the parcels follow in this message.
    """

    steps: list[StepNote]
    labels: list[int]
    sizes: list[int]
    large: list[list[int]]
    inline: bool


class Handing:
    """Who reads for whom, and what of each other's structures they know.

    Attributes:
        step_bytes: what readers packed for a step of the last message.

    Args:
        ctx: the context.
        call: what all ranks call each step.
        groups: by rank, which ranks share a reader: equal numbers; the lowest rank of each reads.
        parts: by rank, which part of the data it gets.
    """

    def __init__(self, ctx: DistContext, call: Call, groups: list[int], parts: list[int]) -> None:
        self._ctx = ctx
        self._call = call
        self._parts = parts
        self._readers = [groups.index(group) for group in groups]
        self._served = [rank for rank, reader in enumerate(self._readers) if reader == ctx.rank]
        self._senders = {rank: Sender() for rank in self._served if rank != ctx.rank}
        self._receiver = Receiver()
        self.step_bytes = 0

    @property
    def readers(self) -> list[int]:
        """By rank, who reads for it."""
        return self._readers

    @property
    def reads(self) -> bool:
        """Whether this rank reads."""
        return bool(self._served)

    @property
    def mine(self) -> tuple[int, ...]:
        """The parts of the data that this rank reads for itself and others."""
        return tuple(sorted({self._parts[rank] for rank in self._served}))

    def hand(self, steps: list[Step]) -> list[tuple[Part, StepNote]]:
        """Hand out the next steps, as many as all readers have read. A collective.

        A reader that has read fewer could not read on, and says so in the next message.

        Args:
            steps: what this rank has read, if it reads; none at the end.

        Returns:
            This rank's batches, and what its reader said about them; none at the end of an empty stream.

        Raises:
            TreeError: a batch that cannot be handed over; on every rank.
            DataError: readers have read different streams; on every rank.
        """
        ctx = self._ctx
        with shared_failure(ctx.comm, Call("batches")):
            parcels = {rank: sender.pack(self._data(steps, rank)) for rank, sender in self._senders.items()}
        messages = exchange(ctx.comm, self._call, self._message(steps, parcels))
        notes = {reader: _read_note(messages[reader]) for reader in sorted(set(self._readers))}
        count = _agreed({reader: note.steps for reader, (note, _) in notes.items()})
        reader = self._readers[ctx.rank]
        note, end = notes[reader]
        at = [rank for rank, its in enumerate(self._readers) if its == reader].index(ctx.rank)
        if self.reads:
            if not note.inline:
                send_flat(ctx.comm, {rank: [each.buffer, *each.large] for rank, each in parcels.items()})
            batches = self._data(steps, ctx.rank)
        else:
            batches = self._receiver.unpack(self._receive(note, at, messages[reader][end:], reader))
        self.step_bytes = max(_bytes_sent(note) // max(len(note.steps), 1) for note, _ in notes.values())
        given = zip(batches, note.steps, strict=True)
        return [(Part(data, step.rows[at]), step) for data, step in given][:count]

    def _data(self, steps: list[Step], rank: int) -> list[Any]:
        return [step.parts[self._parts[rank]].data for step in steps]

    def _message(self, steps: list[Step], parcels: dict[int, Parcel]) -> torch.Tensor:
        """The note, and the parcels if they fit."""
        if not self.reads:
            return torch.empty(0, dtype=torch.uint8)
        rows = [[step.parts[self._parts[rank]].rows for rank in self._served] for step in steps]
        told = [StepNote(step.counts, step.more, own) for step, own in zip(steps, rows, strict=True)]
        labels = [parcels[rank].label if rank in parcels else 0 for rank in self._served]
        sizes = [parcels[rank].buffer.numel() if rank in parcels else 0 for rank in self._served]
        large = [[each.numel() for each in parcels[rank].large] if rank in parcels else [] for rank in self._served]
        head = _head(_Note(told, labels, sizes, large, inline=True))
        if any(large) or head.numel() + sum(sizes) > inline_bytes(self._ctx.comm):
            return _head(_Note(told, labels, sizes, large, inline=False))
        return torch.cat([head, *(parcel.buffer for parcel in parcels.values())])

    def _receive(self, note: _Note, at: int, inline: torch.Tensor, reader: int) -> Parcel:
        """This rank's parcel; it is number `at` of those that the reader has made."""
        if note.inline:
            begin = sum(note.sizes[:at])
            return Parcel(note.labels[at], inline[begin : begin + note.sizes[at]].clone())
        pinned = self._ctx.device.type == "cuda"
        sizes = [note.sizes[at], *note.large[at]]
        buffer, *large = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        receive_flat(self._ctx.comm, [buffer, *large], source=reader)
        return Parcel(note.labels[at], buffer, large)


def _bytes_sent(note: _Note) -> int:
    return sum(note.sizes) + sum(map(sum, note.large))


def _agreed(notes: dict[int, list[StepNote]]) -> int:
    """Return how many steps all readers have read; raise if they differ in one of them."""
    said = {reader: [_words(step) for step in steps] or ["nothing"] for reader, steps in notes.items()}
    first, *others = said
    for reader in others:
        for mine, theirs in zip(said[first], said[reader], strict=False):
            if mine != theirs:
                raise DataError(
                    "nodes read different streams",
                    expected=f"samples by rank as on rank {first}: {mine}",
                    got=f"on rank {reader}: {theirs}",
                    where="batches",
                    fix='Let every node read the same data in the same order, or use stream="dispatch".',
                )
    return min(len(steps) for steps in notes.values())


def _words(step: StepNote) -> str:
    return f"{step.counts}, {'more follows' if step.more else 'the end'}"


def _head(note: _Note) -> torch.Tensor:
    """A note's length and the note, aligned."""
    text = msgspec.msgpack.encode(note)
    head = len(text).to_bytes(_ALIGN, "little") + text
    return torch.frombuffer(bytearray(head.ljust(-(-len(head) // _ALIGN) * _ALIGN, b"\0")), dtype=torch.uint8)


def _read_note(message: torch.Tensor) -> tuple[_Note, int]:
    """A reader's note, and where what follows it begins."""
    start = message.data_ptr()
    length = int.from_bytes(ctypes.string_at(start, _ALIGN), "little")
    note = msgspec.msgpack.decode(ctypes.string_at(start + _ALIGN, length), type=_Note)
    return note, -(-(_ALIGN + length) // _ALIGN) * _ALIGN
