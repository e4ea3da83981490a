# SPDX-License-Identifier: Apache-2.0
"""Distributed programs on one process: simulated ranks, exact deadlock reports, injected faults."""

from accel.testing._faults import Fault as Fault, WriteFault as WriteFault
from accel.testing._networks import Network as Network
from accel.testing._regression import (
    Line as Line,
    RegressionDataset as RegressionDataset,
    RegressionModel as RegressionModel,
)
from accel.testing._simulate import Simulator as Simulator, simulate as simulate, simulate_groups as simulate_groups
from accel.testing._sites import (
    Deadlock as Deadlock,
    FaultNotReached as FaultNotReached,
    InjectedFault as InjectedFault,
    SimulationError as SimulationError,
)
