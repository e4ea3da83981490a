# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a folder of each host: the functions of a save, and the checkpoint of all hosts that a load holds.

Each host gets, as a separate checkpoint, every box that a rank of it reads again at the same layout: so it writes its
own copy of what all ranks hold, and receives what only other hosts have. Its manifest names the files of other hosts
where a tensor continues, so that the folders of all hosts, copied together, are a whole checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import msgspec
import torch

from accel.checkpoint._boxes import NamedBox, plan_writes
from accel.checkpoint._manifest import HostPart, Item, candidates, committed, step_name
from accel.checkpoint._read import (
    Held,
    SkippedCheckpoints,
    all_damaged,
    is_checkpoint,
    open_checkpoint,
    open_same,
)
from accel.checkpoint._retention import sweep
from accel.checkpoint._snapshot import (
    Agreement,
    Boxes,
    Content,
    ItemsAndMetrics,
    Snapshot,
    WritePlan,
    tensor_facts,
)
from accel.comm import Call, agreed, barrier, broadcast_value, exchange_values, gather_bytes, shared_failure
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.storage import Place, as_place, host_name


class HostNote(msgspec.Struct, frozen=True):
    """A rank's message about its host's folder."""

    node: int  # rank of the host
    name: str  # its name
    commits: list[tuple[str, str]]  # names of the folder's checkpoints, newest first, each with the number of its save
    leads: bool = False  # whether this rank commits for its host
    save: str = ""  # number of the save that begins; rank 0's is used
    main: str = ""  # digest of names and shapes of what only rank 0 would write

    @property
    def label(self) -> str:
        """The host, for people."""
        return f"node {self.node} ({self.name})"


class HostWrites(NamedTuple):
    """The writing, where each host has a separate folder."""

    ranks: list[tuple[NamedBox, ...]]  # boxes that each rank writes, on its host
    sent: dict[NamedBox, int]  # boxes that some host needs and does not have, each with the rank that sends it


@dataclass(frozen=True, kw_only=True, slots=True)
class Folders:
    """The folders that a save writes to, as functions: one of all ranks, or one of each host.

    Attributes:
        shares_to: rank that gets names and digests of all files; None for every rank.
        shown: run's folder: to its part of the call that ranks compare.
        leads: whether this rank opens a stage and commits it.
        clear: run's folder: clears up after dead writers before a stage is made, under the lock.
        note: run's folder and content: to what all ranks must know of the folder. No communication.
        agree: call, run's folder, name of the stage on a rank that leads, notes of all ranks, items and metrics of this
            one: to what all ranks agree on. May be a collective.
        receive: snapshot: to one with the boxes that this rank writes without holding them. May be a collective.
        commit: call, checkpoint's folder, a function that gives the stage its name on a rank that leads, one that
            deletes what this returns once nothing can need it. A collective: all ranks that lead commit, or none.
    """

    shares_to: int | None
    shown: Callable[[Place], str]
    leads: Callable[[DistContext], bool]
    clear: Callable[[Place], None]
    note: Callable[[DistContext, Place, Content], bytes]
    agree: Callable[[DistContext, Call, Place, str | None, Sequence[bytes], ItemsAndMetrics], Agreement]
    receive: Callable[[DistContext, Snapshot], Snapshot]
    commit: Callable[
        [DistContext, Call, Place, Callable[[], Place | None] | None, Callable[[Place | None], None]], None
    ]


def _note(ctx: DistContext, out: Place, content: Content) -> bytes:
    """Describe this host's folder, and begin the number of the save on rank 0."""
    main = hashlib.sha256("\n".join(tensor_facts(content.main)).encode()).hexdigest()
    # a step may be saved twice, as after a restart; this number distinguishes the saves
    save = secrets.token_hex(32) if ctx.is_main_process else ""
    note = note_of(out, ctx.node_rank)
    return msgspec.msgpack.encode(msgspec.structs.replace(note, leads=ctx.is_local_main_process, save=save, main=main))


