# SPDX-License-Identifier: Apache-2.0
"""Several steps in one message: what a rank has read and not given yet, and how many steps the next message holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from accel.comm import Call, fail
from accel.context import DistContext
from accel.data._stream_read import Step
from accel.errors import AccelError, DataError

_MOST_BYTES = 1 << 22


class Ahead:
    """The steps of a reader, some of them read ahead; an error in reading waits until those have been given.

    Args:
        ctx: the context.
        call: what all ranks call the next message.
        steps: what is read.
    """

    def __init__(self, ctx: DistContext, call: Call, steps: Iterator[Step]) -> None:
        self._ctx = ctx
        self._call = call
        self._steps = steps
        self._held: deque[Step] = deque()
        self._failure: AccelError | None = None

    def fill(self, count: int) -> list[Step]:
        """Return the next steps: so many, fewer at the end. Raises on every rank if the first cannot be read."""
        while len(self._held) < count and self._failure is None and (not self._held or self._held[-1].more):
            try:
                step = next(self._steps, None)
            except AccelError as error:
                self._failure = error
            except Exception as error:  # whatever the user's stream raises
                problem = f"reading the stream failed: {type(error).__name__}: {error}"
                self._failure = DataError(problem, where=f"rank {self._ctx.rank}, batches")
                self._failure.__cause__ = error
            else:
                if step is None:
                    break
                self._held.append(step)
        if self._failure is not None and not self._held:
            fail(self._ctx.comm, self._call, self._failure)
        return list(self._held)[:count]

    def give(self, count: int) -> None:
        """Take the first steps away."""
        for _ in range(count):
            self._held.popleft()


def steps_after(size: int, limit: int, step_bytes: int) -> int:
    """Return how many steps the next message holds: twice as many, as far as they are few and small.

    Args:
        size: steps in this message; the first holds one, so that nobody waits for more.
        limit: the most.
        step_bytes: of one step.
    """
    return max(1, min(2 * size, limit, _MOST_BYTES // max(step_bytes, 1)))
