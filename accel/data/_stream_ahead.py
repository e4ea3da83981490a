# SPDX-License-Identifier: Apache-2.0
"""Several steps in one message: reading them, and how many the next message holds."""

from __future__ import annotations

from collections.abc import Iterator

from accel.comm import Call, fail
from accel.context import DistContext
from accel.data._stream_read import Step
from accel.errors import AccelError, DataError

_MOST_BYTES = 1 << 22


class Ahead:
    """Reads several steps at once; an error in reading waits until the steps before it have been given.

    Args:
        ctx: the context.
        call: what all ranks call the next message.
        steps: what is read.
    """

    def __init__(self, ctx: DistContext, call: Call, steps: Iterator[Step]) -> None:
        self._ctx = ctx
        self._call = call
        self._steps = steps
        self._failure: AccelError | None = None

    def take(self, count: int) -> list[Step]:
        """Return the next steps: so many, fewer at the end or before an error.

        Raises:
            AccelError: the first of them cannot be read; on every rank.
        """
        taken: list[Step] = []
        while len(taken) < count and self._failure is None:
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
                taken.append(step)
        if self._failure is not None and not taken:
            fail(self._ctx.comm, self._call, self._failure)
        return taken


def steps_after(size: int, limit: int, step_bytes: int) -> int:
    """Return how many steps the next message holds: twice as many, as far as they are few and small.

    Args:
        size: steps in this message; the first holds one, so that nobody waits for more.
        limit: the most.
        step_bytes: of one step.
    """
    return max(1, min(2 * size, limit, _MOST_BYTES // max(step_bytes, 1)))
