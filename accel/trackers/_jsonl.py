# SPDX-License-Identifier: Apache-2.0
"""`jsonl`: a line for each call of `log`, in the run's folder."""

from __future__ import annotations

import functools
import os
import re
import time
from pathlib import Path
from typing import Any

import msgspec

from accel.run_folder import METRICS, encode_line
from accel.trackers._line_file import LineFile, first_step, open_lines
from accel.trackers._log import split_times
from accel.trackers._tracker import Config, Figure, Images, Run, Table, Tracker, Values, png_of

_MEDIA = "media"


class _StepRecord(msgspec.Struct):
    step: int


class _OpenJsonl(msgspec.Struct, frozen=True):
    lines: LineFile
    media: Path


def jsonl(path: str | os.PathLike[str] = METRICS) -> Tracker:
    """Return the tracker that writes a line of JSON for each `log`, and media beside it as PNG and JSON files.

    The file of a resumed run is truncated to the checkpoint's last step, so it equals an uninterrupted run's, apart
    from the key `time`. Checkpoints wait until it is on the disk. `accel report` reads it.

    Args:
        path: the file, in the run's folder unless it is absolute.
    """

    def place(run: Run) -> Path:
        return run.folder_for("jsonl") / path if not Path(path).is_absolute() else Path(path)

    def start(run: Run, config: Config) -> _OpenJsonl:
        del config  # in run.json
        lines = open_lines(place(run), run)
        lines.cut_back(run, _step_of)
        return _OpenJsonl(lines, lines.path.parent / _MEDIA)

    return Tracker(
        "jsonl",
        start,
        _log,
        finish=lambda live, ending: live.lines.close(),
        flush=lambda live: live.lines.flush(),
        log_images=_log_images,
        log_table=_log_table,
        log_figure=_log_figure,
        first_step=lambda run: first_step(place(run), _step_of),
        check=place,
    )


def _step_of(line: bytes) -> int | None:
    try:
        return msgspec.json.decode(line, type=_StepRecord).step
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _log(live: _OpenJsonl, values: Values, step: int) -> None:
    numbers, times = split_times(values)
    live.lines.append(encode_line(step, numbers, {**times, "at": round(time.time(), 3)}))


def _log_images(live: _OpenJsonl, images: Images, step: int) -> None:
    for at, pixels in enumerate(images.tensors):
        _write(live, f"{images.name}-{step:08}-{at}.png", png_of(pixels))


def _log_figure(live: _OpenJsonl, figure: Figure, step: int) -> None:
    _write(live, f"{figure.name}-{step:08}.png", figure.png)


def _log_table(live: _OpenJsonl, table: Table, step: int) -> None:
    content: dict[str, Any] = {"columns": table.columns, "rows": table.rows}
    _write(live, f"{table.name}-{step:08}.json", msgspec.json.encode(content))


def _write(live: _OpenJsonl, name: str, content: bytes) -> None:
    live.media.mkdir(exist_ok=True)
    _ = (live.media / _safe(name)).write_bytes(content)


@functools.lru_cache(maxsize=256)
def _safe(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name).lstrip(".")
