# SPDX-License-Identifier: Apache-2.0
"""`clearml`: ClearML."""

from __future__ import annotations

import html
import io
from typing import Any

from accel.trackers import _media as media
from accel.trackers._packages import array, load, needs, picture
from accel.trackers._tracker import Config, Ending, Run, Tracker, Values

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
        log_media=_log_media,
        media=(media.Images, media.Table, media.Figure, media.TextRecord, media.Histogram, media.Artifact),
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


def _log_media(live: Any, record: media.Media, step: int) -> None:
    logger, name = live.get_logger(), record.name
    match record:
        case media.Images():
            for at, pixels in enumerate(record.tensors):
                logger.report_image(name, str(at), step, image=array(pixels), max_image_history=_ALL)
        case media.Table():
            rows = [list(record.columns), *map(list, record.rows)]
            logger.report_table(name, name, step, table_plot=rows)
        case media.Figure():
            pixels = load("numpy").asarray(picture(record.png).convert("RGB"))
            logger.report_image(name, name, step, image=pixels, max_image_history=_ALL)
        case media.TextRecord():
            page = f'<meta charset="utf-8"><pre>{html.escape(record.text)}</pre>'.encode(errors="backslashreplace")
            stream = io.BytesIO(page)
            logger.report_media(name, name, step, stream=stream, file_extension=".html", max_history=_ALL)
        case media.Histogram():
            axes = {"xlabels": record.middles, "xaxis": "value", "yaxis": "values"}
            logger.report_histogram(name, name, list(record.counts), step, **axes)
        case media.Artifact():
            live.upload_artifact(name, str(record.path))
