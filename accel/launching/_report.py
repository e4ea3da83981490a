# SPDX-License-Identifier: Apache-2.0
"""Reports of the launcher as text. The first line of a report names the rank, the error and the place."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence

from accel.launching._failure_record import Failure, FailureRecord
from accel.launching._user_frames import WORKER, is_users
from accel.terminal import show_clock

_MOST_OTHERS = 8
_LONG = 120  # characters of a message that is not repeated
_FRAME = re.compile(r'  File "(.+)", line (\d+)')
_HINTS = (
    (signal.SIGKILL, "the kernel sends SIGKILL when memory runs out; `dmesg` tells"),
    (signal.SIGBUS, "shared memory may be full; `df /dev/shm` tells"),
)


def tell(text: str) -> None:
    """Write to stderr, at once."""
    _ = sys.stderr.write(text)
    sys.stderr.flush()


def failure_report(
    first: Failure,
    others: Iterable[Failure] = (),
    log: str = "",
    *,
    hosts: Mapping[int, str] | None = None,
    where: str = "",
    absent: str = "",
) -> str:
    """Return the report of a failed run: one line for the culprit, one for the others, the culprit's traceback.

    Args:
        first: failure of the culprit.
        others: failures of other ranks.
        log: path of the culprit's output.
        hosts: host of each rank, if there are several.
        where: line with the ranks of each host, if a rank is missing.
        absent: result of `absent_report`, if a rank is missing.
    """

    def told(failure: Failure) -> str:
        host = (hosts or {}).get(failure.rank)
        return f"rank {failure.rank}{f' on {host}' if host else ''} {describe_end(failure)}"

    lines = [f"accel: {told(first)}"]
    lines += [f"accel: {hint}" for number, hint in _HINTS if first.status == -number]
    lines += [f"accel: its output is in {log}"] if log else []
    lines += [f"accel: {where}"] if where else []
    after = [
        f"rank {other.rank} failed with the same error{_place(other)}" if _is_same(first, other) else told(other)
        for other in sorted(others, key=lambda other: other.time_s)
    ]
    lines += [f"accel: after it, {text}" for text in after[:_MOST_OTHERS]]
    if len(after) > _MOST_OTHERS:
        lines.append(f"accel: after it, {len(after) - _MOST_OTHERS} more ranks failed")
    # Python shows no traceback of a SystemExit either.
    raised = _raised(first.record) if first.record and first.record.exception != "SystemExit" else ""
    return absent + "\n".join(lines) + "\n" + last_crash_lines(first.crash) + raised


def last_line(
    status: int,
    *,
    ranks: int,
    seconds: float,
    restarts: int = 0,
    stopped: int = 0,
    culprit: int | None = None,
    checkpoint: str = "",
    log_dir: str = "",
) -> str:
    """Return the last line of a launch: its end, its time, the folder of its files.

    Args:
        status: the exit status of the launch.
        ranks: processes started.
        seconds: time since the first start.
        restarts: times that all ranks have started again.
        stopped: number of the signal that stopped it, or 0.
        culprit: the rank that failed first, None if none did.
        checkpoint: folder of the newest checkpoint; empty if there is none.
        log_dir: folder of the ranks' output; empty if there is none.
    """
    if stopped:
        end = f"stopped by {signal.Signals(stopped).name}"
    elif culprit is not None:
        end = f"rank {culprit} failed"
    else:
        end = f"{ranks} ranks finished" if ranks > 1 else "finished"
    text = f"accel: {end} after {show_clock(seconds)}"
    text += f" and {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
    text += f", exit status {status}" if status else ""
    text += f"; newest checkpoint {checkpoint}" if checkpoint else ""
    text += f"; output of each rank in {log_dir}" if log_dir else ""
    return f"{text}\n"


def stop_report(signum: int, failures: Iterable[Failure], killed: Sequence[int]) -> str:
    """Return the report of a run that a signal stopped: places of the ranks, and ranks that had to be killed."""
    name = signal.Signals(signum).name
    places = [
        f"rank {failure.rank} was at {failure.record.location}"
        for failure in sorted(failures, key=lambda failure: failure.rank)
        if failure.record and failure.record.location
    ]
    if len(places) > _MOST_OTHERS:
        places[_MOST_OTHERS:] = [f"and {len(places) - _MOST_OTHERS} more"]
    text = f"accel: stopped by {name}{'; ' if places else ''}{', '.join(places)}\n"
    if killed:
        ranks = ", ".join(str(rank) for rank in killed)
        text += f"accel: killed because still running: rank {ranks}\n"
    return text


def describe_end(failure: Failure) -> str:
    """Return the end of a failed rank in one line."""
    if failure.status < 0 and failure.record is None:
        try:
            name = signal.Signals(-failure.status).name
        except ValueError:  # real-time signals have numbers only
            name = f"signal {-failure.status}"
        frames: list[tuple[str, str]] = _FRAME.findall(last_crash_lines(failure.crash))
        places = [f" - at {file}:{line}" for file, line in frames if is_users(file)]  # innermost first
        return f"was killed by {name}{places[0] if places else ''}"
    if failure.record is None:
        return f"exited with status {failure.status} and left no traceback"
    record = failure.record
    place = _place(failure)
    if record.exception == "SystemExit":
        return f"exited with status {failure.status}{place}"
    message = next(iter(record.message.splitlines()), "")
    return f"failed: {record.exception}{': ' if message else ''}{message}{place}"


def _place(failure: Failure) -> str:
    return f" - at {failure.record.location}" if failure.record and failure.record.location else ""


def _is_same(first: Failure, other: Failure) -> bool:
    """Whether two ranks raised the same error, so long that one line is enough."""
    one, two = first.record, other.record
    if one is None or two is None or len(one.message) < _LONG:
        return False
    return (one.exception, one.message) == (two.exception, two.message)


def _raised(record: FailureRecord) -> str:
    """Return a traceback, without a long message at its end, which the first line of the report has."""
    end = f": {record.message}\n"
    is_told = len(record.message) >= _LONG and len(record.message.splitlines()) == 1
    return f"{record.traceback.removesuffix(end)}\n" if is_told and record.traceback.endswith(end) else record.traceback


def last_crash_lines(crash: str) -> str:
    """Return the fault handler's dump without the launcher's frames and the list of extensions."""
    lines = crash.rstrip().splitlines(keepends=True)
    shown = "".join(line for line in lines if not (WORKER in line or line.startswith("Extension modules:")))
    return f"{shown.rstrip()}\n" if shown else ""
