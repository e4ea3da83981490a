# SPDX-License-Identifier: Apache-2.0
"""torchft: replica groups that come and go at every step, while the others continue to train.

Begin with `_step.py`: groups agree on a step, a group behind them adopts their state, and gradients are summed over
groups. `_group.py` joins the job, and sends state to groups that join.
"""

from accel.engines.torchft._group import ReplicaGroup, lighthouse, replica
from accel.engines.torchft._step import (
    StepReport,
    Turn,
    begin_step,
    next_batch,
    optimizer_step,
)

__all__ = [
    "ReplicaGroup",
    "StepReport",
    "Turn",
    "begin_step",
    "lighthouse",
    "next_batch",
    "optimizer_step",
    "replica",
]
__dir__ = __all__.copy
