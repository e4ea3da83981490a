# SPDX-License-Identifier: Apache-2.0
"""`swanlab`: SwanLab."""

from __future__ import annotations

from typing import Any

from accel.trackers import _media as media
from accel.trackers._packages import array, load, needs, picture
from accel.trackers._tracker import Config, Ending, Run, Tracker

_ID_LENGTH = 21


def swanlab(**options: Any) -> Tracker:
    """Return the tracker that writes to SwanLab, by `swanlab.init`. Extra: `swanlab`.

    A resumed run has the same id; offline, it has another folder of files. SwanLab knows one run in a process.

    Args:
        options: of `swanlab.init`, such as `mode="offline"`, `workspace` or `log_dir`.
    """

    def start(run: Run, config: Config) -> Any:
        given = {
            "project": run.project,
            "name": run.name,
            "id": run.id[:_ID_LENGTH],
            "config": dict(config),
            "resume": None if run.step is None else "allow",
        }
        if run.folder is not None:
            given["log_dir"] = str(run.folder / "swanlab")
        return load("swanlab").init(**{**given, **options})

    return Tracker(
        "swanlab",
        start,
        log=lambda live, values, step: live.log(dict(values), step=step),
        finish=_finish,
        log_media=_log_media,
        media=(media.Images, media.Figure, media.TextRecord, media.Histogram),
        check=needs("swanlab", "swanlab"),
    )


def _finish(live: Any, ending: Ending) -> None:
    if ending.status == "finished":
        live.finish()
    else:
        live.finish(state="crashed", error=ending.error)


def _log_media(live: Any, record: media.Media, step: int) -> None:
    package = load("swanlab")
    match record:
        case media.Images():
            made: Any = [package.Image(array(pixels)) for pixels in record.tensors]
        case media.Figure():
            made = package.Image(picture(record.png))
        case media.TextRecord():
            made = package.Text(record.text)
        case media.Histogram():
            charts = package.echarts
            bars = charts.Bar().add_xaxis([f"{middle:.4g}" for middle in record.middles])
            labels = charts.options.LabelOpts(False)
            _ = bars.add_yaxis("values", list(record.counts), category_gap=0, label_opts=labels)
            made = package.ECharts(bars)
        case _:
            return  # not among its media
    live.log({record.name: made}, step=step)
