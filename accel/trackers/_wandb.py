# SPDX-License-Identifier: Apache-2.0
"""`wandb`: Weights & Biases."""

from __future__ import annotations

import html
from typing import Any

from accel.trackers._packages import array, load, needs, picture, rank_name
from accel.trackers._tracker import (
    Artifact,
    Config,
    Ending,
    Figure,
    Histogram,
    Images,
    Ranks,
    Run,
    Table,
    TextRecord,
    Tracker,
)


def wandb(*, ranks: Ranks = "main", **options: Any) -> Tracker:
    """Return the tracker that writes to Weights & Biases, by `wandb.init`. Extra: `wandb`.

    A resumed run has the same id. The run is not `wandb.run`, so that two may live in one process; `get_tracker` gives
    it.

    Args:
        ranks: processes that write. With several, all write to one run in W&B's shared mode, where rank 0 is the
            primary; in the modes "offline" and "disabled", each has a run of its own, in a group.
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
        log_images=_log_images,
        log_table=_log_table,
        log_figure=_log_figure,
        log_text=_log_text,
        log_histogram=_log_histogram,
        log_artifact=_log_artifact,
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


def _log_images(live: Any, images: Images, step: int) -> None:
    image = load("wandb").Image
    live.log({images.name: [image(array(pixels)) for pixels in images.tensors]}, step=step)


def _log_table(live: Any, table: Table, step: int) -> None:
    made = load("wandb").Table(columns=list(table.columns), data=[list(row) for row in table.rows])
    live.log({table.name: made}, step=step)


def _log_figure(live: Any, figure: Figure, step: int) -> None:
    live.log({figure.name: load("wandb").Image(picture(figure.png))}, step=step)


def _log_text(live: Any, text: TextRecord, step: int) -> None:
    shown = f"<pre>{html.escape(text.text)}</pre>"
    live.log({text.name: load("wandb").Html(shown, inject=False)}, step=step)


def _log_histogram(live: Any, histogram: Histogram, step: int) -> None:
    pair = (list(histogram.counts), histogram.edges)
    live.log({histogram.name: load("wandb").Histogram(np_histogram=pair)}, step=step)


def _log_artifact(live: Any, artifact: Artifact, step: int) -> None:
    del step
    made = load("wandb").Artifact(artifact.name, type="folder" if artifact.path.is_dir() else "file")
    (made.add_dir if artifact.path.is_dir() else made.add_file)(str(artifact.path))
    live.log_artifact(made)
