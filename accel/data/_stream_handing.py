# SPDX-License-Identifier: Apache-2.0
"""Handing the batches of a step from the ranks that read to the ranks that use them."""

from __future__ import annotations

import ctypes

import msgspec
import torch

from accel.comm import INLINE_BYTES, Call, exchange, fail, receive_flat, send_flat
from accel.context import DistContext
from accel.data._dispatch import Parcel, Receiver, Sender
from accel.data._stream_cut import Part
from accel.data._stream_read import Step
from accel.errors import AccelError, DataError

_ALIGN = 16


class Note(msgspec.Struct, frozen=True, array_like=True):
    """What a reader says about a step.

    Attributes:
        counts: real samples by part of the data; empty if there is no step.
        more: whether another step follows.
        rows: samples of each rank's batch, stand-ins included; like the next two by rank, of the ranks read for.
        labels: bytes of its parcel before the tensors; 0 for the reader itself.
        sizes: bytes of its parcel.
        inline: whether the parcels follow in this message.
    """

    counts: list[int] = []
    more: bool = False
    rows: list[int] = []
    labels: list[int] = []
    sizes: list[int] = []
    inline: bool = False


class Handing:
    """Who reads for whom, and what of each other's structures they know.

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

    @property
    def reads(self) -> bool:
        """Whether this rank reads."""
        return bool(self._served)

    @property
    def mine(self) -> tuple[int, ...]:
        """The parts of the data that this rank reads for itself and others."""
        return tuple(sorted({self._parts[rank] for rank in self._served}))

    def hand(self, step: Step | None) -> tuple[Part | None, Note]:
        """Hand out one step. A collective.

        Args:
            step: what this rank has read, if it reads; None at the end.

        Returns:
            This rank's batch, None without a step; and what its reader said.

        Raises:
            TreeError: a batch that cannot be handed over; on every rank.
            DataError: readers have read different streams; on every rank.
        """
        try:
            parcels = {} if step is None else self._pack(step)
        except AccelError as error:
            fail(self._ctx.comm, self._call, error)
        messages = exchange(self._ctx.comm, self._call, self._message(step, parcels))
        notes = {reader: _read_note(messages[reader]) for reader in sorted(set(self._readers))}
        self._check_same(notes)
        reader = self._readers[self._ctx.rank]
        note = notes[reader][0]
        if not note.counts:
            return None, note
        if step is not None:
            if not note.inline and parcels:
                send_flat(self._ctx.comm, {rank: parcel.buffer for rank, parcel in parcels.items()})
            return step.parts[self._parts[self._ctx.rank]], note
        return self._take(note, messages[reader][notes[reader][1] :], reader), note

    def _pack(self, step: Step) -> dict[int, Parcel]:
        return {rank: sender.pack(step.parts[self._parts[rank]].data) for rank, sender in self._senders.items()}

    def _message(self, step: Step | None, parcels: dict[int, Parcel]) -> torch.Tensor:
        """The note, and the parcels if they fit."""
        if not self.reads:
            return torch.empty(0, dtype=torch.uint8)
        note, follow = Note(), list[torch.Tensor]()
        if step is not None:
            buffers = {rank: parcel.buffer for rank, parcel in parcels.items()}
            sizes = [buffers[rank].numel() if rank in buffers else 0 for rank in self._served]
            note = Note(
                counts=step.counts,
                more=step.more,
                rows=[step.parts[self._parts[rank]].rows for rank in self._served],
                labels=[parcels[rank].label if rank in parcels else 0 for rank in self._served],
                sizes=sizes,
            )
            if _head(note).numel() + sum(sizes) <= INLINE_BYTES:
                note, follow = msgspec.structs.replace(note, inline=True), list(buffers.values())
        return torch.cat([_head(note), *follow])

    def _take(self, note: Note, inline: torch.Tensor, reader: int) -> Part:
        served = [rank for rank, its in enumerate(self._readers) if its == reader]
        at = served.index(self._ctx.rank)
        if note.inline:
            begin = sum(note.sizes[:at])
            buffer = inline[begin : begin + note.sizes[at]].clone()
        else:
            pinned = self._ctx.device.type == "cuda"
            buffer = torch.empty(note.sizes[at], dtype=torch.uint8, pin_memory=pinned)
            receive_flat(self._ctx.comm, buffer, source=reader)
        return Part(self._receiver.unpack(Parcel(note.labels[at], buffer)), note.rows[at])

    def _check_same(self, notes: dict[int, tuple[Note, int]]) -> None:
        said = {
            reader: f"{note.counts}, {'more follows' if note.more else 'the end'}"
            for reader, (note, _) in notes.items()
        }
        first = next(iter(said))
        for reader, words in said.items():
            if words != said[first]:
                raise DataError(
                    "nodes read different streams",
                    expected=f"samples by rank as on rank {first}: {said[first]}",
                    got=f"on rank {reader}: {words}",
                    where="batches",
                    fix='Let every node read the same data in the same order, or use stream="dispatch".',
                )


def _head(note: Note) -> torch.Tensor:
    """A note's length and the note, aligned."""
    text = msgspec.msgpack.encode(note)
    head = len(text).to_bytes(_ALIGN, "little") + text
    return torch.frombuffer(bytearray(head.ljust(-(-len(head) // _ALIGN) * _ALIGN, b"\0")), dtype=torch.uint8)


def _read_note(message: torch.Tensor) -> tuple[Note, int]:
    """A reader's note, and where what follows it begins."""
    start = message.data_ptr()
    length = int.from_bytes(ctypes.string_at(start, _ALIGN), "little")
    note = msgspec.msgpack.decode(ctypes.string_at(start + _ALIGN, length), type=Note)
    return note, -(-(_ALIGN + length) // _ALIGN) * _ALIGN
