# SPDX-License-Identifier: Apache-2.0
"""`load_state`: all ranks compare, check bytes, read and apply, and agree after each step."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from accel.checkpoint._boxes import Box, plan_checks
from accel.checkpoint._hosts import hold_on_hosts
from accel.checkpoint._live_tensors import held_box
from accel.checkpoint._manifest import Manifest
from accel.checkpoint._read import Held, Saved, SkippedCheckpoints, divide_files, hold_newest
from accel.checkpoint._records import MisfitError
from accel.comm import Call, agreed, agreed_values, call_site
from accel.context import DistContext, context_first
from accel.errors import CheckpointError
from accel.items._bases import Sums, differing_bases
from accel.items._kinds import (
    begin_again,
    check_items,
    chosen_items,
    handler_of,
    refuse_replaced_items,
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
    CheckpointSource,
    ItemLoad,
    LoadOptions,
    LoadTransform,
    Problems,
    StateChange,
    Wanted,
    apply_on_all_ranks,
)
from accel.items._values import VALUE
from accel.loop_state import Accumulation, Cursor, LossScale
from accel.metrics import Metrics, StepStatistics
from accel.parallel import LocalSgd
from accel.parallel._engines import ENGINES, engine_loaded
from accel.random import Key, RngState
from accel.storage import RemotePath, Span, as_place, folder_of, lag_of
from accel.system import write_error
from accel.tensors import local_part

# made without a live one
_OWN_RECORDS = (Cursor, Accumulation, LossScale, LocalSgd, Metrics, StepStatistics, Key, RngState)


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
    only: Sequence[str] | None = None,
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
        strict: whether any difference is an error. Else modules are loaded by tensor, optimizers by parameter and by
            group, and other items as a whole, where they fit; differences are in the result, and logged by
            `accel.checkpoint`.
        cast: whether floating-point tensors may differ in dtype; stored ones are converted to the live dtype, and so is
            optimizer state in its parameter's dtype. Devices may always differ.
        transform: maps the modules' stored tensors, by name, to the names to load them by; a pure function. Parameters
            of optimizers follow.
        only: names of the items to load, such as ("model",); None for all. Other items and the random streams stay as
            they are, and what else the checkpoint holds stays in the file.

    Returns:
        Every item: the live objects, and new records and values; with `path` and `skipped`.

    Raises:
        CheckpointError: the checkpoint is missing, deleted, damaged, half-written or of a newer format, or does not
            fit; every difference is listed. The same on every rank. Nothing has been changed, unless the disk fails
            after all checks, which the error reports.
        ConfigError: no items, a name that is no identifier, a name in `only` of no item, or a wrong result of the
            transform.
        NonFiniteError: a gradient of a deferred step was not finite; nothing has been changed, and a second call loads.
        StepError: a block, such as `Ema.applied_to`, has replaced an item's weights; nothing has been changed.

    Examples:
        >>> path = accel.save_state(ctx, "runs/demo", {"model": model, "best": 0.25}, step=3)
        >>> loaded = accel.load_state(ctx, path, {"model": model, "best": 0.0})
        >>> loaded["best"]
        0.25
    """
    options = LoadOptions(strict, cast, transform, only)
    loaded = load_newest(ctx, path, items, verify=verify, options=options, site=call_site())
    if loaded is None:
        raise CheckpointError(
            "the folder holds no checkpoint",
            expected="a folder that save_state has written to, or a checkpoint's own",
            where=str(path),
            fix=f"Check the path: it must be on a file system that every node shares.{lag_of(path)}",
        )
    return loaded


