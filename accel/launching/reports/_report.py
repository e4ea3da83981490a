# SPDX-License-Identifier: Apache-2.0
"""Reports of the launcher as text. The first line of a report names the rank, the error and the place."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence

from accel.errors._base import escaped
from accel.errors._checks import is_users
from accel.launching.reports._failure import WORKER, Failure, FailureRecord, without_own
from accel.run_folder import bounded, conflicting_package
from accel.system import current_folder, write_error
from accel.terminal import show_clock

_MOST_OTHERS = 8
_LONG = 120  # characters of a message that is not repeated
_MOST_MESSAGE = 1_000  # characters of a message in a line
_INNER = "Traceback (most recent call last):"  # in the message of an error that a worker process had
_FRAME = re.compile(r'  File "([^"\n]+)", line (\d+)')
_HINTS = (
    (signal.SIGKILL, "the kernel sends SIGKILL when memory runs out; see `dmesg`"),
    (signal.SIGBUS, "shared memory may be full; see `df /dev/shm`"),
)


def notify(text: str) -> None:
    """Write to stderr, at once; what terminals would act on is escaped, as an exception may hold anything."""
    write_error(escaped(text.expandtabs(4)))


def warn_of_surroundings() -> None:
    """Warn on stderr if the package was installed into the folder of another distribution, or of a deleted folder."""
    if warning := conflicting_package():
        notify(f"accel: {warning}\n")
    if not os.path.isdir(folder := current_folder()):  # in which torch may not compute, as MKL then fails to load
        notify(f"accel: the working directory is gone: {folder}\n")


def failure_report(
    first: Failure,
    others: Iterable[Failure] = (),
    log: str = "",
    *,
    hosts: Mapping[int, str] | None = None,
    where: str = "",
    absent: str = "",
    left: str = "",
) -> str:
    """Return the report of a failed run: a line for the culprit, lines for other ranks, the culprit's traceback."""

    def line_of(failure: Failure) -> str:
        host = (hosts or {}).get(failure.rank)
        return f"rank {failure.rank}{f' on {host}' if host else ''} {describe_end(failure)}"

    lines = [f"accel: {line_of(first)}"]
    lines += [f"accel: {hint}" for number, hint in _HINTS if first.status == -number]
    lines += [f"accel: its output is in {log}"] if log else []
    lines += [f"accel: {where}"] if where else []
    after = [
        f"rank {other.rank} failed with the same error{_place(other)}" if _is_same(first, other) else line_of(other)
        for other in sorted(others, key=lambda other: other.time_s)
    ]
    lines += [f"accel: after it, {text}" for text in after[:_MOST_OTHERS]]
    if len(after) > _MOST_OTHERS:
        lines.append(f"accel: after it, {len(after) - _MOST_OTHERS} more ranks failed")
    lines += [f"accel: {left}"] if left else []
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
    reason: str = "",
    checkpoint: str = "",
    log_dir: str = "",
) -> str:
    """Return the last line of a launch: its end, its time, the folder of its files."""
    if stopped:
        end = f"stopped by {signal.Signals(stopped).name}"
    elif culprit is not None:
        end = f"rank {culprit} failed"
    else:
        end = f"{ranks} ranks finished" if ranks > 1 else "finished"
    text = f"accel: {end} after {show_clock(seconds)}"
    text += f" and {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
    text += f", exit status {status}" if status else ""
    text += f": {reason.removeprefix('failed: ')}" if reason else ""
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
    if record.exception == "SystemExit":
        return f"exited with status {failure.status}{_place(failure)}"
    message, place = _message(failure)
    return f"failed: {record.exception}{': ' if message else ''}{message}{place}"


def reason(first: Failure | None) -> str:
    """Return the facts about a failed run that its exit status lacks, as `describe_end` has them; empty for none."""
    return describe_end(first) if first is not None and (has_stack(first) or first.status < 0) else ""


def has_stack(failure: Failure) -> bool:
    """Return whether the report of a failure ends with a traceback, or with the stack of a crash."""
    return bool(failure.crash) or (failure.record is not None and failure.record.exception != "SystemExit")


def last_message(first: Failure) -> str:
    """Return a line with the error if the traceback leaves a long message out; else nothing."""
    is_left_out = first.record is not None and _is_plain_message(first.record)
    return f"accel: rank {first.rank} {describe_end(first)}\n" if is_left_out else ""


def _message(failure: Failure) -> tuple[str, str]:
    """Return message and place of an error in one line; of an error in a worker process, the place there."""
    assert failure.record is not None
    lines = [line for line in failure.record.message.splitlines() if line.strip()]
    place = _place(failure)
    text = lines[0] if failure.record.message.strip() else ""
    if _INNER in failure.record.message:
        frames: list[tuple[str, str]] = _FRAME.findall(failure.record.message)
        own = [f" - at {file}:{line}" for file, line in frames if is_users(file)]
        text, place = f"{text} {lines[-1]}", own[-1] if own else place
    return bounded(text, _MOST_MESSAGE), place


def _place(failure: Failure) -> str:
    return f" - at {failure.record.location}" if failure.record and failure.record.location else ""


def _is_same(first: Failure, other: Failure) -> bool:
    """Whether two ranks raised the same error, so long that one line is enough."""
    one, two = first.record, other.record
    if one is None or two is None or len(one.message) < _LONG:
        return False
    return (one.exception, one.message) == (two.exception, two.message)


def _raised(record: FailureRecord) -> str:
    """Return a traceback without accel's own frames, and without a long message, which the first line has."""
    end = f": {record.message}\n"
    return without_own(f"{record.traceback.removesuffix(end)}\n" if _is_plain_message(record) else record.traceback)


def _is_plain_message(record: FailureRecord) -> bool:
    """Whether the traceback leaves out the message, as the first line and the last have all of it."""
    is_line = _LONG <= len(record.message) <= _MOST_MESSAGE and len(record.message.splitlines()) == 1
    return is_line and record.traceback.endswith(f": {record.message}\n")


def last_crash_lines(crash: str) -> str:
    """Return the fault handler's dump without the launcher's frames and the list of extensions."""
    lines = crash.rstrip().splitlines(keepends=True)
    shown = "".join(line for line in lines if not (WORKER in line or line.startswith("Extension modules:")))
    return f"{shown.rstrip()}\n" if shown else ""
