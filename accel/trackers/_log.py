# SPDX-License-Identifier: Apache-2.0
"""`log` and its kin: records of a step, queued for the trackers of this rank."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import torch

from accel.alerts import LEVELS, AlertLevel
from accel.comm import Call, call_site, exchange_values
from accel.comm._streams import DeviceEvent, streams_of
from accel.context import DistContext, context_first
from accel.devices import wide_dtype
from accel.errors import ConfigError
from accel.errors._checks import check_choice, check_count, check_kind
from accel.tensors import is_dtensor
from accel.trackers import _media as media
from accel.trackers._tracker import Tracker
from accel.trackers._tracking import Trackers, raise_lost
from accel.trackers._writer import Write

TIME = "time/"  # names of readings of clocks begin with it
_RESERVED = ("step", "time")


class StepValues:
    """Numbers of a step by name, some of which may still be on a device.

    Args:
        numbers: numbers by name, all names in their order; 0 in place of those on devices.
        waiting: names and a stacked copy of the tensors on each device, with the event after the copy where a device
            has streams.
    """

    def __init__(self, numbers: dict[str, float], waiting: list[tuple[list[str], torch.Tensor, DeviceEvent]]) -> None:
        self._numbers = numbers
        self._waiting = waiting
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        return 200 + 150 * len(self._numbers)

    @property
    def names(self) -> Collection[str]:
        """Names of the numbers; waits for no device."""
        return self._numbers.keys()

    def read(self) -> dict[str, float]:
        """Return the numbers; waits for the devices. Several threads may call it."""
        with self._lock:
            while self._waiting:
                names, stacked, copied = self._waiting[-1]
                if copied is not None:  # this thread reads on another stream than the one that copied
                    streams_of(stacked.device).synchronize(copied)
                self._numbers.update(zip(names, cast("Any", stacked).tolist(), strict=True))
                _ = self._waiting.pop()
        return self._numbers


def make_values(values: Mapping[str, object]) -> StepValues:
    """Copy numbers, tensors of one element and scalars of numpy, by name. Does not wait for a device.

    Nested mappings join names by "/"; readings of clocks are under "time". Other values and names are a `ConfigError`.
    """
    numbers: dict[str, float] = {}
    waiting: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, value in _flat(values, ""):
        if name in numbers:
            raise ConfigError("two values have one name", got=repr(name), where="log")
        if type(value) is float or type(value) is int:
            numbers[name] = value
        elif isinstance(value, torch.Tensor):
            _check_tensor(name, value)
            numbers[name] = _unboxed(value.item()) if value.is_cpu else 0.0
            if not value.is_cpu:
                waiting.setdefault(value.device, {})[name] = value
        else:
            numbers[name] = _number(name, value)
    stacks = [(list(tensors), *_stacked(tensors)) for tensors in waiting.values()]
    return StepValues(numbers, stacks)


def split_times(values: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return numbers without the readings of clocks, and these under their own names."""
    numbers = {name: value for name, value in values.items() if not name.startswith(TIME)}
    return numbers, {name.removeprefix(TIME): value for name, value in values.items() if name.startswith(TIME)}


def _flat(values: Mapping[str, object], before: str) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if not isinstance(key, str) or not key or not key.isprintable():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError("the name of a value is not valid", expected="printable text", got=repr(key), where="log")
        name = before + key
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, object]", value), f"{name}/")
        elif name in _RESERVED:
            raise ConfigError(
                "a value has a name that each line has itself",
                got=repr(name),
                where="log",
                fix='Rename it; readings of clocks are {"time": {"step_s": ...}}.',
            )
        else:
            yield name, value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float):
        return value
    item: Any = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", None) == 1:  # scalars and arrays of numpy
        found = item()
        if isinstance(found, int | float):
            return _unboxed(found)
    fixes = {"str": "Texts go into a table: accel.trackers.log_table(...).", "NoneType": "Leave the name out."}
    raise ConfigError(
        "the value is not a number",
        expected="a number or a tensor of one element",
        got=f"{type(value).__name__} {value!r:.40}",
        where=f"log, {name!r}",
        fix=fixes.get(type(value).__name__, ""),
    )


def _unboxed(value: Any) -> float:
    return int(value) if isinstance(value, bool) else value


def _check_tensor(name: str, value: torch.Tensor) -> None:
    if value.numel() != 1 or value.is_complex():
        raise ConfigError(
            "the value is not a number",
            expected="a tensor of one real element",
            got=f"{value.dtype} of shape {list(value.shape)}",
            where=f"log, {name!r}",
            fix="Log its mean() or another number of it.",
        )


