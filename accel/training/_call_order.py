# SPDX-License-Identifier: Apache-2.0
"""Order of the loop's calls: the next call of a window, and errors for another in its place."""

from __future__ import annotations

from accel.errors import StepError
from accel.optim import Accumulation


def is_begun(window: Accumulation) -> bool:
    """Return whether the current batch waits for its first backward pass."""
    return window.latest < window.micro


def begun_window(window: Accumulation, call: str) -> Accumulation:
    """Return a window within a micro-batch.

    Raises:
        StepError: no batch was begun.
    """
    if not window.micro:
        raise _not_begun(call)
    return window


def ended_window(window: Accumulation, call: str) -> Accumulation:
    """Return a window that waits for its optimizer step.

    Raises:
        StepError: no batch was begun, it had no backward pass, or the window goes on.
    """
    if not window.micro:
        raise _not_begun(
            call, fix="Optimizers that end one window step in one call: optimizer_step(ctx, [first, second], state)."
        )
    if is_begun(window):
        raise dropped(window, call)
    if not window.sync:
        raise StepError(
            "the window has not ended",
            expected="the call where state.sync",
            got=f"micro-batch {window.micro} of {window.steps}",
            where=call,
            fix="Guard it: `if state.sync:`.",
        )
    return window


def check_between(window: Accumulation, call: str) -> None:
    """Raise `StepError` within a window; the error names the missing call."""
    if not window.micro:
        return
    if window.sync or is_begun(window):
        raise dropped(window, call)
    raise StepError(
        "the window is not full",
        expected="a state between two windows",
        got=f"micro-batch {window.micro} of {window.steps}",
        where=call,
        fix="Drop its gradients before: state = accel.discard(state, model). Or end it with its last batch:"
        " state = state.next(batch, last=True).",
    )


def dropped(window: Accumulation, call: str) -> StepError:
    """Make the error for a call before the one that the window waits for, or after its result was dropped."""
    if is_begun(window):
        missing, line = "the backward of this batch", "state = accel.backward(ctx, loss, state)"
    else:
        missing, line = "the optimizer step of this window", "state = accel.optimizer_step(ctx, optimizer, state)"
    return StepError(
        f"the state does not know of {missing}",
        expected=line,
        got=f"micro-batch {window.micro} of {window.steps}",
        where=call,
        fix=f"Keep the result: {line}. To abandon the window: state = accel.discard(state, model).",
    )


def _not_begun(call: str, fix: str = "") -> StepError:
    return StepError(
        "no batch was begun",
        expected="state = state.next(batch) before it",
        got="a state between two windows",
        where=call,
        fix=fix,
    )
