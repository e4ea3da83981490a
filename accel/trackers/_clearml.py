# SPDX-License-Identifier: Apache-2.0
"""`clearml`: ClearML."""

from __future__ import annotations

import html
import io
from typing import Any

from accel.trackers._packages import array, load, needs, picture
from accel.trackers._tracker import (
    Artifact,
    Config,
    Ending,
    Figure,
    Histogram,
    Images,
    Run,
    Table,
    TextRecord,
    Tracker,
    Values,
)

_ALL = -1  # else files of earlier steps are overwritten


def clearml(*, offline: bool = False, **options: Any) -> Tracker:
    """Return the tracker that writes to ClearML, by `clearml.Task.init`. Extra: `clearml`.

    ClearML knows one task in a process. A resumed run continues the task that has its tag; offline, it is another one.

    Args:
        offline: whether to write an archive, for `clearml.Task.import_offline_session`; holds for the whole process.
        options: of `Task.init`, such as `output_uri` or `auto_connect_frameworks`.
    """

    def start(run: Run, config: Config) -> Any:
        task_class = load("clearml").Task
        if offline:
            task_class.set_offline(True)
        given: dict[str, Any] = {"project_name": run.project, "task_name": run.name, "reuse_last_task_id": False}
        if run.step is not None and not offline:
            found = task_class.get_tasks(project_name=run.project, tags=[run.id])
            if found:
                given["continue_last_task"] = found[0].id
        live = task_class.init(**{**given, **options})
        live.set_initial_iteration(0)  # a continued task would add its last step to each
        live.add_tags([run.id])
        live.connect(dict(config))
        return live

    return Tracker(
        "clearml",
        start,
        _log,
        _finish,
        log_images=_log_images,
        log_table=_log_table,
        log_figure=_log_figure,
        log_text=_log_text,
        log_histogram=_log_histogram,
        log_artifact=_log_artifact,
        check=needs("clearml", "clearml"),
    )


def _log(live: Any, values: Values, step: int) -> None:
    logger = live.get_logger()
    for name, value in values.items():
        title, _, series = name.partition("/")
        logger.report_scalar(title, series or title, value, step)


def _finish(live: Any, ending: Ending) -> None:
    if ending.status == "failed":
        live.mark_failed(status_reason=ending.error, force=True)
    live.close()


def _log_images(live: Any, images: Images, step: int) -> None:
    for at, pixels in enumerate(images.tensors):
        live.get_logger().report_image(images.name, str(at), step, image=array(pixels), max_image_history=_ALL)


def _log_table(live: Any, table: Table, step: int) -> None:
    rows = [list(table.columns), *(list(row) for row in table.rows)]
    live.get_logger().report_table(table.name, table.name, step, table_plot=rows)


def _log_figure(live: Any, figure: Figure, step: int) -> None:
    pixels = load("numpy").asarray(picture(figure.png).convert("RGB"))
    live.get_logger().report_image(figure.name, figure.name, step, image=pixels, max_image_history=_ALL)


def _log_text(live: Any, text: TextRecord, step: int) -> None:
    page = f'<meta charset="utf-8"><pre>{html.escape(text.text)}</pre>'.encode(errors="backslashreplace")
    live.get_logger().report_media(
        text.name, text.name, step, stream=io.BytesIO(page), file_extension=".html", max_history=_ALL
    )


def _log_histogram(live: Any, histogram: Histogram, step: int) -> None:
    live.get_logger().report_histogram(
        histogram.name,
        histogram.name,
        list(histogram.counts),
        step,
        xlabels=histogram.middles,
        xaxis="value",
        yaxis="values",
    )


def _log_artifact(live: Any, artifact: Artifact, step: int) -> None:
    del step
    live.upload_artifact(artifact.name, str(artifact.path))
