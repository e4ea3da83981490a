# SPDX-License-Identifier: Apache-2.0
"""`wandb`: Weights & Biases."""

from __future__ import annotations

import html
from typing import Any

from accel.trackers import _media as media
from accel.trackers._packages import array, load, needs, picture, rank_name
from accel.trackers._tracker import Config, Ending, Ranks, Run, Tracker


def wandb(*, ranks: Ranks = "main", **options: Any) -> Tracker:
    """Return the tracker that writes to Weights & Biases, by `wandb.init`. Extra: `wandb`.

    A resumed run has the same id. The run is not `wandb.run`, so that two may live in one process; `get_tracker` gives
    it.

    Args:
        ranks: processes that write. With several, all write to one run in W&B's shared mode, where rank 0 is the
            primary; in the modes "offline" and "disabled", each has a separate run, in a group.
        options: of `wandb.init`, such as `entity`, `tags`, `mode` or `settings`.
    """

    def start(run: Run, config: Config) -> Any:
        package = load("wandb")
        given = {
            "project": run.project,
            "id": run.id,
            "name": run.name,
            "config": dict(config),
            "reinit": "create_new",
            "resume": None if run.step is None else "allow",
        }
        if run.folder is not None:
            run.folder.mkdir(parents=True, exist_ok=True)
            given["dir"] = str(run.folder)
        if ranks != "main":
            given |= _shared(package, run, options.get("mode"))
        return package.init(**{**given, **options})

    return Tracker(
        "wandb",
        start,
        log=lambda live, values, step: live.log(dict(values), step=step),
        finish=_finish,
        log_media=_log_media,
        media=(media.Images, media.Table, media.Figure, media.TextRecord, media.Histogram, media.Artifact),
        check=needs("wandb", "wandb"),
        ranks=ranks,
    )


def _shared(package: Any, run: Run, mode: str | None) -> dict[str, Any]:
    """Return the options by which several processes write."""
    if mode in ("offline", "disabled"):
        return {"id": f"{run.id}-{run.rank}", "name": f"{run.name}-{rank_name(run)}", "group": run.name}
    primary = run.rank == 0
    facts = {"x_label": rank_name(run), "x_primary": primary, "x_update_finish_state": primary}
    return {"settings": package.Settings(mode="shared", **facts)}


def _finish(live: Any, ending: Ending) -> None:
    if ending.error:
        live.summary["error"] = ending.error
    live.finish(exit_code=0 if ending.status == "finished" else 1)


def _log_media(live: Any, record: media.Media, step: int) -> None:
    package = load("wandb")
    match record:
        case media.Images():
            made = [package.Image(array(pixels)) for pixels in record.tensors]
        case media.Table():
            made = package.Table(columns=list(record.columns), data=[list(row) for row in record.rows])
        case media.Figure():
            made = package.Image(picture(record.png))
        case media.TextRecord():
            made = package.Html(f"<pre>{html.escape(record.text)}</pre>", inject=False)
        case media.Histogram():
            made = package.Histogram(np_histogram=(list(record.counts), record.edges))
        case media.Artifact():
            stored = package.Artifact(record.name, type="folder" if record.path.is_dir() else "file")
            (stored.add_dir if record.path.is_dir() else stored.add_file)(str(record.path))
            live.log_artifact(stored)
            return
    live.log({record.name: made}, step=step)
