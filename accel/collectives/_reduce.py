# SPDX-License-Identifier: Apache-2.0
"""Collectives with one result on all ranks: `reduce`, `broadcast`, `broadcast_from_holder`."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, cast, get_args

import msgspec
import torch

import accel.tree._walk as trees
from accel.collectives._packing import (
    Packing,
    TreeTensors,
    bytes_of,
    check_packable,
    check_rank,
    make_call,
    plan_buckets,
    plan_packing,
    read_tensors,
    sections,
    split,
    to_bytes,
    write,
)
from accel.comm import (
    HEADER_BYTES,
    PAIRWISE,
    Call,
    ReduceOp,
    all_reduce_flat,
    as_bytes,
    as_tensor,
    blank,
    broadcast_bytes,
    broadcast_flat,
    call_site,
    check_tag,
    exchange_values,
    inline_bytes,
    reduced_bytes,
    shared_failure,
    start,
)
from accel.context import DistContext, context_first
from accel.errors import ConfigError, TreeError
from accel.errors._checks import check_choice

T = TypeVar("T")
Reduction = Literal["sum", "mean", "max", "min", "product"]

_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
           torch.float64, torch.complex64, torch.complex128)  # fmt: skip

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # while ranks' values are added
_PAIRWISE = {**PAIRWISE, "mean": torch.add}


@context_first
def reduce(ctx: DistContext, tree: T, op: Reduction = "sum", *, tag: str | None = None) -> T:
    """Reduce each tensor of a tree over all ranks. A collective.

    All ranks get the same bits. The rounding of floating-point sums depends on the size of the tree: small ones are
    added in rank order, among more than 64 ranks in pairs of neighbours, and large ones in the backend's order.

    Args:
        ctx: the context.
        tree: nested containers of None and of tensors, with the same shapes and dtypes on every rank.
        op: "sum", "mean", "max", "min" or "product"; a mean of integers is refused, and so are arithmetic on bool and
            anything but sum and mean of complex numbers.
        tag: name of the call, compared between ranks. It distinguishes calls of one kind and shape if their order could
            differ between ranks by mistake, as in a loop over keys.

    Returns:
        The same containers with new tensors of the same shape, dtype and device, which belong to no autograd graph.

    Raises:
        CollectiveMismatch: ranks differ in operation, `tag`, structure, dtype or shape; on every rank.
        ConfigError: an unknown operation, or a tag that is no text; on every rank.
        TreeError: an operation that a tensor's dtype cannot carry out, or a tensor that cannot be sent; by its path, on
            every rank.
    """
    with shared_failure(ctx.comm, Call("reduce")):
        check_tag(tag, "reduce")
        check_choice(op, get_args(Reduction), "unknown operation", where="reduce(op=)")
        leaves = read_tensors(ctx, tree)
        if any(_refusal(dtype, op) for dtype in set(leaves.dtypes)):
            _refuse(ctx, tree, op)
    if ctx.world_size == 1:
        ctx.comm.check_open()
        reduced = [leaf.detach().clone() for leaf in leaves.tensors]
    else:
        reduced = _reduce(ctx, leaves, make_call(ctx, "reduce", tree, leaves, f"op={op}", tag=tag), op)
    return trees.replace_tensors(tree, reduced, ctx.containers)


def _reduce(ctx: DistContext, leaves: TreeTensors, call: Call, op: Reduction) -> list[torch.Tensor]:
    """Reduce small tensors in the checked message, in rank order; the rest by all-reduce, one for each dtype."""
    counts = tuple([leaf.numel() for leaf in leaves.tensors])
    reduced: dict[int, torch.Tensor] = {}
    whole = plan_packing(leaves.dtypes, counts)
    if ctx.comm.is_large and leaves.on_cpu:
        wide = plan_packing(tuple([_WIDER.get(dtype, dtype) for dtype in leaves.dtypes]), counts)
        if wide.nbytes <= reduced_bytes(ctx.comm):
            reduced = _reduce_on_the_way(ctx, leaves, call, op, wide)
            return [reduced[i].view(shape) for i, shape in enumerate(leaves.shapes)]
    if whole.nbytes <= inline_bytes(ctx.comm) and leaves.on_cpu:
        message = blank(ctx.comm)
        write(whole, leaves.tensors, message, HEADER_BYTES)
        answers = start(ctx.comm, call, message, whole.nbytes)()
        for group in whole.groups:
            elements = answers.elements(group.dtype, group.start, sum(group.counts))
            reduced.update(split(group, _combine(elements, op), give=True))
    else:
        wait = start(ctx.comm, call)
        buckets = plan_buckets(leaves.dtypes, counts, leaves.device_types)
        packings = [plan_packing(leaves.dtypes, counts, chosen) for chosen in buckets]
        buffers = [to_bytes(packing, leaves.tensors) for packing in packings]  # while the first message is sent
        _ = wait()
        for packing, buffer in zip(packings, buffers, strict=True):
            for group, elements in sections(packing, buffer):
                reduced.update(split(group, _all_reduce(ctx, elements, op), give=True))
    return [reduced[i].view(shape) if len(shape) != 1 else reduced[i] for i, shape in enumerate(leaves.shapes)]


def _reduce_on_the_way(
    ctx: DistContext, leaves: TreeTensors, call: Call, op: Reduction, packing: Packing
) -> dict[int, torch.Tensor]:
    """Reduce small tensors of a large group in the checked message, 16-bit ones as float32."""
    message = blank(ctx.comm)
    mine = [leaf.to(_WIDER.get(leaf.dtype, leaf.dtype)) for leaf in leaves.tensors]
    write(packing, mine, message, HEADER_BYTES)

    def combine(lower: torch.Tensor, upper: torch.Tensor) -> None:
        others = sections(packing, upper)
        for (_, elements), (_, more) in zip(sections(packing, lower), others, strict=True):
            _ = _PAIRWISE[op](elements, more, out=elements)

    answers = start(ctx.comm, call, message, packing.nbytes, combine=combine)()
    assert answers.reduced is not None  # in a large group
    reduced: dict[int, torch.Tensor] = {}
    for group, elements in sections(packing, answers.reduced):
        total = elements / ctx.world_size if op == "mean" else elements
        reduced.update(split(group, total))
    return {i: each.to(leaves.dtypes[i]) for i, each in reduced.items()}


def _all_reduce(ctx: DistContext, flat: torch.Tensor, op: Reduction) -> torch.Tensor:
    """Reduce a flat tensor over all ranks; it may be overwritten."""
    wire_op: ReduceOp = "sum" if op == "mean" else op
    wire = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
    if op == "mean" and flat.dtype in (torch.float16, torch.bfloat16):
        wire = wire.div_(ctx.world_size)  # before the sum, which could be too large for them
    if flat.device.type == "cpu" != ctx.comm.control.type:
        wire = wire.to(ctx.comm.control)
    total = all_reduce_flat(ctx.comm, wire, wire_op).to(flat.device).view(flat.dtype)
    return total.div_(ctx.world_size) if op == "mean" and wire.dtype.itemsize > 2 else total


def _combine(ranks: torch.Tensor, op: Reduction) -> torch.Tensor:
    """Reduce along the first dimension."""
    if op == "sum":
        return ranks.sum(0, dtype=ranks.dtype)
    if op == "mean":
        return ranks.mean(0)
    if op == "product":
        return ranks.prod(0, dtype=ranks.dtype)
    return ranks.amax(0) if op == "max" else ranks.amin(0)


def _refuse(ctx: DistContext, tree: object, op: Reduction) -> None:
    for path, leaf in trees.tensors(tree, ctx.containers):
        if problem := _refusal(leaf.dtype, op):
            raise TreeError(problem, got=f"{op} of {leaf.dtype}", where=path, fix="Convert the tensor first.")


def _refusal(dtype: torch.dtype, op: Reduction) -> str:
    """Return the reason why a dtype cannot be reduced by an operation; "" if it can."""
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        return "a mean of integers is not an integer"
    if dtype == torch.bool and op in ("sum", "product"):
        return "bool cannot be added or multiplied"
    if dtype.is_complex and op in ("max", "min"):
        return "complex numbers have no order"
    if dtype.is_complex and op == "product":
        return "backends cannot multiply complex numbers"
    return "" if dtype in _DTYPES else "backends cannot combine this dtype"


@context_first
def broadcast(ctx: DistContext, tree: T, *, src: int = 0, tag: str | None = None) -> T:
    """Broadcast each tensor of a tree from one rank. A collective.

    Args:
        ctx: the context.
        tree: nested containers of None and of tensors, with the same shapes and dtypes on every rank.
        src: the rank that sends its tensors.
        tag: name of the call, compared between ranks. It distinguishes calls of one kind and shape if their order could
            differ between ranks by mistake, as in a loop over keys.

    Returns:
        The same containers with new tensors, which belong to no autograd graph, each on the kind of device where this
        rank's was.

    Raises:
        CollectiveMismatch: ranks differ in `src`, `tag`, structure, dtype or shape; on every rank.
        ConfigError: no such rank, or a tag that is no text; on every rank.
        TreeError: a container that cannot be flattened, a leaf that is no tensor, or a tensor that cannot be sent; by
            its path, on every rank.
    """
    with shared_failure(ctx.comm, Call("broadcast")):
        check_tag(tag, "broadcast")
        check_rank(ctx, src, "broadcast, src=")
        leaves = read_tensors(ctx, tree)
    if ctx.world_size == 1:
        ctx.comm.check_open()
        received = [leaf.detach().clone() for leaf in leaves.tensors]
    else:
        received = _broadcast(ctx, leaves, make_call(ctx, "broadcast", tree, leaves, f"src={src}", tag=tag), src)
    return trees.replace_tensors(tree, received, ctx.containers)


def _broadcast(ctx: DistContext, leaves: TreeTensors, call: Call, src: int) -> list[torch.Tensor]:
    """Send small tensors in the checked message; the rest follows once all ranks are known to expect the same."""
    counts = tuple([leaf.numel() for leaf in leaves.tensors])
    sends = ctx.rank == src
    received: dict[int, torch.Tensor] = {}
    whole = plan_packing(leaves.dtypes, counts)
    if ctx.comm.is_large and whole.nbytes <= reduced_bytes(ctx.comm) and leaves.on_cpu:
        mine = as_bytes(bytes_of(whole, leaves.tensors)) if sends else b""
        buffer = broadcast_bytes(ctx.comm, call, as_tensor(mine), source=src)
        for group, elements in sections(whole, buffer):
            received.update(split(group, elements, give=True))
    elif whole.nbytes <= inline_bytes(ctx.comm) and leaves.on_cpu:
        message = blank(ctx.comm)
        if sends:
            write(whole, leaves.tensors, message, HEADER_BYTES)
        answers = start(ctx.comm, call, message, whole.nbytes)()
        for group in whole.groups:
            received.update(split(group, answers.elements(group.dtype, group.start, sum(group.counts))[src]))
    else:
        _ = start(ctx.comm, call)()
        for chosen in plan_buckets(leaves.dtypes, counts, leaves.device_types):
            packing = plan_packing(leaves.dtypes, counts, chosen)
            if sends:
                buffer = bytes_of(packing, leaves.tensors)
            else:
                buffer = torch.empty(packing.nbytes, dtype=torch.uint8, device=leaves.tensors[chosen[0]].device)
            broadcast_flat(ctx.comm, buffer, source=src)
            for group, elements in sections(packing, buffer):
                received.update(split(group, elements, give=not sends))
    return [received[i].view(shape) for i, shape in enumerate(leaves.shapes)]


_NAME = "broadcast_from_holder"


class _Node(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor by its facts, or a container with the nodes inside; None in a tree is a node of neither."""

    dtype: str = ""  # name of a tensor's dtype; "" for anything else
    shape: tuple[int, ...] = ()
    host: bool = True  # whether it is on the CPU
    kind: str = ""  # "dict", "list" or "tuple" of a container; "" for anything else
    keys: tuple[str | int, ...] = ()  # keys of a dict
    nodes: tuple[_Node, ...] = ()  # children of a container


