# SPDX-License-Identifier: Apache-2.0
"""Start a script on N processes of this machine, show what they print, and tell which one failed and why.

`plan_launch` turns plain values into a `LaunchPlan`, `run_plan` carries a plan out, `launch` does both. None of them
imports torch or writes to the environment of the calling process. Names resolve on first use: each process of a launch
imports this package for what it writes down when it fails, and for nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import exports

if TYPE_CHECKING:
    from accel.launch._launch import launch as launch
    from accel.launch._launch import plan_here as plan_here
    from accel.launch._machine import Gpu as Gpu
    from accel.launch._machine import Machine as Machine
    from accel.launch._machine import read_machine as read_machine
    from accel.launch._machine import visible_gpus as visible_gpus
    from accel.launch._plan import LaunchPlan as LaunchPlan
    from accel.launch._plan import ProcessPlan as ProcessPlan
    from accel.launch._plan import plan_launch as plan_launch
    from accel.launch._record import FailureRecord as FailureRecord
    from accel.launch._run import run_plan as run_plan
    from accel.launch._target import Target as Target
    from accel.launch._target import check_target as check_target

__getattr__ = exports(
    __name__,
    {
        "_launch": ("launch", "plan_here"),
        "_machine": ("Gpu", "Machine", "read_machine", "visible_gpus"),
        "_plan": ("LaunchPlan", "ProcessPlan", "plan_launch"),
        "_record": ("FailureRecord",),
        "_run": ("run_plan",),
        "_target": ("Target", "check_target"),
    },
)
