# SPDX-License-Identifier: Apache-2.0
"""Python objects over ranks, pickled: the one place of the package that pickles, and only to and from peers of a job.

Unpickling runs code that the sender chose. The ranks of a job trust each other, as they run one program; nothing that
was read from a file or from elsewhere on the network comes here.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, TypeVar, overload

import torch

from accel.collectives._packing import check_rank
from accel.comm import Call, as_bytes, as_tensor, barrier, broadcast_bytes, check_tag, exchange, shared_failure, tagged
from accel.context import DistContext, context_first
from accel.errors._checks import not_pickled, not_unpickled

T = TypeVar("T")


@overload
def gather_object(ctx: DistContext, obj: T, *, dst: None = None, tag: str | None = None) -> list[T]: ...


@overload
def gather_object(ctx: DistContext, obj: T, *, dst: int, tag: str | None = None) -> list[T] | None: ...


@context_first
def gather_object(ctx: DistContext, obj: T, *, dst: int | None = None, tag: str | None = None) -> list[T] | None:
    """Gather an object from each rank, in rank order. A collective.

    Objects are pickled: for ranks of one job, which trust each other. Tensors are sent faster by `gather`, and
    tensors on a rank's own device only there.

    Args:
        ctx: the context.
        obj: an object that pickle takes.
        dst: the only rank that gets the list; None for all.
        tag: name of the call, compared between ranks. It distinguishes calls of one kind and shape if their order could
            differ between ranks by mistake, as in a loop over keys.

    Returns:
        A list as long as there are ranks, its elements copies; None on ranks other than `dst`.

    Raises:
        ConfigError: an object that cannot be pickled or, on a rank that gets it, unpickled; no such rank; a tag that is
            no text; on every rank.
        CollectiveMismatch: ranks made different calls; on every rank.
    """
    with shared_failure(ctx.comm, Call("gather_object")):
        check_tag(tag, "gather_object")
        check_rank(ctx, dst, "gather_object, dst=")
        payload = _pickled(obj, "gather_object")
    call = Call("gather_object", tagged(f"dst={dst}", tag), ordered=tag is None)
    parts = exchange(ctx.comm, call, payload, dst=dst)
    objects = _all_unpickled(ctx, parts, "gather_object")
    return objects if dst in (None, ctx.rank) else None


@context_first
def broadcast_object_list(ctx: DistContext, objects: Sequence[T], *, src: int = 0, tag: str | None = None) -> list[T]:
    """Broadcast a list of objects from one rank. A collective.

    Objects are pickled: for ranks of one job, which trust each other.

    Args:
        ctx: the context.
        objects: objects that pickle takes on rank `src`; elsewhere a sequence of the same length, such as [None, None].
        src: the rank that sends its objects.
        tag: name of the call, compared between ranks. It distinguishes calls of one kind and shape if their order could
            differ between ranks by mistake, as in a loop over keys.

    Returns:
        A new list; its elements are copies, and on rank `src` copies as well.

    Raises:
        ConfigError: an object that cannot be pickled or, on another rank, unpickled; no such rank; a tag that is no
            text; on every rank.
        CollectiveMismatch: ranks made different calls, or lists of different lengths; on every rank.
    """
    with shared_failure(ctx.comm, Call("broadcast_object_list")):
        check_tag(tag, "broadcast_object_list")
        check_rank(ctx, src, "broadcast_object_list, src=")
        count = len(objects)
        payload = _pickled(list(objects), "broadcast_object_list") if ctx.rank == src else as_tensor(b"")
    detail = tagged(f"src={src}\n{count} objects", tag)
    call = Call("broadcast_object_list", detail, ordered=tag is None)
    sent = broadcast_bytes(ctx.comm, call, payload, source=src)
    (received,) = _all_unpickled(ctx, [sent], "broadcast_object_list")
    return received


def _pickled(obj: object, where: str) -> torch.Tensor:
    try:
        return as_tensor(pickle.dumps(obj))
    except Exception as error:
        raise not_pickled(obj, error, where, "numbers, text, lists and dicts of them") from error


def _all_unpickled(ctx: DistContext, parts: Sequence[torch.Tensor], name: str) -> list[Any]:
    """Unpickle; an error on one rank is raised on all. A collective."""
    with shared_failure(ctx.comm, Call(name)):
        try:
            objects = [pickle.loads(as_bytes(part)) for part in parts]
        except Exception as error:
            raise not_unpickled(error, name) from error
    barrier(ctx.comm, Call(name, "unpickled", ordered=False))
    return objects
