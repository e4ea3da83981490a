# SPDX-License-Identifier: Apache-2.0
"""Views of runs from the files in their folders: one HTML page. Nothing here loads torch or talks to other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import exports

if TYPE_CHECKING:
    from accel.report._curves import Curve as Curve, Curves as Curves, thin as thin
    from accel.report._page import report_page as report_page
    from accel.report._run_data import (
        RunData as RunData,
        StoredCheckpoint as StoredCheckpoint,
        name_runs as name_runs,
        read_data as read_data,
    )
    from accel.report._state import RunState as RunState, state_of as state_of

__getattr__ = exports(
    __name__,
    {
        "_curves": ("Curve", "Curves", "thin"),
        "_page": ("report_page",),
        "_run_data": ("RunData", "StoredCheckpoint", "name_runs", "read_data"),
        "_state": ("RunState", "state_of"),
    },
)
