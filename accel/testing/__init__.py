# SPDX-License-Identifier: Apache-2.0
"""Distributed programs on one process: simulated ranks, exact deadlock reports, injected faults."""

from accel.testing._errors import Deadlock as Deadlock
from accel.testing._errors import FaultNotReached as FaultNotReached
from accel.testing._errors import InjectedFault as InjectedFault
from accel.testing._errors import SimulationError as SimulationError
from accel.testing._faults import Fault as Fault
from accel.testing._faults import WriteFault as WriteFault
from accel.testing._networks import Network as Network
from accel.testing._simulate import Simulator as Simulator
from accel.testing._simulate import simulate as simulate
from accel.testing._simulate import simulate_groups as simulate_groups
