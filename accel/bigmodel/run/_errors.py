# SPDX-License-Identifier: Apache-2.0
"""Errors of streamed blocks."""

from __future__ import annotations

from accel.errors import AccelError, StreamError, describe, rebuild


def closed_model(where: str) -> StreamError:
    """Return the error of a use after `close`.

    Args:
        where: name of the block or weight.
    """
    return StreamError(
        "the dispatched model is closed",
        where=where,
        fix="Call the model inside of `with accel.dispatch_model(...)`, or dispatch it again.",
    )


def forked_model(where: str) -> StreamError:
    """Return the error of a use in a process that was forked from the model's, and that lacks its threads.

    Args:
        where: name of the block.
    """
    return StreamError(
        "the thread that fetches blocks is not in this process",
        where=where,
        fix="Dispatch the model after the fork, in each process that calls it.",
    )


def changed_block(name: str) -> StreamError:
    """Return the error of a block that has written to its slot, or has put other tensors in the place of its own."""
    return StreamError(
        "a streamed block has changed its own weights or buffers, and the change is lost",
        where=name,
        fix="Keep its segment on the device that computes.",
    )


def failed_fill(error: Exception, name: str) -> AccelError:
    """Return the error of a block's fill as one of this package: new each time, of the same type if it has one."""
    if isinstance(error, AccelError):
        return rebuild(describe(error))
    return StreamError(f"{name!r} could not be fetched", got=f"{type(error).__name__}: {error}", where=name)
