# SPDX-License-Identifier: Apache-2.0
"""`aim`: Aim."""

from __future__ import annotations

from typing import Any

from accel.trackers import _media as media
from accel.trackers._packages import load, markdown, needs, picture
from accel.trackers._tracker import Config, Ending, Run, Tracker, Values


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
        log_media=_log_media,
        media=(media.Images, media.Table, media.Figure, media.TextRecord, media.Histogram),
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


def _log_media(live: Any, record: media.Media, step: int) -> None:
    package = load("aim")
    match record:
        case media.Images():
            made: Any = [package.Image(picture(media.png_of(pixels))) for pixels in record.tensors]
        case media.Table():
            made = package.Text(markdown(record))
        case media.Figure():
            made = package.Image(picture(record.png))
        case media.TextRecord():
            made = package.Text(record.text)
        case media.Histogram():
            made = package.Distribution(hist=list(record.counts), bin_range=(record.low, record.high))
        case media.Artifact():
            return  # not among its media
    live.track(made, name=record.name, step=step)
