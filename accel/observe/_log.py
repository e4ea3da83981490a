# SPDX-License-Identifier: Apache-2.0
"""`log` and its kin: records of a step, queued for the trackers of this rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from accel.comm import Call, call_site, exchange_values
from accel.context import DistContext, context_first
from accel.errors import ConfigError
from accel.observe._handle import Trackers
from accel.observe._media import make_artifact, make_figure, make_images, make_table, split_images
from accel.observe._tracker import Tracker
from accel.observe._tracking import raise_lost
from accel.observe._values import StepValues, make_values
from accel.observe._writer import Write


class _Said(msgspec.Struct, frozen=True):
    """Losses of a rank, and its values if they are compared."""

    lost: str
    values: tuple[tuple[str, str], ...]


@context_first
def log(ctx: DistContext, trackers: Trackers, values: Mapping[str, object], *, step: int) -> None:
    """Log numbers of a step. Every rank calls it; no communication, and no wait for a device or a tracker.

    Args:
        ctx: the context.
        trackers: from `tracking`.
        values: numbers, tensors of one element and scalars of numpy by name, alike on all ranks; nested mappings join
            names by "/". Readings of clocks, which differ between two runs of the same training, are under "time".
            What differs by rank comes out of a metric.
        step: optimizer step, not below the last one logged.

    Raises:
        ConfigError: a value that is no number, a name that cannot be one, a step that goes back, or trackers that have
            ended; on every rank. Values that differ between ranks, with `debug`.
        TrackerError: a tracker lost records, with `strict`; on every rank.

    Example:
        >>> with accel.tracking(ctx, "demo", to=[accel.trackers.csv()], dir="runs/demo") as trackers:
        ...     accel.log(ctx, trackers, {"train": {"loss": torch.tensor(0.5)}}, step=1)
        >>> Path("runs/demo/metrics.csv").read_text()[:15]
        'step,train/loss'
    """
    _check_trackers(trackers, "log")
    trackers.tracked.advance(step, "log")
    made = make_values(values)
    if trackers.strict or trackers.debug:
        _compare(ctx, trackers, made, step)
    trackers.tracked.count_line(step)
    trackers.tracked.put(lambda tracker: _writing(tracker, made, step), made.size)


@context_first
def log_images(
    ctx: DistContext,
    trackers: Trackers,
    images: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    *,
    step: int,
) -> None:
    """Log images of a step. Waits for their copy from the device on ranks that write; no communication.

    Args:
        ctx: the context.
        trackers: from `tracking`.
        images: tensors [N, C, H, W], [C, H, W] or [H, W] by name; uint8, or floats from 0 to 1; 1, 3 or 4 channels.
        step: optimizer step, not below the last one logged.

    Raises:
        ConfigError: no image, no tracker that takes images, or as `log`.
    """
    taking = _taking(trackers, "log_images", "images", step)
    single = {name: split_images(name, each) for name, each in images.items()}
    if taking:
        for name, each in single.items():
            made = make_images(name, each)
            trackers.tracked.put(lambda tracker, made=made: _media(tracker.log_images, made, step), made.size)


@context_first
def log_table(
    ctx: DistContext,
    trackers: Trackers,
    name: str,
    *,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    step: int,
) -> None:
    """Log a table of texts and numbers. No communication.

    Args:
        ctx: the context.
        trackers: from `tracking`.
        name: name of the table.
        columns: names of the columns.
        rows: a value a column each.
        step: optimizer step, not below the last one logged.

    Raises:
        ConfigError: a row of another length, a value that is neither text nor number, no tracker that takes tables, or
            as `log`.
    """
    taking = _taking(trackers, "log_table", "tables", step)
    made = make_table(name, columns, rows)
    if taking:
        trackers.tracked.put(lambda tracker: _media(tracker.log_table, made, step), made.size)


@context_first
def log_figure(ctx: DistContext, trackers: Trackers, name: str, figure: object, *, step: int) -> None:
    """Log a figure, drawn at once on ranks that write. No communication.

    Args:
        ctx: the context.
        trackers: from `tracking`.
        name: name of the figure.
        figure: of matplotlib; on ranks that do not write, it may be None.
        step: optimizer step, not below the last one logged.

    Raises:
        ConfigError: not a figure, no tracker that takes figures, or as `log`.
    """
    if _taking(trackers, "log_figure", "figures", step):
        made = make_figure(name, figure)
        trackers.tracked.put(lambda tracker: _media(tracker.log_figure, made, step), made.size)


@context_first
def log_artifact(
    ctx: DistContext, trackers: Trackers, path: str | os.PathLike[str], *, step: int, name: str | None = None
) -> None:
    """Store a file or folder with the run. No communication; the background thread reads it, so it must stay.

    Args:
        ctx: the context.
        trackers: from `tracking`.
        path: file or folder; one that is missing counts as a lost record.
        step: optimizer step, not below the last one logged.
        name: name of the artifact; the file's own by default.

    Raises:
        ConfigError: no tracker that takes artifacts, or as `log`.
    """
    if _taking(trackers, "log_artifact", "artifacts", step):
        made = make_artifact(name, path)
        trackers.tracked.put(lambda tracker: _media(tracker.log_artifact, made, step), 0)


def _taking(trackers: Trackers, verb: str, kind: str, step: int) -> bool:
    """Check a call for media; return whether this rank writes to a tracker that takes them."""
    _check_trackers(trackers, verb)
    trackers.tracked.advance(step, verb)
    without = [tracker.name for tracker in trackers.tracked.all if getattr(tracker, verb) is None]
    if len(without) == len(trackers.tracked.all):
        raise ConfigError(
            f"no tracker takes {kind}",
            got=", ".join(without) or "no trackers",
            where=verb,
            fix="Add one that does, such as accel.trackers.mlflow(); the page on trackers has a table.",
        )
    trackers.tracked.tell_left_out(kind, without)
    return trackers.tracked.writes(verb)


def _check_trackers(trackers: Trackers, where: str) -> None:
    if not isinstance(trackers, Trackers):  # pyright: ignore[reportUnnecessaryIsInstance]
        expected = f"accel.{where}(ctx, trackers, ..., step=), with the trackers that accel.tracking gives"
        raise ConfigError("these are no trackers", expected=expected, got=type(trackers).__name__, where=where)


def _writing(tracker: Tracker, made: StepValues, step: int) -> Write:
    return lambda live: tracker.log(live, made.read(), step)


def _media(function: Any, made: object, step: int) -> Write | None:
    return None if function is None else lambda live: function(live, made, step)


def _compare(ctx: DistContext, trackers: Trackers, made: StepValues, step: int) -> None:
    """Exchange losses, and values in debug. A collective."""
    alike = trackers.debug and all(tracker.ranks == "main" for tracker in trackers.tracked.all)
    values = tuple((name, repr(value)) for name, value in made.read().items()) if alike else ()
    call = Call("log", f"step {step}", call_site())
    said = exchange_values(ctx.comm, call, _Said(trackers.tracked.trouble() if trackers.strict else "", values), _Said)
    raise_lost([each.lost for each in said], f"log, step {step}")
    for rank, each in enumerate(said):
        if each.values != said[0].values:
            differing = sorted(set(each.values) ^ set(said[0].values))[0][0]
            raise ConfigError(
                "ranks log different values",
                expected=f"{dict(said[0].values).get(differing, 'nothing')}, as on rank 0",
                got=f"{dict(each.values).get(differing, 'nothing')} on rank {rank}",
                where=f"log, {differing!r}, step {step}",
                fix="Reduce it over the ranks first: accel.reduce(ctx, ...), or a record of running metrics.",
            )
