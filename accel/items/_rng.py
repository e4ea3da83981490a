# SPDX-License-Identifier: Apache-2.0
"""A rank's row in a checkpoint: its random streams, and its parts of records that differ between ranks."""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

import msgspec
import torch

from accel import xla
from accel.checkpoint._boxes import Box
from accel.checkpoint._encoding import Classes, DiffersByRank, JoinsRanks, decode, encode, is_record
from accel.checkpoint._manifest import RANKS, Item, record_names
from accel.checkpoint._read import Saved
from accel.comm import as_bytes
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.random import Key, RngState, capture_rng, restore_rng, seed_rng
from accel.storage import dtype_name, storable_dtype
from accel.tensors import is_dtensor

_NUMPY_WORDS = 624
_LENGTH_BYTES = 4
_MISFITS = (msgspec.ValidationError, ValueError, RuntimeError)


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _RankPart(msgspec.Struct, frozen=True):
    value: Any
    tensors: dict[str, _Tensor]


class Row(msgspec.Struct, frozen=True):
    """One rank's row."""

    rng: RngState  # random streams of the rank
    parts: dict[str, _RankPart]  # parts of records, by path; the path of an item is its name


def capture_row(ctx: DistContext, records: Mapping[str, object]) -> bytes:
    """Return this rank's row: its streams, and its parts of the records in the items, by path."""
    parts: dict[str, _RankPart] = {}
    for path, part in _own_parts(records).items():
        tensors: dict[str, torch.Tensor] = {}
        value = encode(part, path, tensors)
        parts[path] = _RankPart(value, {key: _to_bytes(key, tensor) for key, tensor in tensors.items()})
    return msgspec.msgpack.encode(Row(capture_rng(ctx.device), parts))


def _own_parts(records: Mapping[str, object]) -> dict[str, object]:
    """Return this rank's parts by path, without a record that a record inside gives too: a state's is its cursor's."""
    held = dict[str, object]()
    for path in reversed(list(records)):  # a record comes before those inside of it
        record = records[path]
        part = record.rank_part() if isinstance(record, DiffersByRank) and not isinstance(record, type) else None
        inside = (each for inner, each in held.items() if inner.startswith(f"{path}."))
        # Python keeps one object for equal numbers and texts, which are parts of different records.
        if part is not None and not (is_record(part) and any(each is part for each in inside)):
            held[path] = part
    return held


def wanted_rows(ctx: DistContext, saved: Saved, *, joins: bool) -> tuple[str, Box] | None:
    """Return the position of the rows that this rank reads: its own or, where another number of ranks `joins` its
    parts, all on rank 0; None for none."""
    entry, world = saved.entries.get(RANKS), saved.manifest.world_size
    if entry is None or entry.dtype != "uint8" or len(entry.shape) != 2 or entry.shape[0] != world:
        raise CheckpointError("no row of random streams for each rank", where=f"{saved.path}, tensor {RANKS}")
    if world == ctx.world_size:
        return RANKS, Box((ctx.rank, 0), (1, entry.shape[1]))
    return (RANKS, Box((0, 0), (world, entry.shape[1]))) if joins and ctx.rank == 0 else None


def joins_ranks(item: Item, classes: Classes) -> bool:
    """Return whether an item holds a record that takes the parts of another number of ranks together."""
    names = record_names(item.value) | {item.type, f"accel.{item.type}"}
    return any(issubclass(kind, JoinsRanks) for name in names for kind in classes.get(name, ()))


def read_rows(saved: Saved, part: tuple[str, Box] | None) -> list[Row]:
    """Return rows of ranks, in their order, at a position from `wanted_rows`."""
    return [] if part is None else [_decoded(saved, row) for row in saved.read(*part)]


def with_parts(value: object, path: str, live: object, rows: Sequence[Row], *, same_ranks: bool) -> object:
    """Return a loaded record with its ranks' parts; other values as they are. `same_ranks`: the run had as many ranks,
    so that the row is this rank's own."""
    joins = isinstance(value, JoinsRanks)
    with _stored_part(f"item {path}"):
        if joins and type(live) is type(value):
            value = value.declared_as(cast("Any", live))
    where = f"item {path}, this rank's part" if same_ranks else f"item {path}, the ranks' parts"
    with _stored_part(where):
        if same_ranks and rows and path in rows[0].parts and isinstance(value, DiffersByRank):
            return value.with_rank_part(_part_of(rows[0], path, where))
        if not same_ranks and rows and joins:
            return cast("JoinsRanks", value).with_rank_parts([_part_of(row, path, where) for row in rows])
    return value


@contextlib.contextmanager
def _stored_part(where: str) -> Generator[None]:
    try:
        yield
    except _MISFITS as error:
        raise CheckpointError(f"the stored part is not valid: {error}", where=where) from error


def rehearse_rng(ctx: DistContext, saved: Saved, row: Row | None) -> RngState | None:
    """Return this rank's stored streams, None if another set-up saved them; raises if they cannot be set."""
    if row is None:
        return None
    state, where = row.rng, f"{saved.path}, tensor {RANKS}"
    try:
        _rehearse(state, ctx.device)
    except (ValueError, TypeError, RuntimeError, OverflowError, ImportError) as error:
        raise CheckpointError(f"the state of random streams is not valid: {error}", where=where) from error
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


def _decoded(saved: Saved, row: torch.Tensor) -> Row:
    data = as_bytes(row)
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        return msgspec.msgpack.decode(data[_LENGTH_BYTES:][:length], type=Row)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the row of a rank is not valid: {error}", where=f"{saved.path}, tensor {RANKS}"
        ) from error


def _part_of(row: Row, path: str, where: str) -> object:
    """Return the part for a path, in plain values; None without one."""
    part = row.parts.get(path)
    if part is None:
        return None
    tensors = {key: _from_bytes(tensor) for key, tensor in part.tensors.items()}
    return decode(part.value, where, tensors)


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
        importlib.import_module("numpy")  # the state shows that the run used it
        key, position, _, _ = state.numpy
        if len(key) != _NUMPY_WORDS * 4 or not 0 <= position <= _NUMPY_WORDS:
            raise ValueError("numpy's words or position are out of range")


def _to_bytes(name: str, tensor: torch.Tensor) -> _Tensor:
    if is_dtensor(tensor):
        raise CheckpointError(
            "a value that each rank keeps for itself holds a DTensor", where=name, fix="Keep its to_local()."
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _Tensor(dtype_name(tensor.dtype), tuple(tensor.shape), bytes(flat.numpy()))


def _from_bytes(tensor: _Tensor) -> torch.Tensor:
    dtype = storable_dtype(tensor.dtype)
    if dtype is None:
        raise ValueError(f"no dtype {tensor.dtype!r}")
    if not tensor.data:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8).view(dtype).view(tensor.shape)
