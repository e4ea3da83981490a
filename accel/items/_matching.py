# SPDX-License-Identifier: Apache-2.0
"""Stored items beside live ones: all are compared, then read, then changed, or restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from accel.checkpoint import Box, MisfitError, Saved, held_box
from accel.context import DistContext
from accel.data import Cursor
from accel.errors import CheckpointError
from accel.items._bases import Sums, differing_bases
from accel.items._kinds import (
    drop_gradients,
    handler_of,
    staged_names,
    stored_handler,
    with_engine_state,
    without_parts,
)
from accel.items._module import module_states, parameter_names, transformed_names
from accel.items._rng import apply_rng, joins_ranks, read_rows, rehearse_rng, wanted_rows
from accel.items._source import (
    MISSING,
    UNASKED,
    Change,
    CheckpointSource,
    ItemLoad,
    LoadOptions,
    Problems,
    Wanted,
)
from accel.items._value import VALUE
from accel.metrics import Metrics, StepStatistics
from accel.optim import Accumulation
from accel.parallel import ENGINES, LocalSgd, engine_loaded
from accel.precision import LossScale
from accel.random import Key, RngState
from accel.tensors import local_part

_OWN_RECORDS = (
    Cursor,
    Accumulation,
    LossScale,
    LocalSgd,
    Metrics,
    StepStatistics,
    Key,
    RngState,
)  # made without a live one


@dataclass(slots=True)
class Matching:
    """A checkpoint that fits live items.

    Attributes:
        source: the checkpoint.
        passed: the caller's live items.
        loads: the items to load, in order of names; folders last, as what they load is not undone.
        rows: position of the rows of ranks that this rank reads.
        streams: this rank's random streams, once read.
        whole: items through which an engine's are loaded, by name.
    """

    source: CheckpointSource
    passed: Mapping[str, object]
    loads: list[ItemLoad] = field(default_factory=list[ItemLoad])
    rows: tuple[str, Box] | None = None
    streams: RngState | None = None
    whole: Mapping[str, object] = field(default_factory=dict[str, object])

    def wanted(self) -> list[Wanted]:
        """Return the boxes that this rank reads."""
        wanted = [each for load in self.loads for each in load.wanted]
        return wanted if self.rows is None else [*wanted, self.rows]

    def compare_bases(self, ranks: Sequence[Mapping[str, Sums]]) -> None:
        """Compare sharded frozen parameters with their digests, by the sums of all ranks; the same on every rank."""
        source = self.source
        source.judge(differing_bases({key: stored for key, (stored, _) in source.bases.items()}, ranks))
        if source.problems:
            raise source.problems.error(source.saved.path)

    def read(self) -> list[Change]:
        """Read the wanted boxes; return the changes that can fail. Changes nothing."""
        source, changes = self.source, list[Change]()
        source.rows = read_rows(source.saved, self.rows)
        for load in self.loads:
            try:
                changes += load.read()
            except MisfitError as misfit:
                source.problems.wrong_type(misfit.where, misfit.expected, misfit.got)
        if source.problems:
            raise source.problems.error(source.saved.path)
        self.streams = rehearse_rng(source.ctx, source.saved, source.row)
        return changes

    def finish(self) -> None:
        """Make the changes that fail only with the disk: of tensors loaded in place, and of random streams."""
        copies = ((local_part(live), key, held_box(live, key)) for load in self.loads for live, key in load.copies)
        parts = ((part, key, box) for part, key, box in copies if box is not None and part.numel())
        try:
            self.source.saved.read_all(parts)
        except CheckpointError as failure:
            raise CheckpointError(
                f"{failure.problem}; it was whole when it was checked, and parts of it have been loaded",
                expected=failure.expected,
                got=failure.got,
                where=failure.where,
                fix="Load it, or an older checkpoint, into the same items again before they are used.",
            ) from failure
        if self.whole:
            engine_loaded(self.source.ctx, self.passed, self.whole)
        apply_rng(self.source.ctx, self.source.saved, self.streams)
        own = self._replaced()
        ended = (item for name, item in self.passed.items() if name not in own or isinstance(item, nn.Module))
        drop_gradients(ended)  # of a window that ends here; those of an engine's optimizers are gone by now

    def results(self) -> dict[str, object]:
        """Return every item by name: live objects, and new records and values."""
        own = self._replaced()
        made = {load.name: load.result for load in self.loads if load.name not in own}
        return {name: self.passed[name] for name in sorted(self.passed)} | made

    def _replaced(self) -> set[str]:
        """Return the names of items that an engine loads through others."""
        return {name for name, item in self.whole.items() if item is not self.passed.get(name)}


def match_items(ctx: DistContext, saved: Saved, items: Mapping[str, object], options: LoadOptions) -> Matching:
    """Compare a checkpoint's manifest with items; the error lists every difference. Changes nothing."""
    passed, stored = without_parts(items), saved.manifest.items
    whole: Mapping[str, object] = {}
    if ctx.settings.strategy in ENGINES:
        items = with_engine_state(ctx, items)
        whole = without_parts(items)
    live = without_parts(items)
    modules = module_states(live)
    source = CheckpointSource(
        ctx=ctx,
        saved=saved,
        options=options,
        file_names=_file_names(saved, options),
        parameters=parameter_names(modules),
        parts=staged_names(ctx, items),
        modules=modules,
        types=[*_OWN_RECORDS, *map(type, live.values())],
    )
    matching = Matching(source, passed, whole=whole)
    found = Problems()
    found.note(MISSING, (f"item {name}" for name in items.keys() - stored.keys()))
    found.note(UNASKED, stored.keys() - items.keys())
    source.judge(found)
    for name in sorted(live.keys() & stored.keys(), key=lambda name: (handler_of(live[name]).loads_last, name)):
        if live[name] is None and stored_handler(stored[name]) is not VALUE:
            continue  # it stays in the file
        handler = handler_of(live[name])
        load = handler.load(
            live=live[name],
            name=name,
            item=stored[name],
            source=source,
            result=passed[name],
            problems=Problems(options.cast),
        )
        if _same_kind(load, live[name]):
            load.compare()
        source.judge(load.problems)
        if not load.problems or handler.loads_partly:
            matching.loads.append(load)
    if source.problems:
        raise source.problems.error(saved.path)
    values = [load.item for load in matching.loads if load.item.kind != "module" and not source.same_ranks]
    joins = any(joins_ranks(item, source.classes) for item in values)
    matching.rows = wanted_rows(ctx, saved, joins=joins)
    return matching