def _stacked(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, DeviceEvent]:
    """Copy tensors on one device, as a replayed graph overwrites its results; with the event after it on CUDA."""
    device = next(iter(tensors.values())).device
    copy = torch.stack([tensor.detach().reshape(()).to(wide_dtype(device)) for tensor in tensors.values()])
    streams = streams_of(device)
    return copy, streams.record(streams.current()) if streams.is_pinnable else None


class _RankValues(msgspec.Struct, frozen=True):
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

    Examples:
        >>> with accel.tracking(ctx, "demo", to=[accel.trackers.csv()], dir="runs/demo") as trackers:
        ...     accel.log(ctx, trackers, {"train": {"loss": torch.tensor(0.5)}}, step=1)
        >>> Path("runs/demo/metrics.csv").read_text()[:15]
        'step,train/loss'
    """
    _check_trackers(trackers, "log")
    trackers.tracked.advance(step, "log")
    made = make_values(values)
    trackers.tracked.check_rules(made.names)
    if trackers.strict or trackers.debug:
        _compare(ctx, trackers, made, step)
    trackers.tracked.count_line(step)
    trackers.tracked.put(lambda tracker: lambda live: tracker.log(live, made.read(), step), made.size)


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
    taking = _taking(trackers, "log_images", media.Images, "images", step)
    single = {name: media.split_images(name, each) for name, each in images.items()}
    if taking:
        for name, each in single.items():
            made = media.make_images(name, each)
            trackers.tracked.put(lambda tracker, made=made: _media(tracker, made, step), made.size)


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
    taking = _taking(trackers, "log_table", media.Table, "tables", step)
    made = media.make_table(name, columns, rows)
    if taking:
        trackers.tracked.put(lambda tracker: _media(tracker, made, step), made.size)


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
    if _taking(trackers, "log_figure", media.Figure, "figures", step):
        made = media.make_figure(name, figure)
        trackers.tracked.put(lambda tracker: _media(tracker, made, step), made.size)


@context_first
def log_text(ctx: DistContext, trackers: Trackers, name: str, text: str, *, step: int) -> None:
    """Log a text, such as a sample of a language model. No communication.

    Args:
        ctx: the context.
        trackers: from `tracking`.
        name: name of the text.
        text: the text; rank 0's. No tracker runs or renders what is in it.
        step: optimizer step, not below the last one logged.

    Raises:
        ConfigError: no text, no tracker that takes texts, or as `log`.
    """
    taking = _taking(trackers, "log_text", media.TextRecord, "texts", step)
    where = f"log_text, {name}"
    check_kind(text, str, "the value is not a text", expected="a str", where=where, fix="Use str(...).")
    if taking:
        made = media.TextRecord(name, text)
        trackers.tracked.put(lambda tracker: _media(tracker, made, step), made.size)


@context_first
def log_histogram(
    ctx: DistContext, trackers: Trackers, name: str, values: torch.Tensor, *, step: int, bins: int = 64
) -> None:
    """Log how the values of a tensor are spread. Waits for their counts from the device on ranks that write.

    No communication: the writing rank logs its values, such as a replicated weight or gradient.

    Args:
        ctx: the context.
        trackers: from `tracking`.
        name: name of the histogram.
        values: real numbers, of any shape; values that are not finite are counted separately.
        step: optimizer step, not below the last one logged.
        bins: number of intervals of one width between the least and the largest value.

    Raises:
        ConfigError: no tensor of real numbers, a sharded one, no tracker that takes histograms, or as `log`.
    """
    taking = _taking(trackers, "log_histogram", media.Histogram, "histograms", step)
    where = f"log_histogram, {name}"
    check_kind(
        values,
        torch.Tensor,
        "the value is not a tensor",
        expected="a tensor",
        where=where,
        fix="Use torch.as_tensor(...).",
    )
    check_count(bins, "the number of intervals is not valid", most=4096, where=f"{where}, bins=")
    if values.is_complex():
        raise ConfigError("the values are not real numbers", got=str(values.dtype), where=where, fix="Log its abs().")
    if is_dtensor(values):
        fix = "Pass values.full_tensor(), which is a collective, or the rank's part, values.to_local()."
        raise ConfigError("a tensor that is shared out to the ranks", got="a DTensor", where=where, fix=fix)
    if taking:
        made = media.make_histogram(name, values, bins)
        trackers.tracked.put(lambda tracker: _media(tracker, made, step), made.size)


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
    if _taking(trackers, "log_artifact", media.Artifact, "artifacts", step):
        made = media.make_artifact(name, path)
        trackers.tracked.put(lambda tracker: _media(tracker, made, step), 0)


@context_first
def alert(
    ctx: DistContext,
    trackers: Trackers,
    title: str,
    text: str = "",
    *,
    level: AlertLevel = "warning",
    every_s: float = 600.0,
) -> None:
    """Raise an alert. No collective, any rank; waits for no disk and no service.

    It is logged on this rank, kept in the run's folder for `accel watch` and the report, and passed to the command and
    the webhook of the setting `alerts`, in the background. Credentials in it become stars.

    Args:
        ctx: the context.
        trackers: from `tracking`.
        title: the alert in a few words, alike for equal ones.
        text: further facts.
        level: "info", "warning" or "error".
        every_s: seconds in which equal ones of this rank are one, with a count.

    Raises:
        ConfigError: a title that is no printable text, an unknown level, a negative time, or trackers that have ended;
            on this rank alone.

    Examples:
        >>> accel.trackers.alert(ctx, trackers, "few free blocks", f"{count} left", level="error")
    """
    del ctx
    _check_trackers(trackers, "alert")
    check_choice(level, LEVELS, "the level of the alert is unknown", where="alert, level=")
    if not isinstance(title, str) or not title or not title.isprintable():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError("the title is not valid", expected="printable text", got=repr(title)[:80], where="alert")
    if not every_s >= 0:
        raise ConfigError(
            "the time is not valid", expected="0 or more seconds", got=repr(every_s), where="alert, every_s="
        )
    trackers.tracked.alert(title, str(text), level=level, every_s=every_s)


def _taking(trackers: Trackers, verb: str, medium: type[media.Media], kind: str, step: int) -> bool:
    """Check a call for media; return whether this rank writes to a tracker that takes them."""
    _check_trackers(trackers, verb)
    trackers.tracked.advance(step, verb)
    without = [tracker.name for tracker in trackers.tracked.all if medium not in tracker.media]
    if len(without) == len(trackers.tracked.all):
        raise ConfigError(
            f"no tracker takes {kind}",
            got=", ".join(without) or "no trackers",
            where=verb,
            fix="Add one that does, such as accel.trackers.mlflow(); the page on trackers has a table.",
        )
    trackers.tracked.warn_left_out(kind, without)
    return trackers.tracked.writes(medium)


def _check_trackers(trackers: Trackers, where: str) -> None:
    if not isinstance(trackers, Trackers):  # pyright: ignore[reportUnnecessaryIsInstance]
        expected = f"accel.{where}(ctx, trackers, ..., step=), with the trackers that accel.tracking gives"
        fix = 'with accel.tracking(ctx, "demo", to=[accel.trackers.jsonl()], dir="runs/demo") as trackers:'
        raise ConfigError(
            "the values are not trackers", expected=expected, got=type(trackers).__name__, where=where, fix=fix
        )


def _media(tracker: Tracker, made: media.Media, step: int) -> Write | None:
    write = tracker.log_media
    return None if write is None or type(made) not in tracker.media else lambda live: write(live, made, step)


def _compare(ctx: DistContext, trackers: Trackers, made: StepValues, step: int) -> None:
    """Exchange losses, and values in debug. A collective."""
    alike = trackers.debug and all(tracker.ranks == "main" for tracker in trackers.tracked.all)
    values = tuple((name, repr(value)) for name, value in made.read().items()) if alike else ()
    call = Call("log", f"step {step}", call_site())
    sent = exchange_values(
        ctx.comm, call, _RankValues(trackers.tracked.trouble() if trackers.strict else "", values), _RankValues
    )
    raise_lost([each.lost for each in sent], f"log, step {step}")
    for rank, each in enumerate(sent):
        if each.values != sent[0].values:
            differing = sorted(set(each.values) ^ set(sent[0].values))[0][0]
            raise ConfigError(
                "ranks log different values",
                expected=f"{dict(sent[0].values).get(differing, 'nothing')}, as on rank 0",
                got=f"{dict(each.values).get(differing, 'nothing')} on rank {rank}",
                where=f"log, {differing!r}, step {step}",
                fix="Reduce it over the ranks first: accel.reduce(ctx, ...), or a record of running metrics.",
            )
