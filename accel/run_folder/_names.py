# SPDX-License-Identifier: Apache-2.0
"""Names in a run's folder."""

from __future__ import annotations

METRICS = "metrics.jsonl"  # a line for each logged step
RUN = "run.json"  # the record of the run
LAUNCHES = "launches"  # a folder with a record for each launch and host
PROFILE = "profile"  # a folder with a trace for each rank
RUN_EVENT = "accel.run"  # audit event by which a rank announces the run's folder to its launcher
