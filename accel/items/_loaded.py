# SPDX-License-Identifier: Apache-2.0
"""The steps of loading: all ranks compare, check bytes, read and apply, and agree after each step."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from accel.checkpoint import Held, Manifest, Saved, plan_checks, settle
from accel.comm import Call
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.items._gradients import drop_gradients
from accel.items._items import check_items
from accel.items._loading import rollback, try_risky
from accel.items._parts import check_taken
from accel.items._restore import LoadOptions, Matching, finish
from accel.storage import RemotePath, Span


class Loaded(dict[str, Any]):
    """The items that `load_state` returns, by name.

    Attributes:
        path: the checkpoint's folder, the same on every rank.
        skipped: what did not fit, a line each; empty unless `strict=False`.
    """

    def __init__(self, values: Mapping[str, object], path: Path | RemotePath, skipped: tuple[str, ...] = ()) -> None:
        super().__init__(values)
        self.path = path
        self.skipped = skipped


class _Wish(msgspec.Struct, frozen=True):
    """A rank's intention.

    Attributes:
        bytes_of_files: how much of each file it reads.
        left: names that it leaves of `Part`s.
        damage: why it cannot read a checkpoint that another may replace; "" if it can.
    """

    bytes_of_files: list[int] = []
    left: set[str] = set()
    damage: str = ""


class Loading:
    """One checkpoint on its way into items. Each method is a collective; all of it happens, or nothing."""

    def __init__(self, ctx: DistContext, held: Held, verify: bool, options: LoadOptions, site: str, verb: str) -> None:
        self._ctx, self._held, self._options = ctx, held, options
        self._verify, self._site, self._verb = verify, site, verb
        self._wishes: list[_Wish] = []
        self._matching: Matching | None = None

    def compare(self, items_for: Callable[[Manifest], Mapping[str, object]]) -> str:
        """Compare items with the manifest, and open the files that this rank reads. Changes nothing.

        Args:
            items_for: gives the live items for a manifest.

        Returns:
            The damage, if another checkpoint may take this one's place; "" for none. The same on every rank.

        Raises:
            CheckpointError: the items do not fit, or there is damage.
            ConfigError: the items are none.
        """
        error, wish = None, _Wish()
        try:
            saved = self._held.opened
            if isinstance(saved, CheckpointError):
                wish = self._damaged(saved)
            else:
                items = items_for(saved.manifest)
                check_items(items, self._verb)
                self._matching = Matching(self._ctx, saved, items, self._options)
                self._matching.compare()
                wish = self._open(saved, self._matching)
        except Exception as failure:
            error = failure
        self._wishes = settle(self._ctx, Call(f"{self._verb}: comparing", site=self._site), error, wish, _Wish)
        return self._of_all([wish.damage for wish in self._wishes])

    def check_bytes(self) -> str:
        """Compare this rank's share of the files with their digests. Changes nothing; returns as `compare` does.

        Raises:
            CheckpointError: there is damage, or ranks leave the same of `Part`s.
        """
        error, damage, saved = None, "", self._held.opened
        assert isinstance(saved, Saved)  # compare has told otherwise
        try:
            if self._options.strict:
                check_taken([wish.left for wish in self._wishes])
            if self._verify:
                try:
                    saved.verify(self._spans(saved))
                except CheckpointError as failure:
                    damage = self._damaged(failure).damage
        except CheckpointError as failure:
            error = failure
        return self._of_all(settle(self._ctx, Call(f"{self._verb}: checking", site=self._site), error, damage, str))

    def apply(self) -> Loaded:
        """Read the tensors, then change the items. Mutates them.

        Raises:
            CheckpointError: something is not what was saved, and nothing has changed; or the disk failed since.
        """
        saved, matching, verb, site = self._held.opened, self._matching, self._verb, self._site
        assert isinstance(saved, Saved)
        assert matching is not None
        error, undo, rng = None, [], None
        try:
            rng = matching.read()
            undo = try_risky(matching.changes)
        except Exception as failure:
            error = failure
        try:
            settle(self._ctx, Call(f"{verb}: applying", site=site), error, b"", bytes)
        except BaseException:
            rollback(undo)
            raise
        try:
            finish(self._ctx, saved, matching.changes, rng)
            drop_gradients(matching.changes.values)  # of a window that ends here
        except CheckpointError as failure:
            error = _half_loaded(failure)
        settle(self._ctx, Call(f"{verb}: copying", site=site), error, b"", bytes)
        loaded = Loaded(matching.changes.values, self._held.place.path, matching.skipped.lines())
        if loaded.skipped and self._ctx.is_main_process:
            text, lines = (
                "%s was not loaded in full, as strict=False:%s",
                "".join(f"\n  {line}" for line in loaded.skipped),
            )
            logging.getLogger("accel.checkpoint").warning(text, self._held.place, lines)
        if self._ctx.is_main_process:
            _report(self._verb, self._held.place)
        return loaded

    def _open(self, saved: Saved, matching: Matching) -> _Wish:
        try:
            saved.open_files(matching.changes.wanted)
        except CheckpointError as failure:
            return self._damaged(failure)
        return _Wish(saved.bytes_of_files(matching.changes.wanted), matching.left)

    def _damaged(self, failure: CheckpointError) -> _Wish:
        """Let another checkpoint take the place of one that was chosen as the newest; raise for one that was named."""
        if not self._held.is_newest:
            raise failure
        return _Wish(damage=str(failure))

    def _of_all(self, damages: list[str]) -> str:
        several = self._ctx.world_size > 1
        return "; ".join(f"rank {rank}: {text}" if several else text for rank, text in enumerate(damages) if text)

    def _spans(self, saved: Saved) -> list[tuple[str, Span]]:
        """Divide the files that are read among the ranks, each among those that read most of it."""
        spans, readers = dict[str, list[Span]](), dict[str, list[int]]()
        for at, name in enumerate(sorted(saved.manifest.files)):
            if most := max(wish.bytes_of_files[at] for wish in self._wishes):
                spans[name] = saved.manifest.files[name].spans()
                readers[name] = [rank for rank, wish in enumerate(self._wishes) if 2 * wish.bytes_of_files[at] >= most]
        mine = plan_checks({name: len(parts) for name, parts in spans.items()}, readers, self._ctx.rank)
        return [(name, span) for name, share in mine.items() for span in spans[name][share.start : share.stop]]


def _report(verb: str, path: object) -> None:
    """Log a load. A run that goes on from a checkpoint shows that on stderr too, unless the script logs by itself."""
    logger = logging.getLogger("accel.checkpoint")
    logger.info("%s: loaded %s", verb, path)
    if verb == "resume" and not logger.hasHandlers():
        print(f"accel: resumes from {path}", file=sys.stderr, flush=True)


def _half_loaded(failure: CheckpointError) -> CheckpointError:
    return CheckpointError(
        f"{failure.problem}; it was whole when it was checked, and parts of it have been loaded",
        expected=failure.expected,
        got=failure.got,
        where=failure.where,
        fix="Load it, or an older checkpoint, into the same items again before they are used.",
    )
