# SPDX-License-Identifier: Apache-2.0
"""What each rank of a launched function executes, by `_worker`: the call, with its value or exception sent back."""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

from accel.launching._parcel import pack, receive_call, send_error, send_value, unpack


def main(folder: str) -> None:
    """Call the function that lies in a folder, and leave there what came of it.

    Raises:
        BaseException: whatever the function raises.
    """
    rank = int(os.environ["RANK"])
    try:
        value = _call(receive_call(folder))
    except BaseException as error:
        told = traceback.TracebackException(type(error), error, _beyond(error.__traceback__), compact=True)
        send_error(folder, rank, error, "".join(told.format()))
        raise
    send_value(folder, rank, value)


def _call(call: bytes) -> bytes:
    from accel.context import session

    fn, args = unpack(call, "the function that was launched")
    with session(os.environ) as ctx:
        return pack(fn(ctx, *args), "the value that the function returned")


def _beyond(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main(sys.argv[1])
