# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that all ranks load: the one at a path, or the newest of a run's folder, held open meanwhile."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from accel.checkpoint._boxes import main_readers
from accel.checkpoint._manifest import MANIFEST, candidates, step_of, warn_skipped
from accel.checkpoint._read import Saved, open_checkpoint
from accel.comm import Call, Comm, broadcast_value, exchange, reduce_ints, shared_failure
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.storage import Place

_BITS = 8


class _Pick(msgspec.Struct, frozen=True):
    """Rank 0's choice."""

    name: str = ""  # name of the checkpoint's folder in the run's; "" where the path is the checkpoint's own
    digest: str = ""  # digest of its manifest; "" if there is no checkpoint
    damaged: tuple[str, ...] = ()  # damaged checkpoints with reasons; only if no other exists


@dataclass(slots=True)
class SkippedCheckpoints:
    """Checkpoints of a run's folder not to choose again, by folder name and manifest digest.

    Attributes:
        reasons: the damage of each.
        gone: checkpoints that their writer deleted or replaced.
    """

    reasons: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    gone: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    def add(self, path: Place, digest: str, reason: str) -> None:
        """Note a damaged checkpoint; the logger reports it once."""
        if self.reasons.get((path.name, digest)) != reason:
            text = "%s cannot be loaded and is skipped: %s"
            logging.getLogger("accel.checkpoint").warning(text, path, reason)
        self.reasons[path.name, digest] = reason

    def add_held(self, held: Held, reason: str) -> None:
        """Note damage of a held checkpoint, unless its writer has deleted it."""
        if isinstance(held.opened, Saved) and not held.opened.is_current():
            self.gone.add((held.place.name, held.opened.digest))
        else:
            self.add(held.place, held.digest, reason)


@dataclass(frozen=True, slots=True)
class Held:
    """A checkpoint that this rank holds open."""

    place: Place  # the checkpoint's folder, the same on every rank
    digest: str  # digest of its manifest on rank 0
    is_newest: bool  # whether it was chosen from a run's folder, so that another may take its place
    is_own_choice: bool  # whether this rank chose it, and notes its damage
    opened: Saved | CheckpointError  # its contents, or the reason why this rank cannot read it
    node: int | None  # rank of the host whose part this is; None if all ranks read the same files


@contextlib.contextmanager
def hold_newest(
    ctx: DistContext,
    path: Place,
    call: Call,
    skipped: SkippedCheckpoints,
    error: Exception | None = None,
) -> Generator[Held | None]:
    """Hold a checkpoint open for the block: the one at a path, or the newest that can be read in a run's folder. A
    collective. Yields None for a folder without checkpoints; `error` is this rank's failure so far; `skipped` grows."""
    call = Call(call.name, f"{path.name}\n{call.detail}", call.site)
    with contextlib.ExitStack() as stack:
        opened, pick = None, _Pick()
        with shared_failure(ctx.comm, call):
            if error is not None:
                raise error
            if ctx.is_main_process:
                opened, pick = _pick(stack, path, skipped)
        # one choice for all ranks: a writer may change the folder between two looks
        pick = broadcast_value(ctx.comm, call, pick, _Pick)
        if pick.damaged:
            raise all_damaged(path, pick.damaged)
        if not pick.digest:
            yield None
            return
        chosen = path / pick.name if pick.name else path
        # each rank holds the folder open itself, which keeps retention on its host away
        opened = opened or open_same(stack, chosen, pick.digest)
        # one plain path may name the part of each host
        is_part = isinstance(opened, Saved) and opened.manifest.host is not msgspec.UNSET
        node = ctx.node_rank if is_part else None
        yield Held(chosen, pick.digest, bool(pick.name), ctx.is_main_process, opened, node)


def is_checkpoint(path: Place) -> bool:
    """Return whether a path is that of a checkpoint, not of a run's folder."""
    return _is_of_step(path) or MANIFEST in (path.names() if path.exists() else ())


def _is_of_step(path: Place) -> bool:
    return step_of(path.name.partition(".")[0]) is not None


def _pick(stack: contextlib.ExitStack, path: Place, skipped: SkippedCheckpoints) -> tuple[Saved | None, _Pick]:
    """Open the checkpoint at a path, or the newest of a run's folder."""
    look = path if _is_of_step(path) else path.listed()
    if is_checkpoint(look):
        saved = stack.enter_context(open_checkpoint(path))
        return saved, _Pick("", saved.digest)
    if (saved := _open_newest(stack, path, look, skipped)) is not None:
        return saved, _Pick(saved.path.name, saved.digest)
    return None, _Pick(damaged=tuple(f"{name}: {reason}" for (name, _), reason in skipped.reasons.items()))


