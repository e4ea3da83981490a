# SPDX-License-Identifier: Apache-2.0
"""Parts of estimates that tests compare with measurements: what a forward keeps, and memory moment by moment."""

from __future__ import annotations

from accel.cli._estimate_tables import with_recorded_calls as with_recorded_calls
from accel.estimate._build import kept_by_forward as kept_by_forward, read_config as read_config
from accel.estimate._choices import Choice as Choice
from accel.estimate._efficiencies import H100 as H100, MessageSpeed as MessageSpeed
from accel.estimate._memory import (
    PARTS as PARTS,
    STRATEGIES as STRATEGIES,
    largest_parts as largest_parts,
    memory_by_moment as memory_by_moment,
)
from accel.estimate._step import OPTIMIZERS as OPTIMIZERS
