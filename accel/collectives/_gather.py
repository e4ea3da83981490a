# SPDX-License-Identifier: Apache-2.0
"""`gather`: the tensors of all ranks, joined along the first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from accel import tree as trees
from accel.collectives._pack import describe, pack, packed_bytes, tensor_leaves, unpack
from accel.comm import Call, all_gather_flat, call_site, exchange, fail
from accel.context import DistContext
from accel.errors import TreeError

T = TypeVar("T")


def gather(ctx: DistContext, tree: T) -> T:
    """Return the tree with each tensor replaced by all ranks' tensors, joined in rank order. A collective.

    Args:
        ctx: the context.
        tree: nested containers; tensors of shape [rows, ...], where rows may differ between ranks, or of shape [],
            which count as one row; and None.

    Returns:
        The same containers with new tensors of shape [rows of all ranks, ...], on the device each tensor was on.

    Raises:
        CollectiveMismatch: ranks differ in structure, dtype or trailing shape; on every rank.
        TreeError: a container that cannot be taken apart, a leaf that is no tensor, or a tensor that cannot be sent; by
            its path, on every rank.
    """
    try:
        found = tensor_leaves(tree, ctx.device)
    except TreeError as error:
        fail(ctx.comm, Call("gather", site=call_site()), error)
    rows = [leaf.detach().reshape(1) if leaf.ndim == 0 else leaf.detach() for _, leaf in found]
    if ctx.world_size == 1:
        ctx.comm.check_open()
        return trees.replace_tensors(tree, [leaf.clone() for leaf in rows])
    detail = [f"{path}: {describe(leaf, ragged=True)}" for path, leaf in found]
    call = Call("gather", "\n".join([*detail, trees.structure(tree)]), call_site())
    return trees.replace_tensors(tree, _gather_rows(ctx, call, rows))


def _gather_rows(ctx: DistContext, call: Call, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Send lengths and everything on the CPU in the checked message; what is on the device follows on the device."""
    on_cpu = [i for i, leaf in enumerate(leaves) if leaf.device.type == "cpu"]
    on_device = [i for i, leaf in enumerate(leaves) if leaf.device.type != "cpu"]
    lengths = torch.tensor([leaf.shape[0] for leaf in leaves], dtype=torch.int64)
    payload = pack([lengths, *(leaves[i] for i in on_cpu)], torch.device("cpu"))
    messages = exchange(ctx.comm, call, payload)
    counts = [unpack(message, [torch.int64], [[len(leaves)]])[0] for message in messages]
    joined: dict[int, torch.Tensor] = {}
    head = packed_bytes(torch.int64, [len(leaves)])
    joined.update(_join(leaves, on_cpu, counts, [message[head:] for message in messages]))
    if on_device:
        joined.update(_join(leaves, on_device, counts, _gather_on_device(ctx, leaves, on_device, counts)))
    return [joined[i] for i in range(len(leaves))]


def _gather_on_device(
    ctx: DistContext, leaves: list[torch.Tensor], chosen: list[int], counts: list[torch.Tensor]
) -> Sequence[torch.Tensor]:
    mine = pack([leaves[i] for i in chosen], ctx.device)
    widths = [
        sum(packed_bytes(leaves[i].dtype, [int(count[i]), *leaves[i].shape[1:]]) for i in chosen) for count in counts
    ]
    padded = mine.new_zeros(max(widths))
    padded[: mine.numel()] = mine
    return list(all_gather_flat(ctx.comm, padded)) if max(widths) else [mine] * len(counts)


def _join(
    leaves: list[torch.Tensor], chosen: list[int], counts: list[torch.Tensor], buffers: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    dtypes = [leaves[i].dtype for i in chosen]
    parts = [
        unpack(buffer, dtypes, [[int(count[i]), *leaves[i].shape[1:]] for i in chosen])
        for buffer, count in zip(buffers, counts, strict=True)
    ]
    return {i: torch.cat([part[at] for part in parts]) for at, i in enumerate(chosen)}
