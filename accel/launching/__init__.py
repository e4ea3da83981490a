# SPDX-License-Identifier: Apache-2.0
"""Start N processes that run a script or a function, show their output, and report the first failure.

Read `_launch.py` first: a target (`_target.py`) and settings become a `LaunchPlan` (`local/_launch_plan.py`), the
supervisor (`local/_supervisor.py`) carries it out, and `reports/` describes what happened. `_function.py` does so for a
function. Over several hosts each launcher starts an agent (`hosts/`), which supervises this host's ranks. Only agents
import torch, and none writes to the environment of its own process. Names resolve on first use, as every rank imports
this package for the record of its failure alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import exports

if TYPE_CHECKING:
    from accel.launching._function import (
        debug_launcher as debug_launcher,
        launch as launch,
        launch_placed as launch_placed,
        notebook_launcher as notebook_launcher,
    )
    from accel.launching._launch import (
        PlacedRank as PlacedRank,
        RankNews as RankNews,
        RankPosition as RankPosition,
        plan_here as plan_here,
        run_launch as run_launch,
    )
    from accel.launching._target import LaunchTarget as LaunchTarget, check_target as check_target
    from accel.launching.hosts._hostfile import (
        HostCommand as HostCommand,
        HostSlots as HostSlots,
        batch_script as batch_script,
        choose_hosts as choose_hosts,
        exported as exported,
        host_commands as host_commands,
        read_hostfile as read_hostfile,
        read_hosts as read_hosts,
        run_on_hosts as run_on_hosts,
        submit as submit,
    )
    from accel.launching.hosts._hosts import check_endpoint as check_endpoint, check_tasks as check_tasks
    from accel.launching.local._children import (
        Children as Children,
        Relay as Relay,
        open_logs as open_logs,
        start_relay as start_relay,
    )
    from accel.launching.local._launch_plan import (
        HostPosition as HostPosition,
        LaunchPlan as LaunchPlan,
        ProcessPlan as ProcessPlan,
        plan_launch as plan_launch,
    )
    from accel.launching.local._machine import (
        Gpu as Gpu,
        Machine as Machine,
        describe_cores as describe_cores,
        on_pod as on_pod,
        read_machine as read_machine,
        visible_gpus as visible_gpus,
    )
    from accel.launching.local._supervisor import run_plan as run_plan
    from accel.launching.reports._failure import (
        Failure as Failure,
        FailureRecord as FailureRecord,
        read_failure as read_failure,
    )

__getattr__ = exports(
    __name__,
    {
        "hosts._hostfile": (
            "HostCommand",
            "HostSlots",
            "choose_hosts",
            "exported",
            "host_commands",
            "read_hosts",
            "read_hostfile",
            "run_on_hosts",
            "batch_script",
            "submit",
        ),
        "local._machine": (
            "describe_cores",
            "Gpu",
            "Machine",
            "read_machine",
            "visible_gpus",
            "on_pod",
        ),
        "local._children": (
            "Children",
            "open_logs",
            "start_relay",
            "Relay",
        ),
        "_function": (
            "debug_launcher",
            "launch",
            "launch_placed",
            "notebook_launcher",
        ),
        "hosts._hosts": (
            "check_endpoint",
            "check_tasks",
        ),
        "_launch": (
            "plan_here",
            "run_launch",
            "PlacedRank",
            "RankNews",
            "RankPosition",
        ),
        "local._launch_plan": (
            "LaunchPlan",
            "HostPosition",
            "ProcessPlan",
            "plan_launch",
        ),
        "reports._failure": (
            "Failure",
            "FailureRecord",
            "read_failure",
        ),
        "local._supervisor": ("run_plan",),
        "_target": (
            "LaunchTarget",
            "check_target",
        ),
    },
    {"Place": "The position of a host is `HostPosition`."},
)
