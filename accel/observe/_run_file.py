# SPDX-License-Identifier: Apache-2.0
"""`run.json` in the run's folder, kept by a tracker of its own that `tracking` adds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from accel.context import DistContext
from accel.observe._tracker import Config, Ending, Run, Tracker
from accel.run_folder import (
    RUN,
    RUN_EVENT,
    RunRecord,
    Setting,
    ask_git,
    hide_in_text,
    installed_versions,
    read_run,
    write_json,
)


class _Open(msgspec.Struct, frozen=True):
    path: str
    record: RunRecord


def run_file(ctx: DistContext, hidden: Sequence[str]) -> Tracker:
    """Return the tracker that writes `run.json`.

    Args:
        ctx: the context, for its settings.
        hidden: dotted names of credentials in the run's configuration.
    """
    fields: dict[str, Any] = {
        "hidden": tuple(hidden),
        "settings": _settings(ctx),
        "world_size": ctx.world_size,
    }
    return Tracker(
        RUN,
        start=lambda run, config: _start(run, config, fields),
        log=lambda live, values, step: None,
        finish=_finish,
    )


def _start(run: Run, config: Config, fields: dict[str, Any]) -> _Open:
    source = ask_git(_script_folder())
    folder = run.folder_for(RUN)
    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    before = read_run(folder)
    times: dict[str, Any] = {"started_s": now}
    if before is not None and before.id == run.id:
        times = {"started_s": before.started_s, "resumed_s": (*before.resumed_s, now)}
    facts = {"config": dict(config), "versions": installed_versions(), "source": source()}
    record = RunRecord(id=run.id, project=run.project, name=run.name, **times, **facts, **fields)
    opened = _Open(str(folder / RUN), record)
    write_json(opened.path, record)
    sys.audit(RUN_EVENT, str(folder))
    return opened


def _finish(opened: _Open, ending: Ending) -> None:
    error = hide_in_text(ending.error)
    ended = msgspec.structs.replace(opened.record, status=ending.status, error=error, ended_s=time.time())
    write_json(opened.path, ended)


def _settings(ctx: DistContext) -> dict[str, Setting]:
    values: dict[str, object] = msgspec.to_builtins(ctx.settings, enc_hook=str)
    if (precision := ctx.precision.name) != "custom":
        values["precision"] = precision
    return {name: Setting(_text(value), ctx.launched.get(name, "")) for name, value in values.items()}


def _text(value: object) -> str:
    return hide_in_text(msgspec.json.encode(value).decode() if isinstance(value, dict) else str(value))


def _script_folder() -> str:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.abspath(file)) if file else os.getcwd()