def load_newest(
    ctx: DistContext,
    path: str | os.PathLike[str] | RemotePath,
    items: Mapping[str, object],
    more_for: Callable[[Manifest], Mapping[str, object]] | None = None,
    *,
    verify: bool = True,
    options: LoadOptions,
    site: str,
    verb: str = "load_state",
) -> Loaded | None:
    """Load as `load_state`, into items and more that depend on the manifest; None where there is no checkpoint. Every
    rank calls `more_for` with the agreed manifest, and again if another checkpoint takes its place."""
    ctx.comm.settle()  # the error of a deferred step is not lost with the state that it left
    folder, per_host, error, chosen = as_place(""), False, None, items
    try:
        folder, per_host = folder_of(path)
        chosen = chosen_items(items, options.only)
        refuse_replaced_items(chosen, f"accel.{verb}")
    except Exception as failure:
        error = failure
    part = "" if options.only is None or error is not None else f"\nonly {' '.join(chosen)}"
    call = Call(verb, f"verify {verify}\nstrict {options.strict}{part}", site)
    hold = hold_on_hosts if per_host else hold_newest
    skipped = SkippedCheckpoints()
    while True:
        with hold(ctx, folder, call, skipped, error) as held:
            if held is None:
                return None
            loading = _Loading(ctx, held, verify, options, site, verb)
            damage = loading.compare(items, more_for) or loading.check_bytes()
            if not damage:
                loaded = loading.apply()
                others = {name: item for name, item in items.items() if name not in loaded}  # left alone by `only`
                return Loaded({**loaded, **others}, loaded.path, loaded.skipped)
            if held.is_own_choice:
                skipped.add_held(held, damage)


class _Request(msgspec.Struct, frozen=True):
    """A rank's intention."""

    # Bytes to read of each file; empty in a large group, where they would be most of the message.
    bytes_of_files: list[int] = []
    left: set[str] = set()  # entries of `Part`s that this rank does not load
    bases: dict[str, Sums] = {}  # sums of sharded frozen parameters, by name
    damage: str = ""  # reason why this rank cannot read a replaceable checkpoint; "" for none
    node: int | None = None  # as in `Held`


class _Loading:
    """One checkpoint on its way into items. Each method is a collective; all of it happens, or nothing."""

    def __init__(self, ctx: DistContext, held: Held, verify: bool, options: LoadOptions, site: str, verb: str) -> None:
        self._ctx = ctx
        self._held = held
        self._verify = verify
        self._options = options
        self._site = site
        self._verb = verb
        self._requests: list[_Request] = []
        self._bytes_of_files: list[int] = []
        self._matching: Matching | None = None

    def compare(self, passed: Mapping[str, object], more_for: Callable[[Manifest], Mapping[str, object]] | None) -> str:
        """Compare items with the manifest, and open the files that this rank reads. Changes nothing. Returns the
        damage, the same on every rank, if another checkpoint may take this one's place; "" for none."""

        def match() -> _Request:
            saved = self._held.opened
            if isinstance(saved, CheckpointError):
                return _Request(damage=self._damage(saved))
            items = passed if more_for is None else {**passed, **more_for(saved.manifest)}
            check_items(items, self._verb)
            self._matching = match_items(self._ctx, saved, items, self._options)
            wanted = self._matching.wanted()
            try:
                saved.open_files(wanted)
            except CheckpointError as failure:
                return _Request(damage=self._damage(failure))
            source = self._matching.source
            self._bytes_of_files = saved.bytes_of_files(wanted)
            shown = [] if self._ctx.comm.is_large else self._bytes_of_files
            sums = {key: own for key, (_, own) in source.bases.items()}
            return _Request(shown, source.left, sums, node=self._held.node)

        self._requests = agreed_values(self._ctx.comm, self._call("comparing"), match, _Request)
        damage = self._of_all([request.damage for request in self._requests])
        if self._options.strict and all(request.left for request in self._requests):
            _check_taken([request.left for request in self._requests])
        if self._matching is not None and not damage and any(request.bases for request in self._requests):
            self._matching.compare_bases([request.bases for request in self._requests])
        return damage

    def check_bytes(self) -> str:
        """Compare this rank's share of files with their digests. Changes nothing; returns and raises as `compare`."""
        if not self._verify:
            return ""
        saved = self._held.opened
        assert isinstance(saved, Saved)  # `compare` reported otherwise
        statements = [(request.node, request.bytes_of_files) for request in self._requests]
        readers = divide_files(self._ctx.comm, self._call("dividing"), self._held, self._bytes_of_files, statements)

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
        apply_on_all_ranks(self._ctx.comm, self._call("applying"), matching.read)
        with agreed(self._ctx.comm, self._call("copying")):
            matching.finish()
        source = matching.source
        skipped = Problems(found=[*source.skipped.found, *source.counted.found]).lines()
        loaded = Loaded(matching.results(), self._held.place.path, skipped)
        for record in loaded.values():
            # A TrainState's methods have no context: guards find this one's marks by the loss scale.
            if isinstance(scaler := getattr(record, "scaler", None), LossScale):
                self._ctx.comm.marks.watch(scaler)
        if self._ctx.is_main_process:
            _report(self._verb, loaded, [*source.skipped.lines(), *source.summaries], source.flags)
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


