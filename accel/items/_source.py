# SPDX-License-Identifier: Apache-2.0
"""Shared by kinds of items: the record of a kind, the gathered parts of a save, a checkpoint next to the live items."""

from __future__ import annotations

import enum
import itertools
import operator
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeGuard, cast

import msgspec
import torch
from torch import nn

from accel.checkpoint._boxes import Box
from accel.checkpoint._encoding import Classes, Kept, Making, class_name, decode, is_record_class
from accel.checkpoint._live_tensors import held_box
from accel.checkpoint._manifest import Item, ItemKind, tensors_in
from accel.checkpoint._read import Saved
from accel.comm import Call, Comm, agreed
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.items._rng import Row, with_parts
from accel.storage import dtype_name
from accel.tensors import dtensor_like, is_dtensor, local_part


class Stored(msgspec.Struct, frozen=True):
    """A stored tensor of a module, for a `transform` that gives it another name, several, or none.

    Attributes:
        name: name in the file.
        dtype: torch's name, such as "float32".
        shape: shape of the whole tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


SaveTransform = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
LoadTransform = Callable[[Mapping[str, Stored]], Mapping[str, Stored]]


Facts = tuple[str, tuple[int, ...]]  # dtype and shape
Wanted = tuple[str, Box | None]  # a tensor's name, and the part that this rank reads; None for all of it

_NAMED_SINCE = 4  # since this format values name the classes of the records in them
_CPU = torch.device("cpu")

MISSING = "missing in the checkpoint"
UNEXPECTED = "in the checkpoint, but not in what was passed"
SHAPES = "of another shape (expected: the live one)"
TYPES = "of another type (expected: the live one)"
UNASKED = "items of the checkpoint that were not asked for"
_TITLES = (MISSING, UNEXPECTED, SHAPES, TYPES, UNASKED)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Differences to allow between a checkpoint and live items; see `load_state`."""

    strict: bool
    cast: bool
    transform: LoadTransform | None
    only: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class StateChange:
    """A change of a live object that runs code of others, and so can fail."""

    where: str  # the item, for errors
    apply: Callable[[], object]  # makes the change
    undo: Callable[[], object] | None  # puts the former state back; None where nothing can


def apply_changes(changes: Sequence[StateChange]) -> None:
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


def apply_on_all_ranks(comm: Comm, call: Call, find: Callable[[], Sequence[StateChange]]) -> None:
    """Make the changes that a function returns, on every rank or on none. A collective."""
    applied: Sequence[StateChange] = ()
    try:
        with agreed(comm, call):
            changes = find()
            apply_changes(changes)
            applied = changes
    except BaseException:
        _ = undo_changes(applied)
        raise


def undo_changes(changes: Sequence[StateChange]) -> bool:
    """Undo changes, the last first, also after a failure; return whether all were undone."""
    undone = True
    for change in reversed(changes):
        try:
            if change.undo is not None:
                change.undo()
        except Exception:
            undone = False
    return undone


@dataclass(slots=True)
class Problems:
    """A list that grows while one checkpoint is compared; empty means that it fits."""

    cast: bool = False  # whether another floating-point dtype fits, too
    found: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # differences, each under its title

    def __bool__(self) -> bool:
        return bool(self.found)

    def note(self, title: str, lines: Iterable[str]) -> None:
        """Note differences of one kind."""
        self.found += [(title, line) for line in lines]

    def compare_names(self, live: Set[str], stored: Set[str], prefix: str) -> None:
        """Note the names that only one side has."""
        self.note(MISSING, (prefix + name for name in live - stored))
        self.note(UNEXPECTED, (prefix + name for name in stored - live))

    def compare_tensor(self, name: str, live: Facts, stored: Facts) -> bool:
        """Note a difference in shape or dtype; return whether there is none."""
        same = live[0] == stored[0] or (self.cast and is_floating(live[0]) and is_floating(stored[0]))
        if live[1] != stored[1]:
            self.note(SHAPES, [f"{name}: expected {list(live[1])}, got {list(stored[1])}"])
        if not same:
            self.wrong_type(name, live[0], stored[0])
        return same and live[1] == stored[1]

    def wrong_type(self, name: str, expected: str, got: str) -> None:
        """Note a difference in kind."""
        self.note(TYPES, [f"{name}: expected {expected}, got {got}"])

    def lines(self) -> tuple[str, ...]:
        """Return each difference as a separate line."""
        return tuple(f"{title}: {line}" for title, line in self._sorted())

    def error(self, path: object) -> CheckpointError:
        """Make the error that lists them all."""
        text = ""
        for title, same in itertools.groupby(self._sorted(), key=lambda each: each[0]):
            text += f"\n  {title}:" + "".join(f"\n    {line}" for _, line in same)
        leave = ", ".join(f"{name}=None" for title, name in self._sorted() if title == UNASKED)
        return CheckpointError(
            "the checkpoint does not fit the objects passed; nothing has been changed" + text + "\n ",
            where=str(path),
            fix="Pass what was saved, built the same way, or strict=False to load what fits; cast=True converts dtypes."
            + (f" To leave an item in the file, pass None for it: dict(items, {leave})." if leave else ""),
        )

    def _sorted(self) -> list[tuple[str, str]]:
        return sorted(self.found, key=lambda each: (_TITLES.index(each[0]), each[1]))


