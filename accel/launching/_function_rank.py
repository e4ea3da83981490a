# SPDX-License-Identifier: Apache-2.0
"""The module that each rank of a launched function runs: calls the function, and sends its value or exception back."""

from __future__ import annotations

import os
import sys
import traceback

from accel.launching._parcel import pack, receive_call, send_error, send_value, unpack
from accel.launching._user_frames import frames_below


def main(folder: str) -> None:
    """Call the function in a folder, and write its value or exception there.

    Raises:
        BaseException: the exception of the function.
    """
    rank = int(os.environ["RANK"])
    try:
        value = _call(receive_call(folder))
    except BaseException as error:
        told = traceback.TracebackException(
            type(error), error, frames_below(error.__traceback__, __file__), compact=True
        )
        send_error(folder, rank, error, "".join(told.format()))
        raise
    send_value(folder, rank, value)


def _call(call: bytes) -> bytes:
    from accel.context import session

    fn, args = unpack(call, "the function that was launched")
    with session(os.environ) as ctx:
        return pack(fn(ctx, *args), "the value that the function returned")


if __name__ == "__main__":
    main(sys.argv[1])
