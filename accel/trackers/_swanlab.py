# SPDX-License-Identifier: Apache-2.0
"""`swanlab`: SwanLab."""

from __future__ import annotations

from typing import Any

from accel.trackers._packages import array, load, needs, picture
from accel.trackers._tracker import Config, Ending, Figure, Histogram, Images, Run, Tracker

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
        log_images=_log_images,
        log_figure=_log_figure,
        log_text=lambda live, text, step: live.log({text.name: load("swanlab").Text(text.text)}, step=step),
        log_histogram=_log_histogram,
        check=needs("swanlab", "swanlab"),
    )


def _finish(live: Any, ending: Ending) -> None:
    if ending.status == "finished":
        live.finish()
    else:
        live.finish(state="crashed", error=ending.error)


def _log_images(live: Any, images: Images, step: int) -> None:
    image = load("swanlab").Image
    live.log({images.name: [image(array(pixels)) for pixels in images.tensors]}, step=step)


def _log_figure(live: Any, figure: Figure, step: int) -> None:
    live.log({figure.name: load("swanlab").Image(picture(figure.png))}, step=step)


def _log_histogram(live: Any, histogram: Histogram, step: int) -> None:
    charts = load("swanlab").echarts
    bars = charts.Bar().add_xaxis([f"{middle:.4g}" for middle in histogram.middles])
    _ = bars.add_yaxis("values", list(histogram.counts), category_gap=0, label_opts=charts.options.LabelOpts(False))
    live.log({histogram.name: load("swanlab").ECharts(bars)}, step=step)
