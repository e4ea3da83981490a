# SPDX-License-Identifier: Apache-2.0
"""`broadcast`: the tensors of one rank, on all ranks."""

from __future__ import annotations

from typing import TypeVar

import torch

from accel import tree as trees
from accel.collectives._packing import bytes_of, plan_buckets, plan_packing, sections, split, write
from accel.collectives._tree_tensors import TreeTensors, check_rank, make_call, read_tensors
from accel.comm import (
    HEADER_BYTES,
    Call,
    as_bytes,
    as_tensor,
    blank,
    broadcast_bytes,
    broadcast_flat,
    check_tag,
    inline_bytes,
    reduced_bytes,
    shared_failure,
    start,
)
from accel.context import DistContext, context_first

T = TypeVar("T")


@context_first
def broadcast(ctx: DistContext, tree: T, *, src: int = 0, tag: str | None = None) -> T:
    """Broadcast each tensor of a tree from one rank. A collective.

    Args:
        ctx: the context.
        tree: nested containers of None and of tensors, with the same shapes and dtypes on every rank.
        src: the rank that sends its tensors.
        tag: name of the call, compared between ranks. It tells apart calls of one kind and shape, whose order could
            differ between ranks by mistake, as in a loop over keys.

    Returns:
        The same containers with new tensors, which belong to no autograd graph, each on the kind of device where this
        rank's was.

    Raises:
        CollectiveMismatch: ranks differ in `src`, `tag`, structure, dtype or shape; on every rank.
        ConfigError: no such rank, or a tag that is no text; on every rank.
        TreeError: a container that cannot be taken apart, a leaf that is no tensor, or a tensor that cannot be sent; by
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
