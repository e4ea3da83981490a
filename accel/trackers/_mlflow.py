# SPDX-License-Identifier: Apache-2.0
"""`mlflow`: MLflow, by its client."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from accel.errors import ConfigError
from accel.terminal import show_limit
from accel.trackers import _media as media
from accel.trackers._packages import load, needs, picture
from accel.trackers._tracker import Config, Ending, Ranks, Run, Tracker, Values

_TAG = "accel.run"
_FIND_S = 60.0
_POLL_S = 0.5
_MOST_CHARACTERS = 6000


class _Live:
    """A run of MLflow, as `get_tracker` gives it.

    Attributes:
        client: an `MlflowClient`.
        run_id: MLflow's id of the run.
    """

    def __init__(self, client: Any, run_id: str, prefix: str, is_main: bool) -> None:
        self.client = client
        self.run_id = run_id
        self.prefix = prefix
        self.is_main = is_main
        self.last_steps: dict[str, int] = {}  # of metrics that an earlier process has logged

    def last_step(self, key: str) -> int:
        """Return the last step of a metric that an earlier process has logged; -1 for none."""
        if key not in self.last_steps:
            history = self.client.get_metric_history(self.run_id, key)
            self.last_steps[key] = max((metric.step for metric in history), default=-1)
        return self.last_steps[key]


class MlflowVariables(NamedTuple):
    """Variables of MLflow users that its client does not read itself."""

    experiment: str  # `MLFLOW_EXPERIMENT_NAME`; empty if it is not set
    tags: dict[str, str]  # `MLFLOW_TAGS`


def read_mlflow(environ: Mapping[str, str]) -> MlflowVariables:
    """Read `MLFLOW_EXPERIMENT_NAME` and `MLFLOW_TAGS`; raise `ConfigError` if the tags are no JSON object of texts.
    Pure."""
    text = environ.get("MLFLOW_TAGS", "")
    try:
        tags = msgspec.json.decode(text or "{}", type=dict[str, str])
    except msgspec.DecodeError as error:
        raise ConfigError(
            "the tags for MLflow cannot be read",
            expected='a JSON object of texts, such as {"team": "vision"}',
            got=text[:80],
            where="MLFLOW_TAGS",
            fix="Correct or unset the variable, or pass accel.trackers.mlflow(tags=...).",
        ) from error
    return MlflowVariables(environ.get("MLFLOW_EXPERIMENT_NAME", ""), tags)


def mlflow(*, tracking_uri: str | None = None, ranks: Ranks = "main", **options: Any) -> Tracker:
    """Return the tracker that writes to MLflow, by an `MlflowClient`. Extra: `mlflow`.

    The project is the experiment, unless `MLFLOW_EXPERIMENT_NAME` names another. `MLFLOW_TAGS`, a JSON object, adds
    tags to a new run; tags passed here win. A resumed run is found by its tag `accel.run`. MLflow cannot
    delete points, so steps that an earlier process has logged already are not logged again. A checkpoint waits for
    MLflow's own files and databases on this machine, and not for a server.

    Args:
        tracking_uri: server or database, such as "sqlite:///runs/mlflow.db"; by default from MLflow's settings.
        ranks: processes that write. With several, all write to one run, each to separate metrics: `rank_3/loss`.
        options: of `MlflowClient.create_run`, such as `tags`; and `artifact_location` of a new experiment.
    """
    location = options.pop("artifact_location", None)
    # `log` comes back once MLflow has stored its points, so a flush has nothing to do but to come behind them.
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    is_local = urlsplit(uri).scheme in ("", "file", "sqlite")
    installed = needs("mlflow", "mlflow", "sqlalchemy", "alembic")

    def check(run: Run) -> None:
        _ = read_mlflow(os.environ)
        installed(run)

    def start(run: Run, config: Config) -> _Live:
        client = load("mlflow").MlflowClient(tracking_uri=tracking_uri)
        variables = read_mlflow(os.environ)
        project = variables.experiment or run.project
        prefix = "" if ranks == "main" else f"rank_{run.rank}/"
        if run.rank > 0:
            return _Live(client, _find(client, project, run.id, _FIND_S), prefix, False)
        found = "" if run.step is None else _find(client, project, run.id, 0.0)
        if found:
            client.update_run(found, status="RUNNING")
            return _Live(client, found, prefix, True)
        tags = {**variables.tags, **options.get("tags", {}), _TAG: run.id}
        given = {"run_name": run.name, **options, "tags": tags}
        made = client.create_run(_experiment(client, project, location), **given).info.run_id
        _log_config(client, made, config)
        return _Live(client, made, prefix, True)

    def log(live: _Live, values: Values, step: int) -> None:
        metric = load("mlflow.entities").Metric
        now = int(time.time() * 1000)
        keys = {_key(live.prefix + name): value for name, value in values.items()}
        points = [metric(key, value, now, step) for key, value in keys.items() if live.last_step(key) < step]
        if points:
            live.client.log_batch(live.run_id, metrics=points)

    return Tracker(
        "mlflow",
        start,
        log,
        _finish,
        flush=(lambda live: None) if is_local else None,
        log_media=_log_media,
        media=(media.Images, media.Table, media.Figure, media.TextRecord, media.Histogram, media.Artifact),
        check=check,
        ranks=ranks,
    )


def _find(client: Any, project: str, run_id: str, patience_s: float) -> str:
    """Return MLflow's id of a run; empty if there is none in time and the run may be made."""
    until = time.monotonic() + patience_s
    while True:
        experiment = client.get_experiment_by_name(project)
        if experiment is not None:
            query = f"tags.`{_TAG}` = '{run_id}'"
            for found in client.search_runs([experiment.experiment_id], query, max_results=1):
                return found.info.run_id
        if time.monotonic() >= until:
            break
        time.sleep(_POLL_S)
    if patience_s:
        raise TimeoutError(f"rank 0 has made no run in {show_limit(patience_s)}")
    return ""


