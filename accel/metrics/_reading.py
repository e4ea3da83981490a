# SPDX-License-Identifier: Apache-2.0
"""The one collective of a record of metrics: every rank's row, in the checked message where it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from accel.comm import Call, as_bytes, as_tensor, call_site, exchange, shared_failure
from accel.context import DistContext
from accel.metrics._kinds import Kind
from accel.metrics._rows import Row


def gather_rows(ctx: DistContext, name: str, kinds: Mapping[str, Kind], own: Callable[[], Row]) -> list[Row]:
    """Return the rows of all ranks, in rank order. A collective.

    Args:
        ctx: the context.
        name: name of the call, for errors.
        kinds: the declared names, which ranks compare.
        own: returns this rank's row; waits for its device.

    Raises:
        CollectiveMismatch: ranks declare different metrics; on every rank.
    """
    call = Call(name, "\n".join(f"{metric}: {kind}" for metric, kind in kinds.items()), call_site())
    with shared_failure(ctx.comm, call):
        row = own()
    payload = as_tensor(msgspec.msgpack.encode(row))
    return [msgspec.msgpack.decode(as_bytes(each), type=Row) for each in exchange(ctx.comm, call, payload)]
