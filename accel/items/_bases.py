# SPDX-License-Identifier: Apache-2.0
"""Partly frozen models: a checkpoint holds the trainable part, and a digest of each frozen parameter.

A digest is a sum over the parameter's words of 8 bytes, mixed with their positions. So each rank sums its own piece,
and the sums of all ranks give the digest of the whole, for any sharding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from accel.checkpoint._boxes import Box
from accel.checkpoint._live_tensors import held_box
from accel.checkpoint._manifest import is_list, is_object
from accel.errors import CheckpointError, ConfigError
from accel.items._source import Facts, Problems, facts
from accel.tensors import integers, is_dtensor, local_part

BASE = "$base"  # the key in a module's value; no name begins with "$"
_RUN = 1 << 24  # words at a time, so that a digest takes little memory
_WORD = 8


class Sums(msgspec.Struct, frozen=True, array_like=True):
    """One rank's sums of a sharded parameter."""

    facts: Facts  # dtype and shape of the whole
    box: Box | None  # this rank's piece; None for none
    bits: tuple[int, int] = (0, 0)  # sums of the words inside the piece
    loose: dict[int, int] = {}  # bytes of words partly inside the piece, by position; other bytes are 0


def without_base(
    name: str, parameters: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, str | Sums]]:
    """Return the trainable parameters of a module, and a digest of each frozen one; sums of sharded ones."""
    trained = {key: each for key, each in parameters.items() if each.requires_grad}
    if not trained:
        fix = "Let some parameter have requires_grad=True before the save."
        raise ConfigError("the model has no trainable parameters", where=f"item {name}", fix=fix)
    frozen = {key: each for key, each in parameters.items() if key not in trained}
    return trained, {key: digest(f"{name}.{key}", tensor) for key, tensor in frozen.items()}


def compare_base(
    name: str, parameters: Mapping[str, torch.Tensor], stored: object, problems: Problems
) -> tuple[frozenset[str], dict[str, tuple[str, Sums]]]:
    """Compare frozen parameters with stored digests; return their names and, of sharded ones by full name, the stored
    digest with this rank's sums, for `differing_bases`."""
    shown = repr(stored)[:80]
    digests: dict[str, Any] = stored if is_object(stored) else {"": None}
    if not all(isinstance(each, str) for each in digests.values()):
        raise CheckpointError("the digests of the base are not valid", got=shown, where=f"item {name}")
    known = parameters.keys() & digests.keys()
    problems.compare_names(known, digests.keys(), f"{name}.")
    sharded: dict[str, tuple[str, Sums]] = {}
    for key in known:
        found = digest(f"{name}.{key}", parameters[key])
        if isinstance(found, Sums):
            sharded[f"{name}.{key}"] = digests[key], found
        elif found != digests[key]:
            _note(problems, f"{name}.{key}")
    return frozenset(digests), sharded


def has_sums(value: object) -> bool:
    """Return whether an encoded item holds sums, which ranks must join."""
    held = value.get(BASE) if is_object(value) else None
    return is_object(held) and any(map(is_list, held.values()))


def differing_bases(stored: Mapping[str, str], ranks: Sequence[Mapping[str, Sums]]) -> Problems:
    """Return the sharded parameters that differ from their stored digest, by the sums of all ranks."""
    problems = Problems()
    for name, each in stored.items():
        if _joined(name, [sums[name] for sums in ranks if name in sums]) != each:
            _note(problems, name)
    return problems


