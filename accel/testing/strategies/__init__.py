# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for distributed programs: worlds, schedules, faults, tensors, and trees of them.

They need the extra `accel[testing]`, and are loaded by `from accel.testing import strategies` only. Draw before the
simulation starts: `data.draw` does not work on the threads of ranks.
"""

from accel.errors import MissingExtraError

try:
    import hypothesis as _  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        "accel.testing.strategies needs Hypothesis, which is not installed",
        fix='Run: pip install "accel[testing]".',
    ) from error

from accel.testing.strategies._tensors import DTYPES as DTYPES
from accel.testing.strategies._tensors import tensors as tensors
from accel.testing.strategies._trees import Pair as Pair
from accel.testing.strategies._trees import Point as Point
from accel.testing.strategies._trees import Record as Record
from accel.testing.strategies._trees import rank_trees as rank_trees
from accel.testing.strategies._trees import trees as trees
from accel.testing.strategies._worlds import World as World
from accel.testing.strategies._worlds import faults as faults
from accel.testing.strategies._worlds import schedules as schedules
from accel.testing.strategies._worlds import worlds as worlds
from accel.testing.strategies._worlds import write_faults as write_faults
