# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint keeps for each rank: its random streams, and the parts of records that differ between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, Self, runtime_checkable

import msgspec
import torch

from accel.checkpoint import RANKS, Box, Saved, decode, encode, is_sharded
from accel.comm import as_bytes
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.random import RngState, capture_rng
from accel.storage import dtype_name, stored_dtype

_LENGTH_BYTES = 4


@runtime_checkable
class DiffersByRank(Protocol):
    """A record a part of which each rank has for itself."""

    def rank_part(self) -> object:
        """Return that part, None if there is none now."""
        ...

    def with_rank_part(self, part: object) -> Self:
        """Return the record with another part, of plain values; raise `msgspec.ValidationError` if it does not fit."""
        ...


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Part(msgspec.Struct, frozen=True):
    value: Any
    tensors: dict[str, _Tensor]


class Row(msgspec.Struct, frozen=True):
    """One rank's row.

    Attributes:
        rng: its random streams.
        parts: of records, by path; a record that is an item has the item's name.
    """

    rng: RngState
    parts: dict[str, _Part]


def write_row(ctx: DistContext, records: Mapping[str, object]) -> bytes:
    """Return what is this rank's own of its streams and records.

    Args:
        ctx: the context.
        records: all that the items hold, by path.

    Raises:
        CheckpointError: something cannot be stored, named by its path.
    """
    parts: dict[str, _Part] = {}
    for path, record in records.items():
        part = record.rank_part() if isinstance(record, DiffersByRank) and not isinstance(record, type) else None
        if part is not None:
            tensors: dict[str, torch.Tensor] = {}
            value = encode(part, path, tensors)
            parts[path] = _Part(value, {key: _to_bytes(key, tensor) for key, tensor in tensors.items()})
    return msgspec.msgpack.encode(Row(capture_rng(ctx.device), parts))


def row_part(ctx: DistContext, saved: Saved) -> tuple[str, Box] | None:
    """Return where this rank's row is, None if the run had another number of ranks.

    Raises:
        CheckpointError: there are no rows.
    """
    entry, world = saved.entries.get(RANKS), saved.manifest.world_size
    if entry is None or entry.dtype != "uint8" or len(entry.shape) != 2 or entry.shape[0] != world:
        raise CheckpointError("no row of random streams for each rank", where=f"{saved.path}, tensor {RANKS}")
    return (RANKS, Box((ctx.rank, 0), (1, entry.shape[1]))) if world == ctx.world_size else None


def read_row(ctx: DistContext, saved: Saved) -> Row | None:
    """Return this rank's row, None if the run had another number of ranks.

    Raises:
        CheckpointError: there are no rows, or this is none.
    """
    where, part = f"{saved.path}, tensor {RANKS}", row_part(ctx, saved)
    if part is None:
        return None
    row = as_bytes(saved.read(*part).view(-1))
    length = int.from_bytes(row[:_LENGTH_BYTES], "little")
    try:
        return msgspec.msgpack.decode(row[_LENGTH_BYTES:][:length], type=Row)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(f"not a rank's row: {error}", where=where) from error


def with_own_part(value: object, path: str, row: Row | None) -> object:
    """Return a loaded record with this rank's own part, if there is one of its path; others as they are.

    Raises:
        CheckpointError: the part does not fit.
    """
    if row is None or path not in row.parts or not isinstance(value, DiffersByRank):
        return value
    part, where = row.parts[path], f"item {path}, this rank's part"
    try:
        tensors = {key: _from_bytes(tensor) for key, tensor in part.tensors.items()}
        return value.with_rank_part(decode(part.value, where, tensors))
    except (msgspec.ValidationError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"not a stored part: {error}", where=where) from error


def _to_bytes(name: str, tensor: torch.Tensor) -> _Tensor:
    if is_sharded(tensor):
        raise CheckpointError("a DTensor in what each rank keeps for itself", where=name, fix="Keep its to_local().")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _Tensor(dtype_name(tensor.dtype), tuple(tensor.shape), bytes(flat.numpy()))


def _from_bytes(tensor: _Tensor) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype) or stored_dtype(dtype) is None:
        raise ValueError(f"no dtype {tensor.dtype!r}")
    if not tensor.data:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8).view(dtype).view(tensor.shape)
