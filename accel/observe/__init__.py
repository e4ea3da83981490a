# SPDX-License-Identifier: Apache-2.0
"""Trackers of a run, written to in the background; profiles of its steps; loggers that know their rank.

Begin with `_tracking.py`: `tracking` opens trackers (`_tracker.py`, `trackers/`) as a run (`_tracked_run.py`). `log`
(`_log.py`) copies values into a queue, and a thread for each tracker writes them (`_writer.py`), so that a step waits
for no tracker. `_profile.py` and `_logger.py` need no run.
"""

from accel.observe import trackers as trackers
from accel.observe._log import (
    log as log,
    log_artifact as log_artifact,
    log_figure as log_figure,
    log_images as log_images,
    log_table as log_table,
)
from accel.observe._logger import RankLogger as RankLogger, get_logger as get_logger, rich_handler as rich_handler
from accel.observe._profile import Profile as Profile, profile as profile
from accel.observe._tracker import (
    Artifact as Artifact,
    Ending as Ending,
    Figure as Figure,
    Images as Images,
    Run as Run,
    Table as Table,
    Tracker as Tracker,
)
from accel.observe._tracking import (
    Trackers as Trackers,
    end_trackers as end_trackers,
    get_tracker as get_tracker,
    init_trackers as init_trackers,
    tracking as tracking,
)
