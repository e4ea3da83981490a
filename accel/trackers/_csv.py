# SPDX-License-Identifier: Apache-2.0
"""`csv`: a row for each call of `log`, a column for each name."""

from __future__ import annotations

import csv as standard
import io
import os
import time
from pathlib import Path

from accel.trackers._line_file import LineFile, first_step, open_lines
from accel.trackers._log import TIME, split_times
from accel.trackers._tracker import Config, Ending, Run, Tracker, Values

_AT = f"{TIME}at"


class _OpenCsv:
    """An open file and its columns; names of values come before those of clocks."""

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
        live.lines.cut_back(run, _step_of, begin=len(live.lines.first_line()))
        return live

    return Tracker(
        "csv",
        start,
        _log,
        _finish,
        flush=lambda live: live.lines.flush(),
        first_step=lambda run: first_step(place(run), _step_of, skip=1),
        check=place,
    )


def _step_of(line: bytes) -> int | None:
    step = line.partition(b",")[0]
    return int(step) if step.isdigit() else None


def _log(live: _OpenCsv, values: Values, step: int) -> None:
    numbers, times = split_times(values)
    clocks = {f"{TIME}{name}": value for name, value in times.items()} | {_AT: round(time.time(), 3)}
    row: dict[str, float] = {"step": step, **numbers, **clocks}
    if not row.keys() <= set(live.columns):
        _widen(live, [*numbers], [*clocks])
    live.lines.append(_row([_cell(row.get(name)) for name in live.columns]))


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


def _cell(value: float | None) -> str:
    return "" if value is None else repr(value)  # nan, inf and -inf as they are


def _finish(live: _OpenCsv, ending: Ending) -> None:
    del ending
    live.lines.close()
