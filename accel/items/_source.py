# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as items are loaded from it: its tensors and records beside the live ones, and where both differ."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import msgspec
import torch

from accel.checkpoint import (
    Box,
    Classes,
    Item,
    Kept,
    Making,
    Saved,
    TensorEntry,
    check_tensor,
    decode,
    held_box,
    named_classes,
    tensors_in,
)
from accel.comm import Call, Comm, exchange, reduce_ints
from accel.context import DistContext
from accel.errors import CheckpointError, ConfigError
from accel.items._kinds import is_floating
from accel.items._rng import Row, with_parts
from accel.storage import dtype_name
from accel.tensors import dtensor_like, is_dtensor, local_part

T = TypeVar("T")


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


def transformed_names(entries: Mapping[str, TensorEntry], transform: LoadTransform) -> dict[str, str]:
    """Return the names to load the tensors of modules by, each with its name in the file.

    Args:
        entries: the checkpoint's tensors of modules, aliases included.
        transform: the user's transform.

    Raises:
        ConfigError: the result is no dict of the function's arguments by name.
    """
    given = {name: Stored(name, each.dtype, each.shape) for name, each in entries.items()}
    found = _checked(transform(given), Stored, "load_state")
    for name, stored in found.items():
        if given.get(stored.name) != stored:
            raise _refusal("load_state", f"{stored!r} as {name!r}")
    return {name: stored.name for name, stored in found.items()}


def transformed_tensors(
    tensors: Mapping[str, torch.Tensor], modules: Iterable[str], transform: SaveTransform
) -> dict[str, torch.Tensor]:
    """Return the tensors to save of modules, by name.

    Args:
        tensors: tensors of modules, by name.
        modules: names of items.
        transform: the user's transform.

    Raises:
        CheckpointError: a tensor cannot be stored.
        ConfigError: the result is no dict of tensors by names that begin with a module's.
    """
    found = _checked(transform(tensors), torch.Tensor, "save_state")
    for name, tensor in found.items():
        if not name.startswith(tuple(f"{item}." for item in modules)):
            raise _refusal("save_state", f"the name {name!r}, which begins with no item that is a module")
        check_tensor(tensor, name)
    return {name: tensor.detach() if tensor.requires_grad else tensor for name, tensor in found.items()}


def _checked(found: object, kind: type[T], caller: str) -> dict[str, T]:
    """Check the result of a user's function: a dict of such values by name."""
    if not isinstance(found, Mapping):
        raise _refusal(caller, type(found).__name__)
    pairs = cast("Mapping[Any, Any]", found)
    for name, value in pairs.items():
        if not isinstance(name, str) or not isinstance(value, kind):
            raise _refusal(caller, f"{type(value).__name__} under {name!r}")
    return dict(pairs)


def _refusal(caller: str, got: str) -> ConfigError:
    return ConfigError(
        "a transform with an invalid result",
        expected="some of what it was given, by names that begin with an item's",
        got=got,
        where=f"{caller}, transform=",
        fix="Return a new dict, such as {name.replace('old.', 'new.'): value for name, value in tensors.items()}.",
    )


Facts = tuple[str, tuple[int, ...]]  # dtype and shape
Wanted = tuple[str, Box | None]  # a tensor's name, and the part that this rank reads; None for all of it

