# SPDX-License-Identifier: Apache-2.0
"""The way of `gather`: what is small in the checked message, what is large straight from its own memory."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import torch

from accel.collectives._leaves import Leaves
from accel.collectives._pack import (
    KEPT_PLANS,
    Group,
    Packing,
    aligned,
    bytes_of,
    plan_packing,
    plan_parcels,
    sections,
    split,
    write,
)
from accel.comm import (
    HEADER_BYTES,
    Answers,
    Call,
    all_gather_flat,
    as_bytes,
    blank,
    fill,
    gather_bytes,
    inline_bytes,
    start,
)
from accel.context import DistContext

_LENGTH = struct.Struct("<I")


class _Share(NamedTuple):
    """One rank's part in a gather.

    Attributes:
        rows, counts: rows and elements of each tensor.
        head: the rows, encoded.
        inline: where the tensors are in the first message, behind the head; None if they do not fit.
        parcels: else what travels together if all ranks have this share: the tensors' numbers, and where they are.
    """

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    head: bytes
    inline: Packing | None
    parcels: tuple[tuple[tuple[int, ...], Packing], ...]


class _Parcel(NamedTuple):
    """What travels together: the tensors' numbers, where they are in each rank's bytes, and this rank's bytes."""

    chosen: tuple[int, ...]
    packings: list[Packing]
    mine: torch.Tensor


def gather_rows(ctx: DistContext, leaves: Leaves, call: Call, dst: int | None) -> list[torch.Tensor] | None:
    """Join the tensors of all ranks along the first dimension. A collective of more than one rank.

    Args:
        ctx: the context.
        leaves: this rank's tensors.
        call: what ranks compare.
        dst: the rank that gets the result; None for all.

    Returns:
        New tensors; None where they are not wanted.
    """
    room = inline_bytes(ctx.comm) if leaves.on_cpu else 0
    own = _share(leaves.dtypes, leaves.shapes, leaves.places, room)
    wait = start(ctx.comm, call, *_first_message(ctx, leaves, own), variant=own.head)
    shares = [own] * ctx.world_size
    parcels = _parcels(ctx, leaves, shares) if own.inline is None else []  # packed while the first message travels
    answers = wait()
    if not answers.same:
        shares = _all_shares(ctx, leaves, own, room, answers)
    wanted = dst in (None, ctx.rank)
    different = [own] if answers.same else shares
    packings = [share.inline for share in different if share.inline is not None]
    if len(packings) == len(different):
        return _join_first(leaves, shares, packings, answers) if wanted else None
    if not answers.same:
        parcels = _parcels(ctx, leaves, shares)
    joined: dict[int, torch.Tensor] = {}
    for chosen, packings, mine in parcels:
        sizes = [packing.nbytes for packing in packings]
        everything = gather_bytes(ctx.comm, mine, sizes, dst)
        if everything is None:
            continue
        if len(chosen) == 1:  # the ranks' rows lie one after another already
            i, total = chosen[0], sum(share.rows[chosen[0]] for share in shares)
            joined[i] = _shaped(everything.view(leaves.dtypes[i]), leaves.shapes[i], total)
        elif answers.same and everything.numel():  # rows of no bytes cannot be viewed as another dtype
            joined.update(_join(leaves, shares, sections(packings[0], everything.view(len(sizes), -1))))
        else:
            joined.update(_join_ragged(leaves, shares, packings, torch.split(everything, sizes)))
    return [joined[i] for i in range(len(leaves.shapes))] if wanted else None


@functools.lru_cache(maxsize=KEPT_PLANS)
def _share(
    dtypes: tuple[torch.dtype, ...], shapes: tuple[Sequence[int], ...], places: tuple[str, ...], room: int
) -> _Share:
    """Plan one rank's part; `room` is what the first message can hold of it."""
    rows = tuple([shape[0] if shape else 1 for shape in shapes])
    counts = tuple([math.prod(shape) for shape in shapes])
    encoded = msgspec.msgpack.encode(rows)
    head, packing = _LENGTH.pack(len(encoded)) + encoded, plan_packing(dtypes, counts)
    if aligned(len(head)) + packing.nbytes <= room:
        return _Share(rows, counts, head, packing, ())
    parcels = [(chosen, plan_packing(dtypes, counts, chosen)) for chosen in plan_parcels(dtypes, counts, places)]
    return _Share(rows, counts, head, None, tuple(parcels))


