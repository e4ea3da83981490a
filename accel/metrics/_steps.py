# SPDX-License-Identifier: Apache-2.0
"""`StepStatistics`: running metrics of training steps, with their times, rates, totals and the slowest rank."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, ClassVar, Protocol

import msgspec
import torch

from accel.comm._marks import Uncompared
from accel.context import DistContext, check_context
from accel.devices import name_of_device, peak_memory, wait_for_device
from accel.errors import ConfigError
from accel.metrics._flops import peak_flops
from accel.metrics._kinds import Kind, Weight
from accel.metrics._metrics import Metrics, MetricsRow, emptied, gather_rows, own_row, read_values, running_metrics
from accel.terminal import show_seconds
from accel.topology import data_dimension

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
        """Return the times with a batch added that ended at `now`, by `perf_counter`; one without times is left out."""
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
    """Return times of a step and rates over all ranks, in rank order; nothing without a step."""
    timed = {rank: each for rank, each in enumerate(ranks) if each.steps and each.seconds > 0}
    if not timed:
        return {}
    steps = [each.seconds / each.steps for each in timed.values()]
    slowest = max(timed, key=lambda rank: (timed[rank].own / timed[rank].steps, -rank))
    longest = max(each.seconds for each in timed.values())
    worst = timed[slowest]
    other = {"other_rank": next(rank for rank in timed if rank != slowest)} if len(timed) == 2 else {}
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
        **other,
        "samples_per_s": sum(each.samples for each in ranks) / longest,
    }


def straggler(values: Mapping[str, Any]) -> str | None:
    """Return a sentence that names the rank that the others wait for, and why; None if the ranks are even.

    Args:
        values: result of `StepStatistics.read`.

    Examples:
        >>> time = {"step_s": 0.026, "own_s": 0.005, "data_wait_s": 0.001}
        >>> time |= {"slowest_rank": 1, "slowest_own_s": 0.026, "slowest_data_wait_s": 0.021}
        >>> print(accel.metrics.straggler({"time": time}))
        rank 1 takes 26 ms a step of its own, the median is 5 ms; it waits for data, 21 ms a step
    """
    time: Mapping[str, float] = values.get("time", {})
    if "slowest_own_s" not in time:
        return None
    late = time["slowest_own_s"] - time["own_s"]
    if time["slowest_own_s"] <= _UNEVEN * time["own_s"] or late < _SHARE * time["step_s"]:
        return None
    for_data = time["slowest_data_wait_s"] - time["data_wait_s"] > late / 2
    cause = "it takes longer before the backward"  # to compute, or to sleep: the times do not show which
    if for_data:
        cause = f"it waits for data, {show_seconds(time['slowest_data_wait_s'])} a step"
    own = f"rank {int(time['slowest_rank'])} takes {show_seconds(time['slowest_own_s'])} a step of its own"
    others = f"rank {int(time['other_rank'])} takes" if "other_rank" in time else "the median is"
    return f"{own}, {others} {show_seconds(time['own_s'])}; {cause}"


_OWN: dict[str, Kind] = {
    "samples": "count",
    "tokens": "count",
    "skipped_steps": "count",
    "loss_scale": "last",
    "grad_norm": "mean",
    "grad_norm_max": "max",
}
_CLOCK = "$time/"  # before the names of clocks in a row
_TOTALS = ("samples", "tokens", "skipped_steps")


class Scale(Protocol):
    """A loss scale; `accel.LossScale` is one."""

    @property
    def scale(self) -> float:
        """The factor."""
        ...

    @property
    def dynamic(self) -> bool:
        """Whether it follows overflows."""
        ...


class Window(Protocol):
    """An accumulation window; `accel.Accumulation` is one."""

    @property
    def micro(self) -> int:
        """Micro-batches begun in it; 0 between windows."""
        ...


class StepOutcome(Protocol):
    """The state after a batch, or after the step that it ended; `accel.TrainState` is one."""

    @property
    def accum(self) -> Window:
        """The accumulation window."""
        ...

    @property
    def scaler(self) -> Scale:
        """The loss scale."""
        ...

    @property
    def stepped(self) -> bool | None:
        """Whether the latest step changed parameters; None while that is not known."""
        ...

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of the latest step's gradients."""
        ...

    @property
    def backward_at(self) -> float | None:
        """Time at which the latest batch's first backward began."""
        ...


