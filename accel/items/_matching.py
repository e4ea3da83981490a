# SPDX-License-Identifier: Apache-2.0
"""Stored items beside live ones: all are compared, then read, then changed, or restored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from accel.checkpoint import Box, Item, MisfitError, Saved, held_box
from accel.context import DistContext
from accel.data import Cursor
from accel.errors import CheckpointError
from accel.items._bases import Sums, differing_bases
from accel.items._folder_files import FolderLoad
from accel.items._kinds import (
    Folder,
    Part,
    Stateful,
    are_numbers,
    is_staged,
    kind_of,
    type_name,
    with_engine_state,
    without_parts,
    without_wrappers,
)
from accel.items._module import ModuleLoad, ModuleState, module_states, parameter_names
from accel.items._optimizer import OptimizerLoad
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
    transformed_names,
)
from accel.items._stateful import StatefulLoad
from accel.items._value import ValueLoad
from accel.metrics import Metrics, StepStatistics
from accel.optim import Accumulation, parameters_of
from accel.parallel import ENGINES, LocalSgd, clear_gradients, clear_parameters, engine_loaded
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
        """Compare sharded frozen parameters with their digests, by the sums of all ranks; the same on every rank.

        Raises:
            CheckpointError: parameters differ; each is named.
        """
        source = self.source
        source.judge(differing_bases({key: stored for key, (stored, _) in source.bases.items()}, ranks))
        if source.problems:
            raise source.problems.error(source.saved.path)

    def read(self) -> list[Change]:
        """Read the wanted boxes; return the changes that can fail. Changes nothing.

        Raises:
            CheckpointError: a stored value is invalid.
        """
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
        """Make the changes that fail only with the disk: of tensors loaded in place, and of random streams.

        Raises:
            CheckpointError: a file can no longer be read.
        """
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
    """Compare a checkpoint's manifest with items. Changes nothing, reads no tensor.

    Raises:
        CheckpointError: the items do not fit, with every difference; or the manifest holds what `save_state` never
            writes.
        ConfigError: a `Part` of neither module nor optimizer, or a `TrainableOnly` of no module.
    """
    passed, stored = without_parts(items), saved.manifest.items
    whole: Mapping[str, object] = {}
    if ctx.settings.strategy in ENGINES:
        items = with_engine_state(ctx, items)
        whole = without_parts(items)
    live = without_wrappers(without_parts(items))
    modules = module_states(live)
    source = CheckpointSource(
        ctx=ctx,
        saved=saved,
        options=options,
        file_names=_file_names(saved, options),
        parameters=parameter_names(modules),
        parts={name for name, item in items.items() if isinstance(item, Part) or is_staged(ctx, item)},
        types=[*_OWN_RECORDS, *map(type, live.values())],
    )
    matching = Matching(source, passed, whole=whole)
    found = Problems()
    found.note(MISSING, (f"item {name}" for name in items.keys() - stored.keys()))
    found.note(UNASKED, stored.keys() - items.keys())
    source.judge(found)
    for name in sorted(live.keys() & stored.keys(), key=lambda name: (isinstance(live[name], Folder), name)):
        load = _load_of(name, live[name], stored[name], source, passed[name], modules)
        if load is None:
            continue
        if _same_kind(load, live[name]):
            load.compare()
        source.judge(load.problems)
        if not load.problems or isinstance(load, ModuleLoad):  # of a module, what fits is loaded
            matching.loads.append(load)
    if source.problems:
        raise source.problems.error(saved.path)
    values = [load.item for load in matching.loads if load.item.kind != "module" and not source.same_ranks]
    joins = any(joins_ranks(item, source.classes) for item in values)
    matching.rows = wanted_rows(ctx, saved, joins=joins)
    return matching


def apply_changes(changes: Sequence[Change]) -> None:
    """Make changes; undo all if one fails.

    Raises:
        CheckpointError: an object refused its state; `where` names the item.
    """
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


def drop_gradients(items: Iterable[object]) -> None:
    """Drop the gradients of modules and of optimizers' parameters. No communication."""
    for item in items:
        if isinstance(item, nn.Module):
            clear_gradients(item)
        elif isinstance(item, Optimizer):
            clear_parameters(parameters_of([item]))


def _file_names(saved: Saved, options: LoadOptions) -> dict[str, str]:
    """Return the names of modules' tensors in the file, by live name."""
    modules = tuple(f"{name}." for name, item in saved.manifest.items.items() if item.kind == "module")
    entries = {name: entry for name, entry in saved.entries.items() if name.startswith(modules)}
    if options.transform is not None:
        return transformed_names(entries, options.transform)
    return {name: name for name in entries}


def _load_of(
    name: str, live: object, item: Item, source: CheckpointSource, passed: object, modules: Mapping[str, ModuleState]
) -> ItemLoad | None:
    """Make the load of an item by the kind of the live one; None where a live None leaves it in the file."""
    if live is None and (item.kind != "value" or item.type == Folder.__qualname__):
        return None
    common: dict[str, Any] = {"name": name, "item": item, "source": source, "result": passed}
    common["problems"] = Problems(source.options.cast)
    if isinstance(live, nn.Module):
        return ModuleLoad(live=modules[name], **common)
    if isinstance(live, Optimizer):
        return OptimizerLoad(live=live, **common)
    if isinstance(live, Stateful) and item.kind == "stateful":
        return StatefulLoad(live=live, **common)
    if isinstance(live, Folder):
        return FolderLoad(live=live, **common)
    return ValueLoad(live=live, **common)


def _same_kind(load: ItemLoad, live: object) -> bool:
    """Return whether the live item has the stored one's kind and class; note a difference."""
    if live is None:
        return True  # a plain value of any class
    kind = kind_of(live)
    name = type_name(live)
    item = load.item
    if kind == item.kind == "optimizer" and _is_wrapper_name(item.type):
        return True
    named = kind != "module" and item.type != ""  # a module is its tensors, and other formats name no classes
    if kind == item.kind and (not named or name == item.type or are_numbers([name, item.type])):
        return True
    load.problems.wrong_type(f"item {load.name}", f"{kind} {name}", f"{item.kind} {item.type}")
    return False


def _is_wrapper_name(name: str) -> bool:
    """Return whether a name is the class of a wrapper, of Accelerate or Fabric, which older versions stored."""
    return name in ("AcceleratedOptimizer", "_FabricOptimizer") or name.startswith("Fabric")
