# SPDX-License-Identifier: Apache-2.0
"""Profiles of chosen ranks by torch.profiler, and snapshots of CUDA's memory, in a run's folder."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Collection, Generator, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerAction, ProfilerActivity, record_function

from accel.context import DistContext, context_first
from accel.errors import ConfigError, StepError
from accel.run_folder import PROFILE

_MOST_EVENTS = 100_000  # allocations and frees, the newest


@contextlib.contextmanager
def recording() -> Generator[None]:
    """Record allocations of CUDA with their stacks in the block."""
    cuda: Any = torch.cuda.memory
    cuda._record_memory_history(max_entries=_MOST_EVENTS)
    try:
        yield
    finally:
        cuda._record_memory_history(enabled=None)


def write_snapshot(path: Path) -> None:
    """Write a snapshot of the memory, with its recorded history; raise `OSError` if the file cannot be written."""
    cuda: Any = torch.cuda.memory
    cuda._dump_snapshot(str(path))


T = TypeVar("T")
Schedule = Callable[[int], ProfilerAction]

_DATA = "accel.data"  # the reader's name for waits for data


class Profile:
    """The profile of a rank; on ranks that were not chosen, its methods do nothing.

    Attributes:
        files: files that this rank has written.
    """

    def __init__(self, *, chosen: bool = True) -> None:
        self.files: list[Path] = []
        self._chosen = chosen
        self._profiler: Any = None
        self._recorded: Any = None  # torch's autograd profiler of the latest cycle, which a later one replaces

    def key_averages(self, group_by_input_shape: bool = False, group_by_stack_n: int = 0) -> EventList:
        """Return the operators of the latest trace, summed up by name; `table(sort_by=...)` of it is a text.

        Inside the block or behind it, once the schedule's steps are over. Empty on ranks that were not chosen.

        Args:
            group_by_input_shape: whether to sum up by shapes of inputs, too, with `record_shapes`.
            group_by_stack_n: number of frames to sum up by, with `with_stack`.

        Raises:
            StepError: no trace yet.
        """
        if not self._chosen:
            return EventList([])
        if self._recorded is None:
            raise StepError(
                "the profile has no trace yet",
                where="Profile.key_averages",
                fix="Call it after the schedule's steps, such as behind the block.",
            )
        return self._recorded.key_averages(group_by_input_shape=group_by_input_shape, group_by_stack_n=group_by_stack_n)

    def step(self) -> None:
        """End a step. Call it after each `optimizer_step`; the schedule counts these calls."""
        if self._profiler is not None:
            self._profiler.step()

    def data(self, batches: Iterable[T]) -> Generator[T]:
        """Yield the batches of a loop, and mark the time until each one comes as a wait for data.

        Args:
            batches: such as `accel.batches(ctx, loader, state)`.
        """
        if self._profiler is None:
            yield from batches
            return
        source = iter(batches)
        end = object()
        try:
            while True:
                with record_function(_DATA):
                    batch: Any = next(source, end)
                if batch is end:
                    return
                yield batch
        finally:
            if isinstance(source, Generator):
                source.close()


@context_first
@contextlib.contextmanager
def profile(
    ctx: DistContext,
    *,
    out: str | os.PathLike[str],
    schedule: Schedule | None = None,
    ranks: Collection[int] | None = None,
    memory: bool = False,
    activities: Collection[ProfilerActivity] | None = None,
    on_trace_ready: Callable[[torch.profiler.profile], object] | None = None,
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_stack: bool = False,
    with_flops: bool = False,
    with_modules: bool = False,
) -> Generator[Profile]:
    """Profile the steps of a loop. No communication; every rank calls it.

    Each chosen rank writes the trace `out/profile/rank-00000.json.gz` when the schedule's steps are over, and the
    traces of later cycles into `out/profile/cycle-2` and so on. `accel profile OUT` reads them; so do
    https://ui.perfetto.dev and chrome://tracing. A trace that cannot be written is logged by `accel.trackers`.

    Args:
        ctx: the context.
        out: a folder, best the run's. Older traces of the same ranks in it are deleted.
        schedule: result of `torch.profiler.schedule`; by default steps 6 to 10 are recorded, after 2 of warm-up.
        ranks: ranks to profile; None for all, an empty list for none.
        memory: whether to write a snapshot of CUDA's memory next to each trace, `memory-00000.pickle`, with the history
            of allocations, for https://docs.pytorch.org/memory_viz.
        activities: kinds of events; by default the CPU's, and CUDA's in a context on cuda.
        on_trace_ready: function of torch's profiler, called on each chosen rank after it has written a trace.
        record_shapes, profile_memory, with_stack, with_flops, with_modules: as for `torch.profiler.profile`.

    Returns:
        A context manager that gives the `Profile`.

    Raises:
        ConfigError: no such rank, a folder at a URL, `memory` without CUDA, no activity, or several simulated ranks,
            which share one profiler; on every rank.

    Examples:
        >>> with accel.profile(ctx, out="runs/demo") as profile:
        ...     for batch in profile.data(batches):
        ...         profile.step()
    """
    steps = _schedule(schedule)
    chosen = set(range(ctx.world_size)) if ranks is None else _rank_numbers(ranks)
    folder = _check(ctx, chosen, os.fspath(out), memory=memory)
    kinds = _activities(ctx, activities)
    made = Profile(chosen=ctx.rank in chosen)
    if ctx.rank not in chosen:
        yield made
        return
    _delete_old(folder, ctx.rank)

    def write(ended: Any) -> None:
        made._recorded = ended.profiler  # pyright: ignore[reportPrivateUsage]
        _write(ctx, ended, folder, made.files, memory=memory)
        if on_trace_ready is not None:
            _ = on_trace_ready(ended)

    with recording() if memory else contextlib.nullcontext():
        profiler: Any = _Profiler(
            activities=kinds,
            schedule=steps,
            on_trace_ready=write,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
            with_modules=with_modules,
        )
        about = {"rank": ctx.rank, "world_size": ctx.world_size}  # torch knows the ranks of its default group alone
        profiler.preset_metadata_json("accel", msgspec.json.encode(about).decode())
        with profiler:
            made._profiler = profiler  # pyright: ignore[reportPrivateUsage]
            try:
                yield made
            finally:
                made._profiler = None  # pyright: ignore[reportPrivateUsage]
    if not made.files:
        _logger().warning("the profile of rank %d has no trace: the schedule's steps were not reached", ctx.rank)


class _Profiler(torch.profiler.profile):
    """torch's profiler without two warnings: before torch 2.13 at the first cycle that it clears the events of earlier
    ones, and since torch 2.14 that `with_modules`, which a user has asked for, serves TorchScript alone."""

    def prepare_trace(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "with_modules is deprecated", FutureWarning)
            if self.profiler is None:
                warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            super().prepare_trace()


def _schedule(given: Schedule | None) -> Schedule:
    if given is None:
        torchs: Any = torch.profiler
        return torchs.schedule(wait=3, warmup=2, active=5, repeat=1)
    if not callable(given):
        raise ConfigError(
            "the schedule is not valid",
            expected="a function of the step's number",
            got=type(given).__name__,
            where="profile, schedule=",
            fix="Pass torch.profiler.schedule(wait=3, warmup=2, active=5).",
        )
    return given


def _activities(ctx: DistContext, named: Collection[ProfilerActivity] | None) -> list[ProfilerActivity]:
    if named is None:
        return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ctx.device.type == "cuda" else [])]
    if not named or not all(isinstance(each, ProfilerActivity) for each in cast("Collection[object]", named)):
        raise ConfigError(
            "the activities are not valid",
            expected="a list such as [torch.profiler.ProfilerActivity.CPU]",
            got=repr(named),
            where="profile, activities=",
        )
    return list(named)


def _rank_numbers(ranks: Any) -> set[int]:
    if not isinstance(ranks, Collection) or not all(type(rank) is int for rank in cast("Collection[Any]", ranks)):
        raise ConfigError(
            "the ranks are not valid", expected="a list such as [0, 1]", got=repr(cast("object", ranks)), where="ranks="
        )
    return set(cast("Collection[int]", ranks))


def _check(ctx: DistContext, ranks: Collection[int], out: str, *, memory: bool) -> Path:
    wrong = sorted(rank for rank in ranks if not 0 <= rank < ctx.world_size)
    if wrong:
        raise ConfigError(
            "there is no such rank to profile", expected=f"0 to {ctx.world_size - 1}", got=str(wrong), where="ranks"
        )
    if "://" in out:
        raise ConfigError("traces are written to local folders", got=out, where="out", fix="Name a local folder.")
    if memory and ctx.device.type != "cuda":
        raise ConfigError(
            "memory snapshots need CUDA's allocator",
            expected="a context on cuda",
            got=str(ctx.device),
            where="memory",
            fix="Leave memory out.",
        )
    if ctx.backend == "simulated" and len(ranks) > 1:  # torch 2.13 crashes
        raise ConfigError(
            "simulated ranks share one profiler", got=f"{len(ranks)} ranks", where="ranks", fix="Pass ranks=[0]."
        )
    return Path(out) / PROFILE


def _write(ctx: DistContext, profiler: Any, folder: Path, files: list[Path], *, memory: bool) -> None:
    """Write the trace of a cycle, whole or not at all."""
    cycle = 1 + sum(file.name.startswith("rank-") for file in files)
    place = folder if cycle == 1 else folder / f"cycle-{cycle}"
    path = place / f"rank-{ctx.rank:05}.json.gz"
    partial = place / f".rank-{ctx.rank:05}.partial.json.gz"
    try:
        place.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(partial))
        os.replace(partial, path)
        files.append(path)
        if memory:
            snapshot = place / f"memory-{ctx.rank:05}.pickle"
            write_snapshot(snapshot)
            files.append(snapshot)
    except (OSError, RuntimeError) as error:  # training continues without it
        _logger().warning("the profile of rank %d is not written to %s: %s", ctx.rank, place, error)


def _delete_old(folder: Path, rank: int) -> None:
    names = (f"rank-{rank:05}.json.gz", f"memory-{rank:05}.pickle")
    for place in (folder, *folder.glob("cycle-*")):
        for name in names:
            with contextlib.suppress(OSError):
                (place / name).unlink()


def _logger() -> logging.Logger:
    return logging.getLogger("accel.trackers")
