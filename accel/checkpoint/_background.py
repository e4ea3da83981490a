# SPDX-License-Identifier: Apache-2.0
"""Saving while training continues: a copy in host memory, written and committed by a thread of each rank."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from accel.checkpoint._manifest import step_name
from accel.checkpoint._retention import Keep, retain
from accel.checkpoint._save import ONE_FOLDER, Stage, WrittenFile, begin, commit_stage, write_share
from accel.checkpoint._snapshot import Content, Snapshot
from accel.comm import Call, agreed, call_site
from accel.comm._streams import DeviceStreams, streams_of
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.errors._base import ErrorRecord, describe, rebuild
from accel.storage import Place, RemotePath
from accel.terminal import show_limit

_LARGEST = 1 << 20


class ShareReport(msgspec.Struct, frozen=True):
    """Outcome of a rank's thread: its file, or its error."""

    share: WrittenFile | None = None
    error: ErrorRecord | None = None


def leave_note(stage: Stage, rank: int, note: ShareReport) -> None:
    """Write a note into the stage, atomically."""
    # whole or not at all: rank 0 looks for the file while it is written
    stage.place.put(_name(stage, rank), msgspec.json.encode(note))


def show_life(stage: Stage, rank: int) -> contextlib.AbstractContextManager[object]:
    """Show rank 0 that this rank is alive, in a store, where an upload is invisible until its end."""
    return stage.place.beating(f"share-{rank:05d}{stage.mark}.beat") if rank else contextlib.nullcontext()


def collect_notes(
    stage: Stage, ranks: Iterable[int], *, timeout_s: float, given_up: threading.Event
) -> dict[int, ShareReport]:
    """Wait for the notes of ranks, and remove them from the stage. Raises `CheckpointError` if no rank writes anything
    for `timeout_s` seconds, or once `given_up` is set."""
    waiting = set(ranks)
    notes = dict[int, ShareReport]()
    seen, since = None, time.monotonic()
    while waiting:
        for rank in sorted(waiting):
            if (note := _read(stage, rank)) is not None:
                notes[rank] = note
                waiting.remove(rank)
        # progress of any rank restarts the clock: one large share may take longer than the time-out
        if (written := stage.place.usage()) != seen:
            seen, since = written, time.monotonic()
        if waiting and (given_up.wait(stage.place.pause_s) or time.monotonic() - since > timeout_s):
            raise CheckpointError(
                "the checkpoint was abandoned"
                if given_up.is_set()
                else f"nothing was written for {show_limit(timeout_s)}",
                expected="the shares of all ranks",
                got=f"none of rank {', '.join(map(str, sorted(waiting)))}",
                where=str(stage.place),
                fix="See whether those ranks have ended, and whether all nodes share this folder.",
            )
    # before the commit, as retention keeps folders with files that no manifest lists
    stage.place.remove(_name(stage, rank) for rank in notes)
    return notes


def _read(stage: Stage, rank: int) -> ShareReport | None:
    name = _name(stage, rank)
    data = stage.place.get(name, _LARGEST)
    try:
        return msgspec.json.decode(data, type=ShareReport) if data is not None else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"a rank's note is not valid: {error}", where=str(stage.place / name)) from error


def _name(stage: Stage, rank: int) -> str:
    return f"share-{rank:05d}{stage.mark}.json"