_NAMED_SINCE = 4  # the format whose values name the classes of the records in them
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


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a live object that runs code of others, and so can fail.

    Attributes:
        where: the item, for errors.
        apply: makes the change.
        undo: puts the former state back; None where nothing can.
    """

    where: str
    apply: Callable[[], object]
    undo: Callable[[], object] | None


@dataclass(slots=True)
class Problems:
    """A list that grows while one checkpoint is compared; empty means that it fits.

    Attributes:
        cast: whether another floating-point dtype fits, too.
        found: differences, each under its title.
    """

    cast: bool = False
    found: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

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
        """Return each difference as a line of its own."""
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


@dataclass(kw_only=True)
class CheckpointSource:
    """One checkpoint, as this rank loads it.

    Attributes:
        ctx, saved, options: context, checkpoint and options of the load.
        file_names: names of modules' tensors in the file, by live name.
        parameters: full names of the live modules' parameters, by `id`.
        parts: names of items that are `Part`s.
        types: types of the live items and of accel's own records, by which stored records are made.
        problems: differences that are errors.
        skipped: differences that `strict=False` allows.
        left: entries of `Part`s that this rank does not load.
        bases: stored digests and this rank's sums of sharded frozen parameters, by name.
        rows: rows of ranks, once they have been read: this rank's, or all of another number of ranks on rank 0.
    """

    ctx: DistContext
    saved: Saved
    options: LoadOptions
    file_names: dict[str, str]
    parameters: Mapping[int, str]
    parts: Set[str]
    types: Sequence[type]
    problems: Problems = field(default_factory=Problems)
    skipped: Problems = field(default_factory=Problems)
    left: set[str] = field(default_factory=set[str])
    bases: dict[str, tuple[str, Any]] = field(default_factory=dict[str, tuple[str, Any]])
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

    def facts(self, key: str) -> Facts:
        """Return a stored tensor's dtype and shape."""
        entry = self.saved.entries[key]
        return entry.dtype, entry.shape

    def names_in(self, name: str, value: Any) -> set[str]:
        """Return the tensors that an item's value refers to.

        Raises:
            CheckpointError: the value refers to tensors of others.
        """
        found = tensors_in(value)
        for key in found:
            if key not in self.saved.entries or not belongs(key, {name}):
                raise CheckpointError("not a stored value: $tensor", got=repr(key), where=f"item {name}")
        return found

    def want(self, keys: Iterable[str], live: Mapping[str, torch.Tensor]) -> list[Wanted]:
        """Return the boxes that this rank reads of stored tensors: those of live namesakes, else whole tensors."""
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
        """Make a value with tensors of its own."""
        return decode(value, f"item {path}", self.tensors(path, value, live), path, self.making(kept))

    def making(self, kept: Kept) -> Making:
        """Return the maker of records: in classes of live ones, with this rank's parts.

        Args:
            kept: live records of an item, by path.
        """
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
    """One stored item beside the live one; each kind of item implements comparing and reading.

    Attributes:
        name, item: name and entry in the checkpoint.
        source: the checkpoint.
        result: its value in the result of `load_state`.
        problems: differences, found by `compare`.
        wanted: entries that this rank reads.
        copies: live tensors, each with the name of the stored one to copy at the end.
    """

    name: str
    item: Item
    source: CheckpointSource
    result: object
    problems: Problems
    wanted: list[Wanted] = field(default_factory=list[Wanted])
    copies: list[tuple[torch.Tensor, str]] = field(default_factory=list[tuple[torch.Tensor, str]])

    @abstractmethod
    def compare(self) -> None:
        """Compare by the manifest alone. Changes nothing, reads no tensor."""

    @abstractmethod
    def read(self) -> Sequence[Change]:
        """Read the wanted entries; return the changes that can fail. Changes nothing."""


def facts(tensor: torch.Tensor) -> Facts:
    """Return a tensor's dtype and shape."""
    return dtype_name(tensor.dtype), tuple(tensor.shape)


def belongs(key: str, inside: Set[str]) -> bool:
    """Return whether a name is that of a value, or of something inside it."""
    return any(key == path or key.startswith((f"{path}.", f"{path}[")) for path in inside)


def fields_in(value: object, name: str) -> dict[str, Any]:
    """Return the encoded fields of an item by name.

    Raises:
        CheckpointError: the value has no fields.
    """
    if not isinstance(value, dict):
        raise CheckpointError("not a stored value", got=type(value).__name__, where=f"item {name}")
    return cast("dict[str, Any]", value)


_BITS = 8


def agree_on_readers(comm: Comm, call: Call, mine: Sequence[int]) -> list[list[int]]:
    """Return the `main_readers` of each file. A collective.

    Args:
        comm: an open handle.
        call: the expected call of all ranks.
        mine: bytes that this rank reads of each file.
    """
    most = reduce_ints(comm, call, mine, "max")
    reads = [bool(largest) and 2 * own >= largest for own, largest in zip(mine, most, strict=True)]
    places = torch.arange(_BITS, dtype=torch.uint8)
    padded = torch.zeros(-(-len(reads) // _BITS) * _BITS, dtype=torch.uint8)
    padded[: len(reads)] = torch.tensor(reads, dtype=torch.uint8)
    packed = (padded.view(-1, _BITS) << places).sum(1, dtype=torch.uint8)
    rows = torch.stack(exchange(comm, call, packed))
    bits = (rows.unsqueeze(-1) >> places & 1).flatten(1)
    return [[int(rank) for rank in bits[:, at].nonzero()] for at in range(len(reads))]
