# SPDX-License-Identifier: Apache-2.0
"""`comet_ml`: Comet."""

from __future__ import annotations

from typing import Any

from accel.trackers._packages import array, load, needs, picture
from accel.trackers._tracker import Artifact, Config, Ending, Figure, Histogram, Images, Run, Table, Tracker


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
        log_images=_log_images,
        log_table=_log_table,
        log_figure=_log_figure,
        log_text=lambda live, text, step: live.log_text(text.text, step=step, metadata={"name": text.name}),
        log_histogram=_log_histogram,
        log_artifact=_log_artifact,
        check=needs("comet_ml", "comet_ml"),
    )


def _finish(live: Any, ending: Ending) -> None:
    live.log_other("status", ending.status)
    if ending.error:
        live.log_other("error", ending.error)
    live.end()


def _log_images(live: Any, images: Images, step: int) -> None:
    for at, pixels in enumerate(images.tensors):
        live.log_image(array(pixels), name=f"{images.name}-{at}", step=step)


def _log_table(live: Any, table: Table, step: int) -> None:
    rows = [list(row) for row in table.rows]
    live.log_table(f"{table.name}-{step:08}.json", tabular_data=rows, headers=list(table.columns))


def _log_figure(live: Any, figure: Figure, step: int) -> None:
    live.log_image(picture(figure.png), name=figure.name, step=step)


def _log_histogram(live: Any, histogram: Histogram, step: int) -> None:
    made = load("comet_ml").Histogram()  # of Comet's own intervals, a tenth wider each, which its pages draw
    made.add(histogram.middles, counts=list(histogram.counts))
    live.log_histogram_3d(made, name=histogram.name, step=step)


def _log_artifact(live: Any, artifact: Artifact, step: int) -> None:
    if artifact.path.is_dir():
        live.log_asset_folder(str(artifact.path), step=step, log_file_name=True, recursive=True)
    else:
        live.log_asset(str(artifact.path), file_name=artifact.name, step=step)