def _open_newest(stack: contextlib.ExitStack, out: Place, look: Place, skipped: SkippedCheckpoints) -> Saved | None:
    """Open the newest checkpoint of a folder, which `look` is as it was listed last."""
    seen = None
    while (found := candidates(look) if look.exists() else []) != seen:  # a writer may replace all of them meanwhile
        for step, _, path, identity in found:
            with contextlib.ExitStack() as inner:
                try:
                    saved = inner.enter_context(open_checkpoint(path, follow=False, step=step))
                except CheckpointError as error:
                    if path.identity() != identity:  # a writer has replaced or deleted it meanwhile
                        break
                    _note_broken(path, error, skipped)
                    continue
                if (path.name, saved.digest) not in skipped.reasons.keys() | skipped.gone:
                    stack.push(inner.pop_all())
                    return saved
        else:
            seen = found
        look = out.listed()
    return None


def _note_broken(path: Place, error: CheckpointError, skipped: SkippedCheckpoints) -> None:
    """Note a damaged checkpoint; a folder without a manifest may be left by a killed save."""
    try:
        is_checkpoint = MANIFEST in path.names()
    except CheckpointError:
        is_checkpoint = False
    if is_checkpoint:
        skipped.add(path, "", str(error))
    elif path.exists():
        warn_skipped(path, error)


def open_same(stack: contextlib.ExitStack, path: Place, digest: str) -> Saved | CheckpointError:
    """Open the checkpoint that ranks have chosen, by the digest of its manifest."""
    try:
        saved = stack.enter_context(open_checkpoint(path))
    except CheckpointError as error:
        return error
    # on another node the path may lead to another folder, or to a later save of the step
    if saved.digest == digest:
        return saved
    return CheckpointError(
        "ranks read different checkpoints",
        expected="one folder that all nodes share",
        got="another manifest than rank 0's",
        where=str(path),
    )


def all_damaged(path: Place, reasons: Sequence[str]) -> CheckpointError:
    """Make the error for a run's folder without a checkpoint that can be loaded."""
    return CheckpointError(
        "no checkpoint of this run can be loaded",
        expected="a complete checkpoint",
        got="; ".join(reasons),
        where=str(path),
        fix="Restore one of them, or pass another folder to start anew.",
    )


def divide_files(
    comm: Comm, call: Call, held: Held, mine: Sequence[int], statements: Sequence[tuple[int | None, Sequence[int]]]
) -> list[list[int]]:
    """Return the ranks that check each file: its `main_readers` among those that read the same files.

    `mine` are the bytes that this rank reads of each file, `statements` the node of `Held` and the bytes of each rank.
    A collective in a large group, where ranks state no bytes.
    """
    if not comm.is_large:
        beside = [rank for rank, (node, _) in enumerate(statements) if node == held.node]
        return main_readers([statements[rank][1] for rank in beside], beside)
    if held.node is not None:
        # files of one host have few readers: each checks all that it reads
        return [[comm.rank] if nbytes else [] for nbytes in mine]
    return agree_on_readers(comm, call, mine)


def agree_on_readers(comm: Comm, call: Call, mine: Sequence[int]) -> list[list[int]]:
    """Return the `main_readers` of each file, of the bytes that this rank reads of each. A collective."""
    most = reduce_ints(comm, call, mine, "max")
    reads = [bool(largest) and 2 * own >= largest for own, largest in zip(mine, most, strict=True)]
    places = torch.arange(_BITS, dtype=torch.uint8)
    padded = torch.zeros(-(-len(reads) // _BITS) * _BITS, dtype=torch.uint8)
    padded[: len(reads)] = torch.tensor(reads, dtype=torch.uint8)
    # a bit for each file, as every rank gets the bits of all
    packed = (padded.view(-1, _BITS) << places).sum(1, dtype=torch.uint8)
    rows = torch.stack(exchange(comm, call, packed))
    bits = (rows.unsqueeze(-1) >> places & 1).flatten(1)
    return [[int(rank) for rank in bits[:, at].nonzero()] for at in range(len(reads))]
