# SPDX-License-Identifier: Apache-2.0
"""Where the readers of a stream stand: what a cursor needs beside a count, because a stream has no random access."""

from __future__ import annotations

from typing import Any

import msgspec


class WorkerPosition(msgspec.Struct, frozen=True):
    """How far one reading process has come.

    Attributes:
        elements: of its part of the stream, in batches that have been given.
        state: what the stream's `state_dict` said at that point; None if it has none.
        ended: whether its part has been read to the end.
    """

    elements: int = 0
    state: Any = None
    ended: bool = False


class StreamPosition(msgspec.Struct, frozen=True):
    """How far a reader of a stream has come.

    Attributes:
        workers: its reading processes, in order; one if it reads without workers.
        turn: which of them gives the next batch.
        ranks: how many ranks read, each a part of its own; 0 if this is a position in the whole stream, which any
            number of ranks can go on from.
    """

    workers: tuple[WorkerPosition, ...]
    turn: int = 0
    ranks: int = 0
