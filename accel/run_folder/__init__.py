# SPDX-License-Identifier: Apache-2.0
"""The files of a run's folder: their names, the line of metrics, the records of the run and of its launches.

The folder is the one given to `save_state`. It holds, beside the checkpoints:

* `metrics.jsonl`: a line for each logged step, see `MetricsLine`;
* `run.json`: a `RunRecord`;
* `launches/*.json`: a `LaunchRecord` for each launch and host;
* `profile/`: traces of `accel.profile`, one file a rank.

Writers and readers are other processes: records appear whole, and lines are read while they are written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import exports

if TYPE_CHECKING:
    from accel.run_folder._follow import Position as Position, read_new as read_new
    from accel.run_folder._json_files import read_json as read_json, write_json as write_json
    from accel.run_folder._launch_record import (
        Attempt as Attempt,
        EventKind as EventKind,
        LaunchEvent as LaunchEvent,
        LaunchRecord as LaunchRecord,
        RankError as RankError,
        RankState as RankState,
        Setting as Setting,
        launch_file as launch_file,
        read_launches as read_launches,
    )
    from accel.run_folder._metrics import (
        MetricsLine as MetricsLine,
        decode_line as decode_line,
        encode_line as encode_line,
    )
    from accel.run_folder._names import (
        LAUNCHES as LAUNCHES,
        METRICS as METRICS,
        PROFILE as PROFILE,
        RUN as RUN,
        RUN_EVENT as RUN_EVENT,
    )
    from accel.run_folder._run_record import RunRecord as RunRecord, read_run as read_run
    from accel.run_folder._secrets import (
        hide_in_config as hide_in_config,
        hide_in_text as hide_in_text,
        hide_in_words as hide_in_words,
    )
    from accel.run_folder._source_state import (
        SourceState as SourceState,
        ask_git as ask_git,
        installed_versions as installed_versions,
    )

__getattr__ = exports(
    __name__,
    {
        "_follow": ("Position", "read_new"),
        "_json_files": ("read_json", "write_json"),
        "_launch_record": (
            *("Attempt", "EventKind", "LaunchEvent", "LaunchRecord", "RankError", "RankState", "Setting"),
            *("launch_file", "read_launches"),
        ),
        "_metrics": ("MetricsLine", "decode_line", "encode_line"),
        "_names": ("LAUNCHES", "METRICS", "PROFILE", "RUN", "RUN_EVENT"),
        "_run_record": ("RunRecord", "read_run"),
        "_secrets": ("hide_in_config", "hide_in_text", "hide_in_words"),
        "_source_state": ("SourceState", "ask_git", "installed_versions"),
    },
)
