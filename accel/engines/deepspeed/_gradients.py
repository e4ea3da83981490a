# SPDX-License-Identifier: Apache-2.0
"""Gradients that DeepSpeed's optimizer holds, reduced and shared out, where `.grad` shows none."""

from __future__ import annotations

from typing import Any

from accel.engines.deepspeed._package import forget_gradients, holds_gradients
from accel.errors import StepError


class ZeroGradients:
    """Gradients of one model. It notes whether a window began with some.

    Args:
        zero: DeepSpeed's optimizer.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._found = False

    def clear(self) -> None:
        """Drop them, and the note. No communication."""
        forget_gradients(self._zero)
        self._found = False

    def note(self) -> None:
        """Note whether there are any now that a window begins."""
        self._found = holds_gradients(self._zero)

    def refuse_found(self) -> None:
        """Raise if the window began with gradients.

        Raises:
            StepError: on every rank, as all of them ran that backward.
        """
        if self._found:
            raise StepError(
                "the step would use gradients from before its window",
                expected="a model without gradients when a window begins",
                got="gradients that DeepSpeed has reduced already",
                where="optimizer_step",
                fix="Call accel.clear_gradients(model) where a window is abandoned, with the model that prepare"
                " returned.",
            )
