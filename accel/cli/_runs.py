# SPDX-License-Identifier: Apache-2.0
"""Commands on folders of runs: `accel report`, `compare`, `watch` and `profile`; and how they read them."""

from __future__ import annotations

import argparse
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from accel.checkpoint._retention import survey
from accel.cli._parser import Parser, given_flags
from accel.errors import ConfigError
from accel.errors._checks import did_you_mean, import_extra
from accel.opening import read_named
from accel.report import (
    MEDIA_ROOM,
    FollowedRun,
    FoundRuns,
    LiveReport,
    ReportServer,
    RunData,
    StoredCheckpoint,
    compare_runs,
    describe_comparison,
    exit_status,
    find_runs,
    name_runs,
    report_page,
    state_of,
    status_line,
)
from accel.report.traces import describe_profile, read_traces
from accel.run_folder import PROFILE, RUN, replace_file
from accel.storage import as_place
from accel.terminal import show_size, show_text

_MOST_WARNINGS = 5
_LARGEST_PROFILE = 64_000_000  # bytes of traces that a report reads; some seconds
_LARGEST_TOKEN = 10_000  # bytes
_MOST_UNPACKED = 640_000_000  # bytes of the same, unpacked


def read_run_folder(name: str, folder: Path, *, may_be_empty: bool = False) -> RunData:
    """Read a run's folder with its checkpoints; raise `ConfigError` if it is missing, unreadable, or not a run's."""
    check_folder(folder, fix="Pass the folder that the script passes to save_state or tracking.")
    data = FollowedRun(name, folder, list_checkpoints, _profile).look()
    if data.is_empty and not may_be_empty:
        if data.problems:
            raise ConfigError("; ".join(data.problems), where=str(folder))
        inside, unreadable = find_runs(folder)
        is_alone = inside == [folder]
        raise ConfigError(
            "the folder is not a run's, and none is in it" if is_alone else "the folder is not a run's, but holds runs",
            expected="metrics.jsonl, run.json, launches, checkpoints or a profile",
            got="; ".join(unreadable),
            where=str(folder),
            fix="Log by `accel.tracking` with `jsonl()`, or start the run by `accel launch`."
            if is_alone
            else f"Name one of them, such as {inside[0]}.",
        )
    return data


def check_folder(folder: Path, *, fix: str) -> None:
    """Check that a folder exists; `fix` is the advice if no folder next to it has a similar name."""
    if not folder.is_dir():
        problem = "the path is not a folder" if folder.exists() else "there is no such folder"
        others = [each.name for each in folder.parent.glob("*") if each.is_dir()]
        raise ConfigError(problem, got=repr(str(folder)), fix=did_you_mean(folder.name, others, fix))


def _profile(folder: Path) -> str:
    """Return the profile in a run's folder as text; empty where there is none."""
    place = folder / PROFILE
    try:
        sizes = [path.stat().st_size for path in place.iterdir()]
        if sum(sizes) > _LARGEST_PROFILE:
            return f"The traces are large: run `accel profile {folder}`."
        return describe_profile(read_traces(place, within=folder, most=_MOST_UNPACKED)) if sizes else ""
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"The profile cannot be read: {error.strerror or error}"
    except ConfigError as error:
        return str(error)


def list_checkpoints(folder: Path) -> list[StoredCheckpoint]:
    """Return the checkpoints in a folder, without what a process is writing or deleting; raise `CheckpointError` where
    it cannot be read."""
    found = [each for each in survey(as_place(folder)) if not each.is_busy]
    return [
        StoredCheckpoint(
            name=each.path.name,
            size=each.size,
            changed_s=each.changed,
            metrics=dict(each.manifest.metrics) if each.manifest else {},
            problem=each.problem,
        )
        for each in found
    ]


