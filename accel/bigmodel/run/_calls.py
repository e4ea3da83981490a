# SPDX-License-Identifier: Apache-2.0
"""Calls of streamed blocks that a thread is in, and those that it has left without telling."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from accel.bigmodel.run._slots import Block, Slot


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """A call of a block.

    Attributes:
        block: the block.
        slot: the slot that the call uses; None if its weights are fetched one by one.
        plain: whether autograd records nothing, so that the slot's tensors may be in the model.
    """

    block: Block
    slot: Slot | None
    plain: bool


def drop_abandoned(calls: list[Call], release: Callable[[Call], None]) -> None:
    """Release the calls of a thread that no longer run: torch runs no hook after a KeyboardInterrupt.

    Args:
        calls: calls that the thread is thought to be in; abandoned ones are removed.
        release: gives a call's slot back.
    """
    running = running_modules()
    while calls and id(calls[-1].block.module) not in running:
        release(calls.pop())


def running_modules() -> set[int]:
    """Return the ids of the modules whose `__call__` the calling thread is in."""
    found: set[int] = set()
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name in ("_call_impl", "inner") else None
        if isinstance(owner, nn.Module):
            found.add(id(owner))
        frame = frame.f_back
    return found