class StepClock(Uncompared):
    """Readings of this rank's clock.

    Attributes:
        times: times of the rank's steps.
    """

    times: ClassVar[RankTimes] = RankTimes()


class StepStatistics(msgspec.Struct, frozen=True, eq=False):
    """Statistics of training steps, from `step_statistics`. A record: `add` and `read` return new ones.

    Saved like `Metrics`, with each rank's own numbers. Readings of clocks are not saved: after a load, times are of the
    steps since then.

    Attributes:
        metrics: metrics since the last `read`, the user's among them.
        totals: samples, tokens and skipped steps of all ranks up to the last `read`.
        clock: readings of this rank's clock since then; not saved.
    """

    metrics: Metrics = Metrics()
    totals: dict[str, int] = {}
    clock: StepClock = StepClock()

    @property
    def times(self) -> RankTimes:
        """This rank's times since the last `read`. Neither compared nor saved."""
        return self.clock.times

    def add(
        self,
        batch: TimedBatch,
        state: StepOutcome | None = None,
        /,
        *,
        tokens: float | torch.Tensor | None = None,
        weight: Weight | None = None,
        **values: Any,
    ) -> StepStatistics:
        """Return the record with a batch added. No communication, and no wait for an accelerator.

        Call it at the end of the loop's body, after the optimizer's step. A batch's time is that from asking for it to
        this call; what follows, such as logging and saving, does not count.

        Args:
            batch: the batch, from `batches`.
            state: the state after it: `TrainState`. Without one, each batch is a step.
            tokens: number of tokens that count on this rank.
            weight: weight of the values; `batch.weight` by default.
            values: by declared name, as for `Metrics.add`.

        Raises:
            ConfigError, DataError, TreeError: as `Metrics.add`; or a name that the statistics have themselves.
        """
        ends = state is None or not state.accum.micro
        times = self.times.after(batch, perf_counter(), state.backward_at if state is not None else None, ends=ends)
        found: dict[str, Any] = {"samples": batch.weight}
        if tokens is not None:
            found["tokens"] = tokens
        if state is not None and ends:
            found["skipped_steps"] = int(state.stepped is False)  # of a deferred step `read` raises the error
            if state.scaler.dynamic:
                found["loss_scale"] = state.scaler.scale
            if state.grad_norm is not None and state.stepped is not False:
                found["grad_norm"] = state.grad_norm
                found["grad_norm_max"] = state.grad_norm
        metrics = self.metrics.add(1, **found)
        if values:
            _refuse_own(values, "statistics.add")
            metrics = metrics.add(batch.weight if weight is None else weight, **values)
        return StepStatistics(metrics, self.totals, StepClock(times=times))

    def read(
        self, ctx: DistContext, *, flops_per_sample: float | None = None, peak: float | None = None
    ) -> tuple[dict[str, Any], StepStatistics]:
        """Return the statistics over all ranks, and a record that counts on. One collective.

        Args:
            ctx: the context.
            flops_per_sample: FLOPs of forward and backward on one sample by the whole model, for the model FLOPs
                utilisation; see `count_flops`.
            peak: peak FLOP/s of one device, where accel does not know it.

        Returns:
            The values by name, equal on every rank. `samples`, `tokens` and `skipped_steps` count since the run began;
            `grad_norm`, `grad_norm_max`, `loss_scale` and the declared metrics are of the steps since the last `read`.
            Under `time` the measurements: `step_s` (mean of the ranks, `step_s_median`, `step_s_max`), `data_wait`
            (share of the time spent on waiting for data), `samples_per_s` and `tokens_per_s` of all ranks,
            `peak_memory_bytes` of an accelerator, `flops_per_s`, `mfu`, and the readings that `straggler` explains.

        Raises:
            CollectiveMismatch, DataError: as `Metrics.read`.
        """
        check_context(ctx, "statistics.read(ctx)")
        rows = gather_rows(ctx, "statistics.read", self.metrics.kinds, lambda: _closed_row(self, ctx))
        found = read_values(self.metrics, rows)
        totals = {
            name: self.totals.get(name, 0) + found.get(name, 0) for name in _TOTALS if name in {**self.totals, **found}
        }
        time = _times_of(rows, found)
        if flops_per_sample is not None and "samples_per_s" in time:
            time |= _utilisation(ctx, flops_per_sample * time["samples_per_s"], peak)
        values = found | totals
        ordered = {name: values[name] for name in self.metrics.kinds if name in values}
        return ordered | ({"time": time} if time else {}), StepStatistics(emptied(self.metrics), totals)


