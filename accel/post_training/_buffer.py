# SPDX-License-Identifier: Apache-2.0
"""The state of each prompt of a run with rollouts, as a frozen record that a checkpoint holds.

Prompts are numbered in the order of the data. `next` is the first one that was never started. A lower number that is
neither queued, in flight nor finished was used or discarded. So a prompt is in exactly one state at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import torch
from torch import Tensor

from accel.errors import DataError
from accel.errors._checks import check_count, check_kind
from accel.post_training._samples import Samples, check_rewards

PromptStatus = Literal["waiting", "in flight", "finished", "used or discarded"]
_WHERE = "RolloutBuffer"


class StartedPrompt(msgspec.Struct, frozen=True):
    """A prompt in flight.

    Attributes:
        prompt: its number.
        update: number of updates behind the weights that draw its samples.
    """

    prompt: int
    update: int


class RolloutGroup(msgspec.Struct, frozen=True, eq=False):
    """All samples of a prompt.

    Attributes:
        samples: the samples.
        rewards: reward of each sample, shape [rows]; None if it is computed later.
    """

    samples: Samples
    rewards: Tensor | None = None


def group_samples(samples: Samples, rewards: Tensor | Sequence[float] | None = None) -> dict[int, RolloutGroup]:
    """Return the samples of each prompt, by its number, for `RolloutBuffer.put`. No communication.

    Args:
        samples: rows of any number of prompts.
        rewards: reward of each row, shape [rows]; None if they are computed later.

    Raises:
        DataError: another number of rewards than of rows, or rewards that are inf or NaN.
    """
    rewards = None if rewards is None else torch.as_tensor(rewards)
    if rewards is not None and rewards.shape != (len(samples.prompts),):
        raise DataError(
            "rewards do not fit the samples",
            expected=f"shape [{len(samples.prompts)}], one for each row",
            got=f"shape {list(rewards.shape)}",
            where="group_samples(rewards)",
        )
    if rewards is not None:
        check_rewards(rewards, "group_samples(rewards)")
    rows: dict[int, list[int]] = {}
    for at, prompt in enumerate(samples.prompts):
        rows.setdefault(prompt, []).append(at)
    return {
        prompt: RolloutGroup(samples.rows(which), None if rewards is None else rewards[which])
        for prompt, which in rows.items()
    }


class FinishedPrompt(StartedPrompt, frozen=True, eq=False):
    """A prompt with samples that wait for a step.

    Attributes:
        group: the samples.
    """

    group: RolloutGroup


class RolloutBuffer(msgspec.Struct, frozen=True, eq=False):
    """Groups of samples between sampler and trainer: equal on every rank, saved as an item. No communication.

    Each method that changes the state of a prompt returns a new record. Each prompt is used or discarded once, over any
    history of kills. Groups that are finished at a save are in the checkpoint, and a run that resumes there has the
    same bits. Prompts in flight are started again by newer weights.

    Attributes:
        batch: number of prompts of a step.
        max_staleness: most updates between the weights that drew samples and the weights that train on them.
        in_order: whether a step waits for the oldest prompts, so that a run does not depend on which ended first.
        next: first prompt that was never started.
        queue: prompts to be started again before new ones.
        flight: prompts with samples that are being drawn.
        finished: prompts with samples that wait for a step.
        used: number of prompts that steps have taken.
        stale: number of groups that became too old. Their prompts were queued again.
        discarded: number of prompts that were discarded, by reason.

    Examples:
        >>> buffer, prompts = post_training.RolloutBuffer(batch=2).start(update=0)
        >>> prompts, buffer.status(1), buffer.status(2)
        ((0, 1), 'in flight', 'waiting')
    """

    batch: int
    max_staleness: int = 0
    in_order: bool = True
    next: int = 0
    queue: tuple[int, ...] = ()
    flight: tuple[StartedPrompt, ...] = ()
    finished: tuple[FinishedPrompt, ...] = ()
    used: int = 0
    stale: int = 0
    discarded: dict[str, int] = msgspec.field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        check_count(self.batch, "the number of prompts is not valid", where=f"{_WHERE}(batch=)")
        problem, where = "the number of updates is not valid", f"{_WHERE}(max_staleness=)"
        check_count(self.max_staleness, problem, least=0, where=where, error=DataError)

    @property
    def room(self) -> int:
        """Number of prompts that may be started now, so that none need become too old."""
        return max(0, self.batch * (self.max_staleness + 1) - len(self.flight) - len(self.finished))

    def start(self, update: int, count: int | None = None) -> tuple[RolloutBuffer, tuple[int, ...]]:
        """Start prompts, queued ones first.

        Args:
            update: number of updates behind the weights that will draw.
            count: number of prompts at most; None for as many as there is room for.

        Returns:
            The record, and the numbers of the prompts to draw samples for.
        """
        if count is not None:
            check_count(count, "the number of prompts is not valid", least=0, where=f"{_WHERE}.start(count=)")
        count = self.room if count is None else min(count, self.room)
        again = self.queue[:count]
        new = range(self.next, self.next + count - len(again))
        flight = (*self.flight, *(StartedPrompt(each, update) for each in (*again, *new)))
        changed = msgspec.structs.replace(self, queue=self.queue[len(again) :], next=new.stop, flight=flight)
        return changed, (*again, *new)

    def put(self, groups: Mapping[int, RolloutGroup]) -> RolloutBuffer:
        """Take the samples of prompts in flight.

        Args:
            groups: samples by the prompt's number.

        Raises:
            ConfigError: values that are no `RolloutGroup`.
            DataError: a prompt that is not in flight.
        """
        where, fix = f"{_WHERE}.put", "Pass group_samples(samples, rewards)."
        check_kind(groups, Mapping, "the samples are not grouped by prompt", where=where, fix=fix)
        for each in groups.values():
            check_kind(each, RolloutGroup, "the samples of a prompt are no group", where=where, fix=fix)
        self._check_in_flight(groups, "put")
        updates = {each.prompt: each.update for each in self.flight}
        made = (FinishedPrompt(prompt, updates[prompt], group) for prompt, group in groups.items())
        return msgspec.structs.replace(self, flight=self._flight_without(groups), finished=(*self.finished, *made))

    def requeue(self, *prompts: int) -> RolloutBuffer:
        """Give up prompts in flight, as after a lost server: they are started again. Raises as `put`."""
        self._check_in_flight(prompts, "requeue")
        queue = tuple(sorted({*self.queue, *prompts}))
        return msgspec.structs.replace(self, flight=self._flight_without(prompts), queue=queue)

    def discard(self, prompt: int, reason: str) -> RolloutBuffer:
        """Leave out a prompt in flight or finished for good, such as one with equal rewards of all samples.

        Args:
            prompt: its number.
            reason: a word to count it by.

        Raises:
            DataError: a prompt that is neither in flight nor finished.
        """
        if (status := self.status(prompt)) not in ("in flight", "finished"):
            raise _misplaced("discard", "in flight or finished", {prompt: status})
        return msgspec.structs.replace(
            self,
            flight=self._flight_without([prompt]),
            finished=tuple(each for each in self.finished if each.prompt != prompt),
            discarded={**self.discarded, reason: self.discarded.get(reason, 0) + 1},
        )

    def is_ready(self, update: int) -> bool:
        """Return whether `take` would return a batch."""
        return len(self._takeable(update)) == self.batch

    def take(self, update: int) -> tuple[RolloutBuffer, tuple[FinishedPrompt, ...]]:
        """Take the groups of a step.

        Args:
            update: number of updates behind the weights that train.

        Returns:
            The record, and `batch` groups, or none while too few are finished. Groups that are too old for these
            weights are dropped, and their prompts queued.

        Raises:
            DataError: groups that later weights have drawn.
        """
        if ahead := [each.prompt for each in self.finished if each.update > update]:
            raise DataError(
                "samples are newer than the weights that train on them",
                expected="a number of updates that grows",
                got=f"update={update}, and prompts {ahead} of later ones",
                where=f"{_WHERE}.take(update)",
                fix="Restore the record and the weights from the same checkpoint, and pass state.updates.",
            )
        taken = self._takeable(update)
        ready = len(taken) == self.batch
        gone = {each.prompt for each in taken} if ready else set[int]()
        old = {each.prompt for each in self.finished if self._is_stale(each, update)}
        changed = msgspec.structs.replace(
            self,
            finished=tuple(each for each in self.finished if each.prompt not in gone | old),
            queue=tuple(sorted((*self.queue, *old))),
            used=self.used + len(gone),
            stale=self.stale + len(old),
        )
        return changed, tuple(taken) if ready else ()

    def resumed(self) -> RolloutBuffer:
        """Return the record for a new process, in which nothing is in flight; call it on what a load returned."""
        return self.requeue(*(each.prompt for each in self.flight))

    def status(self, prompt: int) -> PromptStatus:
        """Return the state of a prompt."""
        if prompt >= self.next or prompt in self.queue:
            return "waiting"
        if any(each.prompt == prompt for each in self.flight):
            return "in flight"
        return "finished" if any(each.prompt == prompt for each in self.finished) else "used or discarded"

    def _is_stale(self, each: FinishedPrompt, update: int) -> bool:
        return update - each.update > self.max_staleness

    def _takeable(self, update: int) -> list[FinishedPrompt]:
        fresh = [each for each in self.finished if not self._is_stale(each, update)]
        if self.in_order:
            pending = [*self.queue, *(each.prompt for each in (*self.flight, *self.finished))]
            first = sorted(pending)[: self.batch]
            fresh = sorted((each for each in fresh if each.prompt in first), key=lambda each: each.prompt)
        return fresh[: self.batch]

    def _flight_without(self, prompts: Iterable[int]) -> tuple[StartedPrompt, ...]:
        gone = {*prompts}
        return tuple(each for each in self.flight if each.prompt not in gone)

    def _check_in_flight(self, prompts: Iterable[int], call: str) -> None:
        found = {prompt: self.status(prompt) for prompt in prompts}
        if wrong := {prompt: status for prompt, status in found.items() if status != "in flight"}:
            raise _misplaced(call, "in flight", wrong)


def _misplaced(call: str, expected: str, wrong: Mapping[int, str]) -> DataError:
    return DataError(
        f"prompts of another state cannot be taken by {call}",
        expected=f"prompts that are {expected}",
        got=", ".join(f"prompt {prompt} is {status}" for prompt, status in wrong.items()),
        where=f"{_WHERE}.{call}",
        fix="Carry the record that each call returns: buffer = buffer.put(groups).",
    )
