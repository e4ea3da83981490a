# SPDX-License-Identifier: Apache-2.0
"""`jsonl` and `csv`: a line for each call of `log`, in the run's folder."""

from __future__ import annotations

import csv as standard
import io
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from accel.run_folder import MEDIA, METRICS, MediaName, encode_line, parse_media, replace_file
from accel.trackers import _media as media
from accel.trackers._line_file import LineFile, first_step, open_lines, set_aside, step_of
from accel.trackers._log import TIME, split_times
from accel.trackers._tracker import Config, Ending, Run, Tracker, Values

_PARTIAL = ".partial"  # end of the name of a file that is being written


class _OpenJsonl(msgspec.Struct, frozen=True):
    lines: LineFile
    media: Path


def jsonl(path: str | os.PathLike[str] = METRICS) -> Tracker:
    """Return the tracker that writes a line of JSON for each `log`, and media next to it as PNG, JSON and text files.

    The file of a resumed run is truncated to the checkpoint's last step, so it equals an uninterrupted run's, except
    for the key `time`; media of later steps are removed. Checkpoints wait until it is on the disk. `accel report`
    reads it.

    Args:
        path: the file, in the run's folder unless it is absolute.
    """

    def place(run: Run) -> Path:
        return run.folder_for("jsonl") / path if not Path(path).is_absolute() else Path(path)

    def start(run: Run, config: Config) -> _OpenJsonl:
        del config  # in run.json
        lines = open_lines(place(run), run)
        lines.cut_back(run, step_of)
        stored = lines.path.parent / MEDIA
        _cut_media(stored, run.step)
        return _OpenJsonl(lines, stored)

    return Tracker(
        "jsonl",
        start,
        _log,
        finish=lambda live, ending: live.lines.close(),
        flush=lambda live: live.lines.flush(),
        log_media=_log_media,
        media=(media.Images, media.Table, media.Figure, media.TextRecord, media.Histogram),
        first_step=lambda run: first_step(place(run), step_of),
        check=place,
    )


def _log(live: _OpenJsonl, values: Values, step: int) -> None:
    numbers, times = split_times(values)
    live.lines.append(encode_line(step, numbers, {**times, "at": round(time.time(), 3)}))


def _write(live: _OpenJsonl, name: MediaName, content: bytes) -> None:
    live.media.mkdir(exist_ok=True)
    replace_file(live.media / name.file, content)


def _cut_media(folder: Path, step: int | None) -> None:
    """Remove media behind a checkpoint's step; set the media of an earlier run aside."""
    found = [each.name for each in os.scandir(folder)] if folder.is_dir() else []
    if step is None and found:
        set_aside(folder)
        return
    for file in found:
        name = parse_media(file)
        is_behind = name is not None and step is not None and name.step > step
        if is_behind or file.endswith(_PARTIAL):
            (folder / file).unlink(missing_ok=True)


_AT = f"{TIME}at"


class _OpenCsv:
    """An open file and its columns; names of values come before names of clocks."""

    def __init__(self, lines: LineFile) -> None:
        self.lines = lines
        head = lines.first_line().decode()
        self.columns: list[str] = next(standard.reader([head])) if head else []


def csv(path: str | os.PathLike[str] = "metrics.csv") -> Tracker:
    """Return the tracker that writes a row for each `log`: step, values, and last the readings of clocks.

    A new name adds a column, and writes the file anew. A resumed run's file is cut back as by `jsonl`. Checkpoints wait
    until it is on the disk.

    Args:
        path: the file, in the run's folder unless it is absolute.
    """

    def place(run: Run) -> Path:
        return run.folder_for("csv") / path if not Path(path).is_absolute() else Path(path)

    def start(run: Run, config: Config) -> _OpenCsv:
        del config  # in run.json
        live = _OpenCsv(open_lines(place(run), run))
        live.lines.cut_back(run, _step_of_row, begin=len(live.lines.first_line()))
        return live

    return Tracker(
        "csv",
        start,
        _log_row,
        _finish,
        flush=lambda live: live.lines.flush(),
        first_step=lambda run: first_step(place(run), _step_of_row, skip=1),
        check=place,
    )


def _step_of_row(line: bytes) -> int | None:
    step = line.partition(b",")[0]
    return int(step) if step.isdigit() else None


def _log_row(live: _OpenCsv, values: Values, step: int) -> None:
    numbers, times = split_times(values)
    clocks = {f"{TIME}{name}": value for name, value in times.items()} | {_AT: round(time.time(), 3)}
    row: dict[str, float] = {"step": step, **numbers, **clocks}
    if not row.keys() <= set(live.columns):
        _widen(live, [*numbers], [*clocks])
    cells = [repr(row[name]) if name in row else "" for name in live.columns]  # nan, inf and -inf as they are
    live.lines.append(_row(cells))


def _widen(live: _OpenCsv, names: list[str], clocks: list[str]) -> None:
    """Add the columns that are missing, in the order in which they came."""
    before = live.columns
    values = [name for name in before[1:] if not name.startswith(TIME)]
    times = [name for name in before if name.startswith(TIME) and name != _AT]
    columns = ["step", *dict.fromkeys([*values, *names]), *dict.fromkeys([*times, *clocks])]
    columns = [name for name in columns if name != _AT] + [_AT]
    rows = [_row(columns)]
    with open(live.lines.path, newline="") as file:
        rows += [_row([row.get(name) or "" for name in columns]) for row in standard.DictReader(file)]
    live.lines.replace(b"".join(rows))
    live.columns = columns


def _row(cells: list[str]) -> bytes:
    text = io.StringIO()
    _ = standard.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _finish(live: _OpenCsv, ending: Ending) -> None:
    del ending
    live.lines.close()


def _log_media(live: _OpenJsonl, record: media.Media, step: int) -> None:
    match record:
        case media.Images():
            for at, pixels in enumerate(record.tensors):
                _write(live, MediaName(record.name, "images", step, at), media.png_of(pixels))
        case media.Figure():
            _write(live, MediaName(record.name, "figure", step), record.png)
        case media.Table():
            content: dict[str, Any] = {"columns": record.columns, "rows": record.rows}
            _write(live, MediaName(record.name, "table", step), msgspec.json.encode(content))
        case media.TextRecord():
            _write(live, MediaName(record.name, "text", step), record.text.encode(errors="backslashreplace"))
        case media.Histogram():
            content = {"edges": record.edges, "counts": record.counts, "nonfinite": record.nonfinite}
            _write(live, MediaName(record.name, "histogram", step), msgspec.json.encode(content))
        case media.Artifact():
            ...
