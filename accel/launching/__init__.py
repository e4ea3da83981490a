# SPDX-License-Identifier: Apache-2.0
"""Start N processes of this machine that run a script or a function, show their output, and report the first failure.

`launch` runs a function. `plan_launch` turns plain values into a `LaunchPlan`, `run_plan` carries a plan out, and
`run_launch` does both for a script. None of them imports torch or writes to the environment of the calling process.
Names resolve on first use: each process of a launch imports this package for the record of its failure alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import exports

if TYPE_CHECKING:
    from accel.launching._attempts import run_plan as run_plan
    from accel.launching._children import Children as Children, open_logs as open_logs, start_relay as start_relay
    from accel.launching._cores import describe_cores as describe_cores
    from accel.launching._failure_record import (
        Failure as Failure,
        FailureRecord as FailureRecord,
        read_failure as read_failure,
    )
    from accel.launching._function import (
        debug_launcher as debug_launcher,
        launch as launch,
        launch_placed as launch_placed,
        notebook_launcher as notebook_launcher,
    )
    from accel.launching._hostfile import (
        HostCommand as HostCommand,
        HostSlots as HostSlots,
        choose_hosts as choose_hosts,
        exported as exported,
        host_commands as host_commands,
        read_hosts as read_hosts,
    )
    from accel.launching._hosts import check_endpoint as check_endpoint
    from accel.launching._launch import plan_here as plan_here, run_launch as run_launch
    from accel.launching._machine import (
        Gpu as Gpu,
        Machine as Machine,
        read_machine as read_machine,
        visible_gpus as visible_gpus,
    )
    from accel.launching._placed import PlacedRank as PlacedRank, RankNews as RankNews, RankPosition as RankPosition
    from accel.launching._plan import (
        HostPosition as HostPosition,
        LaunchPlan as LaunchPlan,
        ProcessPlan as ProcessPlan,
        plan_launch as plan_launch,
    )
    from accel.launching._relay import Relay as Relay
    from accel.launching._remote_shell import read_hostfile as read_hostfile, run_on_hosts as run_on_hosts
    from accel.launching._slurm import batch_script as batch_script, submit as submit
    from accel.launching._target import Target as Target, check_target as check_target
    from accel.launching._tpu import on_pod as on_pod

__getattr__ = exports(
    __name__,
    {
        "_hostfile": ("HostCommand", "HostSlots", "choose_hosts", "exported", "host_commands", "read_hosts"),
        "_cores": ("describe_cores",),
        "_children": ("Children", "open_logs", "start_relay"),
        "_function": ("debug_launcher", "launch", "launch_placed", "notebook_launcher"),
        "_hosts": ("check_endpoint",),
        "_launch": ("plan_here", "run_launch"),
        "_machine": ("Gpu", "Machine", "read_machine", "visible_gpus"),
        "_plan": ("LaunchPlan", "HostPosition", "ProcessPlan", "plan_launch"),
        "_remote_shell": ("read_hostfile", "run_on_hosts"),
        "_failure_record": ("Failure", "FailureRecord", "read_failure"),
        "_placed": ("PlacedRank", "RankNews", "RankPosition"),
        "_relay": ("Relay",),
        "_slurm": ("batch_script", "submit"),
        "_attempts": ("run_plan",),
        "_target": ("Target", "check_target"),
        "_tpu": ("on_pod",),
    },
    {"Place": "The position of a host is `HostPosition`."},
)
