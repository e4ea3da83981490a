# SPDX-License-Identifier: Apache-2.0
"""Trackers of a run, written to in the background; profiles of its steps; loggers that know their rank.

Begin with `_tracking.py`: `tracking` opens trackers (`_tracker.py`, a file for each) as a run (`_tracked_run.py`).
`log` (`_log.py`) copies values into a queue, and a thread for each tracker writes them (`_writer.py`), so that a step
waits for no tracker. `_profile.py` and `_logger.py` need no run.
"""

from accel.alerts import AlertRule, Alerts
from accel.trackers._aim import aim
from accel.trackers._by_name import by_name
from accel.trackers._clearml import clearml
from accel.trackers._comet_ml import comet_ml
from accel.trackers._console import console
from accel.trackers._dvclive import dvclive
from accel.trackers._jsonl import csv, jsonl
from accel.trackers._log import alert, log_artifact, log_figure, log_histogram, log_images, log_table, log_text
from accel.trackers._logger import RankLogger, rich_handler
from accel.trackers._media import Artifact, Figure, Histogram, Images, Table, TextRecord
from accel.trackers._mlflow import mlflow
from accel.trackers._profile import Profile
from accel.trackers._swanlab import swanlab
from accel.trackers._system import System
from accel.trackers._tensorboard import tensorboard
from accel.trackers._tracker import Ending, Run, Tracker
from accel.trackers._tracking import Trackers
from accel.trackers._trackio import trackio
from accel.trackers._wandb import wandb

__all__ = [
    "AlertRule",
    "Alerts",
    "Artifact",
    "Ending",
    "Figure",
    "Histogram",
    "Images",
    "Profile",
    "RankLogger",
    "Run",
    "System",
    "Table",
    "TextRecord",
    "Tracker",
    "Trackers",
    "aim",
    "alert",
    "by_name",
    "clearml",
    "comet_ml",
    "console",
    "csv",
    "dvclive",
    "jsonl",
    "log_artifact",
    "log_figure",
    "log_histogram",
    "log_images",
    "log_table",
    "log_text",
    "mlflow",
    "rich_handler",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
]
__dir__ = __all__.copy
