# SPDX-License-Identifier: Apache-2.0
"""Handing the batches of steps from the ranks that read to the ranks that use them."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import msgspec
import torch

from accel.comm import Call, exchange, inline_bytes, receive_flat, send_flat, shared_failure
from accel.context import DistContext
from accel.data._dispatch import Parcel, Receiver, Sender
from accel.data._stream_cut import Part
from accel.data._stream_read import Step
from accel.errors import DataError

_ALIGN = 16


class StepNote(msgspec.Struct, frozen=True, array_like=True):
    """What a reader says about a step.

    Attributes:
        counts: real samples by part of the data.
        more: whether another step follows.
        rows: samples of each rank's batch, stand-ins included; like the next two by rank, of the ranks read for.
        labels: bytes of its parcel before the tensors; 0 for the reader itself.
        sizes: bytes of its parcel.
    """

    counts: list[int]
    more: bool
    rows: list[int]
    labels: list[int]
    sizes: list[int]


class _Note(msgspec.Struct, frozen=True, array_like=True):
    """What a reader says about the next steps.

    Attributes:
        steps: none at the end of an empty stream.
        inline: whether the parcels follow in this message: the first rank's of all steps, then the next one's.
    """

    steps: list[StepNote]
    inline: bool = False


class Handing:
    """Who reads for whom, and what of each other's structures they know.

    Attributes:
        step_bytes: what readers packed for the first step of the last message.

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
        with shared_failure(ctx.comm, "batches"):
            packed = [self._pack(step) for step in steps]
        messages = exchange(ctx.comm, self._call, self._message(steps, packed))
        notes = {reader: _read_note(messages[reader]) for reader in sorted(set(self._readers))}
        count = _agreed({reader: note.steps for reader, (note, _) in notes.items()})
        reader = self._readers[ctx.rank]
        note, end = notes[reader]
        if not self.reads:
            parts = self._take(note, count, messages[reader][end:], reader)
        else:
            if not note.inline and self._senders and count:
                buffers = {rank: [parcels[rank].buffer for parcels in packed[:count]] for rank in self._senders}
                send_flat(ctx.comm, {rank: _joined(each) for rank, each in buffers.items()})
            parts = [step.parts[self._parts[ctx.rank]] for step in steps[:count]]
        self.step_bytes = max((sum(note.steps[0].sizes) for note, _ in notes.values() if note.steps), default=0)
        return list(zip(parts, note.steps, strict=False))

    def _pack(self, step: Step) -> dict[int, Parcel]:
        return {rank: sender.pack(step.parts[self._parts[rank]].data) for rank, sender in self._senders.items()}

    def _message(self, steps: list[Step], packed: list[dict[int, Parcel]]) -> torch.Tensor:
        """The note, and the parcels if they fit."""
        if not self.reads:
            return torch.empty(0, dtype=torch.uint8)
        told: list[StepNote] = []
        for step, parcels in zip(steps, packed, strict=True):
            told.append(
                StepNote(
                    counts=step.counts,
                    more=step.more,
                    rows=[step.parts[self._parts[rank]].rows for rank in self._served],
                    labels=[parcels[rank].label if rank in parcels else 0 for rank in self._served],
                    sizes=[parcels[rank].buffer.numel() if rank in parcels else 0 for rank in self._served],
                )
            )
        note = _Note(told)
        if _head(note).numel() + sum(sum(step.sizes) for step in told) > inline_bytes(self._ctx.comm):
            return _head(note)
        follow = [parcels[rank].buffer for rank in self._senders for parcels in packed]
        return torch.cat([_head(_Note(told, inline=True)), *follow])

    def _take(self, note: _Note, count: int, inline: torch.Tensor, reader: int) -> list[Part]:
        """Receive this rank's batches of the first steps."""
        at = [rank for rank, its in enumerate(self._readers) if its == reader].index(self._ctx.rank)
        steps = note.steps[:count]
        total = sum(step.sizes[at] for step in steps)
        if note.inline:
            begin = sum(sum(step.sizes[:at]) for step in note.steps)
            buffer = inline[begin : begin + total].clone()
        else:
            buffer = torch.empty(total, dtype=torch.uint8, pin_memory=self._ctx.device.type == "cuda")
            receive_flat(self._ctx.comm, buffer, source=reader)
        parcels = cast(Any, buffer).split([step.sizes[at] for step in steps])
        return [
            Part(self._receiver.unpack(Parcel(step.labels[at], parcel)), step.rows[at])
            for step, parcel in zip(steps, parcels, strict=True)
        ]


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


def _joined(buffers: list[torch.Tensor]) -> torch.Tensor:
    return buffers[0] if len(buffers) == 1 else torch.cat(buffers)


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
