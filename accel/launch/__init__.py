# SPDX-License-Identifier: Apache-2.0
"""Start a script on N processes of this machine, show what they print, and tell which one failed and why.

`plan_launch` turns plain values into a `LaunchPlan`, `run_plan` carries a plan out, `launch` does both. None of them
imports torch or writes to the environment of the calling process.
"""

from accel.launch._launch import launch as launch
from accel.launch._plan import LaunchPlan as LaunchPlan
from accel.launch._plan import ProcessPlan as ProcessPlan
from accel.launch._plan import plan_launch as plan_launch
from accel.launch._record import FailureRecord as FailureRecord
from accel.launch._run import run_plan as run_plan
