# SPDX-License-Identifier: Apache-2.0
"""`gather`: the tensors of all ranks, joined along the first dimension; `pad_across_processes`: equal sizes."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar, overload

import msgspec
import torch

import accel.tree._walk as trees
from accel.collectives._packing import (
    KEPT_PLANS,
    DtypeGroup,
    Packing,
    TreeTensors,
    aligned,
    bytes_of,
    check_rank,
    make_call,
    plan_buckets,
    plan_packing,
    read_tensors,
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
    check_tag,
    fill,
    gather_bytes,
    inline_bytes,
    reduce_ints,
    shared_failure,
    start,
)
from accel.context import DistContext, context_first
from accel.errors import ConfigError, TreeError

T = TypeVar("T")

_LENGTH = struct.Struct("<I")


@overload
def gather(
    ctx: DistContext, tree: T, *, dst: None = None, to: Literal["cpu"] | None = None, tag: str | None = None
) -> T: ...


@overload
def gather(
    ctx: DistContext, tree: T, *, dst: int, to: Literal["cpu"] | None = None, tag: str | None = None
) -> T | None: ...


@context_first
def gather(
    ctx: DistContext,
    tree: T,
    *,
    dst: int | None = None,
    to: Literal["cpu"] | None = None,
    tag: str | None = None,
) -> T | None:
    """Gather each tensor of a tree from all ranks, joined in rank order. A collective.

    Args:
        ctx: the context.
        tree: nested containers of None and of tensors of shape [rows, ...], where rows may differ between ranks. A
            tensor of shape [] counts as one row.
        dst: the only rank that gets the result, so that the others need no memory for it; None for all.
        to: "cpu" to get the result on the CPU; None to get it where the tensors are.
        tag: name of the call, compared between ranks. It distinguishes calls of one kind and shape if their order could
            differ between ranks by mistake, as in a loop over keys.

    Returns:
        The same containers with new tensors of shape [rows of all ranks, ...] and the same dtypes, which belong to no
        autograd graph; None on ranks other than `dst`.

    Raises:
        CollectiveMismatch: ranks differ in structure, dtype, trailing shape, `dst` or `tag`; on every rank.
        ConfigError: no such rank, an unknown `to`, or a tag that is no text; on every rank.
        TreeError: a container that cannot be flattened, a leaf that is no tensor, or a tensor that cannot be sent; by
            its path, on every rank.
    """
    with shared_failure(ctx.comm, Call("gather")):
        check_tag(tag, "gather")
        check_rank(ctx, dst, "gather, dst=")
        if to not in (None, "cpu"):
            raise ConfigError("no such place", expected="'cpu' or None", got=repr(to), where="gather, to=")
        leaves = read_tensors(ctx, tree)
    if ctx.world_size == 1:
        ctx.comm.check_open()
        joined = [leaf.detach().clone().reshape(leaf.shape or 1) for leaf in leaves.tensors]
    else:
        call = make_call(ctx, "gather", tree, leaves, f"dst={dst}", tag=tag, open_dim=0)
        joined = _gather_rows(ctx, leaves, call, dst)
    if joined is None:
        return None
    return trees.replace_tensors(tree, [leaf.to(to) for leaf in joined] if to else joined, ctx.containers)


class _RankPlan(NamedTuple):
    """The layout of one rank's tensors in a gather."""

    rows: tuple[int, ...]  # rows of each tensor
    counts: tuple[int, ...]  # elements of each tensor
    head: bytes  # the rows, encoded
    inline: Packing | None  # layout of the tensors in the first message, behind the head; None if they do not fit
    # Numbers and layout of the tensors in each bucket, if all ranks have this plan and they do not fit.
    buckets: tuple[tuple[tuple[int, ...], Packing], ...]


class _Bucket(NamedTuple):
    """Tensors of one message: their numbers, their layout on each rank, and this rank's bytes."""

    chosen: tuple[int, ...]
    packings: list[Packing]
    mine: torch.Tensor


