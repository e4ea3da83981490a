# SPDX-License-Identifier: Apache-2.0
"""Folders of runs with their checkpoints, as the commands read them."""

from __future__ import annotations

from pathlib import Path

from accel.checkpoint._retention import survey
from accel.errors import CheckpointError, ConfigError
from accel.errors._checks import did_you_mean
from accel.report import RunData, StoredCheckpoint, read_data
from accel.report.traces import describe_profile, read_traces
from accel.run_folder import PROFILE
from accel.storage import as_place

_LARGEST_PROFILE = 64_000_000  # bytes of traces that a report reads; some seconds


def read_run_folder(name: str, folder: Path) -> RunData:
    """Read a run's folder with its checkpoints; raise `ConfigError` if it is missing, unreadable, or not a run's."""
    check_folder(folder, fix="Name the folder that save_state or tracking got.")
    try:
        data = read_data(name, folder, list_checkpoints(folder), _profile(folder))
    except OSError as error:
        raise ConfigError("a file of the run cannot be read", got=str(error), where=str(folder)) from error
    if data.is_empty:
        raise ConfigError(
            "the folder holds nothing of a run",
            expected="metrics.jsonl, run.json, launches, checkpoints or a profile",
            where=str(folder),
            fix="Log by `accel.tracking` with `jsonl()`, or start the run by `accel launch`.",
        )
    return data


def check_folder(folder: Path, *, fix: str) -> None:
    """Check that a folder exists; `fix` is the advice where no folder beside it has nearly its name."""
    if not folder.is_dir():
        problem = "not a folder" if folder.exists() else "there is no such folder"
        beside = [each.name for each in folder.parent.glob("*") if each.is_dir()]
        raise ConfigError(problem, got=repr(str(folder)), fix=did_you_mean(folder.name, beside, fix))


def _profile(folder: Path) -> str:
    """Return the profile in a run's folder as text; empty where there is none."""
    place = folder / PROFILE
    try:
        sizes = [path.stat().st_size for path in place.iterdir()]
        if sum(sizes) > _LARGEST_PROFILE:
            return f"The traces are large: run `accel profile {folder}`."
        return describe_profile(read_traces(place)) if sizes else ""
    except OSError:
        return ""
    except ConfigError as error:
        return str(error)


def list_checkpoints(folder: Path) -> list[StoredCheckpoint]:
    """Return the checkpoints in a folder; none where it cannot be read."""
    try:
        found = survey(as_place(folder))
    except CheckpointError:
        return []
    return [
        StoredCheckpoint(
            name=each.path.name,
            size=each.size,
            changed_s=each.changed,
            metrics=dict(each.manifest.metrics) if each.manifest else {},
            problem=each.problem,
        )
        for each in found
    ]
