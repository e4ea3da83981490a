# SPDX-License-Identifier: Apache-2.0
"""`accel profile`: where the time of each rank went, from traces of torch.profiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from accel.cli._parser import Parser
from accel.cli._run_folders import check_folder
from accel.errors import ConfigError
from accel.report.traces import describe_profile, read_traces
from accel.run_folder import PROFILE, RUN

_USAGE = "accel profile DIR [--operators N]"
_ABOUT = (
    "Print where the time of each rank went: computing, communication (waiting for a later rank, exposed, hidden), "
    "data, idle; the slowest rank; the longest operators. DIR is the out= of accel.profile, or a folder of traces."
)


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print a profile; return the exit status."""
    known = parser().read(words)
    folder: Path = known.folder
    check_folder(folder, fix="Name the out= of accel.profile.")
    if known.operators < 0:
        raise ConfigError("not a number of operators", got=str(known.operators), where="--operators")
    inner = folder / PROFILE
    if (folder / RUN).exists() and not inner.is_dir():
        raise ConfigError(
            "a run without a profile", where=str(folder), fix="Write one by `accel.profile(ctx, out=...)`."
        )
    print(describe_profile(read_traces(inner if inner.is_dir() else folder), operators=known.operators), end="")
    return 0


def parser() -> Parser:
    """Return the parser of the command's words."""
    built = Parser("accel profile", usage=_USAGE, description=_ABOUT)
    _ = built.add_argument("folder", type=Path, metavar="DIR", help="folder of a run, or of traces")
    _ = built.add_argument(
        "--operators", type=int, default=10, metavar="N", help="number of the longest operators to list (default: 10)"
    )
    return built
