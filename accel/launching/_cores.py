# SPDX-License-Identifier: Apache-2.0
"""The CPU cores of each process of a launch, those near its GPU; memory nodes as Linux lists them below /sys."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_NO_NODE = -1  # Linux's own number for "no node"

# Cores of each memory node; a core is the numbers of its hardware threads.
MemoryNodes = Mapping[int, tuple[tuple[int, ...], ...]]


class Binding(NamedTuple):
    """The cores that each process is bound to.

    Attributes:
        cores: numbers of the hardware threads of each process; empty for all.
        unbound: reason why no process is bound; empty if they are.
    """

    cores: tuple[tuple[int, ...], ...]
    unbound: str = ""


def bind_processes(count: int, nodes: MemoryNodes, near: Sequence[int | None] = ()) -> Binding:
    """Choose the cores of each process: pure.

    Processes with GPUs at the same memory node share its cores evenly, and those without a GPU share all cores, node
    after node. The hardware threads of a core stay together while there are cores enough.

    Args:
        count: number of processes.
        nodes: usable cores of each memory node; empty if unknown.
        near: memory node of each process's GPU, None if unknown; empty if the processes use none.

    Returns:
        The binding, of all processes or of none.
    """
    if not any(nodes.values()):
        return Binding(((),) * count, "the system does not list its cores")
    if len(nodes) == 1 or not near:
        every = [core for cores in nodes.values() for core in cores]
        return Binding(tuple(share_cores(every, each, count) for each in range(count)))
    shares: list[tuple[int, ...]] = []
    for local_rank, node in enumerate(near):
        if node is None:
            return Binding(((),) * count, f"the system does not tell the memory node of local rank {local_rank}'s GPU")
        if not nodes.get(node):
            reason = f"no core of memory node {node}, where local rank {local_rank}'s GPU is, may be used"
            return Binding(((),) * count, reason)
        beside = [other for other, its_node in enumerate(near) if its_node == node]
        shares.append(share_cores(nodes[node], beside.index(local_rank), len(beside)))
    return Binding(tuple(shares))


def share_cores(cores: Sequence[tuple[int, ...]], part: int, count: int) -> tuple[int, ...]:
    """Return one part of the cores, in one piece, as numbers of hardware threads.

    Parts share a core only if there are fewer cores than parts, and a hardware thread only if there are fewer of those.

    Args:
        cores: numbers of each core's hardware threads.
        part: number of the part.
        count: number of parts.
    """
    if len(cores) < count:
        cores = [(thread,) for core in cores for thread in core]
    if len(cores) < count:
        return cores[part % len(cores)]
    each, extra = divmod(len(cores), count)
    start = part * each + min(part, extra)
    return tuple(thread for core in cores[start : start + each + (part < extra)] for thread in core)


def describe_cores(cores: Collection[int]) -> str:
    """Return core numbers as Linux lists them: "0-3,8"."""
    pieces: list[list[int]] = []
    for core in sorted(cores):
        if pieces and core == pieces[-1][-1] + 1:
            pieces[-1].append(core)
        else:
            pieces.append([core])
    return ",".join(str(piece[0]) if len(piece) == 1 else f"{piece[0]}-{piece[-1]}" for piece in pieces)


def list_cores(text: str) -> list[int]:
    """Return the numbers in a list of cores as Linux writes it: "0-3,8".

    Raises:
        ValueError: the text is no such list.
    """
    listed: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        listed += range(int(first), int(last or first) + 1)
    return listed


def read_memory_nodes(usable: Collection[int], sys: Path) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Read the usable cores of each memory node.

    Args:
        usable: numbers of the hardware threads that this process may use, as its affinity and control group leave them.
        sys: the folder /sys.

    Returns:
        The nodes that have a usable core; one node with all of them where the system lists no nodes.
    """
    left = set(usable)
    nodes: dict[int, tuple[tuple[int, ...], ...]] = {}
    listed = {int(path.name[4:]): path for path in sys.glob("devices/system/node/node[0-9]*")}
    for node, path in sorted(listed.items()):
        if found := _cores_among(_read_list(path / "cpulist"), left, sys):
            nodes[node] = found
    if rest := _cores_among(sorted(left), left, sys):
        nodes[_NO_NODE] = rest
    return nodes


def read_memory_node(bus_id: str, sys: Path) -> int | None:
    """Read the memory node of a PCI device; None if the system does not tell.

    Args:
        bus_id: "DOMAIN:BUS:DEVICE.FUNCTION", hexadecimal.
        sys: the folder /sys.
    """
    domain, colon, slot = bus_id.lower().partition(":")
    try:
        node = int((sys / f"bus/pci/devices/{int(domain, 16):04x}{colon}{slot}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node == _NO_NODE else node


def _cores_among(listed: Sequence[int], left: set[int], sys: Path) -> tuple[tuple[int, ...], ...]:
    """Take the listed threads out of those that are left, grouped by core."""
    cores: list[tuple[int, ...]] = []
    for thread in listed:
        if thread in left:
            siblings = _read_list(sys / f"devices/system/cpu/cpu{thread}/topology/thread_siblings_list")
            core = tuple(sorted({thread, *siblings} & left & {*listed}))
            left.difference_update(core)
            cores.append(core)
    return tuple(cores)


def _read_list(path: Path) -> list[int]:
    try:
        return list_cores(path.read_text())
    except (OSError, ValueError):
        return []


@contextlib.contextmanager
def bound(cores: Collection[int]) -> Generator[None]:
    """Bind this thread inside the block: a process that it starts there is bound from its first instruction.

    Args:
        cores: numbers of hardware threads; empty for no change. Those that have been taken away change nothing either.
    """
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)
