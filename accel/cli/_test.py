# SPDX-License-Identifier: Apache-2.0
"""`accel test`: launch the self-check as `accel launch` would launch a script."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

import accel
from accel.cli._parser import Parser, add_fields, resolve_flags
from accel.launching import run_launch

_USAGE = "accel test [--folder DIR] [flags of accel launch]"
_ABOUT = """Check devices, collectives, order of data, gradients, checkpoints and
bandwidth on the ranks of a launch. Flags, variables and the file count as for
`accel launch`. On several hosts, run it on each."""
_SCRIPT = Path(accel.__path__[0], "testing", "selfcheck", "__main__.py")
_STOPPED = (130, 143)  # by Ctrl-C or SIGTERM, which is no finding
_PATIENCE_S = 60.0  # of a check's collectives, which take milliseconds


class _ReportedCheck(msgspec.Struct, frozen=True):
    """One check in a report of the self-check; further fields are ignored."""

    name: str
    state: str
    cause: str = ""


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Launch the self-check; return 0 if all is well, 1 if a check failed, else the status of the launch."""
    known = parser().read(words)
    config = resolve_flags(known, environ).config
    timeout_s = _PATIENCE_S if config.timeout_s == "auto" else config.timeout_s
    config = msgspec.structs.replace(config, prefix=False, timeout_s=timeout_s)
    with tempfile.TemporaryDirectory(prefix="accel-test-", ignore_cleanup_errors=True) as folder:
        report = Path(folder, "report.json")
        shared = known.folder or (folder if config.hosts[1] == 1 else "")
        args = ["--report", str(report), *(["--folder", shared] if shared else [])]
        status = run_launch(str(_SCRIPT), args, config=config, environ=environ)
        checks = msgspec.json.decode(report.read_bytes(), type=list[_ReportedCheck]) if report.exists() else []
    if status and status not in _STOPPED:
        print(_broken_off(checks))
    return status or int(any(each.state not in ("ok", "skipped") for each in checks))


def parser() -> Parser:
    """Return the parser of the command's flags."""
    built = Parser("accel test", usage=_USAGE, description=_ABOUT)
    _ = built.add_argument(
        "--folder", metavar="DIR", help="folder for trial checkpoints; several hosts must share it (default: temporary)"
    )
    _ = add_fields(built)
    return built


def _broken_off(checks: Sequence[_ReportedCheck]) -> str:
    if not checks:
        return "The ranks did not get as far as the first check: see the report above, and `accel env`."
    return f"Broken off in the check of {checks[-1].name}; likely: {checks[-1].cause}"
