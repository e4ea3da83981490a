# SPDX-License-Identifier: Apache-2.0
"""Several steps in one message: reading them, and how many the next message holds."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

from accel.comm import Call, exchange_values, shared_failure
from accel.context import DistContext
from accel.data._read_error import read_error
from accel.data.stream._read import Skipped, Step
from accel.errors import AccelError, DataError, TreeError
from accel.random import isolated_rng
from accel.tree import Container, tensors

_MOST_BYTES = 1 << 23


class Ahead:
    """Reads several steps at once; an error in reading waits until the steps before it have been given.

    Args:
        ctx: the context.
        call: what all ranks call the next message.
        steps: what is read; nothing on a rank that does not read.
        here: whether this process reads, so that its own random streams are put back after it.
    """

    def __init__(self, ctx: DistContext, call: Call, steps: Iterator[Step | Skipped], *, here: bool) -> None:
        self._guard = isolated_rng if here else contextlib.nullcontext
        self._ctx = ctx
        self._call = call
        self._steps = steps
        self._read: deque[Step] = deque()
        self._failure: AccelError | None = None

    def catch_up(self) -> None:
        """Wait until all ranks have read what they skip. A collective, now and then.

        Reading again can take longer than a message may: ranks that still skip say so, and none is given up.
        """
        while any(exchange_values(self._ctx.comm, self._call, self._skips(), bool)):
            pass

    def take(self, count: int) -> list[Step]:
        """Return the next steps: so many, fewer at the end or before an error.

        Raises:
            AccelError: the first of them cannot be read; on every rank.
        """
        taken: list[Step] = []
        with self._guard():  # once for all steps: it takes as long as a small one
            while len(taken) < count and (step := self._next()) is not None:
                if isinstance(step, Step):
                    taken.append(step)
        if self._failure is not None and not taken:
            with shared_failure(self._ctx.comm, self._call):
                raise self._failure
        return taken

    def _skips(self) -> bool:
        """Read the first step, or what the reader says before it has come there; return whether it was that."""
        if self._read:
            return False
        with self._guard():
            step = self._next()
        if isinstance(step, Step):
            self._read.append(step)
        return isinstance(step, Skipped)

    def _next(self) -> Step | Skipped | None:
        if self._read:
            return self._read.popleft()
        if self._failure is not None:
            return None
        try:
            return next(self._steps, None)
        except AccelError as error:
            self._failure = error
        except Exception as error:  # whatever the user's stream raises
            cause, place = read_error(error)
            where = f"{place}{', ' * bool(place)}rank {self._ctx.rank}, batches"
            self._failure = DataError(f"reading the stream failed: {cause}", where=where)
            self._failure.__cause__ = error
        return None


def steps_after(size: int, limit: int, step_bytes: int) -> int:
    """Return how many steps the next message holds: twice as many, as far as they are few and small.

    Args:
        size: steps in this message; the first holds one, so that nobody waits for more.
        limit: the most.
        step_bytes: of one step.
    """
    return max(1, min(2 * size, limit, _MOST_BYTES // max(step_bytes, 1)))


def batch_bytes(data: object, containers: Sequence[Container] = ()) -> int:
    """Return the bytes of a batch's tensors; those of a large one if it cannot be taken apart."""
    try:
        return sum(leaf.nbytes for _, leaf in tensors(data, containers))
    except TreeError:
        return _MOST_BYTES
