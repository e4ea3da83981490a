# SPDX-License-Identifier: Apache-2.0
"""`aim`: Aim."""

from __future__ import annotations

from typing import Any

from accel.trackers._packages import load, markdown, needs, picture
from accel.trackers._tracker import Config, Ending, Figure, Histogram, Images, Run, Table, Tracker, Values, png_of


def aim(**options: Any) -> Tracker:
    """Return the tracker that writes to an Aim repository, by `aim.Run`. Extra: `aim`.

    The project is the experiment. Aim chooses a hash for the run, and a file in the run's folder keeps it: a
    resumed run is the same run, and its steps behind the checkpoint are overwritten.

    Args:
        options: of `aim.Run`, such as `repo`, which is the run's folder by default.
    """

    def start(run: Run, config: Config) -> Any:
        folder = run.folder_for("aim")
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / f"aim-{run.id[:6]}.txt"
        given: dict[str, Any] = {"experiment": run.project, "repo": str(folder)}
        if run.step is not None and kept.exists():
            given |= {"run_hash": kept.read_text(), "force_resume": True}  # a killed run has left its lock
        live = load("aim").Run(**{**given, **options})
        _ = kept.write_text(live.hash)
        live.name = run.name
        live["config"] = dict(config)
        return live

    return Tracker(
        "aim",
        start,
        _log,
        _finish,
        log_images=_log_images,
        log_table=_log_table,
        log_figure=_log_figure,
        log_text=lambda live, text, step: live.track(load("aim").Text(text.text), name=text.name, step=step),
        log_histogram=_log_histogram,
        check=lambda run: (needs("aim", "aim")(run), run.folder_for("aim")),
    )


def _log(live: Any, values: Values, step: int) -> None:
    for name, value in values.items():
        live.track(value, name=name, step=step)


def _finish(live: Any, ending: Ending) -> None:
    live["status"] = ending.status
    if ending.error:
        live["error"] = ending.error
    live.close()


def _log_images(live: Any, images: Images, step: int) -> None:
    image = load("aim").Image
    live.track([image(picture(png_of(pixels))) for pixels in images.tensors], name=images.name, step=step)


def _log_table(live: Any, table: Table, step: int) -> None:
    live.track(load("aim").Text(markdown(table)), name=table.name, step=step)


def _log_figure(live: Any, figure: Figure, step: int) -> None:
    live.track(load("aim").Image(picture(figure.png)), name=figure.name, step=step)


def _log_histogram(live: Any, histogram: Histogram, step: int) -> None:
    ends = (histogram.low, histogram.high)
    made = load("aim").Distribution(hist=list(histogram.counts), bin_range=ends)
    live.track(made, name=histogram.name, step=step)
