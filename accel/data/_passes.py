# SPDX-License-Identifier: Apache-2.0
"""The memory of a loader's last complete pass, so that a loop that drops `batch.next` does not repeat it for ever."""

from __future__ import annotations

import weakref

import torch

from accel.data._plan import Cursor
from accel.errors import DataError


class Passes:
    """Where the last complete training pass over a loader began. Holds the cursor weakly.

    A pass trains if gradients are enabled. Only the same object counts: an equal new cursor is a wish to start again.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: weakref.ref[Cursor] | None = None

    def __reduce__(self) -> tuple[type[Passes], tuple[()]]:
        return Passes, ()  # another process begins without a memory

    def check(self, cursor: Cursor) -> None:
        """Raise `DataError` if a training pass would begin at the very cursor of the complete one before."""
        if self._last is None or self._last() is not cursor or not torch.is_grad_enabled():
            return
        raise DataError(
            "the loop has dropped the cursor after each batch, and would repeat the epoch",
            expected="cursor = batch.next for each batch",
            got=f"the cursor of the pass before: epoch {cursor.epoch}, {cursor.consumed} consumed",
            where="batches",
            fix="Write `cursor = batch.next` in the loop, or carry a TrainState: state = state.next(batch). To read the"
            " epoch again, pass a new Cursor, or a state from a train_state of its own; to evaluate, leave the cursor"
            " out: accel.batches(ctx, loader).",
        )

    def complete(self, cursor: Cursor) -> None:
        """Note that a pass from a cursor has ended with its epoch. Evaluation leaves the memory as it is."""
        if torch.is_grad_enabled():
            self._last = weakref.ref(cursor)