class _Offer(msgspec.Struct, frozen=True):
    """A rank's tree without values; None if it has none."""

    tree: _Node | None


@context_first
def broadcast_from_holder(ctx: DistContext, tree: T | None) -> T:
    """Broadcast a tree of tensors from the one rank that has it to the others, which pass None. A collective.

    Args:
        ctx: the context.
        tree: nested dicts, lists and tuples of tensors and None, keys of text or int; None on every rank but one.

    Returns:
        The tree with new tensors, which belong to no autograd graph: on the CPU those that were there, the others on
        each rank's device.

    Raises:
        ConfigError: no rank has a tree, or several have; on every rank.
        TreeError: a container or a leaf of another kind, or a tensor that cannot be sent, by its path; on every rank.

    Examples:
        >>> table = torch.arange(3) if ctx.is_main_process else None
        >>> accel.broadcast_from_holder(ctx, table)
        tensor([0, 1, 2])
    """
    call = Call(_NAME, site=call_site())
    with shared_failure(ctx.comm, call):
        mine = _Offer(None if tree is None else _describe(ctx, tree, "tree"))
    offers = exchange_values(ctx.comm, call, mine, _Offer)
    holders = [rank for rank, offer in enumerate(offers) if offer.tree is not None]
    if len(holders) != 1:
        raise ConfigError(
            "one rank must pass tensors, and the others None",
            expected="a tree on one rank, None on all others",
            got=f"a tree on ranks {', '.join(map(str, holders))}" if holders else "None on every rank",
            where=_NAME,
            fix="Choose the rank by broadcast(ctx, tree, src=) where several have one.",
        )
    node = offers[holders[0]].tree
    assert node is not None
    return cast(T, broadcast(ctx, tree if ctx.rank == holders[0] else _empty(ctx, node), src=holders[0]))