def join_bases(name: str, ranks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the digests of frozen parameters from the digests and encoded sums of all ranks."""
    found: dict[str, str] = {}
    for key, first in ranks[0].items():
        sums = [each[key] for each in ranks if key in each]
        whole = isinstance(first, str)
        found[key] = first if whole else _joined(f"{name}.{key}", msgspec.convert(sums, list[Sums]))
    return found


def digest(name: str, tensor: torch.Tensor) -> str | Sums:
    """Return a digest of dtype, shape and bits, the same on every device; of a sharded tensor this rank's sums."""
    data = local_part(tensor).contiguous().reshape(-1).view(torch.uint8)
    if not is_dtensor(tensor):
        return _text(facts(tensor), _segment(data, 0, data.numel())[0])
    box = held_box(tensor, name)
    if box is None:
        return Sums(facts(tensor), None)
    return Sums(facts(tensor), box, *_piece(data, box, tuple(tensor.shape), tensor.element_size()))


def _piece(
    data: torch.Tensor, box: Box, shape: tuple[int, ...], itemsize: int
) -> tuple[tuple[int, int], dict[int, int]]:
    """Return the sums of a piece: equally long segments, each contiguous in the whole tensor."""
    split = max((dim for dim in range(len(shape)) if box.shape[dim] != shape[dim]), default=0)
    starts = torch.zeros((), dtype=torch.int64)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :]) * itemsize
        at = torch.arange(box.shape[dim]) if dim < split else torch.zeros(1, dtype=torch.int64)
        starts = starts[..., None] + (box.offset[dim] + at if dim <= split else at) * stride
    starts = starts.reshape(-1)
    end = math.prod(shape) * itemsize
    segments = data.view(len(starts), -1)
    if segments.shape[1] % _WORD == 0 and not (starts % _WORD).any():
        aligned = data if data.data_ptr() % _WORD == 0 else data.clone()
        return _sums(aligned.view(torch.int64).view(len(starts), -1), (starts // _WORD).to(data.device)), {}
    found, loose = [(0, 0)], dict[int, int]()
    for segment, start in zip(segments, integers(starts), strict=True):
        bits, ends = _segment(segment, start, end)
        found.append(bits)
        for place, word in ends.items():
            loose[place] = loose.get(place, 0) + word
    return _added(found), loose


def _segment(data: torch.Tensor, start: int, end: int) -> tuple[tuple[int, int], dict[int, int]]:
    """Return the sums of a segment's bytes, and its incomplete words, from its position and the tensor's size."""
    lead, stop = start % _WORD, start + data.numel()
    words = torch.nn.functional.pad(data, (lead, -stop % _WORD)).view(torch.int64)
    first = 1 if lead else 0
    last = len(words) - (1 if stop % _WORD and stop != end else 0)
    ends = {*range(first), *range(last, len(words))}
    loose = {start // _WORD + at: int(words[at]) % 2**64 for at in ends}
    inner = words[first : max(first, last)]
    return _sums(inner[None], torch.tensor([start // _WORD + first], device=data.device)), loose


def _sums(words: torch.Tensor, starts: torch.Tensor) -> tuple[int, int]:
    """Sum words, shape [segments, words of each], mixed with their positions, from `starts` on."""
    sums = [torch.zeros(2, dtype=torch.int64, device=words.device)]
    rows = max(1, _RUN // max(1, words.shape[1]))
    for row in range(0, words.shape[0], rows):
        for column in range(0, words.shape[1], _RUN):
            run = words[row : row + rows, column : column + _RUN]
            places = starts[row : row + rows, None] + torch.arange(column, column + run.shape[1], device=run.device)
            mixed = (run ^ (run >> 29)) * (2 * places + 1)
            sums.append(torch.stack([run.sum(), (mixed ^ (mixed >> 32)).sum()]))
    first, second = torch.stack(sums).sum(0).cpu()
    return int(first), int(second)


def _joined(name: str, ranks: Sequence[Sums]) -> str:
    pieces = {each.box: each for each in ranks if each.box is not None}  # copies of a piece count once
    dtype, shape = ranks[0].facts
    if sum(box.size for box in pieces) != math.prod(shape):
        raise CheckpointError(
            "a frozen parameter has shards on other ranks too",
            where=name,
            fix="Shard it over a mesh of ranks of this context only.",
        )
    loose: dict[int, int] = {}
    for place, word in (pair for each in pieces.values() for pair in each.loose.items()):
        loose[place] = loose.get(place, 0) + word
    words = torch.tensor([word - 2**64 if word >= 2**63 else word for word in loose.values()], dtype=torch.int64)
    ends = _sums(words[:, None], torch.tensor(list(loose), dtype=torch.int64))
    return _text((dtype, shape), _added([ends, *(each.bits for each in pieces.values())]))


def _added(sums: Sequence[tuple[int, int]]) -> tuple[int, int]:
    first, second = torch.tensor(sums, dtype=torch.int64).sum(0)
    return int(first), int(second)


def _text(of: Facts, bits: tuple[int, int]) -> str:
    return hashlib.sha256(repr((of, list(bits))).encode()).hexdigest()


def _note(problems: Problems, name: str) -> None:
    problems.wrong_type(name, "the base that the checkpoint was trained on", "other values")
