# SPDX-License-Identifier: Apache-2.0
"""`load_state`: all ranks compare, check bytes, read and apply, and agree after each step."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec

from accel.checkpoint import Held, Manifest, Saved, SkippedCheckpoints, hold_newest, main_readers, plan_checks
from accel.comm import Call, agreed, agreed_values, call_site
from accel.context import DistContext, context_first
from accel.errors import CheckpointError
from accel.items._bases import Sums
from accel.items._kinds import check_items
from accel.items._matching import Matching, apply_changes, match_items, undo_changes
from accel.items._source import Change, LoadOptions, LoadTransform, agree_on_readers
from accel.storage import HostFolder, RemotePath, Span, as_place, lag_of


def _check_taken(left: Sequence[Set[str]]) -> None:
    """Raise `CheckpointError` unless some rank loads each entry of `Part`s; `left` has those it does not, by rank."""
    if lost := sorted(name for name in left[0] if all(name in other for other in left)):
        raise CheckpointError(
            "stored, but in no rank's part:" + "".join(f"\n  {name}" for name in lost),
            fix="Build the parts so that together they are the whole, or pass strict=False.",
        )


class Loaded(dict[str, Any]):
    """The items that `load_state` returns, by name.

    Attributes:
        path: the checkpoint's folder, the same on every rank.
        skipped: differences, a line each; empty unless `strict=False`.
    """

    def __init__(self, values: Mapping[str, object], path: Path | RemotePath, skipped: tuple[str, ...] = ()) -> None:
        super().__init__(values)
        self.path = path
        self.skipped = skipped


@context_first
def load_state(
    ctx: DistContext,
    path: str | os.PathLike[str] | RemotePath,
    items: Mapping[str, object],
    *,
    verify: bool = True,
    strict: bool = True,
    cast: bool = False,
    transform: LoadTransform | None = None,
) -> Loaded:
    """Load a checkpoint into items, all of it or nothing. A collective. Mutates modules, optimizers, random streams.

    Drops the gradients of the items, of an unfinished window too.

    Every rank checks everything before any rank changes anything. It reads its own parts of sharded tensors, from a
    save on any mesh. At the saved world size, random streams continue; at another, or on another kind of device, each
    rank's are seeded from the checkpoint's digest and the rank.

    Args:
        ctx: the context.
        path: folder or URL as for `save_state`, for its newest checkpoint; or a checkpoint's own. In the first case
            rank 0 chooses, skips damaged checkpoints with a warning of the logger `accel.checkpoint`, and a writer may
            save meanwhile.
        items: live objects to load into, by the names of the save; and records and plain values, for their types. A
            number is returned as it was saved, int or float. None for an item leaves it in the file.
        verify: whether to compare every byte of the files to read with their digests. Ranks divide that work, so all
            nodes must share the folder.
        strict: whether any difference is an error. Else modules are loaded by tensor and other items as a whole, where
            they fit; differences are in the result, and logged by `accel.checkpoint`.
        cast: whether floating-point tensors may differ in dtype; stored ones are converted to the live dtype, and so is
            optimizer state in its parameter's dtype. Devices may always differ.
        transform: maps the modules' stored tensors, by name, to the names to load them by; a pure function. Parameters
            of optimizers follow.

    Returns:
        Every item: the live objects, and new records and values; with `path` and `skipped`.

    Raises:
        CheckpointError: the checkpoint is missing, deleted, damaged, half-written or of a newer format, or does not
            fit; every difference is listed. The same on every rank. Nothing has been changed, unless the disk fails
            after all checks, which the error reports.
        ConfigError: no items, a name that is no identifier, or a wrong result of the transform.

    Example:
        >>> path = accel.save_state(ctx, "runs/demo", {"model": model, "best": 0.25}, step=3)
        >>> loaded = accel.load_state(ctx, path, {"model": model, "best": 0.0})
        >>> loaded["best"]
        0.25
    """
    options = LoadOptions(strict, cast, transform)
    loaded = load_newest(ctx, path, lambda _: items, verify=verify, options=options, site=call_site())
    if loaded is None:
        raise CheckpointError(
            "no checkpoint in this folder",
            expected="a folder that save_state has written to, or a checkpoint's own",
            where=str(path),
            fix=f"See whether the path is right, and on a file system that every node shares.{lag_of(path)}",
        )
    return loaded


def load_newest(
    ctx: DistContext,
    path: str | os.PathLike[str] | RemotePath,
    items_for: Callable[[Manifest], Mapping[str, object]],
    *,
    verify: bool = True,
    options: LoadOptions,
    site: str,
    verb: str = "load_state",
) -> Loaded | None:
    """Load as `load_state`, into items that may depend on the manifest; None where there is no checkpoint.

    Every rank calls `items_for` with the agreed manifest, and again if another checkpoint takes its place.
    """
    folder, error = as_place(""), None
    try:
        folder = as_place(path)
    except Exception as failure:
        error = failure
    call = Call(verb, f"verify {verify}\nstrict {options.strict}", site)
    per_host = isinstance(path, HostFolder)
    skipped = SkippedCheckpoints()
    while True:
        with hold_newest(ctx, folder, call, skipped, error, per_host=per_host) as held:
            if held is None:
                return None
            loading = _Loading(ctx, held, verify, options, site, verb)
            damage = loading.compare(items_for) or loading.check_bytes()
            if not damage:
                return loading.apply()
            if held.is_own_choice:
                skipped.add_held(held, damage)


class _Wish(msgspec.Struct, frozen=True):
    """A rank's intention.

    Attributes:
        bytes_of_files: bytes to read of each file; empty in a large group, where they would be most of the message.
        left: entries of `Part`s that this rank does not load.
        bases: sums of sharded frozen parameters, by name.
        damage: reason why this rank cannot read a replaceable checkpoint; "" for none.
        node: as in `Held`.
    """

    bytes_of_files: list[int] = []
    left: set[str] = set()
    bases: dict[str, Sums] = {}
    damage: str = ""
    node: int | None = None


class _Loading:
    """One checkpoint on its way into items. Each method is a collective; all of it happens, or nothing."""

    def __init__(self, ctx: DistContext, held: Held, verify: bool, options: LoadOptions, site: str, verb: str) -> None:
        self._ctx = ctx
        self._held = held
        self._verify = verify
        self._options = options
        self._site = site
        self._verb = verb
        self._wishes: list[_Wish] = []
        self._bytes_of_files: list[int] = []
        self._matching: Matching | None = None

    def compare(self, items_for: Callable[[Manifest], Mapping[str, object]]) -> str:
        """Compare items with the manifest, and open the files that this rank reads. Changes nothing.

        Returns the damage, the same on every rank, if another checkpoint may take this one's place; "" for none.
        """

        def match() -> _Wish:
            saved = self._held.opened
            if isinstance(saved, CheckpointError):
                return _Wish(damage=self._damage(saved))
            items = items_for(saved.manifest)
            check_items(items, self._verb)
            self._matching = match_items(self._ctx, saved, items, self._options)
            wanted = self._matching.wanted()
            try:
                saved.open_files(wanted)
            except CheckpointError as failure:
                return _Wish(damage=self._damage(failure))
            source = self._matching.source
            self._bytes_of_files = saved.bytes_of_files(wanted)
            shown = [] if self._ctx.comm.is_large else self._bytes_of_files
            sums = {key: own for key, (_, own) in source.bases.items()}
            return _Wish(shown, source.left, sums, node=self._held.node)

        self._wishes = agreed_values(self._ctx.comm, self._call("comparing"), match, _Wish)
        damage = self._of_all([wish.damage for wish in self._wishes])
        if self._options.strict and all(wish.left for wish in self._wishes):
            _check_taken([wish.left for wish in self._wishes])
        if self._matching is not None and not damage and any(wish.bases for wish in self._wishes):
            self._matching.compare_bases([wish.bases for wish in self._wishes])
        return damage

    def check_bytes(self) -> str:
        """Compare this rank's share of files with their digests. Changes nothing; returns and raises as `compare`."""
        if not self._verify:
            return ""
        saved = self._held.opened
        assert isinstance(saved, Saved)  # `compare` reported otherwise
        beside = [rank for rank, wish in enumerate(self._wishes) if wish.node == self._held.node]
        if not self._ctx.comm.is_large:
            readers = main_readers([self._wishes[rank].bytes_of_files for rank in beside], beside)
        elif self._held.node is not None:  # each checks all that it reads
            readers = [[self._ctx.rank] if nbytes else [] for nbytes in self._bytes_of_files]
        else:
            readers = agree_on_readers(self._ctx.comm, self._call("dividing"), self._bytes_of_files)

        def verify() -> str:
            try:
                saved.verify(self._spans(saved, readers))
            except CheckpointError as failure:
                return self._damage(failure)
            return ""

        return self._of_all(agreed_values(self._ctx.comm, self._call("checking"), verify, str))

    def apply(self) -> Loaded:
        """Read the tensors, then change the items. Mutates them; an error before `copying` leaves them unchanged."""
        matching = self._matching
        assert matching is not None
        applied: list[Change] = []
        try:
            with agreed(self._ctx.comm, self._call("applying")):
                changes = matching.read()
                apply_changes(changes)
                applied = changes
        except BaseException:
            undo_changes(applied)
            raise
        with agreed(self._ctx.comm, self._call("copying")):
            matching.finish()
        loaded = Loaded(matching.results(), self._held.place.path, matching.source.skipped.lines())
        if self._ctx.is_main_process:
            _report(self._verb, loaded)
        return loaded

    def _call(self, step: str) -> Call:
        return Call(f"{self._verb}: {step}", site=self._site)

    def _damage(self, failure: CheckpointError) -> str:
        """Return the damage of a checkpoint chosen as the newest, for another to replace it; raise for a named one."""
        if not self._held.is_newest:
            raise failure
        return str(failure)

    def _of_all(self, damages: list[str]) -> str:
        several = self._ctx.world_size > 1
        return "; ".join(f"rank {rank}: {text}" if several else text for rank, text in enumerate(damages) if text)

    def _spans(self, saved: Saved, readers: list[list[int]]) -> list[tuple[str, Span]]:
        """Divide the files to read among the ranks, each file among those that read most of it."""
        read = {name: ranks for name, ranks in zip(sorted(saved.manifest.files), readers, strict=True) if ranks}
        spans = {name: saved.manifest.files[name].spans() for name in read}
        mine = plan_checks({name: len(parts) for name, parts in spans.items()}, read, self._ctx.rank)
        return [(name, span) for name, share in mine.items() for span in spans[name][share.start : share.stop]]


def _report(verb: str, loaded: Loaded) -> None:
    """Log a load. A resumed run reports it on stderr too, unless the script configures logging."""
    logger = logging.getLogger("accel.checkpoint")
    if loaded.skipped:
        lines = "".join(f"\n  {line}" for line in loaded.skipped)
        logger.warning("%s was not loaded in full, as strict=False:%s", loaded.path, lines)
    logger.info("%s: loaded %s", verb, loaded.path)
    if verb == "resume":
        sys.audit("accel.checkpoint", str(loaded.path))  # for the launcher's last line
    if verb == "resume" and not logger.hasHandlers():
        print(f"accel: resumes from {loaded.path}", file=sys.stderr, flush=True)
