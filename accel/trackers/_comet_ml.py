# SPDX-License-Identifier: Apache-2.0
"""`comet_ml`: Comet."""

from __future__ import annotations

from typing import Any

from accel.trackers import _media as media
from accel.trackers._packages import array, load, needs, picture
from accel.trackers._tracker import Config, Ending, Run, Tracker


def comet_ml(**options: Any) -> Tracker:
    """Return the tracker that writes to Comet, by `comet_ml.start`. Extra: `comet_ml`.

    A resumed run has the same experiment key; offline, it has another archive.

    Args:
        options: of `comet_ml.start`, such as `online=False`, `workspace` or `experiment_config`.
    """

    def start(run: Run, config: Config) -> Any:
        package = load("comet_ml")
        given = {"project_name": run.project, "experiment_key": run.id, "mode": "get_or_create"}
        if run.folder is not None:
            given["experiment_config"] = package.ExperimentConfig(
                name=run.name, offline_directory=str(run.folder / "comet")
            )
        experiment = package.start(**{**given, **options})
        experiment.log_parameters(dict(config))
        return experiment

    return Tracker(
        "comet_ml",
        start,
        log=lambda live, values, step: live.log_metrics(dict(values), step=step),
        finish=_finish,
        log_media=_log_media,
        media=(media.Images, media.Table, media.Figure, media.TextRecord, media.Histogram, media.Artifact),
        check=needs("comet_ml", "comet_ml"),
    )


def _finish(live: Any, ending: Ending) -> None:
    live.log_other("status", ending.status)
    if ending.error:
        live.log_other("error", ending.error)
    live.end()


def _log_media(live: Any, record: media.Media, step: int) -> None:
    match record:
        case media.Images():
            for at, pixels in enumerate(record.tensors):
                live.log_image(array(pixels), name=f"{record.name}-{at}", step=step)
        case media.Table():
            rows = [list(row) for row in record.rows]
            live.log_table(f"{record.name}-{step:08}.json", tabular_data=rows, headers=list(record.columns))
        case media.Figure():
            live.log_image(picture(record.png), name=record.name, step=step)
        case media.TextRecord():
            live.log_text(record.text, step=step, metadata={"name": record.name})
        case media.Histogram():
            made = load("comet_ml").Histogram()  # of Comet's own intervals, a tenth wider each, which its pages draw
            made.add(record.middles, counts=list(record.counts))
            live.log_histogram_3d(made, name=record.name, step=step)
        case media.Artifact():
            if record.path.is_dir():
                live.log_asset_folder(str(record.path), step=step, log_file_name=True, recursive=True)
            else:
                live.log_asset(str(record.path), file_name=record.name, step=step)