def _experiment(client: Any, project: str, location: str | None) -> str:
    found = client.get_experiment_by_name(project)
    return found.experiment_id if found is not None else client.create_experiment(project, artifact_location=location)


def _log_config(client: Any, run_id: str, config: Config) -> None:
    param = load("mlflow.entities").Param
    values = [param(_key(name), str(value)[:_MOST_CHARACTERS]) for name, value in config.items()]
    for at in range(0, len(values), 100):  # the most of one call
        client.log_batch(run_id, params=values[at : at + 100])


def _key(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


def _finish(live: _Live, ending: Ending) -> None:
    if not live.is_main:
        return
    if ending.error:
        live.client.set_tag(live.run_id, "accel.error", ending.error[:_MOST_CHARACTERS])
    live.client.set_terminated(live.run_id, "FINISHED" if ending.status == "finished" else "FAILED")


def _log_media(live: _Live, record: media.Media, step: int) -> None:
    client, at_step = live.client, f"{_key(record.name)}/{step:08}"
    match record:
        case media.Images():
            for at, pixels in enumerate(record.tensors):
                client.log_image(live.run_id, picture(media.png_of(pixels)), artifact_file=f"{at_step}-{at}.png")
        case media.Figure():
            client.log_image(live.run_id, picture(record.png), artifact_file=f"{at_step}.png")
        case media.Table():
            content: Any = msgspec.to_builtins({"columns": record.columns, "data": record.rows})
            client.log_dict(live.run_id, content, f"{at_step}.json")
        case media.TextRecord():
            client.log_text(live.run_id, record.text, f"{at_step}.txt")
        case media.Histogram():
            content = {"edges": record.edges, "counts": list(record.counts), "nonfinite": record.nonfinite}
            client.log_dict(live.run_id, content, f"{at_step}.histogram.json")
        case media.Artifact():
            is_folder = record.path.is_dir()
            log = client.log_artifacts if is_folder else client.log_artifact
            log(live.run_id, str(record.path), record.name if is_folder else None)