_REPORT_USAGE = (
    "accel report DIR [DIR...] [--output FILE] [--media MB]\n"
    "       accel report --serve DIR [DIR...] [--host HOST]\n"
    "                    [--port PORT] [--token-file FILE] [--media MB]"
)
_REPORT_ABOUT = (
    "Write one HTML page that shows runs side by side: curves, media, checkpoints, launches and configuration. "
    "DIR is the folder that the script passes to save_state and tracking, or the folder of --log-dir. In any other "
    "folder, runs are searched three levels deep. The page needs no server. With --serve, a server updates the page."
)
_OUTPUT = "report.html"
_LOOPBACK = "127.0.0.1"


def run_report(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Write the page; return the exit status."""
    known = report_parser().read(words)
    asked: list[Path] = known.folders
    if known.serve:
        return _serve(known)
    for flag in given_flags(known, ("host", "port", "token_file")):
        raise ConfigError("the flag needs --serve", got=flag, fix=f"Pass --serve too, or drop {flag}.")
    output = Path(known.output) if known.output else asked[0] / _OUTPUT
    if os.path.isdir(output):
        fix = f"Name a file, such as {output / _OUTPUT}."
        raise ConfigError("the page cannot be written", got="a folder", where=str(output), fix=fix)
    for each in asked:
        check_folder(each, fix="Pass the folder that the script passes to save_state or tracking.")
    folders, unreadable = _find_asked(asked)
    named = zip(name_runs(folders), folders, strict=True)
    # a run that was found may have begun a moment ago; one that was named has something to show
    runs = [read_run_folder(name, folder, may_be_empty=folder not in asked) for name, folder in named]
    if all(run.is_empty for run in runs):
        raise ConfigError(
            "no run has begun",
            got="; ".join([f"{len(runs)} without a line or a record", *unreadable]),
            where=str(asked[0]),
        )
    page = report_page(runs, known.media, unreadable).encode(errors="replace")
    try:
        replace_file(output, page)
    except OSError as error:
        raise ConfigError(
            "the page cannot be written", got=str(error.strerror), where=str(output), fix="Name another --output."
        ) from error
    print(f"{output}: {show_size(len(page))}")
    _warn_unreadable([*unreadable, *(f"{run.folder}: {line}" for run in runs for line in run.problems)])
    return 0


def _find_asked(asked: Sequence[Path]) -> FoundRuns:
    """Return the runs at or in some folders; a folder that does not exist yet is one of a run."""
    found = [find_runs(each) if each.is_dir() else FoundRuns([each]) for each in asked]
    return FoundRuns(
        [run for each in found for run in each.folders], [line for each in found for line in each.unreadable]
    )


def _warn_unreadable(lines: Sequence[str]) -> None:
    """Print what the page lacks."""
    for line in lines[:_MOST_WARNINGS]:
        print(f"accel report: {show_text(line)}", file=sys.stderr)
    if len(lines) > _MOST_WARNINGS:
        print(f"accel report: {len(lines) - _MOST_WARNINGS} more, on the page", file=sys.stderr)


def report_parser() -> Parser:
    """Return the parser of the command's words."""
    built = Parser("accel report", usage=_REPORT_USAGE, description=_REPORT_ABOUT)
    built.value("folders", "DIR", "folder of a run, or of runs", nargs="+", type=Path)
    built.value("--output", "FILE", f"file to write (default: {_OUTPUT} in the first DIR)", default="")
    built.value(
        "--media",
        "MB",
        f"limit for images, tables and other media on the page, in MB (default: {MEDIA_ROOM / 1e6:g})",
        type=_megabytes,
        default=MEDIA_ROOM,
    )
    built.switch("--serve", "serve the page and update it, until Ctrl-C")
    built.value("--host", "HOST", f"name or address to serve at (default: {_LOOPBACK}, this machine)")
    built.value("--port", "PORT", "port to serve at (default: a free one)", type=_port)
    built.value("--token-file", "FILE", "file with the token, created if missing (default: a new token)", type=Path)
    return built


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 65536:
        raise argparse.ArgumentTypeError(f"expected 0 to 65535, got {text!r}")
    return int(text)


def _megabytes(text: str) -> int:
    return int(_number(text, 0, 10_000, "0 to 10000") * 1e6)


def _number(text: str, least: float, most: float, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def _serve(known: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C; return the exit status."""
    asked: list[Path] = known.folders
    if known.output:
        raise ConfigError("--serve writes no file", got="--output", fix="Drop --output, or drop --serve.")
    for each in asked:
        if each.exists():
            check_folder(each, fix="Pass the folder that the script passes to save_state or tracking.")
    host = known.host or _LOOPBACK
    if host in ("0.0.0.0", "::"):
        fix = "Name the address or the name by which readers reach this machine."
        raise ConfigError("readers cannot connect to this address", got=host, where="--host", fix=fix)

    def follow(folder: Path) -> FollowedRun:
        return FollowedRun(folder.name, folder, list_checkpoints, _profile)

    report = LiveReport(lambda: _find_asked(asked), follow, room=known.media)
    token = _token(known.token_file) if known.token_file else secrets.token_urlsafe(24)
    try:
        server = ReportServer(report, token, host, known.port or 0)
    except OSError as error:
        got = f"{host}, port {known.port or 0}: {error.strerror or error}"
        raise ConfigError("the page cannot be served", got=got, fix="Name another --host or --port.") from error
    print(f"{server.url}\nCtrl-C ends the server.", flush=True)
    for each in asked:
        if not each.exists():
            print(f"{each} does not exist yet", flush=True)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


def _token(path: Path) -> str:
    """Return the token in a file, after writing a new one if there is none."""
    try:
        with (
            suppress(FileExistsError),
            os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file,
        ):
            _ = file.write(secrets.token_urlsafe(24))
        mode = path.stat().st_mode & 0o777
        token = read_named(path, _LARGEST_TOKEN).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the token cannot be read", got=str(error), where="--token-file") from error
    if mode & 0o077:
        fix = f"Run `chmod 600 {path}`."
        raise ConfigError("others can read the token", got=f"mode {mode:o}", where=str(path), fix=fix)
    if not re.fullmatch(r"[A-Za-z0-9_-]{16,}", token):
        expected = "16 or more letters, digits, - and _"
        raise ConfigError(
            "the token is not valid", expected=expected, where=str(path), fix="Remove the file to get a new one."
        )
    return token


_COMPARE_USAGE = "accel compare DIR DIR [--rtol R] [--json]"
_COMPARE_ABOUT = (
    "Print the settings, versions and code that differ between two runs, A and B. For each metric, print the first "
    "step at which it differs, and the largest difference. The exit status is 0 if the runs are equal, 1 if they "
    "differ, and 2 if a run cannot be read."
)


def run_compare(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the comparison; return the exit status."""
    known = compare_parser().read(words)
    if not 0 <= known.rtol < 1:
        raise ConfigError(
            "the tolerance is not valid", expected="a number from 0 to below 1", got=str(known.rtol), where="--rtol"
        )
    a, b = (_read_compared(folder) for folder in (known.first, known.second))
    found = compare_runs(a, b, rtol=known.rtol)
    if known.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(describe_comparison(found), end="")
    return 0 if found.alike else 1


def compare_parser() -> Parser:
    """Return the parser of the command's words."""
    built = Parser("accel compare", usage=_COMPARE_USAGE, description=_COMPARE_ABOUT)
    built.value("first", "DIR", "folder of run A", type=Path)
    built.value("second", "DIR", "folder of run B", type=Path)
    built.value(
        "--rtol",
        "R",
        "relative tolerance: values are equal if they differ by at most R times the larger one (default: 0)",
        type=float,
        default=0.0,
    )
    built.switch("--json", "print JSON")
    return built


def _read_compared(folder: Path) -> RunData:
    """Read a run that is compared; a file that cannot be read would look like a difference, or like none."""
    data = read_run_folder(folder.name, folder)
    if data.problems:
        raise ConfigError("; ".join(data.problems), where=str(folder))
    return data


_WATCH_USAGE = "accel watch DIR [--every-s SECONDS] [--plain] [--once]"
_WATCH_ABOUT = (
    "Follow a run: curves, throughput, ranks and checkpoints. DIR is the folder that the script passes to save_state "
    "and tracking; it may not exist yet. Without a terminal, each change prints a line, until the run ends. The exit "
    "status is then 0 if the run finished or continues, 1 if it failed, was stopped or was killed, 2 if it cannot be "
    "read, and 3 if there is no run."
)


def run_watch(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Follow a run; return the exit status."""
    known = watch_parser().read(words)
    folder: Path = known.folder
    if folder.exists():
        check_folder(folder, fix="Pass the folder that the script passes to save_state or tracking.")
    followed = FollowedRun(name_runs([folder])[0], folder, list_checkpoints)
    in_terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if known.plain or known.once or not in_terminal:
        return _print_lines(followed, known.every_s, once=known.once)
    for name in ("textual", "textual_plotext"):
        _ = import_extra(
            name, "a run in a terminal", extra="watch", where="accel watch", otherwise=", or pass --plain for lines"
        )
    from accel.report import open_app

    open_app(followed, every_s=known.every_s, now_s=time.time)
    return 0


def watch_parser() -> Parser:
    """Return the parser of the command's words."""
    built = Parser("accel watch", usage=_WATCH_USAGE, description=_WATCH_ABOUT)
    built.value("folder", "DIR", "folder of a run", type=Path)
    built.value("--every-s", "SECONDS", "seconds between updates (default: 1)", type=_seconds, default=1.0)
    built.switch("--plain", "print lines, also in a terminal")
    built.switch("--once", "print one line and exit")
    return built


def _print_lines(followed: FollowedRun, every_s: float, *, once: bool) -> int:
    """Print a line at each change until the run has ended."""
    shown = ""
    while True:
        seen = followed.look()
        state = state_of(seen.run, seen.launches, folder=seen.folder)
        line = status_line(seen, state, followed.alerts)
        if line != shown:
            print(line, flush=True)
            shown = line
        # a launcher that left no log, such as torchrun, may start ranks again that were lost
        goes_on = state.kind in ("running", "unknown") or (state.kind == "lost" and not seen.launches)
        if once or not goes_on:
            return exit_status(seen, state)
        try:
            time.sleep(every_s)
        except KeyboardInterrupt:
            return exit_status(seen, state)


def _seconds(text: str) -> float:
    return _number(text, 0.05, sys.float_info.max, "0.05 or more")


_PROFILE_USAGE = "accel profile DIR [--operators N]"
_PROFILE_ABOUT = (
    "Print how each rank spent its time: computation, communication (waiting for a later rank, exposed, hidden), "
    "data and idle time. Also print the slowest rank and the longest operators. DIR is the out= of accel.profile, or a "
    "folder of traces."
)


def run_profile(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print a profile; return the exit status."""
    known = profile_parser().read(words)
    folder: Path = known.folder
    check_folder(folder, fix="Name the out= of accel.profile.")
    if known.operators < 0:
        raise ConfigError("the number of operators is not valid", got=str(known.operators), where="--operators")
    inner = folder / PROFILE
    if (folder / RUN).exists() and not inner.is_dir():
        raise ConfigError(
            "the run has no profile", where=str(folder), fix="Write one by `accel.profile(ctx, out=...)`."
        )
    traces = read_traces(inner, within=folder) if inner.is_dir() else read_traces(folder)
    print(describe_profile(traces, operators=known.operators), end="")
    return 0


def profile_parser() -> Parser:
    """Return the parser of the command's words."""
    built = Parser("accel profile", usage=_PROFILE_USAGE, description=_PROFILE_ABOUT)
    built.value("folder", "DIR", "folder of a run, or of traces", type=Path)
    built.value("--operators", "N", "number of the longest operators to list (default: 10)", type=int, default=10)
    return built
