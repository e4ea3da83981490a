# SPDX-License-Identifier: Apache-2.0
"""The record of a launch and its changes, as pure functions of values; time is an argument."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from accel.config import FIELDS, Field, LaunchConfig, Source, to_text
from accel.launching._failure_record import Failure
from accel.launching._report import describe_end, last_crash_lines
from accel.launching._target import Target
from accel.run_folder import (
    Attempt,
    EventKind,
    LaunchEvent,
    LaunchRecord,
    RankError,
    RankState,
    RunRecord,
    Setting,
    hide_in_text,
    hide_in_words,
)

_MOST_ATTEMPTS = 100
_MOST_EVENTS = 500
_MOST_TEXT = 20_000  # characters of one report


def first_record(target: Target, config: LaunchConfig, sources: Mapping[str, Source]) -> LaunchRecord:
    """Return the record of a launch that has not started a rank.

    Args:
        target: program of every process.
        config: settings of the launch.
        sources: source of each setting, by name; settings without one come from the caller.
    """
    kept = config.log_dir and os.path.abspath(config.log_dir)
    settings = {
        field.name: Setting(
            _storable(hide_in_text(to_text(getattr(config, field.name)))), _source(field, config, sources)
        )
        for field in FIELDS
    }
    words = ("-m", target.name) if target.kind == "module" else (target.name,)
    return LaunchRecord(
        host=socket.gethostname(),
        pid=os.getpid(),
        command=tuple(map(_storable, (*words, *hide_in_words(target.args)))),
        folder=_storable(os.getcwd()),
        started_s=time.time(),
        settings=settings,
        log_dir=_storable(kept),
    )


def began(
    record: LaunchRecord, ranks: Sequence[int], hosts: Sequence[str], now_s: float, kind: EventKind
) -> LaunchRecord:
    """Return the record after a start of all ranks."""
    attempt = Attempt(started_s=now_s, hosts=tuple(hosts), ranks=tuple(RankState(rank=rank) for rank in ranks))
    text = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
    record = replace(
        record,
        attempts=(*record.attempts, attempt)[-_MOST_ATTEMPTS:],
        restarts=record.restarts + (kind == "restart"),
    )
    return noted(record, kind, text, now_s)


def seen(record: LaunchRecord, statuses: Mapping[int, int | None], now_s: float) -> LaunchRecord:
    """Return the record after a look at the ranks; the same object if none has ended since the last."""
    attempt = record.attempts[-1]
    ranks = tuple(_state(each, statuses.get(each.rank), now_s) for each in attempt.ranks)
    if ranks == attempt.ranks:
        return record
    return replace(record, attempts=(*record.attempts[:-1], replace(attempt, ranks=ranks)))


def noted(record: LaunchRecord, kind: EventKind, text: str, now_s: float) -> LaunchRecord:
    """Return the record with one event more; of many, the first half and the newest stay."""
    shown = "\n".join(line.removeprefix("accel: ") for line in text.strip().splitlines())
    event = LaunchEvent(time_s=now_s, kind=kind, text=_storable(hide_in_text(shown[:_MOST_TEXT])))
    events = (*record.events, event)
    if len(events) > _MOST_EVENTS:
        events = (*events[: _MOST_EVENTS // 2], *events[-_MOST_EVENTS // 2 :])
    return replace(record, events=events)


def ended(
    record: LaunchRecord,
    statuses: Mapping[int, int | None],
    failures: Iterable[Failure],
    first: Failure | None,
    now_s: float,
) -> LaunchRecord:
    """Return the record after the end of all ranks."""
    record = seen(record, statuses, now_s)
    texts = {failure.rank: hide_in_text(describe_end(failure)) for failure in failures}
    attempt = record.attempts[-1]
    ranks = tuple(replace(each, text=texts.get(each.rank, "")) for each in attempt.ranks)
    error = None if first is None else _error(first)
    attempt = replace(attempt, ranks=ranks, ended_s=now_s, error=error)
    return replace(record, attempts=(*record.attempts[:-1], attempt))


def corrected(run: RunRecord, started_s: float, first: Failure, now_s: float) -> RunRecord:
    """Return the record of a run with the error that ended its launch, where rank 0 knows less.

    Rank 0 writes the record. Its own error may only report a lost peer, and a killed rank 0 writes none.

    Args:
        run: record as rank 0 left it.
        started_s: start of the attempt, in seconds since the epoch; earlier runs stay as they are.
        first: the failure that caused the others.
        now_s: end of the attempt.
    """
    is_earlier = max((run.started_s, *run.resumed_s)) < started_s
    is_told = run.status == "failed" and first.rank == 0
    if is_earlier or is_told or run.status == "finished":
        return run
    error = hide_in_text(f"rank {first.rank} {describe_end(first)}"[:_MOST_TEXT])
    return replace(run, status="failed", error=_storable(error), ended_s=run.ended_s or now_s)


def _state(state: RankState, status: int | None, now_s: float) -> RankState:
    if status is None or state.status is not None:
        return state
    return replace(state, status=status, ended_s=now_s)


def _storable(text: str) -> str:
    """Return a text that JSON can hold: file names and arguments may hold any byte."""
    return text.encode(errors="backslashreplace").decode()


def _source(field: Field, config: LaunchConfig, sources: Mapping[str, Source]) -> str:
    source = sources.get(field.name, Source("default"))
    is_changed = source.kind == "default" and getattr(config, field.name) != field.default
    return "the caller, or this machine" if is_changed else str(source)


def _error(failure: Failure) -> RankError:
    found = failure.record
    if found is None:
        return RankError(rank=failure.rank, status=failure.status, traceback=last_crash_lines(failure.crash))
    return RankError(
        rank=failure.rank,
        status=failure.status,
        exception=found.exception,
        message=hide_in_text(found.message[:_MOST_TEXT]),
        location=found.location,
        traceback=hide_in_text(found.traceback[-_MOST_TEXT:]),
    )