def _gather_rows(ctx: DistContext, leaves: TreeTensors, call: Call, dst: int | None) -> list[torch.Tensor] | None:
    """Join the tensors of all ranks along the first dimension; None on ranks other than `dst`. A collective."""
    room = inline_bytes(ctx.comm) if leaves.on_cpu else 0
    own = _rank_plan(leaves.dtypes, leaves.shapes, leaves.device_types, room)
    wait = start(ctx.comm, call, *_first_message(ctx, leaves, own), variant=own.head)
    plans = [own] * ctx.world_size
    buckets = _even_buckets(ctx, leaves, own) if own.inline is None else []  # packed while the first message is sent
    answers = wait()
    if not answers.same:
        plans = _all_plans(ctx, leaves, own, room, answers)
    wanted = dst in (None, ctx.rank)
    different = [own] if answers.same else plans
    packings = [plan.inline for plan in different if plan.inline is not None]
    if len(packings) == len(different):
        return _join_first(leaves, plans, packings, answers) if wanted else None
    if not answers.same:
        buckets = _buckets(ctx, leaves, plans)
    joined: dict[int, torch.Tensor] = {}
    for chosen, packings, mine in buckets:
        sizes = [mine.numel()] * len(plans) if answers.same else [packing.nbytes for packing in packings]
        everything = gather_bytes(ctx.comm, mine, sizes, dst)
        if everything is None:
            continue
        if len(chosen) == 1:  # the ranks' rows follow each other already
            i = chosen[0]
            total = own.rows[i] * len(plans) if answers.same else sum(plan.rows[i] for plan in plans)
            joined[i] = _shaped(everything.view(leaves.dtypes[i]), leaves.shapes[i], total)
        elif answers.same and everything.numel():  # rows of no bytes cannot be viewed as another dtype
            joined.update(_join(leaves, plans, sections(packings[0], everything.view(len(sizes), -1))))
        else:
            joined.update(_join_ragged(leaves, plans, packings, torch.split(everything, sizes)))
    return [joined[i] for i in range(len(leaves.shapes))] if wanted else None


@functools.lru_cache(maxsize=KEPT_PLANS)
def _rank_plan(
    dtypes: tuple[torch.dtype, ...], shapes: tuple[Sequence[int], ...], device_types: tuple[str, ...], room: int
) -> _RankPlan:
    """Lay out one rank's tensors; `room` is the number of bytes that fit into the first message."""
    rows = tuple([shape[0] if shape else 1 for shape in shapes])
    counts = tuple([math.prod(shape) for shape in shapes])
    encoded = msgspec.msgpack.encode(rows)
    head = _LENGTH.pack(len(encoded)) + encoded
    packing = plan_packing(dtypes, counts)
    if aligned(len(head)) + packing.nbytes <= room:
        return _RankPlan(rows, counts, head, packing, ())
    buckets = [(chosen, plan_packing(dtypes, counts, chosen)) for chosen in plan_buckets(dtypes, counts, device_types)]
    return _RankPlan(rows, counts, head, None, tuple(buckets))


def _first_message(ctx: DistContext, leaves: TreeTensors, own: _RankPlan) -> tuple[bytearray | None, int]:
    """Return the message and the bytes of its payload: rows and tensors, or only the rows, or nothing."""
    if aligned(len(own.head)) > inline_bytes(ctx.comm):
        return None, 0
    message = blank(ctx.comm)
    begin = HEADER_BYTES + aligned(len(own.head))
    fill(message, own.head)
    if own.inline is None:
        return message, len(own.head)
    write(own.inline, leaves.tensors, message, begin)
    return message, begin - HEADER_BYTES + own.inline.nbytes


