# SPDX-License-Identifier: Apache-2.0
"""A run that is followed while it goes on: in a terminal, or as plain lines.

Begin with `_followed.py`, which reads a run's folder again and again; `_app.py` shows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import exports

if TYPE_CHECKING:
    from accel.report.watch._app import WatchApp as WatchApp, open_app as open_app
    from accel.report.watch._followed import (
        FollowedRun as FollowedRun,
        rank_rows as rank_rows,
        status_line as status_line,
    )

__getattr__ = exports(
    __name__,
    {
        "_app": (
            "WatchApp",
            "open_app",
        ),
        "_followed": (
            "FollowedRun",
            "rank_rows",
            "status_line",
        ),
    },
)
