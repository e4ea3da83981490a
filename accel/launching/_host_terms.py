# SPDX-License-Identifier: Apache-2.0
"""The terms on which hosts take part in a launch, compared before any rank starts. No input or output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from accel.config import SETTINGS, LaunchConfig, to_text
from accel.errors import LaunchError

# What must be the same on all hosts, or ranks would wait for each other in vain.
_SHARED = ("nnodes", *(field.name for field in SETTINGS), "max_restarts")


class HostTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms on which one host takes part in a launch.

    Attributes:
        host: its name.
        node_rank: the position that it asks for; None for any.
        settings: values that must be the same on all hosts, as text.
        role: role of its processes.
    """

    host: str
    node_rank: int | None
    settings: dict[str, str]
    role: str = "default"


def terms_of(host: str, config: LaunchConfig, *, processes: int, contents: Mapping[str, str]) -> HostTerms:
    """Return the terms of a host.

    Args:
        host: its name.
        config: settings of the launch on it.
        processes: number of ranks that it starts.
        contents: versions of the packages and of the script, which must be the same.
    """
    settings = {name: to_text(getattr(config, name)) for name in _SHARED}
    return HostTerms(
        host=host,
        node_rank=None if config.node_rank == "auto" else config.node_rank,
        settings=settings | {"processes": str(processes)} | dict(contents),
        role=config.role,
    )


def assign_node_ranks(terms: Sequence[HostTerms]) -> list[int]:
    """Return the node rank of each host: the one that it asks for, else the next free one.

    Raises:
        LaunchError: two hosts ask for one node rank, or their settings differ; it names them.
    """
    asked = Counter(each.node_rank for each in terms if each.node_rank is not None)
    if taken := [rank for rank, count in asked.items() if count > 1]:
        hosts = " and ".join(each.host for each in terms if each.node_rank == taken[0])
        raise LaunchError(
            "hosts ask for the same place",
            got=f"node_rank={taken[0]} on {hosts}",
            fix="Give each host a number of its own, or leave node_rank out on all.",
        )
    compare(terms, "Launch alike on all hosts.")
    free = iter(rank for rank in range(len(terms)) if rank not in asked)
    return [next(free) if each.node_rank is None else each.node_rank for each in terms]


def compare(terms: Sequence[HostTerms], fix: str) -> None:
    """Refuse hosts whose settings differ.

    Raises:
        LaunchError: they differ; it names the hosts, and ends with `fix`.
    """
    for name in terms[0].settings:
        said: dict[str, list[str]] = {}
        for each in terms:
            said.setdefault(each.settings.get(name, "nothing"), []).append(each.host)
        if len(said) > 1:
            got = "; ".join(f"{value} on {_few(hosts)}" for value, hosts in said.items())
            raise LaunchError(f"hosts do not agree on {name}", got=got, fix=fix)


def describe_hosts(hosts: Sequence[str], processes: int) -> str:
    """Return the ranks of each host as text: "ranks 0-1 on node0, 2-3 on node1"."""
    spans = [(at * processes, (at + 1) * processes - 1, host) for at, host in enumerate(hosts)]
    shown = [f"{first}-{last} on {host}" if last > first else f"{first} on {host}" for first, last, host in spans[:8]]
    more = [f"and {len(hosts) - 8} more hosts"] if len(hosts) > 8 else []
    return f"rank{'s' if len(hosts) * processes > 1 else ''} {', '.join(shown + more)}"


def _few(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
