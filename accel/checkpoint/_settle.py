# SPDX-License-Identifier: Apache-2.0
"""One outcome for all ranks: a value from each, or the same error on each, of whatever length."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from accel.comm import Call, exchange_values
from accel.context import DistContext
from accel.errors import ErrorRecord, describe, rebuild

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
    if ctx.world_size == 1:
        ctx.comm.check_open()
        if error is not None:
            raise error
        return [value]
    answer = describe(error) if error is not None else None
    answers = exchange_values(ctx.comm, call, (answer, value), tuple[ErrorRecord | None, kind])  # pyright: ignore[reportArgumentType]
    failures = {rank: record for rank, (record, _) in enumerate(answers) if record is not None}
    if not failures:
        return [mine for _, mine in answers]
    rank, record = next(iter(failures.items()))
    if len(failures) < ctx.world_size or any(other != record for other in failures.values()):
        record = msgspec.structs.replace(record, problem=f"rank {rank}: {record.problem}")
    raise rebuild(record) from error