def apply_changes(changes: Sequence[Change]) -> None:
    """Make changes; undo all if one fails, with an error that names the item."""
    for at, change in enumerate(changes):
        try:
            change.apply()
        except Exception as error:
            undone = undo_changes(changes[: at + 1])
            lasting = ", ".join(each.where for each in changes[: at + 1] if each.undo is None)
            kept = "nothing has been changed" if undone else "it did not take its former state back either"
            if lasting and undone:
                kept = f"what the load of {lasting} did stays, the others have their former state back"
            raise CheckpointError(
                f"an object refused its state: {type(error).__name__}: {error}",
                where=change.where,
                fix=f"Build it the way it was when it was saved; {kept}.",
            ) from error


def undo_changes(changes: Sequence[Change]) -> bool:
    """Undo changes, the last first, also after a failure; return whether all were undone."""
    undone = True
    for change in reversed(changes):
        try:
            if change.undo is not None:
                change.undo()
        except Exception:
            undone = False
    return undone


def _file_names(saved: Saved, options: LoadOptions) -> dict[str, str]:
    """Return the names of modules' tensors in the file, by live name."""
    modules = tuple(f"{name}." for name, item in saved.manifest.items.items() if item.kind == "module")
    entries = {name: entry for name, entry in saved.entries.items() if name.startswith(modules)}
    if options.transform is not None:
        return transformed_names(entries, options.transform)
    return {name: name for name in entries}


def _same_kind(load: ItemLoad, live: object) -> bool:
    """Return whether the live item has the stored one's kind and class; note a difference."""
    if live is None:
        return True  # a plain value of any class
    item, handler = load.item, handler_of(live)
    name = handler.type_of(live)
    if item.kind == handler.kind and (not item.type or handler.fits(name, item.type)):  # other formats name no classes
        return True
    load.problems.wrong_type(f"item {load.name}", f"{handler.kind} {name}", f"{item.kind} {item.type}")
    return False