def _agree(
    ctx: DistContext, call: Call, out: Place, stage: str | None, statements: Sequence[bytes], stored: ItemsAndMetrics
) -> Agreement:
    """Give every host rank 0's items and metrics, and settle what a former save has committed on some hosts only."""
    notes = [msgspec.msgpack.decode(each, type=HostNote) for each in statements]
    check_notes(notes)
    leader = [note.node if note.leads else None for note in notes].index(ctx.node_rank)
    # each host writes a manifest, and all must hold the same values
    stored = broadcast_value(ctx.comm, call, stored, tuple[dict[str, Item], dict[str, float]])
    older = None
    common = on_all_hosts(notes)
    with agreed(ctx.comm, call):
        if stage is not None:
            commits = notes[ctx.rank].commits
            # before `sweep`, which deletes what is moved aside
            settle(out, commits, common)
            sweep(out, stage)
            names = {step_name(step) for step, _ in committed(out)}
            older = frozenset(names & {name.partition(".")[0] for name, save in commits if save in common})
    return Agreement(leader, stored, partial(_divide, notes, ctx.rank), older)


def _divide(notes: Sequence[HostNote], rank: int, boxes: Boxes, files: Sequence[str]) -> WritePlan:
    """Divide the writing into a folder of each host."""
    nodes = [each.node for each in notes]
    writes = plan_host_writes(boxes.sizes, boxes.holders, boxes.readers(), nodes)
    places = places_seen_from(nodes[rank], writes, nodes)
    # files of the checkpoint that a load on this host neither has nor misses
    others = [other for other in sorted(set(places.values())) if nodes[other] != nodes[rank]]
    return WritePlan(
        ranks=writes.ranks,
        places=places,
        sent=writes.sent,
        missing={part for part in writes.ranks[rank] if part in writes.sent and rank not in boxes.holders[part]},
        host=HostPart(notes[0].save, {files[other]: notes[other].label for other in others}),
    )


def _receive(ctx: DistContext, snapshot: Snapshot) -> Snapshot:
    """Send what only one host has to those that need it. A collective where there is any."""
    if not snapshot.sent:
        return snapshot
    # alike on every rank and by sender, so that one gather carries all boxes
    order = sorted(snapshot.sent, key=lambda part: (snapshot.sent[part], part))
    dtypes = {part: getattr(torch, snapshot.manifest.tensors[part[0]].dtype) for part in order}
    nbytes = {part: part[1].size * dtypes[part].itemsize for part in order}
    sizes = [0] * ctx.world_size
    for part in order:
        sizes[snapshot.sent[part]] += nbytes[part]
    own = [_flat_bytes(snapshot.outgoing[part]) for part in order if part in snapshot.outgoing]
    received = gather_bytes(ctx.comm, torch.cat(own) if own else torch.empty(0, dtype=torch.uint8), sizes)
    assert received is not None
    tensors = dict(snapshot.tensors)
    for part, data in zip(order, torch.split(received, list(nbytes.values())), strict=True):
        if part in snapshot.missing:
            # a copy: a view would be unaligned, and keep the whole message in memory
            tensors[part[0]] = data.clone().view(dtypes[part]).view(part[1].shape)
    return replace(snapshot, tensors=tensors)


def _commit(
    ctx: DistContext,
    call: Call,
    target: Place,
    put: Callable[[], Place | None] | None,
    finish: Callable[[Place | None], None],
) -> None:
    """Commit on every host, or on none."""
    aside, is_committed = None, False
    try:
        with agreed(ctx.comm, call):
            if put is not None:
                aside = put()
                is_committed = True
    except BaseException:
        if is_committed:
            target.take_back(aside)
        raise
    # A host that dies between the commits leaves some hosts with the new checkpoint and others without: then the
    # newest that all hosts have is loaded. So nothing of former ones goes before all have committed, and know it.
    barrier(ctx.comm, Call("save_state: committed", site=call.site))
    if put is not None:
        finish(aside)


HOST_FOLDERS = Folders(
    shares_to=None,
    shown=lambda out: f" in a folder {out.name!r} of each host",
    leads=lambda ctx: ctx.is_local_main_process,
    clear=lambda _: None,  # all hosts must first agree on what is left of a former save
    note=_note,
    agree=_agree,
    receive=_receive,
    commit=_commit,
)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)


def note_of(place: Place, node: int) -> HostNote:
    """Describe this host's folder of a run; a damaged checkpoint is left out with a warning."""
    found: list[tuple[str, str]] = []
    for step, _, path, _ in candidates(place) if place.exists() else ():
        try:
            # manifest and sizes are checked: a host must not offer what it cannot load
            with open_checkpoint(path, follow=False, step=step) as saved:
                found.append((path.name, saved.digest))
        except CheckpointError as error:
            logging.getLogger("accel.checkpoint").warning("%s cannot be loaded and is skipped: %s", path, error)
    return HostNote(node, host_name(), found)