def _first_message(ctx: DistContext, leaves: Leaves, own: _Share) -> tuple[bytearray, int]:
    """The message, and the bytes of its payload: the rows, and the tensors; or only the rows; or nothing."""
    message, begin = blank(ctx.comm), HEADER_BYTES + aligned(len(own.head))
    if begin > len(message):
        return message, 0
    fill(message, own.head)
    if own.inline is None:
        return message, len(own.head)
    write(own.inline, leaves.tensors, message, begin)
    return message, begin - HEADER_BYTES + own.inline.nbytes


def _all_shares(ctx: DistContext, leaves: Leaves, own: _Share, room: int, answers: Answers) -> list[_Share]:
    if all(answers.sizes):
        data = [as_bytes(row) for row in answers.inline]
        stops = [_LENGTH.size + _LENGTH.unpack_from(each)[0] for each in data]
        encoded = [each[_LENGTH.size : stop] for each, stop in zip(data, stops, strict=True)]
        everyones = [msgspec.msgpack.decode(each, type=list[int]) for each in encoded]
    else:  # so many tensors that not even the rows fit
        gathered = all_gather_flat(ctx.comm, torch.tensor(own.rows, device=ctx.comm.control))
        everyones = [[int(n) for n in each] for each in gathered.cpu()]
    rests = [tuple(shape[1:]) for shape in leaves.shapes]
    return [
        _share(leaves.dtypes, tuple([(n, *rest) for n, rest in zip(rows, rests, strict=True)]), leaves.places, room)
        for rows in everyones
    ]


def _parcels(ctx: DistContext, leaves: Leaves, shares: list[_Share]) -> list[_Parcel]:
    different = {id(share): share for share in shares}
    if len(different) == 1:
        planned = shares[0].parcels
        return [_Parcel(each, [plan] * len(shares), bytes_of(plan, leaves.tensors)) for each, plan in planned]
    most = [max(counts) for counts in zip(*(share.counts for share in different.values()), strict=True)]
    parcels: list[_Parcel] = []
    for chosen in plan_parcels(leaves.dtypes, most, leaves.places):
        plans = {key: plan_packing(leaves.dtypes, share.counts, chosen) for key, share in different.items()}
        packings = [plans[id(share)] for share in shares]
        parcels.append(_Parcel(chosen, packings, bytes_of(packings[ctx.rank], leaves.tensors)))
    return parcels


def _join_first(leaves: Leaves, shares: list[_Share], packings: list[Packing], answers: Answers) -> list[torch.Tensor]:
    """Join what came in the first message."""
    if answers.same and len(leaves.tensors) == 1:
        (group,) = packings[0].groups
        elements = answers.elements(group.dtype, aligned(len(shares[0].head)), group.counts[0])
        joined = elements.clone(memory_format=torch.contiguous_format)
        return [_shaped(joined, leaves.shapes[0], shares[0].rows[0] * len(shares))]
    if answers.same:
        own, skip = packings[0], aligned(len(shares[0].head))
        parts = ((each, answers.elements(each.dtype, skip + each.start, sum(each.counts))) for each in own.groups)
        joined = _join(leaves, shares, parts)
    else:
        behind = [row[aligned(len(share.head)) :] for row, share in zip(answers.inline, shares, strict=True)]
        joined = _join_ragged(leaves, shares, packings, behind)
    return [joined[i] for i in range(len(leaves.shapes))]


def _join(leaves: Leaves, shares: list[_Share], parts: Iterable[tuple[Group, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Join tensors of the same shapes on all ranks, from each group's elements, shape [ranks, elements]."""
    rows, ranks = shares[0].rows, len(shares)
    return {
        i: _shaped(part, leaves.shapes[i], rows[i] * ranks)
        for group, elements in parts
        for i, part in split(group, elements)
    }


def _join_ragged(
    leaves: Leaves, shares: list[_Share], packings: list[Packing], parts: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Join the ranks' parts of each tensor, from each rank's bytes."""
    joined: dict[int, torch.Tensor] = {}
    found: dict[int, list[torch.Tensor]] = {}
    for packing, part in zip(packings, parts, strict=True):
        for group, elements in sections(packing, part):
            for i, own in zip(group.members, torch.split(elements, list(group.counts)), strict=True):
                found.setdefault(i, []).append(own)
    for i, same in found.items():
        whole = same[0].new_empty(sum(map(len, same)))
        torch.cat(same, out=whole)  # into a given tensor, because autocast takes part in a plain cat
        joined[i] = _shaped(whole, leaves.shapes[i], sum(share.rows[i] for share in shares))
    return joined


def _shaped(elements: torch.Tensor, shape: torch.Size, rows: int) -> torch.Tensor:
    return elements.view(rows) if len(shape) < 2 else elements.view(rows, *shape[1:])
