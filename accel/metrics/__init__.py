# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run as frozen records: added on each rank without a wait, reduced over ranks when they are read.

Begin with `_metrics.py`, `Metrics`. Values come in by `_adding.py`, by the arithmetic of `_kinds.py`; reading turns a
record into a row and gathers the rows of all ranks, where the host waits. `_steps.py` is a record of training steps and
their times on top of it, `_flops.py` counts a model's work for it.
"""

from accel.metrics._flops import FlopCount, count_flops
from accel.metrics._metrics import Metrics, running_metrics
from accel.metrics._steps import StepStatistics, step_statistics, straggler

__all__ = [
    "FlopCount",
    "Metrics",
    "StepStatistics",
    "count_flops",
    "running_metrics",
    "step_statistics",
    "straggler",
]
__dir__ = __all__.copy