def step_statistics(**kinds: Kind) -> StepStatistics:
    """Return empty statistics of training steps. No communication.

    Args:
        kinds: further metrics and their kinds, as for `running_metrics`, so that one collective reads all.

    Raises:
        ConfigError: as `running_metrics`, or a name that the statistics have themselves.

    Examples:
        >>> statistics = accel.metrics.step_statistics(loss="mean")
        >>> statistics = statistics.add(batch, loss=0.5)
        >>> values, statistics = statistics.read(ctx)
        >>> values["loss"], values["samples"]
        (0.5, 4)
    """
    _refuse_own(kinds, "step_statistics")
    return StepStatistics(running_metrics(**kinds, **_OWN))


def _refuse_own(names: Mapping[str, object], where: str) -> None:
    for name in names.keys() & _OWN.keys():
        problem = "a name that step statistics have themselves"
        raise ConfigError(problem, got=repr(name), where=where, fix="Rename the metric.")


def _closed_row(statistics: StepStatistics, ctx: DistContext) -> MetricsRow:
    """Return this rank's row with its times; on an accelerator the interval ends when its work is done."""
    times, memory = statistics.times, 0.0
    if ctx.device.type not in ("cpu", "xla"):
        began = perf_counter()
        wait_for_device(ctx.device)
        memory = float(peak_memory(ctx.device))
        times = msgspec.structs.replace(times, seconds=times.seconds + perf_counter() - began)
    if not _forward_is_own(ctx):
        times = msgspec.structs.replace(times, own=times.wait)
    row = own_row(statistics.metrics)
    clocks = msgspec.structs.asdict(times) | {"memory": memory}
    return MetricsRow(row.numbers | {_CLOCK + name: (value, 1.0) for name, value in clocks.items()}, row.nested)


def _times_of(rows: Sequence[MetricsRow], found: Mapping[str, Any]) -> dict[str, float]:
    """Return the readings of clocks over all ranks."""
    fields = RankTimes.__struct_fields__
    ranks = [RankTimes(**{name: row.numbers[_CLOCK + name][0] for name in fields}) for row in rows]
    time = step_times(ranks)
    if time and "tokens" in found and found["samples"]:
        time["tokens_per_s"] = time["samples_per_s"] * found["tokens"] / found["samples"]
    if memory := max(row.numbers[f"{_CLOCK}memory"][0] for row in rows):
        time["peak_memory_bytes"] = int(memory)
    return time


def _forward_is_own(ctx: DistContext) -> bool:
    """Return whether a forward pass waits for no other rank: only on data-parallel replicas."""
    others = (size for name, size in ctx.axes.sizes.items() if name not in ("dp", "dp_replicate"))
    return data_dimension(ctx.strategy) == "replicate" and all(size == 1 for size in others)


def _utilisation(ctx: DistContext, rate: float, peak: float | None) -> dict[str, float]:
    """Return FLOP/s of all ranks, and their share of the devices' peak if that is known and not exceeded."""
    if peak is None:
        peak = peak_flops(name_of_device(ctx.device), ctx.precision)
    share = rate / (peak * ctx.world_size) if peak else 0.0
    return {"flops_per_s": rate} | ({"mfu": share} if 0 < share <= 1 else {})  # above 1, the count or the peak is wrong
