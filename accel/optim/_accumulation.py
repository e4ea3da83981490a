# SPDX-License-Identifier: Apache-2.0
"""The accumulation window as a frozen record: its position and the weight of its gradients."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import torch

from accel.comm._marks import Uncompared, carry_mark, find_mark
from accel.errors import ConfigError, StepError
from accel.errors._checks import check_count


class WindowLosses(Uncompared):
    """Losses of a window.

    Attributes:
        seen: figure that is finite if the losses are; a tensor of shape [] where reading it would wait.
    """

    seen: ClassVar[float | torch.Tensor | None] = None


class Accumulation(msgspec.Struct, frozen=True, weakref=True):
    """A window of micro-batches that share one optimizer step.

    Attributes:
        steps: micro-batches in a full window.
        sync_each_batch: whether ranks exchange gradients in every micro-batch and not only in the last. This takes more
            communication, but sharded models need no memory for full gradients. The result is the same.
        micro: micro-batches begun in this window; 0 between windows.
        backwards: micro-batches of this window with a backward.
        latest: the last of these.
        sync: whether the current micro-batch ends the window.
        updates: optimizer steps taken since the run began.
        skipped: steps skipped because a gradient was not finite.
        unit: unit of the weights of this window, which keeps gradients at the size of a mean's; 0 before its first
            backward.
        world_weight: weight of the window so far, over all ranks; a number where reading it does not wait for the
            device, else float64 of shape [].
        own_weight: weight of the window so far on this rank alone, a number or a tensor; None without one, as after the
            window's end, when ranks have summed it.
        scale: loss scale of the window's gradients; 0 before its first backward.
        retained: whether ranks exchanged gradients of a retained graph, so that further backward passes may follow.
        divided: number of gradients that `unscale_gradients` has divided by weight and loss scale: all, or 0; -1 where
            it has run and this rank has none.
        weighted: whether backward passes of this window gave a weight; None before its first.
        losses: known facts of the window's losses.
    """

    steps: int = 1
    sync_each_batch: bool = False
    micro: int = 0
    backwards: int = 0
    latest: int = 0
    sync: bool = False
    updates: int = 0
    skipped: int = 0
    unit: float = 0.0
    world_weight: Any = 0.0  # msgspec decodes no union of number and tensor
    own_weight: Any = None
    scale: float = 0.0
    retained: bool = False
    divided: int = 0
    weighted: bool | None = None
    losses: WindowLosses = WindowLosses()

    def __post_init__(self) -> None:
        check_count(self.steps, "the number of micro-batches is not valid", where="Accumulation.steps")

    def next(self, *, last: bool = False) -> Accumulation:
        """Return the record for the next micro-batch.

        Args:
            last: whether this is the last micro-batch, which ends a window that is not full.

        Raises:
            StepError: the window before has ended without an optimizer step, or a later record was dropped.
        """
        check_latest(self, "accum.next")
        if self.sync:
            raise StepError(
                "the window has ended without an optimizer step",
                expected="step = accel.optimizer_step(...); accum = step.accum",
                got=f"accum.next() after micro-batch {self.micro} of {self.steps}",
                fix="Call optimizer_step when accum.sync, and keep the accum that it returns.",
            )
        return next_micro_batch(self, last=last)

    def add(
        self,
        *,
        scale: float,
        unit: float,
        weighted: bool | None = None,
        world: float | torch.Tensor = 0.0,
        local: float | torch.Tensor | None = None,
    ) -> Accumulation:
        """Return the record after a backward.

        Args:
            scale: loss scale of the new gradients.
            unit: unit of their weight.
            weighted: whether the caller passed the weight.
            world: their weight over all ranks, where it is known.
            local: else their weight on this rank.

        Raises:
            StepError: no micro-batch has begun, or the loss scale changed within the window.
        """
        if self.micro == 0:
            raise StepError(
                "a backward outside of any micro-batch",
                expected="accum = accum.next(last=batch.is_last) before it",
                got="an accum between two windows",
            )
        if self.scale not in (0.0, scale):
            raise StepError(
                "the loss scale changed within a window", expected=str(self.scale), got=str(scale), where="backward"
            )
        both = local if self.own_weight is None else self.own_weight if local is None else self.own_weight + local
        return msgspec.structs.replace(
            self,
            backwards=self.backwards + (self.latest != self.micro),
            latest=self.micro,
            scale=scale,
            unit=unit,
            world_weight=self.world_weight + world,
            own_weight=both,
            weighted=weighted,
        )

    def share(self, total: float | torch.Tensor) -> Accumulation:
        """Return the record after ranks have summed their own weights.

        Args:
            total: the sum of `own_weight` over all ranks.
        """
        # most windows have no weight besides: no sum then, which would be a kernel
        before: float | torch.Tensor = self.world_weight
        known = not isinstance(before, torch.Tensor) and before == 0.0
        return msgspec.structs.replace(self, own_weight=None, world_weight=total if known else before + total)

    def close(self, *, stepped: bool, finite: bool = True) -> Accumulation:
        """Return the record between this window and the next.

        Args:
            stepped: whether parameters were changed.
            finite: whether the gradients were finite.
        """
        return Accumulation(
            steps=self.steps,
            sync_each_batch=self.sync_each_batch,
            updates=self.updates + stepped,
            skipped=self.skipped + (not finite),
        )

    def reset(self) -> Accumulation:
        """Return the record between two windows after this one is abandoned."""
        closed = self.close(stepped=False)
        carry_mark(self, closed, "spent")
        return closed

    def check_saveable(self) -> None:
        """Raise `ConfigError` within a window: a checkpoint would lose its gradients."""
        if self.micro:
            raise ConfigError(
                "gradients of an unfinished window cannot be saved",
                expected="a checkpoint between two windows",
                got=f"micro-batch {self.micro} of {self.steps}",
                where="Accumulation",
                fix="Save after optimizer_step.",
            )


def next_micro_batch(window: Accumulation, *, last: bool) -> Accumulation:
    """Return the window with its next micro-batch begun."""
    micro = window.micro + 1
    begun = msgspec.structs.replace(window, micro=micro, sync=last or micro == window.steps)
    if micro == 1:
        carry_mark(window, begun, "spent")  # until the first backward of the window
    return begun


def check_scale(window: Accumulation, scaler: object) -> None:
    """Raise `StepError` if a window begins with the loss scale that the step before has replaced."""
    if (mark := find_mark(window, "spent")) is not None and mark.note is scaler:
        raise StepError(
            "the loss scale belongs to the previous window",
            expected="scaler = step.scaler after each optimizer_step",
            got="the record that the latest step has replaced",
            where="backward",
            fix="Keep both records that the step returns: accum, scaler = step.accum, step.scaler.",
        )


def check_latest(record: object, where: str) -> None:
    """Raise `StepError` if a call has returned a later record of a window, which was dropped."""
    if (mark := find_mark(record, "followed")) is not None:
        raise StepError(
            "a later record of this window was dropped",
            expected="the record that the latest call returned",
            got="the one that it was given",
            where=where,
            fix=f"Keep its result: {mark.note}.",
        )