class Saving:
    """A checkpoint that is being written while training continues.

    Attributes:
        path: the folder after the commit.
    """

    def __init__(
        self,
        ctx: DistContext,
        stage: Stage,
        target: Place,
        snapshot: Snapshot,
        keep: Keep | None,
        check: Callable[[], object] | None,
    ) -> None:
        self.path = target.path
        self._target = target
        self._ctx = ctx
        self._stage = stage
        self._keep = keep
        self._check = check
        self._written: Future[WrittenFile] = Future()
        self._committed: Future[None] = Future()
        self._given_up = threading.Event()
        self._outcome: Exception | Path | RemotePath | None = None
        # context variables of the caller, such as `AFTER_WRITE`, hold in the thread too
        work = contextvars.copy_context()
        # not a daemon: a program that simply ends waits for its last checkpoint
        self._thread = threading.Thread(target=work.run, args=(self._work, snapshot), name=f"accel-save-{target.name}")
        self._thread.start()
        # the next save and the end of the session wait for it
        ctx.comm.unfinished = self

    def __repr__(self) -> str:
        return f"Saving({str(self.path)!r}, done={self.done()})"

    def done(self) -> bool:
        """Return whether this rank's thread has ended, with or without success. No communication."""
        return not self._thread.is_alive()

    def result(self) -> Path | RemotePath:
        """Wait for the commit. A collective the first time.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: the disk failed, or a rank wrote nothing for `timeout_s`; the same on every rank. Nothing
                has changed.
            NonFiniteError: a tensor to be saved is not finite; the same on every rank. Nothing was saved.
        """
        if self._outcome is None:
            try:
                self._outcome = self._settle()
            except Exception as error:
                self._outcome = error
            self._ctx.comm.unfinished = None
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def wait(self) -> None:
        """Wait for this rank's thread, without communication; a failure goes to the log."""
        self._thread.join()
        error = self._written.exception() or self._committed.exception()
        if error is not None and self._outcome is None:
            logging.getLogger("accel.checkpoint").error("%s was not saved: %s", self.path, error)

    def _settle(self) -> Path | RemotePath:
        site = call_site()
        try:
            with agreed(self._ctx.comm, Call("Saving.result", self.path.name, site)):
                self._written.result()
        except BaseException:
            # or rank 0's thread would wait until the time-out for the share of the rank that failed
            self._given_up.set()
            self._thread.join()
            raise
        self._thread.join()
        # only rank 0 has committed: its error becomes the error of all ranks
        with agreed(self._ctx.comm, Call("Saving.result: committing", site=site)):
            self._committed.result()
        return self.path

    def _work(self, snapshot: Snapshot) -> None:
        stage, rank = self._stage, self._ctx.rank
        try:
            if self._check is not None:
                self._check()
            with show_life(stage, rank):
                share = write_share(stage.place, snapshot)
            if rank:
                # after the flush: rank 0 may commit from here on
                leave_note(stage, rank, ShareReport(share=share))
        except Exception as error:
            if rank:
                _leave_failure(stage, rank, snapshot, error)
            self._written.set_exception(error)
        else:
            self._written.set_result(share)
        try:
            if not rank:
                self._commit(snapshot)
        except Exception as error:
            self._stage.abandon()
            self._committed.set_exception(error)
        else:
            self._stage.close()
            self._committed.set_result(None)

    def _commit(self, snapshot: Snapshot) -> None:
        stage, others = self._stage, range(1, self._ctx.world_size)
        notes = collect_notes(stage, others, timeout_s=self._ctx.timeout_s, given_up=self._given_up)
        shares = [self._written.result()]
        for rank in others:
            share, error = notes[rank].share, notes[rank].error
            if share is None:
                raise rebuild(error) if error is not None else CheckpointError(f"rank {rank} wrote nothing")
            shares.append(share)
        commit_stage(stage, self._target, snapshot, shares)
        if self._keep is not None:
            retain(self._target, self._keep)


def save_async(
    ctx: DistContext,
    out: Place,
    content: Content,
    *,
    step: int,
    keep: Keep | None,
    metrics: Mapping[str, float],
    check: Callable[[Content], object] | None,
) -> Saving:
    """Copy this rank's share, and return while threads write and commit it. A collective; see `save`. `check` gets what
    this rank writes, in the thread, and raises if it must not be saved."""
    target = out / step_name(step)
    site = call_site()
    call = Call("save_state", f"step {step}\nkeep {keep}\nmode async", site)
    stage, snapshot = begin(ctx, target, content, ONE_FOLDER, step=step, metrics=metrics, call=call)
    try:
        with agreed(ctx.comm, Call("save_state: copying", site=site)):
            # the thread owns the copies; `spare` keeps their memory for the next save
            snapshot = replace(snapshot, tensors=copy_to_host(snapshot.tensors, ctx.comm.spare, ctx.streams))
        look = partial(check, _written(content, snapshot.tensors)) if check is not None else None
        return Saving(ctx, stage, target, snapshot, keep, look)
    except BaseException:  # such as no more threads
        stage.abandon()
        raise


def _written(content: Content, tensors: Mapping[str, torch.Tensor]) -> Content:
    """Return the part of the content that this rank writes."""
    shared, main, own = (
        {name: tensors[name] for name in each.keys() & tensors.keys()}
        for each in (content.shared, content.main, content.own)
    )
    return replace(content, shared=shared, main=main, own=own)


def _leave_failure(stage: Stage, rank: int, snapshot: Snapshot, error: Exception) -> None:
    """Report a failure to rank 0; if that fails too, `Saving.result` reports it."""
    with suppress(CheckpointError):
        stage.place.remove([snapshot.file])  # a full disk has room for the note then
    with suppress(CheckpointError):
        leave_note(stage, rank, ShareReport(error=describe(error)))


def copy_to_host(
    tensors: Mapping[str, torch.Tensor], spare: dict[str, torch.Tensor], streams: DeviceStreams
) -> dict[str, torch.Tensor]:
    """Copy tensors, so that training may change its own, and wait for the copies. Memory of `spare`, former copies by
    name, is reused. Mutates it: it then holds the new ones, except for pinned memory."""
    copies = dict[str, torch.Tensor]()
    doors, used = {streams.device: streams}, list[DeviceStreams]()
    for name in spare.keys() - tensors.keys():
        del spare[name]
    for name, tensor in tensors.items():
        live = tensor.detach().resolve_conj().resolve_neg()
        door = doors.setdefault(live.device, streams_of(live.device))
        copy = spare.pop(name, None)
        if door.is_pinnable and door.holds(live):  # without pinned memory the bus is not used at its full speed
            copies[name] = door.pinned(live.shape, live.dtype)
            door.copy(copies[name], live)
            used.append(door)
            continue
        if copy is None or (copy.shape, copy.dtype) != (live.shape, live.dtype):
            copy = torch.empty(live.shape, dtype=live.dtype)
        spare[name] = copies[name] = copy.copy_(live)
    # the host waits here: the caller's next step overwrites the live tensors
    for door in dict.fromkeys(used):
        door.synchronize(door.current())
    return copies
