# SPDX-License-Identifier: Apache-2.0
"""Checks that `accel test` runs on every rank: does this installation, on these devices, support training?

Begin with `_checks.py`: the checks, their outcomes and the loop over them. `python -m accel.testing.selfcheck` runs it
under any launcher; on one rank without.
"""

from accel.testing.selfcheck._checks import (
    CHECKS as CHECKS,
    Check as Check,
    Outcome as Outcome,
    likely_cause as likely_cause,
    run_checks as run_checks,
)
