# SPDX-License-Identifier: Apache-2.0
"""`gather`: the tensors of all ranks, joined along the first dimension."""

from __future__ import annotations

from typing import Literal, TypeVar, overload

from accel import tree as trees
from accel.collectives._leaves import check_rank, make_call, read_leaves
from accel.collectives._rows import gather_rows
from accel.comm import Call, check_tag, shared_failure
from accel.context import DistContext, context_first
from accel.errors import ConfigError

T = TypeVar("T")


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
    """Return the tree with each tensor replaced by all ranks' tensors, joined in rank order. A collective.

    Args:
        ctx: the context.
        tree: nested containers; tensors of shape [rows, ...], where rows may differ between ranks, or of shape [],
            which count as one row; and None.
        dst: the only rank that gets the result, so that the others need no memory for it; None for all.
        to: "cpu" to get the result on the CPU; None to get it where the tensors are.
        tag: name of the call, compared between ranks if any rank gives one. It tells apart calls of one kind and shape
            whose order may differ between ranks by mistake, as in a loop over keys.

    Returns:
        The same containers with new tensors of shape [rows of all ranks, ...] and the same dtypes, which belong to no
        autograd graph; None on ranks other than `dst`.

    Raises:
        CollectiveMismatch: ranks differ in structure, dtype, trailing shape, `dst` or `tag`; on every rank.
        ConfigError: no such rank, an unknown `to`, or a tag that is no text; on every rank.
        TreeError: a container that cannot be taken apart, a leaf that is no tensor, or a tensor that cannot be sent; by
            its path, on every rank.
    """
    with shared_failure(ctx.comm, Call("gather")):
        check_tag(tag, "gather")
        check_rank(ctx, dst, "gather, dst=")
        if to not in (None, "cpu"):
            raise ConfigError("no such place", expected="'cpu' or None", got=repr(to), where="gather, to=")
        leaves = read_leaves(ctx, tree)
    if ctx.world_size == 1:
        ctx.comm.check_open()
        joined = [leaf.detach().clone().reshape(leaf.shape or 1) for leaf in leaves.tensors]
    else:
        call = make_call(ctx, "gather", tree, leaves, f"dst={dst}", tag=tag, open_dim=0)
        joined = gather_rows(ctx, leaves, call, dst)
    if joined is None:
        return None
    return trees.replace_tensors(tree, [leaf.to(to) for leaf in joined] if to else joined, ctx.containers)
