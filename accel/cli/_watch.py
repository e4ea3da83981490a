# SPDX-License-Identifier: Apache-2.0
"""`accel watch`: a run in a terminal while it goes on; plain lines where there is no terminal."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from accel.cli._parser import Parser
from accel.cli._run_folders import check_folder, list_checkpoints
from accel.errors import ConfigError, MissingExtraError
from accel.report import name_runs, state_of
from accel.report.watch import FollowedRun, status_line

_USAGE = "accel watch DIR [--every-s SECONDS] [--plain] [--once]"
_ABOUT = (
    "Follow a run: curves, throughput, ranks and checkpoints. DIR is a run's folder, as given to save_state and "
    "tracking; it need not exist yet. Without a terminal, a line is printed at each change until the run ends."
)


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Follow a run; return the exit status."""
    known = parser().read(words)
    folder: Path = known.folder
    if folder.exists():
        check_folder(folder, fix="Name the folder that save_state or tracking got.")
    followed = FollowedRun(name_runs([folder])[0], folder, list_checkpoints)
    in_terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if known.plain or known.once or not in_terminal:
        return _print_lines(followed, known.every_s, once=known.once)
    try:
        from accel.report.watch import open_app
    except ImportError as error:
        raise MissingExtraError(
            "a run in a terminal needs a package that does not import",
            expected="textual and textual-plotext",
            got=f"{type(error).__name__}: {error}",
            fix="Run `pip install 'accel-torch[watch]'`, or pass --plain for lines.",
        ) from error
    open_app(followed, every_s=known.every_s, now_s=time.time)
    return 0


def parser() -> Parser:
    """Return the parser of the command's words."""
    built = Parser("accel watch", usage=_USAGE, description=_ABOUT)
    _ = built.add_argument("folder", type=Path, metavar="DIR", help="folder of a run")
    _ = built.add_argument(
        "--every-s", type=_seconds, default=1.0, metavar="SECONDS", help="time between two looks (default: 1)"
    )
    _ = built.add_argument("--plain", action="store_true", help="print lines, also in a terminal")
    _ = built.add_argument("--once", action="store_true", help="print one line, and do not follow")
    return built


def _print_lines(followed: FollowedRun, every_s: float, *, once: bool) -> int:
    """Print a line at each change until the run has ended."""
    shown = ""
    while True:
        try:
            seen = followed.look()
        except OSError as error:
            raise ConfigError("a file of the run cannot be read", got=str(error)) from error
        state = state_of(seen.run, seen.launches)
        line = status_line(seen, state)
        if line != shown:
            print(line, flush=True)
            shown = line
        if once or state.kind not in ("running", "unknown"):
            return 0
        try:
            time.sleep(every_s)
        except KeyboardInterrupt:
            return 0


def _seconds(text: str) -> float:
    value = float(text)
    if not (0.05 <= value < math.inf):
        raise argparse.ArgumentTypeError("0.05 or more")
    return value
