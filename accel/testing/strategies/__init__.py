# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for distributed programs: worlds, schedules, faults, tensors, and trees of them.

They need the extra `accel-torch[testing]`, and are loaded by `from accel.testing import strategies` only. Draw before
the simulation starts: `data.draw` does not work on the threads of ranks.
"""

from accel.errors import MissingExtraError

try:
    import hypothesis as _  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        "accel.testing.strategies needs Hypothesis, which is not installed",
        fix='Run: pip install "accel-torch[testing]".',
    ) from error

from accel.testing.strategies._worlds import (
    DTYPES as DTYPES,
    Pair as Pair,
    Point as Point,
    Record as Record,
    World as World,
    faults as faults,
    rank_trees as rank_trees,
    schedules as schedules,
    tensors as tensors,
    trees as trees,
    worlds as worlds,
    write_faults as write_faults,
)
