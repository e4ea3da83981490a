# SPDX-License-Identifier: Apache-2.0
"""A rank's row in a checkpoint: its random streams, and its parts of records that differ between ranks."""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping
from typing import Any, Protocol, Self, runtime_checkable

import msgspec
import torch

from accel import xla
from accel.checkpoint import RANKS, Box, Saved, decode, encode
from accel.comm import as_bytes
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.random import Key, RngState, capture_rng, restore_rng, seed_rng
from accel.storage import dtype_name, stored_dtype
from accel.tensors import is_dtensor

_NUMPY_WORDS = 624
_LENGTH_BYTES = 4


@runtime_checkable
class DiffersByRank(Protocol):
    """A record with a part that differs between ranks."""

    def rank_part(self) -> object:
        """Return the part, None for none."""
        ...

    def with_rank_part(self, part: object) -> Self:
        """Return the record with a part of plain values; raise `msgspec.ValidationError` if it does not fit."""
        ...


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _RankPart(msgspec.Struct, frozen=True):
    value: Any
    tensors: dict[str, _Tensor]


class Row(msgspec.Struct, frozen=True):
    """One rank's row.

    Attributes:
        rng: random streams of the rank.
        parts: parts of records, by path; the path of an item is its name.
    """

    rng: RngState
    parts: dict[str, _RankPart]


def capture_row(ctx: DistContext, records: Mapping[str, object]) -> bytes:
    """Return this rank's row: its streams, and its parts of records.

    Args:
        ctx: the context.
        records: all records in the items, by path.

    Raises:
        CheckpointError: something cannot be stored, named by its path.
    """
    parts: dict[str, _RankPart] = {}
    for path, record in records.items():
        part = record.rank_part() if isinstance(record, DiffersByRank) and not isinstance(record, type) else None
        if part is not None:
            tensors: dict[str, torch.Tensor] = {}
            value = encode(part, path, tensors)
            parts[path] = _RankPart(value, {key: _to_bytes(key, tensor) for key, tensor in tensors.items()})
    return msgspec.msgpack.encode(Row(capture_rng(ctx.device), parts))


def compare_row(ctx: DistContext, saved: Saved) -> tuple[str, Box] | None:
    """Return the position of this rank's row, None if the run had another number of ranks.

    Raises:
        CheckpointError: the checkpoint has no rows.
    """
    entry, world = saved.entries.get(RANKS), saved.manifest.world_size
    if entry is None or entry.dtype != "uint8" or len(entry.shape) != 2 or entry.shape[0] != world:
        raise CheckpointError("no row of random streams for each rank", where=f"{saved.path}, tensor {RANKS}")
    return (RANKS, Box((ctx.rank, 0), (1, entry.shape[1]))) if world == ctx.world_size else None


def read_row(saved: Saved, part: tuple[str, Box] | None) -> Row | None:
    """Return this rank's row.

    Args:
        saved: the checkpoint.
        part: position from `compare_row`.

    Raises:
        CheckpointError: not a row.
    """
    if part is None:
        return None
    where, row = f"{saved.path}, tensor {RANKS}", as_bytes(saved.read(*part).view(-1))
    length = int.from_bytes(row[:_LENGTH_BYTES], "little")
    try:
        return msgspec.msgpack.decode(row[_LENGTH_BYTES:][:length], type=Row)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(f"not a rank's row: {error}", where=where) from error


def with_own_part(value: object, path: str, row: Row | None) -> object:
    """Return a loaded record with this rank's part, if the row has one for its path; others unchanged.

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


def rehearse_rng(ctx: DistContext, saved: Saved, row: Row | None) -> RngState | None:
    """Return this rank's stored streams, None if they are those of another set-up.

    Raises:
        CheckpointError: not states of streams.
    """
    if row is None:
        return None
    state, where = row.rng, f"{saved.path}, tensor {RANKS}"
    try:
        _rehearse(state, ctx.device)
    except (ValueError, TypeError, RuntimeError, OverflowError, ImportError) as error:
        raise CheckpointError(f"not a state of random streams: {error}", where=where) from error
    here = [] if ctx.device.type == "cpu" else [ctx.device.type]
    return state if [kind for kind, _ in state.devices] == here else None


def apply_rng(ctx: DistContext, saved: Saved, state: RngState | None) -> None:
    """Restore this rank's streams, or seed them from the checkpoint's digest and the rank. Mutates them."""
    if state is not None:
        restore_rng(state, ctx.device)
        return
    seed = int(saved.digest[:15], 16)
    place, places = ctx.data_parallel
    seed_rng(Key(seed).fold_in("load_state", places, place), ctx.device)


def _rehearse(state: RngState, device: torch.device) -> None:
    """Set unused streams to the state, so that setting the real ones cannot fail."""
    version, words, gauss = state.python
    random.Random().setstate((version, words, gauss))
    torch.Generator().set_state(torch.frombuffer(bytearray(state.torch), dtype=torch.uint8))
    for kind, data in state.devices:
        if kind == "xla" and len(data) != xla.STATE_BYTES:
            raise ValueError(f"XLA's has {xla.STATE_BYTES} bytes")
        if kind == device.type != "xla":
            torch.Generator(device).set_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if state.numpy is not None:
        importlib.import_module("numpy")  # the state says that the run used it
        key, position, _, _ = state.numpy
        if len(key) != _NUMPY_WORDS * 4 or not 0 <= position <= _NUMPY_WORDS:
            raise ValueError("numpy's words or position are out of range")


def _to_bytes(name: str, tensor: torch.Tensor) -> _Tensor:
    if is_dtensor(tensor):
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