def _describe(ctx: DistContext, tree: Any, path: str) -> _Node:
    if tree is None:
        return _Node()
    if isinstance(tree, torch.Tensor):
        check_packable(f"{_NAME}, {path}", tree, ctx.device)
        return _Node(str(tree.dtype).removeprefix("torch."), tuple(tree.shape), tree.device.type == "cpu")
    if type(tree) is dict and all(type(key) in (str, int) for key in cast("dict[Any, Any]", tree)):
        named = cast("dict[str | int, Any]", tree)
        nodes = tuple(_describe(ctx, child, f"{path}[{key!r}]") for key, child in named.items())
        return _Node(kind="dict", keys=tuple(named), nodes=nodes)
    kind = type(cast(object, tree)).__name__
    if isinstance(tree, list | tuple) and kind in ("list", "tuple"):
        listed = enumerate(cast("list[Any]", tree))
        return _Node(kind=kind, nodes=tuple(_describe(ctx, each, f"{path}[{at}]") for at, each in listed))
    raise TreeError(
        "cannot send this container to ranks that hold none",
        expected="dicts, lists and tuples of tensors and None, with keys of text or int",
        got=kind,
        where=f"{_NAME}, {path}",
        fix="Split it, or use broadcast_object_list.",
    )


def _empty(ctx: DistContext, node: _Node) -> Any:
    if node.dtype:
        device = torch.device("cpu") if node.host else ctx.device
        return torch.empty(node.shape, dtype=getattr(torch, node.dtype), device=device)
    children = [_empty(ctx, each) for each in node.nodes]
    if node.kind == "dict":
        return dict(zip(node.keys, children, strict=True))
    return {"list": children, "tuple": tuple(children)}.get(node.kind)
