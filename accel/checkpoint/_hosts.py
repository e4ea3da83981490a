# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a folder of each host: what each must hold, and which checkpoints all hosts have. No communication.

Each host gets, as a checkpoint of its own, every box that a rank of it reads again at the same layout: so it writes its
own copy of what all ranks hold, and receives what only other hosts have. Its manifest names the files of other hosts
where a tensor goes on, so that the folders of all hosts, copied together, are a whole checkpoint.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from accel.checkpoint._manifest import candidates
from accel.checkpoint._plan import Box, plan_writes
from accel.checkpoint._read import open_checkpoint
from accel.errors import CheckpointError
from accel.storage import Place, as_place, host_name


class HostNote(msgspec.Struct, frozen=True):
    """A rank's message about its host's folder.

    Attributes:
        node: rank of the host.
        name: its name.
        commits: names of the folder's checkpoints, newest first, each with the number of its save.
        leads: whether this rank commits for its host.
        save: number of the save that begins; rank 0's is used.
        main: digest of names and shapes of what rank 0 alone would write.
    """

    node: int
    name: str
    commits: list[tuple[str, str]]
    leads: bool = False
    save: str = ""
    main: str = ""

    @property
    def label(self) -> str:
        """The host, for people."""
        return f"node {self.node} ({self.name})"


NamedBox = tuple[str, Box]  # a tensor's name, and which of its elements


class HostWrites(NamedTuple):
    """The writing, where hosts have folders of their own.

    Attributes:
        ranks: boxes that each rank writes, on its host.
        sent: boxes that some host needs and does not have, each with the rank that sends it.
    """

    ranks: list[tuple[NamedBox, ...]]
    sent: dict[NamedBox, int]


def note_of(place: Place, node: int) -> HostNote:
    """Describe this host's folder of a run.

    Raises:
        CheckpointError: it cannot be read.
    """
    found: list[tuple[str, str]] = []
    for step, _, path, _ in candidates(place) if place.exists() else ():
        try:
            with open_checkpoint(path, follow=False, step=step) as saved:
                found.append((path.name, saved.digest))
        except CheckpointError as error:
            logging.getLogger("accel.checkpoint").warning("%s cannot be loaded and is skipped: %s", path, error)
    return HostNote(node, host_name(), found)


def check_notes(notes: Sequence[HostNote]) -> None:
    """Refuse hosts that do not have one leading rank each, and ranks that hold other tensors than rank 0.

    Raises:
        CheckpointError: so it is; the same on every rank.
    """
    leads = sorted(each.node for each in notes if each.leads)
    if leads != sorted({each.node for each in notes}):
        raise CheckpointError(
            "hosts without one rank that writes for them",
            expected="a context whose ranks know their nodes: one rank of each with local_rank 0",
            got=f"such ranks on the nodes {leads} of {sorted({each.node for each in notes})}",
            where="HostFolder",
        )
    if len({each.main for each in notes}) > 1:
        raise CheckpointError(
            "ranks hold buffers or values of other names, dtypes or shapes than rank 0",
            where="HostFolder",
            fix="Save the same items on every rank.",
        )


def on_all_hosts(notes: Sequence[HostNote]) -> set[str]:
    """Return the numbers of the saves that every rank's host has committed."""
    counts = Counter(save for note in notes for save in {save for _, save in note.commits})
    return {save for save, count in counts.items() if count == len(notes)}


def describe_hosts(notes: Sequence[HostNote]) -> str:
    """Return the checkpoints of each host, for people."""
    hosts = {each.node: each for each in notes}
    listed = (f"{note.label}: {', '.join(name for name, _ in note.commits) or 'none'}" for note in hosts.values())
    return "; ".join(listed)


def plan_host_writes(
    sizes: Mapping[NamedBox, int],
    holders: Mapping[NamedBox, Sequence[int]],
    readers: Mapping[NamedBox, Sequence[int]],
    nodes: Sequence[int],
) -> HostWrites:
    """Divide the writing among the ranks of each host: pure.

    Args:
        sizes: bytes of each box.
        holders: ranks (one or more) that hold the box to save; all ranks for boxes without an entry.
        readers: ranks that read a box again at the same layout; all ranks for boxes without an entry.
        nodes: host of each rank.
    """
    found: list[tuple[NamedBox, ...]] = [() for _ in nodes]
    sent: dict[NamedBox, int] = {}
    for node in sorted(set(nodes)):
        local = [rank for rank, its_node in enumerate(nodes) if its_node == node]
        needed: dict[NamedBox, int] = {}
        writers: dict[NamedBox, list[int]] = {}
        for box, size in sizes.items():
            reading = [at for at, rank in enumerate(local) if box not in readers or rank in readers[box]]
            if not reading:
                continue
            needed[box] = size
            holding = [at for at, rank in enumerate(local) if box not in holders or rank in holders[box]]
            if not holding:
                sent[box] = min(holders[box])
            if len(holding or reading) < len(local):
                writers[box] = holding or reading
        for rank, boxes in zip(local, plan_writes(needed, writers, len(local)), strict=True):
            found[rank] = boxes
    return HostWrites(found, sent)


def places_seen_from(node: int, writes: HostWrites, nodes: Sequence[int]) -> dict[NamedBox, int]:
    """Return the rank whose file holds each box, for a host's manifest: one of its own, else the lowest.

    Args:
        node: the host.
        writes: result of `plan_host_writes`.
        nodes: host of each rank.
    """
    order = sorted(range(len(nodes)), key=lambda rank: (nodes[rank] != node, rank))
    found: dict[NamedBox, int] = {}
    for rank in order:
        for box in writes.ranks[rank]:
            _ = found.setdefault(box, rank)
    return found


def settle(out: Place, commits: Sequence[tuple[str, str]], common: Set[str]) -> None:
    """Give a checkpoint its name back where this host had already replaced it, but not all hosts had.

    Needs the lock.

    Args:
        out: this host's folder of the run.
        commits: its checkpoints by name, with the numbers of their saves.
        common: numbers of the saves that all hosts have.

    Raises:
        CheckpointError: the disk failed.
    """
    saves = dict(commits)
    for left in out.leftovers():
        if left.kind == "old" and saves.get(left.path.name) in common and saves.get(left.target) not in common:
            target = out / left.target
            if target.exists():
                target.take_back(as_place(left.path))
            else:
                left.path.rename(left.path.with_name(left.target))
