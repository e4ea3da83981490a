# SPDX-License-Identifier: Apache-2.0
"""The contents of a run's folder: curves of metrics, samples of its hosts, media, and runs in a folder."""

from __future__ import annotations

import math
import os
import re
import stat
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from accel.alerts import Alert
from accel.run_folder import (
    MEDIA,
    METRICS,
    RUN,
    LaunchRecord,
    MediaName,
    MetricsLine,
    Position,
    RunRecord,
    SourceState,
    decode_line,
    noted,
    parse_media,
    read_new,
)
from accel.terminal import natural_key

AT = "at"  # reading of the clock in a line, in seconds since the epoch


class MetricCurve:
    """The values of one metric, in order of their steps.

    Attributes:
        steps: steps with a finite value.
        values: their values.
        marks: steps with a value that is not finite, and its text: "nan", "inf" or "-inf".
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self.marks: list[tuple[int, str]] = []

    def add(self, step: int, value: float) -> None:
        """Add a value at the last step or behind it; a second value of a step replaces the first."""
        if self.marks or (self.steps and self.steps[-1] >= step):
            self.cut(step)
        if math.isfinite(value):
            self.steps.append(step)
            self.values.append(value)
        else:
            self.marks.append((step, str(float(value))))

    def cut(self, step: int) -> None:
        """Drop the values of a step and of those behind it."""
        while self.steps and self.steps[-1] >= step:
            _ = self.steps.pop()
            _ = self.values.pop()
        while self.marks and self.marks[-1][0] >= step:
            _ = self.marks.pop()

    @property
    def last(self) -> tuple[int, float] | None:
        """The last step and its value, finite or not; None for a curve without values."""
        ends = [(self.steps[-1], self.values[-1])] if self.steps else []
        ends += [(step, float(text)) for step, text in self.marks[-1:]]
        return max(ends, key=lambda end: end[0], default=None)


class SpreadCurve(MetricCurve):
    """A curve of several sources, such as hosts: means of one sample of each, also between two steps.

    Attributes:
        lows: least value of each point.
        highs: largest value of each point.
    """

    def __init__(self, points: Iterable[tuple[float, float]], sources: int) -> None:
        super().__init__()
        self.lows: list[float] = []
        self.highs: list[float] = []
        ordered = sorted(points)
        for at in range(0, len(ordered), sources):
            values = [value for _, value in ordered[at : at + sources]]
            self.steps.append(ordered[min(at + sources // 2, len(ordered) - 1)][0])  # type: ignore[arg-type]
            self.values.append(sum(values) / len(values))
            self.lows.append(min(values))
            self.highs.append(max(values))


class Curves:
    """The curves of a run.

    Attributes:
        values: a curve for each metric, in the order in which they appeared.
        time: a curve for each reading of a clock.
        last_step: step of the last line; None before the first.
        damaged: number of lines that could not be read.
    """

    def __init__(self) -> None:
        self.values: dict[str, MetricCurve] = {}
        self.time: dict[str, MetricCurve] = {}
        self.last_step: int | None = None
        self.damaged = 0

    def add(self, lines: Iterable[MetricsLine | None]) -> None:
        """Add lines; None counts as damaged. One of an earlier step drops those behind it: the run resumed
        there."""
        for line in lines:
            if line is None:
                self.damaged += 1
                continue
            if self.last_step is not None and line.step < self.last_step:
                for curve in (*self.values.values(), *self.time.values()):
                    curve.cut(line.step)
            self.last_step = line.step
            for group, found in ((self.values, line.values), (self.time, line.time)):
                for name, value in found.items():
                    curve = group.get(name)
                    if curve is None:
                        curve = group[name] = MetricCurve()
                    curve.add(line.step, value)

    def speed(self, over: int = 20) -> float | None:
        """Return steps per second over the last lines, by the clock; None where it is unknown."""
        clock = self.time.get(AT)
        if clock is None or len(clock.steps) < 2:
            return None
        steps, times = clock.steps[-over:], clock.values[-over:]
        return (steps[-1] - steps[0]) / (times[-1] - times[0]) if times[-1] > times[0] else None


def thin(steps: Sequence[float], values: Sequence[float], most: int = 2000) -> tuple[list[float], list[float]]:
    """Return at most `most` (4 or more) points of a curve, in order: the lowest and the highest of each bucket, and
    both ends."""
    count = len(values)
    if count <= most:
        return list(steps), list(values)
    buckets = (most - 2) // 2
    kept = {0, count - 1}
    for at in range(buckets):
        part = range(at * count // buckets, (at + 1) * count // buckets)
        kept.add(min(part, key=values.__getitem__))
        kept.add(max(part, key=values.__getitem__))
    order = sorted(kept)
    return [steps[at] for at in order], [values[at] for at in order]


class StoredCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of a run."""

    name: str  # name of its folder
    size: int  # its bytes
    changed_s: float  # time of its last write, in seconds since the epoch
    metrics: dict[str, float] = {}  # metrics that were saved with it
    problem: str = ""  # reason why it is none; empty for a whole one


