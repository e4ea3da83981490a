# SPDX-License-Identifier: Apache-2.0
"""What the hosts of a job tell each other before any process starts, and what follows from it. Nothing here waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from accel.config import SETTINGS, LaunchConfig, to_text
from accel.errors import LaunchError

# What must be the same on all hosts, or ranks would wait for each other in vain.
_SHARED = ("nnodes", *(field.name for field in SETTINGS), "max_restarts")


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What one host says of itself.

    Attributes:
        host: its name.
        node_rank: its place among the hosts; None if it takes any.
        settings: what must be the same everywhere, as text.
    """

    host: str
    node_rank: int | None
    settings: dict[str, str]


def note_of(host: str, config: LaunchConfig, *, processes: int, contents: Mapping[str, str]) -> Note:
    """Return what a host says of itself.

    Args:
        host: its name.
        config: how it was told to launch.
        processes: how many it will start.
        contents: versions of the packages and of the script, which must be the same.
    """
    settings = {name: to_text(getattr(config, name)) for name in _SHARED}
    return Note(
        host=host,
        node_rank=None if config.node_rank == "auto" else config.node_rank,
        settings=settings | {"processes": str(processes)} | dict(contents),
    )


def seats(notes: Sequence[Note]) -> list[int]:
    """Return each host's place: the one that it asks for, else the next free one, in the order of the notes.

    Raises:
        LaunchError: two hosts ask for one place, or hosts were told different things; it names them.
    """
    asked = Counter(note.node_rank for note in notes if note.node_rank is not None)
    if taken := [rank for rank, count in asked.items() if count > 1]:
        hosts = " and ".join(note.host for note in notes if note.node_rank == taken[0])
        raise LaunchError(
            "hosts ask for the same place",
            got=f"node_rank={taken[0]} on {hosts}",
            fix="Give each host a number of its own, or leave node_rank out on all.",
        )
    compare(notes, "Launch alike on all hosts.")
    free = iter(rank for rank in range(len(notes)) if rank not in asked)
    return [next(free) if note.node_rank is None else note.node_rank for note in notes]


def compare(notes: Sequence[Note], fix: str) -> None:
    """Refuse hosts that were told different things.

    Raises:
        LaunchError: so they were; it names them, and ends with `fix`.
    """
    for name in notes[0].settings:
        said: dict[str, list[str]] = {}
        for note in notes:
            said.setdefault(note.settings.get(name, "nothing"), []).append(note.host)
        if len(said) > 1:
            got = "; ".join(f"{value} on {_few(hosts)}" for value, hosts in said.items())
            raise LaunchError(f"hosts do not agree on {name}", got=got, fix=fix)


def describe_hosts(hosts: Sequence[str], processes: int) -> str:
    """Return who runs what: "ranks 0-1 on node0, 2-3 on node1"."""
    spans = [(at * processes, (at + 1) * processes - 1, host) for at, host in enumerate(hosts)]
    shown = [f"{first}-{last} on {host}" if last > first else f"{first} on {host}" for first, last, host in spans[:8]]
    more = [f"and {len(hosts) - 8} more hosts"] if len(hosts) > 8 else []
    return f"rank{'s' if len(hosts) * processes > 1 else ''} {', '.join(shown + more)}"


def _few(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
