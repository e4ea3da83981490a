# SPDX-License-Identifier: Apache-2.0
"""`trackio`: Hugging Face's Trackio, on this machine or in a Space."""

from __future__ import annotations

from typing import Any

from accel.trackers._packages import array, load, needs, own_name, picture
from accel.trackers._tracker import Artifact, Config, Figure, Images, Run, Table, Tracker


def trackio(**options: Any) -> Tracker:
    """Return the tracker that writes to Trackio, by `trackio.init`. Extra: `trackio`.

    A resumed run goes on under its name. Local data are in Trackio's own folder, `TRACKIO_DIR`.

    Args:
        options: of `trackio.init`, such as `space_id`.
    """

    def start(run: Run, config: Config) -> Any:
        given = {
            "project": run.project,
            "name": own_name(run),
            "config": dict(config),
            "resume": "never" if run.step is None else "allow",
            "embed": False,
        }
        return load("trackio").init(**{**given, **options})

    return Tracker(
        "trackio",
        start,
        log=lambda live, values, step: live.log(dict(values), step=step),
        finish=lambda live, ending: live.finish(),
        log_images=_log_images,
        log_table=_log_table,
        log_figure=_log_figure,
        log_artifact=_log_artifact,
        check=needs("trackio", "trackio"),
    )


def _log_images(live: Any, images: Images, step: int) -> None:
    image = load("trackio").Image
    for at, pixels in enumerate(images.tensors):
        name = images.name if len(images.tensors) == 1 else f"{images.name}/{at}"
        live.log({name: image(array(pixels))}, step=step)


def _log_table(live: Any, table: Table, step: int) -> None:
    frame = load("pandas").DataFrame([list(row) for row in table.rows], columns=list(table.columns))
    live.log({table.name: load("trackio").Table(dataframe=frame)}, step=step)


def _log_figure(live: Any, figure: Figure, step: int) -> None:
    live.log({figure.name: load("trackio").Image(picture(figure.png))}, step=step)


def _log_artifact(live: Any, artifact: Artifact, step: int) -> None:
    del step
    kind = "folder" if artifact.path.is_dir() else "file"
    live.log_artifact(str(artifact.path), name=artifact.name, type=kind)
