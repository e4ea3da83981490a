# SPDX-License-Identifier: Apache-2.0
"""`by_name`: trackers that a command line or a file of settings names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accel.errors._checks import check_choice
from accel.trackers._aim import aim
from accel.trackers._clearml import clearml
from accel.trackers._comet_ml import comet_ml
from accel.trackers._console import console
from accel.trackers._dvclive import dvclive
from accel.trackers._jsonl import csv, jsonl
from accel.trackers._mlflow import mlflow
from accel.trackers._swanlab import swanlab
from accel.trackers._tensorboard import tensorboard
from accel.trackers._tracker import Tracker
from accel.trackers._trackio import trackio
from accel.trackers._wandb import wandb

TRACKERS: Mapping[str, Callable[..., Tracker]] = {
    each.__name__: each
    for each in (aim, clearml, comet_ml, console, csv, dvclive, jsonl, mlflow, swanlab, tensorboard, trackio, wandb)
}


def by_name(names: str | Sequence[str] | None, options: Mapping[str, Mapping[str, Any]] | None = None) -> list[Tracker]:
    """Return the trackers of some names, as `report_to` of a command line has them.

    Args:
        names: one name or several, such as "wandb". "all" is `jsonl`: no tracker is on because its package is
            installed. None and "none" are no tracker.
        options: keyword arguments of trackers, by their names. Options of trackers that are not named have no effect.

    Raises:
        ConfigError: a name is no tracker's.

    ```python
    from accel.trackers import by_name

    assert [each.name for each in by_name(["jsonl", "wandb"], {"wandb": {"tags": ["a"]}})] == ["jsonl", "wandb"]
    assert by_name(None) == []
    ```
    """
    listed = [names] if isinstance(names, str) else list(names or ())
    chosen = ["jsonl" if name == "all" else name for name in listed if name and name != "none"]
    for name in chosen:
        check_choice(name, tuple(TRACKERS), "no such tracker", where="by_name, names=")
    given = options or {}
    return [TRACKERS[name](**given.get(name, {})) for name in dict.fromkeys(chosen)]
