# SPDX-License-Identifier: Apache-2.0
"""The files of a run's folder, the one given to `save_state`, besides its checkpoints. Free of torch.

Begin with `_files.py`: records appear whole, and lines are read while they are written, as readers are other processes.
`metrics.jsonl` has a line a logged step (`MetricsLine`), `run.json` a `RunRecord` and `launches/*.jsonl` the log of
each launch and host, which `read_launches` folds to a `LaunchRecord` (`_records.py`); `profile/` has a trace a rank,
`media/` a file for each image, table, figure, text and histogram (`MediaName`).
`_secrets.py` hides credentials before anything is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import declared, exports

if TYPE_CHECKING:
    from accel.run_folder._files import (
        CODE as CODE,
        LAUNCHES as LAUNCHES,
        MEDIA as MEDIA,
        METRICS as METRICS,
        PROFILE as PROFILE,
        RUN as RUN,
        RUN_EVENT as RUN_EVENT,
        MediaKind as MediaKind,
        MediaName as MediaName,
        MetricsLine as MetricsLine,
        Position as Position,
        append_rest as append_rest,
        decode_line as decode_line,
        encode_line as encode_line,
        noted as noted,
        parse_media as parse_media,
        read_files as read_files,
        read_json as read_json,
        read_new as read_new,
        replace_file as replace_file,
        write_json as write_json,
    )
    from accel.run_folder._records import (
        Attempt as Attempt,
        AttemptLine as AttemptLine,
        EventKind as EventKind,
        EventLine as EventLine,
        FolderRecords as FolderRecords,
        LaunchEvent as LaunchEvent,
        LaunchLine as LaunchLine,
        LaunchRecord as LaunchRecord,
        LogLine as LogLine,
        RankError as RankError,
        RankState as RankState,
        RunRecord as RunRecord,
        Setting as Setting,
        SourceState as SourceState,
        ask_git as ask_git,
        conflicting_package as conflicting_package,
        fold_log as fold_log,
        installed_versions as installed_versions,
        launch_file as launch_file,
        read_diff as read_diff,
        read_launches as read_launches,
        read_records as read_records,
        read_run as read_run,
    )
    from accel.run_folder._secrets import (
        bounded as bounded,
        hide_in_config as hide_in_config,
        hide_in_text as hide_in_text,
        hide_in_words as hide_in_words,
        hide_variable as hide_variable,
    )

__getattr__ = exports(__name__, declared())