@dataclass(slots=True)
class Matching:
    """A checkpoint that fits live items."""

    source: CheckpointSource  # the checkpoint
    passed: Mapping[str, object]  # the caller's live items
    # The items to load, in order of names; folders last, as what they load is not undone.
    loads: list[ItemLoad] = field(default_factory=list[ItemLoad])
    rows: tuple[str, Box] | None = None  # position of the rows of ranks that this rank reads
    streams: RngState | None = None  # this rank's random streams, once read
    # Items through which an engine's are loaded, by name.
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

    def read(self) -> list[StateChange]:
        """Read the wanted boxes; return the changes that can fail. Changes nothing."""
        source, changes = self.source, list[StateChange]()
        source.rows = read_rows(source.saved, self.rows)
        for load in self.loads:
            try:
                changes += load.read()
            except MisfitError as misfit:
                source.problems.wrong_type(misfit.where, misfit.expected, misfit.got)
        if source.problems:
            raise source.problems.error(source.saved.path)
        if source.options.only is None:
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
                f"{failure.problem}; it was complete when it was checked, and parts of it have been loaded",
                expected=failure.expected,
                got=failure.got,
                where=failure.where,
                fix="Load it, or an older checkpoint, into the same items again before they are used.",
            ) from failure
        if self.whole:
            engine_loaded(self.source.ctx, self.passed, self.whole)
        if self.source.options.only is None:
            apply_rng(self.source.ctx, self.source.saved, self.streams)
        own = self._replaced()
        ended = (item for name, item in self.passed.items() if name not in own or isinstance(item, nn.Module))
        begin_again(ended)  # of a window that ends here; the gradients of an engine's optimizers are gone by now

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
    stored = saved.manifest.items
    passed = without_parts(chosen_items(items, options.only))
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
    found.note(MISSING, (f"item {name}" for name in passed.keys() - stored.keys()))
    found.note(UNASKED, stored.keys() - items.keys() if options.only is None else ())
    source.judge(found)
    for name in sorted(passed.keys() & stored.keys(), key=lambda name: (handler_of(live[name]).loads_last, name)):
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
        same = _same_kind(load, live[name])
        if same:
            load.compare()
        source.judge_load(load)
        if not load.problems or (same and handler.loads_partly):
            matching.loads.append(load)
    if source.problems:
        raise source.problems.error(saved.path)
    values = [load.item for load in matching.loads if load.item.kind != "module" and not source.same_ranks]
    joins = any(joins_ranks(item, source.classes) for item in values)
    matching.rows = wanted_rows(ctx, saved, joins=joins)
    return matching


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


def _check_taken(left: Sequence[Set[str]]) -> None:
    """Raise `CheckpointError` unless some rank loads each entry of `Part`s; `left` has those it does not, by rank."""
    if lost := sorted(name for name in left[0] if all(name in other for other in left)):
        raise CheckpointError(
            "stored, but in no rank's part:" + "".join(f"\n  {name}" for name in lost),
            fix="Build the parts so that together they are the full model, or pass strict=False.",
        )


def _report(verb: str, loaded: Loaded, skipped: Sequence[str], flags: Sequence[str]) -> None:
    """Log a load, and report it on stderr unless the script configures logging."""
    logger = logging.getLogger("accel.checkpoint")
    if skipped:
        lines = "".join(f"\n  {line}" for line in skipped)
        logger.warning("%s was not loaded in full, as strict=False:%s", loaded.path, lines)
    for line in flags:
        logger.info(line)
    logger.info("%s: loaded %s", verb, loaded.path)
    resumes = verb == "resume" or any(_is_position(value) for value in loaded.values())
    if resumes:
        sys.audit("accel.checkpoint", str(loaded.path))  # for the launcher's last line
    if not logger.hasHandlers():
        write_error(f"accel: {'resumes from' if resumes else 'loaded'} {loaded.path}\n")


def _is_position(value: object) -> bool:
    """Return whether a value is the position of a run: a cursor, or a record with one."""
    return isinstance(value if isinstance(value, Cursor) else getattr(value, "cursor", None), Cursor)
