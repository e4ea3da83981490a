# SPDX-License-Identifier: Apache-2.0
"""Views of runs from the files in their folders. Nothing here loads torch or talks to other ranks.

Begin with `_followed.py`, which reads a folder, once or again and again, as the curves and records of `_run_data.py`.
`_page.py` makes one HTML page of it: `_summary.py` its first screen, `_series.py` the curves for the script in
`assets/`, `_media.py` images and other media, checked and made inert, `_tables.py` the markup, tables and sections on
launches. `_compare.py` finds the differences between two runs, `_watch_app.py` shows a run in a terminal, `_served.py`
keeps its page fresh, and `traces` reads profiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import declared, exports

if TYPE_CHECKING:
    from accel.report._compare import compare_runs as compare_runs, describe_comparison as describe_comparison
    from accel.report._followed import (
        FollowedRun as FollowedRun,
        exit_status as exit_status,
        rank_rows as rank_rows,
        status_line as status_line,
    )
    from accel.report._media import MEDIA_ROOM as MEDIA_ROOM
    from accel.report._page import report_page as report_page
    from accel.report._run_data import (
        Curves as Curves,
        FoundRuns as FoundRuns,
        MetricCurve as MetricCurve,
        RunData as RunData,
        StoredCheckpoint as StoredCheckpoint,
        find_runs as find_runs,
        name_runs as name_runs,
        thin as thin,
    )
    from accel.report._run_state import RunState as RunState, state_of as state_of
    from accel.report._served import LiveReport as LiveReport, ReportServer as ReportServer
    from accel.report._watch_app import WatchApp as WatchApp, open_app as open_app

__getattr__ = exports(__name__, declared())
