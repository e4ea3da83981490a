# SPDX-License-Identifier: Apache-2.0
"""Schedulers that end before the run: refused before any parameter changes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, SequentialLR

from accel.errors import ConfigError


def check_not_exhausted(schedulers: Iterable[LRScheduler]) -> None:
    """Raise `ConfigError` if a scheduler has no further step."""
    for each in schedulers:
        for inner in _stepped(each):
            if isinstance(inner, OneCycleLR) and inner.last_epoch >= inner.total_steps:
                raise ConfigError(
                    "the learning rate's cycle is over",
                    expected=f"at most {inner.total_steps} steps",
                    got=f"step {inner.last_epoch + 1}",
                    where="optimizer_step, scheduler=",
                    fix="OneCycleLR(total_steps=) counts optimizer steps, not batches: accel.total_steps gives their"
                    " number.",
                )


def _stepped(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """Return the schedulers inside one that its next step advances; torch has no public names for them."""
    held = cast(Any, scheduler)
    if isinstance(scheduler, ChainedScheduler):
        for each in held._schedulers:
            yield from _stepped(each)
    elif isinstance(scheduler, SequentialLR):
        at = bisect_right(held._milestones, held.last_epoch + 1)
        if at == 0 or held._milestones[at - 1] != held.last_epoch + 1:  # where one begins, it starts anew
            yield from _stepped(held._schedulers[at])
    else:
        yield scheduler
