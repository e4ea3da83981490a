# SPDX-License-Identifier: Apache-2.0
"""Times of steps over ranks: rates, the slowest rank, and its cause. Pure.

Data-parallel ranks all have the step time of the slowest, since the others wait for it in the exchange of gradients. A
straggler is told by the time that a rank takes for itself: waiting for data, and computing up to the backward pass.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

_UNEVEN = 1.1  # times the median from which a rank counts as a straggler
_SHARE = 0.05  # of the step, below which its delay does not matter


class TimedBatch(Protocol):
    """A batch that knows when the loop asked for it; `accel.Batch` is one."""

    @property
    def weight(self) -> int:
        """Samples that count in metrics."""
        ...

    @property
    def asked_at(self) -> float | None:
        """Time at which the loop asked for it, of `time.perf_counter`; None if that is not known."""
        ...

    @property
    def wait_s(self) -> float:
        """Seconds that the loop waited for it."""
        ...


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one rank's steps together.

    Attributes:
        steps: optimizer steps.
        samples: samples of the timed batches.
        seconds: time of the steps.
        wait: time spent waiting for data.
        own: time up to the backward pass, waiting for data included.
    """

    steps: float = 0
    samples: float = 0
    seconds: float = 0.0
    wait: float = 0.0
    own: float = 0.0

    def after(self, batch: TimedBatch, now: float, backward_at: float | None, *, ends: bool) -> RankTimes:
        """Return the times with a batch added; a batch without times is left out.

        Args:
            batch: the batch.
            now: time at its end, of `time.perf_counter`.
            backward_at: time at which its backward began; None if that is not known.
            ends: whether a step ends with it.
        """
        if batch.asked_at is None:
            return self
        began = batch.asked_at + batch.wait_s if backward_at is None else max(backward_at, batch.asked_at)
        return RankTimes(
            steps=self.steps + ends,
            samples=self.samples + batch.weight,
            seconds=self.seconds + now - batch.asked_at,
            wait=self.wait + batch.wait_s,
            own=self.own + began - batch.asked_at,
        )


def step_times(ranks: Sequence[RankTimes]) -> dict[str, float]:
    """Return times of a step and rates over all ranks; nothing without a step.

    Args:
        ranks: each rank's times, in rank order.
    """
    timed = {rank: each for rank, each in enumerate(ranks) if each.steps and each.seconds > 0}
    if not timed:
        return {}
    steps = [each.seconds / each.steps for each in timed.values()]
    slowest = max(timed, key=lambda rank: (timed[rank].own / timed[rank].steps, -rank))
    longest = max(each.seconds for each in timed.values())
    worst = timed[slowest]
    return {
        "step_s": statistics.fmean(steps),
        "step_s_median": statistics.median_low(steps),
        "step_s_max": max(steps),
        "data_wait": sum(each.wait for each in timed.values()) / sum(each.seconds for each in timed.values()),
        "data_wait_s": statistics.median_low(each.wait / each.steps for each in timed.values()),
        "own_s": statistics.median_low(each.own / each.steps for each in timed.values()),
        "slowest_rank": slowest,
        "slowest_own_s": worst.own / worst.steps,
        "slowest_data_wait_s": worst.wait / worst.steps,
        "samples_per_s": sum(each.samples for each in ranks) / longest,
    }


def straggler(values: Mapping[str, Any]) -> str | None:
    """Return a sentence that names the rank that the others wait for, and why; None if the ranks are even.

    Args:
        values: result of `StepStatistics.read`.

    Example:
        >>> time = {"step_s": 0.026, "own_s": 0.005, "data_wait_s": 0.001}
        >>> time |= {"slowest_rank": 1, "slowest_own_s": 0.026, "slowest_data_wait_s": 0.021}
        >>> print(accel.straggler({"time": time}))
        rank 1 takes 26.0 ms a step of its own, the median is 5.0 ms; it waits for data, 21.0 ms a step
    """
    time: Mapping[str, float] = values.get("time", {})
    if "slowest_own_s" not in time:
        return None
    late = time["slowest_own_s"] - time["own_s"]
    if time["slowest_own_s"] <= _UNEVEN * time["own_s"] or late < _SHARE * time["step_s"]:
        return None
    for_data = time["slowest_data_wait_s"] - time["data_wait_s"] > late / 2
    cause = f"it waits for data, {_ms(time['slowest_data_wait_s'])} a step" if for_data else "it computes longer"
    own = f"rank {int(time['slowest_rank'])} takes {_ms(time['slowest_own_s'])} a step of its own"
    return f"{own}, the median is {_ms(time['own_s'])}; {cause}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
