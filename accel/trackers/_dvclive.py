# SPDX-License-Identifier: Apache-2.0
"""`dvclive`: DVCLive, tables and JSON in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel.run_folder import replace_file
from accel.trackers import _media as media
from accel.trackers._packages import load, needs, picture
from accel.trackers._tracker import Config, Ending, Run, Tracker, Values


def dvclive(**options: Any) -> Tracker:
    """Return the tracker that writes DVCLive's files, by `dvclive.Live`. Extra: `dvclive`.

    The files of a resumed run are cut back to the checkpoint's step.

    Args:
        options: of `dvclive.Live`, such as `save_dvc_exp` or `dir`, which is `dvclive` in the run's folder by default.
    """

    def place(run: Run) -> Path:
        return Path(options.get("dir") or run.folder_for("dvclive") / "dvclive")

    def start(run: Run, config: Config) -> Any:
        folder = place(run)
        if run.step is not None:
            for table in folder.glob("plots/metrics/**/*.tsv"):
                _cut(table, run.step)
        given: dict[str, Any] = {"dir": str(folder), "resume": run.step is not None}
        live = load("dvclive").Live(**{**given, **options})
        live.log_params(dict(config))
        return live

    return Tracker(
        "dvclive",
        start,
        _log,
        _finish,
        log_media=_log_media,
        media=(media.Images, media.Figure, media.Histogram),
        check=lambda run: (needs("dvclive", "dvclive")(run), place(run)),
    )


def _cut(table: Path, step: int) -> None:
    """Cut a table's rows behind a step; the first column with that name has it."""
    head, *rows = table.read_text().splitlines()
    at = head.split("\t").index("step")
    kept = [row for row in rows if row.split("\t")[at].isdigit() and int(row.split("\t")[at]) <= step]
    replace_file(table, "".join(f"{row}\n" for row in [head, *kept]).encode())


def _log(live: Any, values: Values, step: int) -> None:
    live.step = step
    for name, value in values.items():
        live.log_metric(name, value)
    live.make_summary()


def _finish(live: Any, ending: Ending) -> None:
    live.summary["status"] = ending.status
    live.make_summary()
    live.end()


def _log_media(live: Any, record: media.Media, step: int) -> None:
    live.step = step
    match record:
        case media.Images():
            for at, pixels in enumerate(record.tensors):
                live.log_image(f"{record.name}-{at}.png", picture(media.png_of(pixels)))
        case media.Figure():
            live.log_image(f"{record.name}.png", picture(record.png))
        case media.Histogram():
            pairs = zip(record.middles, record.counts, strict=True)
            rows = [{"value": middle, "values": count} for middle, count in pairs]
            live.log_plot(record.name, rows, x="value", y="values", template="simple", title=record.name)
        case _:
            ...
