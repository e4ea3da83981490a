# SPDX-License-Identifier: Apache-2.0
"""`accel launch`: flags of the launcher, then the script, then words that belong to the script alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accel.cli._parser import Parser
from accel.errors import LaunchError
from accel.launch import launch

_NPROC = "--nproc-per-node"
_USAGE = f"accel launch [{_NPROC} N] script.py [args...]"


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a script on N processes of this machine; return the exit status."""
    own, rest = split_words(words)
    parser = Parser("accel launch", usage=_USAGE, description="Run a script on N processes of this machine.")
    _ = parser.add_argument(_NPROC, metavar="N", default="1", help="how many processes to start (default: 1)")
    count = _count(parser.read(own).nproc_per_node)
    if not rest:
        raise LaunchError("no script was given", expected=_USAGE, fix="Name the script to run.")
    return launch(rest[0], rest[1:], nproc_per_node=count, environ=environ)


def split_words(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split the command line before the script: the launcher's flags, then the script and all that follows it."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "--":
            return words[:at], words[at + 1 :]
        at += 2 if words[at] == _NPROC else 1
    return words[:at], words[at:]


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            "the number of processes is not a number",
            expected="an integer of at least 1",
            got=repr(text),
            where=_NPROC,
            fix="Give the number of processes to start on this machine.",
        ) from None