@contextlib.contextmanager
def hold_on_hosts(
    ctx: DistContext, path: Place, call: Call, skipped: SkippedCheckpoints, error: Exception | None = None
) -> Generator[Held | None]:
    """Hold the newest checkpoint that every host has open for the block, each its own part; else as `hold_newest`."""
    call = Call(call.name, f"{path.name} per host\n{call.detail}", call.site)
    with contextlib.ExitStack() as stack:
        yield _hold(ctx, stack, path, call, skipped, error)


def _hold(
    ctx: DistContext,
    stack: contextlib.ExitStack,
    path: Place,
    call: Call,
    skipped: SkippedCheckpoints,
    error: Exception | None,
) -> Held | None:
    with shared_failure(ctx.comm, call):
        if error is not None:
            raise error
        is_newest = not is_checkpoint(path)
        run = path if is_newest else path.parent
        note = note_of(run, ctx.node_rank)
        bad = skipped.reasons.keys() | skipped.gone
        wanted = [(name, save) for name, save in note.commits if is_newest or name == path.name]
        note = msgspec.structs.replace(note, commits=[each for each in wanted if each not in bad])
    # by numbers of saves: one step's name may belong to different saves on two hosts
    notes = exchange_values(ctx.comm, call, note, HostNote)
    common = on_all_hosts(notes)
    for name, save in notes[ctx.rank].commits:
        if save in common:  # in the order of steps, which is the same on all hosts
            opened = open_same(stack, run / name, save)
            return Held(run / name, save, is_newest, is_own_choice=True, opened=opened, node=ctx.node_rank)
    if reasons := [f"{name}: {reason}" for (name, _), reason in skipped.reasons.items()]:
        raise all_damaged(path, reasons)
    if is_newest and not any(each.commits for each in notes):
        return None
    raise CheckpointError(
        "no checkpoint is complete on every host",
        expected="one that each host has its part of",
        got=describe_hosts(notes),
        where=str(path),
        fix="Bring the folder of a host that lacks it back, start on the hosts that saved, or pass another folder.",
    )


def check_notes(notes: Sequence[HostNote]) -> None:
    """Refuse hosts without exactly one leading rank, and ranks that hold other tensors than rank 0."""
    # before anything is written: a host without a leader would never commit its part
    leads = sorted(each.node for each in notes if each.leads)
    if leads != sorted({each.node for each in notes}):
        raise CheckpointError(
            "hosts without one rank that writes for them",
            expected="a context with ranks that know their nodes: one rank of each with local_rank 0",
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
    """Divide the writing among the ranks of each host. Boxes without an entry have all ranks as holders or readers.
    `readers` are ranks that read a box again at the same layout; `nodes` has the host of each rank."""
    found: list[tuple[NamedBox, ...]] = [() for _ in nodes]
    sent: dict[NamedBox, int] = {}
    # each host writes all that its ranks read again, so that a load needs no other host
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
                # nobody on this host has it: the lowest rank that does sends it
                sent[box] = min(holders[box])
            # without an entry any rank of the host may write it, which divides the bytes best
            if len(holding or reading) < len(local):
                writers[box] = holding or reading
        for rank, boxes in zip(local, plan_writes(needed, writers, len(local)), strict=True):
            found[rank] = boxes
    return HostWrites(found, sent)


def places_seen_from(node: int, writes: HostWrites, nodes: Sequence[int]) -> dict[NamedBox, int]:
    """Return the rank with the file of each box, for a host's manifest: one of the host, else the lowest."""
    # own files first: a load on this host finds what it reads next to the manifest
    order = sorted(range(len(nodes)), key=lambda rank: (nodes[rank] != node, rank))
    found: dict[NamedBox, int] = {}
    for rank in order:
        for box in writes.ranks[rank]:
            _ = found.setdefault(box, rank)
    return found


def settle(out: Place, commits: Sequence[tuple[str, str]], common: Set[str]) -> None:
    """Give a checkpoint its name back where this host had replaced it, but not all hosts had. Needs the lock. `commits`
    are this host's checkpoints by name, with the numbers of their saves; `common` are the saves of all hosts."""
    saves = dict(commits)
    for left in out.leftovers():
        if left.kind == "old" and saves.get(left.path.name) in common and saves.get(left.target) not in common:
            target = out / left.target
            if target.exists():
                target.take_back(as_place(left.path))
            else:
                left.path.rename(left.path.with_name(left.target))