def _all_plans(ctx: DistContext, leaves: TreeTensors, own: _RankPlan, room: int, answers: Answers) -> list[_RankPlan]:
    if all(answers.sizes):
        data = [as_bytes(row) for row in answers.inline]
        stops = [_LENGTH.size + _LENGTH.unpack_from(each)[0] for each in data]
        encoded = [each[_LENGTH.size : stop] for each, stop in zip(data, stops, strict=True)]
        everyones = [msgspec.msgpack.decode(each, type=list[int]) for each in encoded]
    else:  # so many tensors that not even the rows fit
        gathered = all_gather_flat(ctx.comm, torch.tensor(own.rows, device=ctx.comm.control))
        everyones = [[int(n) for n in each] for each in gathered.cpu()]
    rests = [tuple(shape[1:]) for shape in leaves.shapes]
    shapes = [tuple([(n, *rest) for n, rest in zip(rows, rests, strict=True)]) for rows in everyones]
    return [_rank_plan(leaves.dtypes, each, leaves.device_types, room) for each in shapes]


def _even_buckets(ctx: DistContext, leaves: TreeTensors, own: _RankPlan) -> list[_Bucket]:
    """Pack this rank's tensors where all ranks have its plan."""
    return [
        _Bucket(chosen, [packing] * ctx.world_size, bytes_of(packing, leaves.tensors))
        for chosen, packing in own.buckets
    ]


def _buckets(ctx: DistContext, leaves: TreeTensors, plans: list[_RankPlan]) -> list[_Bucket]:
    different = {id(plan): plan for plan in plans}
    if len(different) == 1:
        return _even_buckets(ctx, leaves, plans[0])
    most = [max(counts) for counts in zip(*(plan.counts for plan in different.values()), strict=True)]
    buckets: list[_Bucket] = []
    for chosen in plan_buckets(leaves.dtypes, most, leaves.device_types):
        planned = {key: plan_packing(leaves.dtypes, plan.counts, chosen) for key, plan in different.items()}
        packings = [planned[id(plan)] for plan in plans]
        buckets.append(_Bucket(chosen, packings, bytes_of(packings[ctx.rank], leaves.tensors)))
    return buckets


def _join_first(
    leaves: TreeTensors, plans: list[_RankPlan], packings: list[Packing], answers: Answers
) -> list[torch.Tensor]:
    """Join the tensors of the first message."""
    if answers.same and len(leaves.tensors) == 1:
        (group,) = packings[0].groups
        elements = answers.elements(group.dtype, aligned(len(plans[0].head)), group.counts[0])
        joined = elements.clone(memory_format=torch.contiguous_format)
        return [_shaped(joined, leaves.shapes[0], plans[0].rows[0] * len(plans))]
    if answers.same:
        own = packings[0]
        skip = aligned(len(plans[0].head))
        parts = ((each, answers.elements(each.dtype, skip + each.start, sum(each.counts))) for each in own.groups)
        joined = _join(leaves, plans, parts)
    else:
        behind = [row[aligned(len(plan.head)) :] for row, plan in zip(answers.inline, plans, strict=True)]
        joined = _join_ragged(leaves, plans, packings, behind)
    return [joined[i] for i in range(len(leaves.shapes))]


def _join(
    leaves: TreeTensors, plans: list[_RankPlan], parts: Iterable[tuple[DtypeGroup, torch.Tensor]]
) -> dict[int, torch.Tensor]:
    """Join tensors of the same shapes on all ranks, from each group's elements, shape [ranks, elements]."""
    rows = plans[0].rows
    return {
        i: _shaped(part, leaves.shapes[i], rows[i] * len(plans))
        for group, elements in parts
        for i, part in split(group, elements)
    }