class RunData(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The files of a run's folder."""

    name: str  # name of the run among those that are shown together
    folder: Path
    curves: Curves  # curves of its metrics
    run: RunRecord | None = None  # its record; None if it has none
    launches: Sequence[LaunchRecord] = ()  # its launches in order of their start
    checkpoints: Sequence[StoredCheckpoint] = ()  # its checkpoints in order of their steps
    profile: str = ""  # its profile as `accel profile` prints it; empty for none
    # Samples of its hosts, by name; samples of all GPUs of all hosts are one curve.
    machine: dict[str, SpreadCurve] = {}
    alerts: Sequence[Alert] = ()  # its alerts in order of time
    media: Sequence[MediaFile] = ()  # the files of its media
    problems: Sequence[str] = ()  # its files that cannot be read, with the reason, a line each

    @property
    def damaged(self) -> int:
        """The number of lines of its files that could not be read."""
        return self.curves.damaged + sum(each.damaged for each in self.launches)

    @property
    def source(self) -> SourceState | None:
        """The state of the code by the newest launch, or else by the run's record."""
        launched = self.launches[-1].source if self.launches else None
        return launched or (self.run.source if self.run else None)

    @property
    def is_empty(self) -> bool:
        """Whether the folder has no file of a run."""
        return self.curves.last_step is None and not (self.run or self.launches or self.checkpoints or self.profile)


def why_closed(folder: Path) -> str:
    """Return why nothing in a folder can be read; empty if it can, or if there is no folder."""
    problems: list[str] = []
    with noted(problems, "the folder"), suppress(FileNotFoundError):
        _ = os.listdir(folder)
        _ = os.lstat(folder / RUN)  # who may list a folder need not be let into it
    return "".join(problems)


class MachineSamples:
    """The samples of all hosts of a run, read again and again."""

    def __init__(self) -> None:
        self._positions: dict[Path, Position] = {}
        self._lines: dict[Path, list[MetricsLine]] = {}

    def look(self, folder: Path, clock: MetricCurve, problems: list[str]) -> dict[str, SpreadCurve]:
        """Return curves of the samples by now, each where the clock of the metrics has its time; note unreadable
        files."""
        points: dict[str, list[tuple[float, float]]] = {}
        sources: dict[str, set[tuple[str, str]]] = {}
        for path in sorted(folder.glob("system-*.jsonl")):
            with noted(problems, path.name):
                self._read(path, folder)
            for line in self._lines.get(path, ()):
                at = _step_at(clock, line.time.get(AT), line.step)
                for name, value in line.values.items():
                    kind = re.sub(r"^gpu\d+/", "gpu/", name)
                    if math.isfinite(value):
                        points.setdefault(kind, []).append((at, value))
                        sources.setdefault(kind, set()).add((path.name, name))
        return {kind: SpreadCurve(found, len(sources[kind])) for kind, found in points.items()}

    def _read(self, path: Path, folder: Path) -> None:
        kept = self._lines.setdefault(path, [])
        while True:
            new = read_new(path, self._positions.get(path, Position()), within=folder)
            self._positions[path] = new.position
            if new.restarted:
                kept.clear()
            kept += [line for line in map(decode_line, new.lines) if line is not None]
            if not new.lines:
                return


class MediaFile(NamedTuple):
    """A file of media."""

    name: MediaName  # the parts of its name
    path: str
    size: int  # its bytes
    changed_ns: int  # time of its last change


class MediaFolder:
    """The media of a run, listed anew where their folder changed."""

    def __init__(self) -> None:
        self._changed_ns = -1
        self._files: Sequence[MediaFile] = ()

    def look(self, folder: Path, problems: list[str]) -> Sequence[MediaFile]:
        """Return the files of a run's media by now; note an unreadable folder. Links are not followed."""
        with noted(problems, MEDIA), suppress(FileNotFoundError):
            state = os.lstat(folder / MEDIA)
            if not stat.S_ISDIR(state.st_mode):
                return ()
            if state.st_mtime_ns != self._changed_ns:
                self._files = list(_list_media(folder / MEDIA))
                is_settled = time.time_ns() - state.st_mtime_ns > 2_000_000_000  # clocks of files have coarse ticks
                self._changed_ns = state.st_mtime_ns if is_settled else -1
            return self._files
        return ()


def _list_media(folder: Path) -> Iterator[MediaFile]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = parse_media(entry.name)
            if name is not None and entry.is_file(follow_symlinks=False):
                state = entry.stat(follow_symlinks=False)
                yield MediaFile(name, entry.path, state.st_size, state.st_mtime_ns)


def _step_at(clock: MetricCurve, time_s: float | None, step: int) -> float:
    """Return the place of a time between the steps of a clock; `step` without a reading."""
    if time_s is None or not clock.values:
        return step
    at = bisect_left(clock.values, time_s)
    if at in (0, len(clock.values)):
        return clock.steps[min(at, len(clock.values) - 1)]
    before, after = clock.values[at - 1], clock.values[at]
    part = (time_s - before) / (after - before) if after > before else 0.0
    return clock.steps[at - 1] + part * (clock.steps[at] - clock.steps[at - 1])


_DEPTH = 3  # levels of folders in which runs are searched


class FoundRuns(NamedTuple):
    """The runs in a folder."""

    folders: Sequence[Path]
    unreadable: Sequence[str] = ()  # folders that cannot be searched, with the reason, a line each


def find_runs(folder: Path) -> FoundRuns:
    """Return the runs at or in a folder, run2 before run10; the folder itself if it holds none.

    A folder with run.json or metrics.jsonl is a run, and no run is inside another. Links to folders are not followed.
    """
    unreadable: list[str] = []
    found = list(_runs_in(folder, _DEPTH, unreadable))
    return FoundRuns(found or [folder], unreadable)


def _runs_in(folder: Path, depth: int, unreadable: list[str]) -> Iterator[Path]:
    inner: list[str] = []
    with noted(unreadable, str(folder)):
        if any(_is_there(folder / name) for name in (RUN, METRICS)):
            yield folder
        elif depth:
            inner = [each.name for each in os.scandir(folder) if each.is_dir(follow_symlinks=False)]
    for name in sorted(inner, key=natural_key):
        yield from _runs_in(folder / name, depth - 1, unreadable)


def _is_there(path: Path) -> bool:
    """Return whether anything has that path, also a file of a kind that is not read."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return bool(os.lstat(path))
    return False


def name_runs(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the folders' paths that differ; equal paths get a number."""
    parts = [folder.resolve().parts for folder in folders]
    length = 1
    names = ["/".join(each[-length:]) for each in parts]
    while len(set(names)) < len(set(parts)):
        length += 1
        names = ["/".join(each[-length:]).removeprefix("//") for each in parts]
    seen: dict[str, int] = {}
    for at, raw in enumerate(names):
        name = raw.encode(errors="replace").decode()  # bytes of a path that are no text
        seen[name] = seen.get(name, 0) + 1
        names[at] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return names
