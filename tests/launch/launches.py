# SPDX-License-Identifier: Apache-2.0
"""What a launcher plans, watches and reports, made from plain values: tests of it import its records from here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel.cli._launch import parser as parser, split_words as split_words
from accel.config import LaunchConfig
from accel.launching._target import LaunchTarget as LaunchTarget
from accel.launching.local._children import Children as Children, Relay as Relay
from accel.launching.local._hang import (
    RankAnswer as RankAnswer,
    absent_report as absent_report,
    hang_report as hang_report,
    locate as locate,
)
from accel.launching.local._launch_plan import (
    HostPosition as HostPosition,
    LaunchPlan as LaunchPlan,
    plan_launch as plan_launch,
)
from accel.launching.local._machine import Gpu as Gpu, Machine as Machine
from accel.launching.reports._failure import (
    EnteredCollective as EnteredCollective,
    Failure as Failure,
    FailureRecord as FailureRecord,
    culprit as culprit,
    file_beside as file_beside,
)
from accel.launching.reports._report import failure_report as failure_report, last_line as last_line


def plan(
    config: LaunchConfig, machine: Machine, environ: Mapping[str, str] | None = None, **options: Any
) -> LaunchPlan:
    """Plan the processes of `train.py` on a machine."""
    return plan_launch(
        options.pop("target", LaunchTarget(name="train.py")),
        config,
        environ=environ or {},
        machine=machine,
        interpreter=("python", "worker"),
        parent_pid=42,
        port=29511,
        record_dir="records",
        **options,
    )


def died(rank: int, time_s: float = 1.0, status: int = 1, **facts: Any) -> Failure:
    """Make the failure of a rank without a record."""
    return Failure(rank=rank, status=status, time_s=time_s, **facts)


def raised(
    rank: int,
    time_s: float = 1.0,
    exception: str = "ValueError",
    message: str = "bad",
    status: int = 1,
    *,
    location: str = "train.py:7",
    traceback: str | None = None,
) -> Failure:
    """Make the failure of a rank whose exception was recorded."""
    text = f"Traceback (most recent call last):\n{exception}: {message}\n" if traceback is None else traceback
    record = FailureRecord(
        rank=rank, host="h", exception=exception, message=message, location=location, traceback=text, time_s=time_s
    )
    return died(rank, time_s, status, record=record)
