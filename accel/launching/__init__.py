# SPDX-License-Identifier: Apache-2.0
"""Start N processes that run a script or a function, show their output, and report the first failure.

Read `_launch.py` first: a target (`_target.py`) and settings become a `LaunchPlan` (`local/_launch_plan.py`), the
supervisor (`local/_supervisor.py`) carries it out, and `reports/` describes what happened. `_function.py` does so for a
function. Over several hosts each launcher starts an agent (`hosts/`), which supervises this host's ranks. Only agents
import torch, and none writes to its environment. Names resolve on first use, as every rank imports
this package for the record of its failure alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import declared, exports

if TYPE_CHECKING:
    from accel.launching._launch import run_launch

__all__ = [
    "run_launch",
]

__getattr__ = exports(__name__, declared())
__dir__ = __all__.copy
