# SPDX-License-Identifier: Apache-2.0
"""Ray: run a function as ranks on a cluster, with the errors, output and stop requests of a launch on one machine.

One file, `_launch.py`: an actor holds each rank's process, and the launcher's supervision asks the actors for news.
"""

from accel.engines.ray._launch import Placement, launch

__all__ = [
    "Placement",
    "launch",
]
__dir__ = __all__.copy