@dataclass(frozen=True, slots=True)
class ModuleState:
    """A module's live state."""

    parameters: Mapping[str, torch.Tensor]  # the live parameters by name; tied ones under every name
    buffers: Mapping[str, torch.Tensor]  # the live buffers, likewise
    extras: Mapping[str, Any]  # values of get_extra_state(), by name
    owners: Mapping[str, nn.Module]  # the submodule of each extra state
    # Of each parameter that several stages of a pipeline have, its first name in the whole model.
    twins: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(kw_only=True, slots=True)
class Captured:
    """The gathered parts of one item, for a save."""

    modules: Mapping[str, ModuleState]  # states of all live modules, by item
    names: Mapping[int, str]  # names of parameters in the checkpoint, by `id`
    equal: dict[str, torch.Tensor]  # receives by name the tensors that are equal on several ranks
    loose: dict[str, torch.Tensor]  # receives other tensors by name; of copies the first rank's is saved
    kept: Kept  # receives records by path


@dataclass(kw_only=True)
class CheckpointSource:
    """One checkpoint, as this rank loads it."""

    ctx: DistContext  # context of the load
    saved: Saved  # the checkpoint
    options: LoadOptions  # options of the load
    file_names: dict[str, str]  # names of modules' tensors in the file, by live name
    parameters: Mapping[int, str]  # full names of the live modules' parameters, by `id`
    parts: Set[str]  # names of items that are `Part`s
    modules: Mapping[str, ModuleState]  # states of the live modules, by item
    types: Sequence[type]  # types of the live items and of accel's own records, by which stored records are made
    problems: Problems = field(default_factory=Problems)  # differences that are errors
    skipped: Problems = field(default_factory=Problems)  # differences that `strict=False` allows
    # Allowed differences of items with a summary, which the log has in place of them.
    counted: Problems = field(default_factory=Problems)
    summaries: list[str] = field(default_factory=list[str])  # a line for each item that was loaded in part
    flags: list[str] = field(default_factory=list[str])  # lines on flags of performance that stay the script's
    left: set[str] = field(default_factory=set[str])  # entries of `Part`s that this rank does not load
    # Stored digests and this rank's sums of sharded frozen parameters, by name.
    bases: dict[str, tuple[str, Any]] = field(default_factory=dict[str, tuple[str, Any]])
    # Rows of ranks, once they have been read: this rank's, or all of another number of ranks on rank 0.
    rows: Sequence[Row] = ()

    @property
    def row(self) -> Row | None:
        """This rank's row, if the run had as many ranks and it has been read."""
        return self.rows[0] if self.rows and self.same_ranks else None

    @property
    def same_ranks(self) -> bool:
        """Whether the run had as many ranks."""
        return self.saved.manifest.world_size == self.ctx.world_size

    def judge(self, found: Problems) -> None:
        """Take differences as errors, or as skipped unless the load is strict."""
        (self.problems if self.options.strict else self.skipped).found.extend(found.found)

    def judge_load(self, load: ItemLoad) -> None:
        """Judge the differences of an item; one with a summary is counted in the log."""
        if not load.summary:
            self.judge(load.problems)
            return
        self.counted.found.extend(load.problems.found)
        self.summaries.append(load.summary)

    def facts(self, key: str) -> Facts:
        """Return a stored tensor's dtype and shape."""
        entry = self.saved.entries[key]
        return entry.dtype, entry.shape

    def names_in(self, name: str, value: Any) -> set[str]:
        """Return the tensors that an item's value refers to; raises if it refers to other items' tensors."""
        found = tensors_in(value)
        for key in found:
            if key not in self.saved.entries or not belongs(key, {name}):
                raise CheckpointError("the stored value is not valid: $tensor", got=repr(key), where=f"item {name}")
        return found

    def want(self, keys: Iterable[str], live: Mapping[str, torch.Tensor]) -> list[Wanted]:
        """Return the boxes that this rank reads of stored tensors: the boxes of live namesakes, else full tensors."""
        wanted: list[Wanted] = []
        for key in keys:
            template = self._template(key, live)
            if template is None or not is_dtensor(template):
                wanted.append((key, None))
            elif (box := held_box(template, key)) is not None:
                wanted.append((key, box))
        return wanted

    def read_like(self, key: str, live: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a stored tensor in new memory: spread as its live namesake, else whole and on the CPU."""
        template = self._template(key, live)
        if template is None or not is_dtensor(template):
            return self.saved.read(key)
        part = torch.empty(local_part(template).shape, dtype=self.saved.stub(key).dtype)
        box = held_box(template, key)
        if box is not None and part.numel():
            self.saved.read_into(part, key, box)
        return dtensor_like(part, template, template.shape)

    def tensors(
        self, name: str, value: Any, live: Mapping[str, torch.Tensor], device: torch.device = _CPU
    ) -> dict[str, torch.Tensor]:
        """Read the tensors of a value, each to the device of its live namesake, others to `device`."""
        tensors: dict[str, torch.Tensor] = {}
        for key in self.names_in(name, value):
            read = self.read_like(key, live)
            namesake = live.get(key)
            if namesake is None:
                tensors[key] = read.to(device)
                continue
            if self.options.cast and read.is_floating_point() and namesake.is_floating_point():
                read = read.to(namesake.dtype)
            tensors[key] = read if is_dtensor(read) else read.to(namesake.device)
        return tensors

    def decode(self, path: str, value: Any, live: Mapping[str, torch.Tensor], kept: Kept) -> Any:
        """Make a value with tensors that nothing else shares."""
        return decode(value, f"item {path}", self.tensors(path, value, live), path, self.making(kept))

    def making(self, kept: Kept) -> Making:
        """Return the maker of records: in classes of live ones, which `kept` has by path, with this rank's parts."""
        return Making(
            kept=kept,
            classes={**self.classes, **named_classes(map(type, kept.values()))},
            own=lambda path, made: with_parts(made, path, kept.get(path), self.rows, same_ranks=self.same_ranks),
            exact=self.saved.manifest.format >= _NAMED_SINCE,
        )

    @cached_property
    def classes(self) -> Classes:
        """Classes of records and enums, by the names that they are stored under."""
        return named_classes(self.types)

    def _template(self, key: str, live: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        found = live.get(key)
        return found if found is not None and tuple(found.shape) == self.facts(key)[1] else None


@dataclass(kw_only=True, slots=True)
class ItemLoad(ABC):
    """One stored item and the live one; each kind of item implements comparing and reading."""

    name: str  # name in the checkpoint
    item: Item  # entry in the checkpoint
    source: CheckpointSource  # the checkpoint
    result: object  # its value in the result of `load_state`
    problems: Problems  # differences, found by `compare`
    wanted: list[Wanted] = field(default_factory=list[Wanted])  # entries that this rank reads
    # Live tensors, each with the name of the stored one to copy at the end.
    copies: list[tuple[torch.Tensor, str]] = field(default_factory=list[tuple[torch.Tensor, str]])
    summary: str = ""  # with strict=False, counts of what was loaded in part, for the log; "" for none

    @abstractmethod
    def compare(self) -> None:
        """Compare only by the manifest. Changes nothing, reads no tensor."""

    @abstractmethod
    def read(self) -> Sequence[StateChange]:
        """Read the wanted entries; return the changes that can fail. Changes nothing."""


class LoadFunction(Protocol):
    """A function, or class, that makes the load of an item."""

    def __call__(
        self, *, live: Any, name: str, item: Item, source: CheckpointSource, result: object, problems: Problems
    ) -> ItemLoad:
        """Pair a live item with the stored one; the arguments are the fields of `ItemLoad`. Compares nothing yet."""
        ...


class ItemHandler(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of item: how a live item of it is captured, compared, read, applied and joined.

    Attributes:
        kind: name of the kind in a manifest.
        stored_type: name in a manifest in place of the class's; "" for the class's. Distinguishes kinds of one name.
        takes: class of live items, or a function that takes an item; the first handler of the table that does has it.
        type_of: name of a live item's class, without wrappers.
        capture: item's name, live item, and what the save gathers: to its entry in the manifest.
        load: makes the load of a live item, which compares, reads and applies.
        fits: names of a live and a stored class: to whether one loads the other.
        join: item's name, and its encoded values by rank: to the value of the whole. None where no item is divided.
        is_part: whether a `Part` may hold one.
        is_staged: whether a pipeline divides a live item; None where none does.
        is_divided: whether ranks hold other parts of a live item for another reason; None where they never do.
        begin_again: drops gradients of before a load; None where there are none.
        tensors: lists the live tensors of an item, or those that an optimizer steps; None where its state shows them.
        loads_last: whether its changes come after other kinds' changes, as they are not undone.
        loads_partly: whether what fits is loaded where the rest does not, with strict=False.
    """

    kind: ItemKind
    stored_type: str = ""
    takes: type | Callable[[object], bool]
    type_of: Callable[[Any], str]
    capture: Callable[[str, Any, Captured], Item]
    load: LoadFunction
    fits: Callable[[str, str], bool] = operator.eq
    join: Callable[[str, Sequence[Any]], Any] | None = None
    is_part: bool = False
    is_staged: Callable[[DistContext, Any], bool] | None = None
    is_divided: Callable[[Any], bool] | None = None
    begin_again: Callable[[Any], None] | None = None
    tensors: Callable[[Any], Iterable[torch.Tensor]] | None = None
    loads_last: bool = False
    loads_partly: bool = False


def join_fields(_name: str, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the fields that ranks hold. Where several hold one, the lowest rank wins."""
    joined = dict[str, Any]()
    for fields in reversed(ranks):
        joined |= fields
    return joined


def named_classes(kinds: Iterable[type]) -> Classes:
    """Return classes of records and enums, and of their fields' annotations, by stored name."""
    seen = dict[type, None]()
    for kind in kinds:
        _add_classes(kind, seen)
    found = dict[str, tuple[type, ...]]()
    for kind in seen:
        found[class_name(kind)] = (*found.get(class_name(kind), ()), kind)
    return found


def _add_classes(hint: object, seen: dict[type, None]) -> None:
    """Add the records and enums in an annotation, and in their fields' annotations."""
    for part in typing.get_args(hint):
        _add_classes(part, seen)
    if not _has_own_class(hint) or hint in seen:
        return
    seen[hint] = None
    if not issubclass(hint, enum.Enum):
        try:
            hints = typing.get_type_hints(hint)
        except (NameError, TypeError, AttributeError):  # names that only a type checker sees
            hints = {}
        for annotation in hints.values():
            _add_classes(annotation, seen)


def _has_own_class(hint: object) -> TypeGuard[type[Any]]:
    return isinstance(hint, type) and (issubclass(hint, enum.Enum) or is_record_class(cast("type[Any]", hint)))


def facts(tensor: torch.Tensor) -> Facts:
    """Return a tensor's dtype and shape."""
    return dtype_name(tensor.dtype), tuple(tensor.shape)


def is_floating(dtype: str) -> bool:
    """Return whether a dtype's name is one of real floating-point numbers."""
    found = getattr(torch, dtype, None)
    return isinstance(found, torch.dtype) and found.is_floating_point


def belongs(key: str, inside: Set[str]) -> bool:
    """Return whether a name belongs to a value, or to something inside it."""
    return any(key == path or key.startswith((f"{path}.", f"{path}[")) for path in inside)


def fields_in(value: object, name: str) -> dict[str, Any]:
    """Return the encoded fields of an item by name."""
    if not isinstance(value, dict):
        raise CheckpointError("the stored value is not valid", got=type(value).__name__, where=f"item {name}")
    return cast("dict[str, Any]", value)
