# SPDX-License-Identifier: Apache-2.0
"""Distributed programs on one process: simulated ranks, exact deadlock reports, injected faults.

Begin with `_simulate.py`. A run (`_world.py`) has a thread a rank (`_threads.py`), one running at a time
(`_scheduler.py`). The ranks' process group (`_group.py`) turns each collective into a meeting (`_meetings.py`); its
last rank computes for all (`_collectives.py`). `_device.py` has a device with streams, `_faults.py` lets a rank fail,
`_networks.py` refuses what a real backend would; `_default_group.py` and `_process.py` are what torch and Python keep
once a process.
"""

from accel.testing._device import STREAM_ORDERS, SimulatedDevice, StreamOrder, StreamRace
from accel.testing._faults import Fault, WriteFault
from accel.testing._networks import Network
from accel.testing._regression import (
    Line,
    RegressionDataset,
    RegressionModel,
)
from accel.testing._simulate import Simulator, simulate, simulate_groups
from accel.testing._sites import (
    Deadlock,
    FaultNotReached,
    InjectedFault,
    SimulationError,
)

__all__ = [
    "STREAM_ORDERS",
    "Deadlock",
    "Fault",
    "FaultNotReached",
    "InjectedFault",
    "Line",
    "Network",
    "RegressionDataset",
    "RegressionModel",
    "SimulatedDevice",
    "SimulationError",
    "Simulator",
    "StreamOrder",
    "StreamRace",
    "WriteFault",
    "simulate",
    "simulate_groups",
]
__dir__ = __all__.copy
