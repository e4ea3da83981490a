# SPDX-License-Identifier: Apache-2.0
"""One outcome for all ranks: a value from each, or the same error on each, of whatever length."""

from __future__ import annotations

from typing import TypeVar

from accel.comm import Call, exchange_values, fail
from accel.context import DistContext

T = TypeVar("T")


def settle(ctx: DistContext, call: Call, error: Exception | None, value: T, kind: type[T]) -> list[T]:
    """Give every rank's value to every rank, unless one failed: then all raise. A collective.

    Args:
        ctx: the context.
        call: what all ranks are doing.
        error: what went wrong on this rank, None if nothing did.
        value: this rank's, ignored if it failed.
        kind: the value's type.

    Returns:
        The values by rank.

    Raises:
        AccelError: the lowest failing rank's error, on every rank, with the rank unless all failed alike.
        CollectiveMismatch: ranks made different calls.
    """
    if error is not None:
        fail(ctx.comm, call, error)
    return exchange_values(ctx.comm, call, value, kind)
