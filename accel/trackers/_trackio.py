# SPDX-License-Identifier: Apache-2.0
"""`trackio`: Hugging Face's Trackio, on this machine or in a Space."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

from accel.terminal import show_limit
from accel.trackers import _media as media
from accel.trackers._packages import array, load, needs, own_name, picture, verbatim
from accel.trackers._tracker import Config, Run, Tracker

_PATIENCE_S = 10.0
_POLL_S = 0.05


def trackio(**options: Any) -> Tracker:
    """Return the tracker that writes to Trackio, by `trackio.init`. Extra: `trackio`.

    A resumed run continues under its name. Local data are in Trackio's folder, `TRACKIO_DIR`, and a checkpoint waits
    until that has its steps.

    Args:
        options: of `trackio.init`, such as `space_id`.
    """

    is_local = options.get("space_id") is None and options.get("server_url") is None
    stored = _StoredRows()

    def start(run: Run, config: Config) -> Any:
        given: dict[str, Any] = {
            "project": run.project,
            "name": own_name(run),
            "config": dict(config),
            "resume": "never" if run.step is None else "allow",
            "embed": False,
        }
        given |= options
        live = load("trackio").init(**given)
        if is_local:
            stored.begin(given["project"], given["name"])
        return live

    def write(live: Any, values: dict[str, Any], step: int) -> None:
        live.log(values, step=step)
        stored.logged += 1

    def log_media(live: Any, record: media.Media, step: int) -> None:
        if isinstance(record, media.Artifact):
            live.log_artifact(str(record.path), name=record.name, type="folder" if record.path.is_dir() else "file")
        for values in _made(record):
            write(live, values, step)

    return Tracker(
        "trackio",
        start,
        log=lambda live, values, step: write(live, dict(values), step),
        finish=lambda live, ending: live.finish(),
        flush=(lambda live: stored.wait()) if is_local else None,
        log_media=log_media,
        media=(media.Images, media.Table, media.Figure, media.TextRecord, media.Histogram, media.Artifact),
        check=needs("trackio", "trackio"),
    )


class _StoredRows:
    """The rows of a run in Trackio's database, which it writes in a separate thread."""

    def __init__(self) -> None:
        self.logged = 0
        self._before = 0
        self._project = self._name = ""
        self._is_late = False

    def begin(self, project: str, name: str) -> None:
        """Count the rows of an earlier process."""
        self._project, self._name = project, name
        self.logged = 0
        self._before = self._count()

    def wait(self) -> None:
        """Wait until all rows are there; once, a warning reports that they are not."""
        until = time.monotonic() + _PATIENCE_S
        while not self._is_late and self._count() < self._before + self.logged:
            if time.monotonic() >= until:
                self._is_late = True
                text = "trackio did not store its rows in %s, and checkpoints wait for it no longer"
                logging.getLogger("accel.trackers").warning(text, show_limit(_PATIENCE_S))
            time.sleep(_POLL_S)

    def _count(self) -> int:
        return load("trackio").SQLiteStorage.get_log_count(self._project, self._name)


def _made(record: media.Media) -> Iterator[dict[str, Any]]:
    """Yield a record as rows of Trackio's."""
    package, name = load("trackio"), record.name
    match record:
        case media.Images():
            for at, pixels in enumerate(record.tensors):
                yield {name if len(record.tensors) == 1 else f"{name}/{at}": package.Image(array(pixels))}
        case media.Table():
            frame = load("pandas").DataFrame([list(row) for row in record.rows], columns=list(record.columns))
            yield {name: package.Table(dataframe=frame)}
        case media.Figure():
            yield {name: package.Image(picture(record.png))}
        case media.TextRecord():
            yield {name: package.Markdown(verbatim(record.text))}
        case media.Histogram():
            array_of = load("numpy").asarray
            pair = (array_of(record.counts), array_of(record.edges))
            yield {name: package.Histogram(np_histogram=pair)}
        case media.Artifact():
            ...
