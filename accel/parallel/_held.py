# SPDX-License-Identifier: Apache-2.0
"""Gradients that an engine holds apart from `.grad`, for windows that begin and windows that are given up."""

from __future__ import annotations

from typing import Protocol, cast

from torch import nn

from accel.parallel._unwrap import wrapped_name

HELD = "accel_held"  # attribute of an engine's wrapper: its `Held`


class Held(Protocol):
    """Gradients of one model, as an engine holds them."""

    def clear(self) -> None:
        """Drop them. No communication."""
        ...

    def note(self) -> None:
        """Note whether there are any now that a window begins; a step then refuses them. No communication."""
        ...


def held_by(model: nn.Module) -> Held | None:
    """Return the gradients that an engine holds of a model, from under wrappers; None if no engine does."""
    at: nn.Module | None = model
    while at is not None:
        if (held := vars(at).get(HELD)) is not None:
            return cast(Held, held)
        name = wrapped_name(at)
        at = None if name is None else getattr(at, name)
    return None
