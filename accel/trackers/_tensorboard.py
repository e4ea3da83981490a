# SPDX-License-Identifier: Apache-2.0
"""`tensorboard`: event files in the run's folder."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from accel.trackers import _media as media
from accel.trackers._packages import array, load, markdown, needs, own_name, picture, rank_name, verbatim
from accel.trackers._tracker import Config, Ranks, Run, Tracker, Values


def tensorboard(log_dir: str | os.PathLike[str] | None = None, *, ranks: Ranks = "main", **options: Any) -> Tracker:
    """Return the tracker that writes TensorBoard's event files, by `torch.utils.tensorboard.SummaryWriter`.

    A resumed run writes on in the same folder, and `purge_step` hides the steps behind the checkpoint's. A checkpoint
    waits until the files hold its steps, if they are local. Extra: `tensorboard`.

    Args:
        log_dir: folder or URL of the runs; `tensorboard` in the run's folder by default. Each run has a folder in it,
            and in that each rank if several write.
        ranks: processes that write.
        options: of `SummaryWriter`.
    """
    remote = log_dir is not None and "://" in str(log_dir)

    def start(run: Run, config: Config) -> Any:
        place = str(log_dir or run.folder_for("tensorboard") / "tensorboard")
        parts = [place, own_name(run)] + ([] if ranks == "main" else [rank_name(run)])
        purge = None if run.step is None else run.step + 1
        writer = load("torch.utils.tensorboard").SummaryWriter("/".join(parts), purge_step=purge, **options)
        if run.step is None:
            writer.add_text("config", f"```json\n{msgspec.json.format(msgspec.json.encode(config)).decode()}\n```")
        return writer

    def check(run: Run) -> None:
        needs("tensorboard", "tensorboard")(run)
        _ = log_dir or run.folder_for("tensorboard")

    return Tracker(
        "tensorboard",
        start,
        _log,
        finish=lambda writer, ending: writer.close(),
        flush=None if remote else lambda writer: writer.flush(),
        log_media=_log_media,
        media=(media.Images, media.Table, media.Figure, media.TextRecord, media.Histogram),
        check=check,
        ranks=ranks,
    )


def _log(writer: Any, values: Values, step: int) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, step)


def _log_histogram(writer: Any, histogram: media.Histogram, step: int) -> None:
    middles = histogram.middles
    count = sum(histogram.counts)
    total = sum(middle * each for middle, each in zip(middles, histogram.counts, strict=True))
    squares = sum(middle * middle * each for middle, each in zip(middles, histogram.counts, strict=True))
    limits = histogram.edges[1:]
    low, high = histogram.low, histogram.high
    writer.add_histogram_raw(
        histogram.name, low, high, count, total, squares, limits, list(histogram.counts), global_step=step
    )


def _log_media(writer: Any, record: media.Media, step: int) -> None:
    match record:
        case media.Images():
            for at, pixels in enumerate(record.tensors):
                name = record.name if len(record.tensors) == 1 else f"{record.name}/{at}"
                values = array(pixels)
                writer.add_image(name, values, step, dataformats="HW" if values.ndim == 2 else "HWC")
        case media.Table():
            writer.add_text(record.name, markdown(record), step)
        case media.Figure():
            values = load("numpy").asarray(picture(record.png).convert("RGB"))
            writer.add_image(record.name, values, step, dataformats="HWC")
        case media.TextRecord():
            writer.add_text(record.name, verbatim(record.text), step)
        case media.Histogram():
            _log_histogram(writer, record, step)
        case media.Artifact():
            ...