def _join_ragged(
    leaves: TreeTensors, plans: list[_RankPlan], packings: list[Packing], parts: Sequence[torch.Tensor]
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
        joined[i] = _shaped(whole, leaves.shapes[i], sum(plan.rows[i] for plan in plans))
    return joined


def _shaped(elements: torch.Tensor, shape: torch.Size, rows: int) -> torch.Tensor:
    return elements.view(rows) if len(shape) < 2 else elements.view(rows, *shape[1:])


@context_first
def pad_across_processes(
    ctx: DistContext,
    tree: T,
    *,
    dim: int = 0,
    pad_index: complex = 0,
    pad_first: bool = False,
    tag: str | None = None,
) -> T:
    """Pad each tensor of a tree to its largest size on any rank. A collective.

    Only sizes are sent. `gather` needs no padding; this is for tensors that must have one shape everywhere.

    Args:
        ctx: the context.
        tree: nested containers of None and of tensors, which differ between ranks in `dim` and in the first dimension
            only, as the rows of a batch may that `gather` takes next.
        dim: the dimension to pad; negative to count from the last.
        pad_index: the fill value, a number that every tensor's dtype can hold.
        pad_first: whether to pad at the beginning instead of the end.
        tag: name of the call, compared between ranks. It distinguishes calls of one kind and shape if their order could
            differ between ranks by mistake, as in a loop over keys.

    Returns:
        The same containers with new tensors of the same dtypes and devices. Padding is local arithmetic, so they belong
        to the autograd graphs of the tensors that went in.

    Raises:
        CollectiveMismatch: ranks differ in structure, dtype, another dimension or the options; on every rank.
        ConfigError: `pad_index` is no number, `dim` no int, or `tag` no text; on every rank.
        TreeError: a tensor without that dimension, or of a dtype that cannot hold `pad_index`; what `gather` refuses;
            by its path, on every rank.
    """
    with shared_failure(ctx.comm, Call("pad_across_processes")):
        check_tag(tag, "pad_across_processes")
        if not isinstance(pad_index, int | float | complex):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                "the value is not a number",
                expected="a number",
                got=repr(pad_index),
                where="pad_across_processes, pad_index=",
            )
        if type(dim) is not int:
            raise ConfigError(
                "the dimension is not valid", expected="an int", got=repr(dim), where="pad_across_processes, dim="
            )
        leaves = read_tensors(ctx, tree)
        for path, leaf in trees.tensors(tree, ctx.containers):
            _check(path, leaf, dim, pad_index)
    options = f"dim={dim}, pad_index={pad_index!r}, pad_first={pad_first}"
    call = make_call(ctx, "pad_across_processes", tree, leaves, options, tag=tag, open_dim=dim)
    most = reduce_ints(ctx.comm, call, [shape[dim] for shape in leaves.shapes], "max")
    return trees.replace_tensors(tree, _padded(leaves, dim, most, pad_index, pad_first=pad_first), ctx.containers)


def _padded(leaves: TreeTensors, dim: int, most: list[int], value: complex, *, pad_first: bool) -> list[torch.Tensor]:
    padded: list[torch.Tensor] = []
    for leaf, size in zip(leaves.tensors, most, strict=True):
        own = leaf.shape[dim]
        shape = list(leaf.shape)
        shape[dim] = size
        whole = leaf.new_full(shape, value)
        padded.append(whole)
        _ = whole.narrow(dim, size - own if pad_first else 0, own).copy_(leaf)
    return padded


def _check(path: str, leaf: torch.Tensor, dim: int, value: complex) -> None:
    if not -leaf.ndim <= dim < leaf.ndim:
        raise TreeError(
            "a tensor without the dimension to pad",
            expected=f"dim={dim} to be one of {leaf.ndim} dimensions",
            got=f"shape {list(leaf.shape)}",
            where=path,
            fix="Pad it in another call, or leave it out.",
        )
    if not _fits(value, leaf.dtype):
        raise TreeError(
            "a value to pad with that the dtype cannot hold",
            expected=f"a number of {leaf.dtype}",
            got=repr(value),
            where=path,
            fix="Choose another pad_index, or convert the tensor first.",
        )


def _fits(value: complex, dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return True
    if isinstance(value, complex):
        return False
    if dtype == torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point:
        stored = float(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype))
        rounded = math.isfinite(stored) and abs(value) <= torch.finfo(dtype).max
        return rounded or stored == value or math.isnan(value)  # not every format has infinities
    limits = torch.iinfo(dtype)
    return math.isfinite(value) and value == int(value) and limits.min <= value <= limits.max
