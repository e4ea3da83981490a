# SPDX-License-Identifier: Apache-2.0
"""`broadcast_from_holder`: tensors of the one rank that has them, on ranks that know neither shapes nor dtypes."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import msgspec
import torch

from accel.collectives._broadcast import broadcast
from accel.comm import Call, call_site, exchange_values, shared_failure
from accel.context import DistContext, context_first
from accel.errors import ConfigError, TreeError

T = TypeVar("T")
_NAME = "broadcast_from_holder"


class _Node(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor by its facts, or a container with the nodes inside; None in a tree is a node of neither.

    Attributes:
        dtype: name of a tensor's dtype; "" for anything else.
        shape: its shape.
        host: whether it is on the CPU.
        kind: "dict", "list" or "tuple" of a container; "" for anything else.
        keys: keys of a dict.
        nodes: children of a container.
    """

    dtype: str = ""
    shape: tuple[int, ...] = ()
    host: bool = True
    kind: str = ""
    keys: tuple[str | int, ...] = ()
    nodes: tuple[_Node, ...] = ()


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
        TreeError: a container or a leaf of another kind, by its path; on every rank.

    Example:
        >>> table = torch.arange(3) if ctx.is_main_process else None
        >>> accel.broadcast_from_holder(ctx, table)
        tensor([0, 1, 2])
    """
    call = Call(_NAME, site=call_site())
    with shared_failure(ctx.comm, call):
        mine = _Offer(None if tree is None else _describe(tree, "tree"))
    offers = exchange_values(ctx.comm, call, mine, _Offer)
    holders = [rank for rank, offer in enumerate(offers) if offer.tree is not None]
    if len(holders) != 1:
        raise ConfigError(
            "not one rank with tensors for the others",
            expected="a tree on one rank, None on all others",
            got=f"a tree on ranks {', '.join(map(str, holders))}" if holders else "None on every rank",
            where=_NAME,
            fix="Choose the rank by broadcast(ctx, tree, src=) where several have one.",
        )
    node = offers[holders[0]].tree
    assert node is not None
    return cast(T, broadcast(ctx, tree if ctx.rank == holders[0] else _empty(ctx, node), src=holders[0]))


def _describe(tree: Any, path: str) -> _Node:
    if tree is None:
        return _Node()
    if isinstance(tree, torch.Tensor):
        return _Node(str(tree.dtype).removeprefix("torch."), tuple(tree.shape), tree.device.type == "cpu")
    if type(tree) is dict and all(type(key) in (str, int) for key in cast("dict[Any, Any]", tree)):
        named = cast("dict[str | int, Any]", tree)
        nodes = tuple(_describe(child, f"{path}[{key!r}]") for key, child in named.items())
        return _Node(kind="dict", keys=tuple(named), nodes=nodes)
    if isinstance(tree, list | tuple) and _kind(cast(object, tree)) in ("list", "tuple"):
        listed = enumerate(cast("list[Any]", tree))
        return _Node(
            kind=_kind(cast(object, tree)), nodes=tuple(_describe(each, f"{path}[{at}]") for at, each in listed)
        )
    raise TreeError(
        "not sent to ranks that do not know it",
        expected="dicts, lists and tuples of tensors and None, with keys of text or int",
        got=_kind(cast(object, tree)),
        where=f"{_NAME}, {path}",
        fix="Take it apart, or use broadcast_object_list.",
    )


def _kind(value: object) -> str:
    return type(value).__name__


def _empty(ctx: DistContext, node: _Node) -> Any:
    if node.dtype:
        device = torch.device("cpu") if node.host else ctx.device
        return torch.empty(node.shape, dtype=getattr(torch, node.dtype), device=device)
    children = [_empty(ctx, each) for each in node.nodes]
    if node.kind == "dict":
        return dict(zip(node.keys, children, strict=True))
    return {"list": children, "tuple": tuple(children)}.get(node.kind)
