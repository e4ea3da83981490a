# SPDX-License-Identifier: Apache-2.0
"""`accel report`: one HTML page of one or several runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from accel.cli._parser import Parser
from accel.cli._run_folders import read_run_folder
from accel.errors import ConfigError
from accel.report import name_runs, report_page
from accel.terminal import show_size

_USAGE = "accel report DIR [DIR...] [--output FILE]"
_ABOUT = (
    "Write one HTML page of runs side by side: curves, checkpoints, launches, configuration. "
    "DIR is a run's folder, as given to save_state and tracking, or that of --log-dir. The page needs no server."
)
_OUTPUT = "report.html"


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Write the page; return the exit status."""
    known = parser().read(words)
    folders: list[Path] = known.folders
    output = Path(known.output) if known.output else folders[0] / _OUTPUT
    runs = [read_run_folder(name, folder) for name, folder in zip(name_runs(folders), folders, strict=True)]
    page = report_page(runs).encode(errors="replace")
    try:
        partial = output.with_name(f"{output.name}.partial")
        _ = partial.write_bytes(page)
        os.replace(partial, output)
    except OSError as error:
        raise ConfigError(
            "the page cannot be written", got=str(error.strerror), where=str(output), fix="Name another --output."
        ) from error
    print(f"{output}: {show_size(len(page))}")
    return 0


def parser() -> Parser:
    """Return the parser of the command's words."""
    built = Parser("accel report", usage=_USAGE, description=_ABOUT)
    _ = built.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folder of a run")
    _ = built.add_argument(
        "--output", default="", metavar="FILE", help=f"the page (default: {_OUTPUT} in the first DIR)"
    )
    return built
