# SPDX-License-Identifier: Apache-2.0
"""Trackers that come with accel, a file each; begin with `_csv.py`. `_packages.py` finds and imports those of
others."""

from accel.observe.trackers._aim import aim as aim
from accel.observe.trackers._clearml import clearml as clearml
from accel.observe.trackers._comet_ml import comet_ml as comet_ml
from accel.observe.trackers._csv import csv as csv
from accel.observe.trackers._dvclive import dvclive as dvclive
from accel.observe.trackers._jsonl import jsonl as jsonl
from accel.observe.trackers._mlflow import mlflow as mlflow
from accel.observe.trackers._swanlab import swanlab as swanlab
from accel.observe.trackers._tensorboard import tensorboard as tensorboard
from accel.observe.trackers._trackio import trackio as trackio
from accel.observe.trackers._wandb import wandb as wandb

__all__ = [
    "aim",
    "clearml",
    "comet_ml",
    "csv",
    "dvclive",
    "jsonl",
    "mlflow",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
]
