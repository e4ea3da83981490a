# SPDX-License-Identifier: Apache-2.0
"""Values of records that are no fields and never compared; and marks that guards put on records and tensors.

A block that replaces the values of tensors until its end marks the tensors and their memory, weakly: no call may save
or change them meanwhile. The memory is marked too, as a state dict holds other tensor objects over it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch

from accel.errors import StepError
from accel.tensors import local_part


@dataclasses.dataclass(frozen=True, init=False)
class Uncompared:
    """Values that are no fields, so that nothing compares, encodes or saves them.

    A subclass declares each as a `ClassVar` with its default. They go along where a record is copied, pickled or
    changed by `msgspec.structs.replace`; what is decoded has the defaults.
    """

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


# Marks that guards put on frozen records: by object identity, weakly, and no part of the record. A copy, or an equal
# record made afresh, is not marked. A record finds its own by its weak references, so that no context is needed.
Subject = Literal[
    "followed", "spent", "left", "watched", "passed", "broken off", "deferred", "replaced", "narrow", "noted",
    "stepped", "agreed", "axes", "cut", "advanced",
]  # fmt: skip


class Mark(weakref.ref[object]):
    """A mark on a record."""

    __slots__ = ("note", "owner", "subject")

    owner: Marks  # holds the mark
    subject: Subject  # name of the guard's fact
    note: object  # the rest of the fact


class Marks:
    """Marks of one owner. They end with the record, or with the owner."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[tuple[int, Subject], Mark] = {}

    def put(self, record: object, subject: Subject, note: object = None) -> None:
        """Mark a record, in place of an earlier mark of this owner and subject."""
        at = (id(record), subject)
        # Called before another record can have this id, as the memory is freed after.
        mark = Mark(record, lambda _: self._held.pop(at, None))
        mark.owner, mark.subject, mark.note = self, subject, note
        self._held[at] = mark

    def find(self, record: object, subject: Subject) -> Mark | None:
        """Return this owner's mark on a record."""
        return self._held.get((id(record), subject))

    def clear(self, subject: Subject) -> None:
        """Drop all marks of a subject."""
        self._held = {at: mark for at, mark in self._held.items() if at[1] != subject}

    def watch(self, record: object) -> None:
        """Make this owner the holder of marks that methods of a record put; the first owner stays."""
        if find_mark(record, "watched") is None:
            self.put(record, "watched")


def find_mark(record: object, subject: Subject) -> Mark | None:
    """Return a mark on a record, of any owner."""
    if weakref.getweakrefcount(record):  # 25 ns; most records have none
        for each in weakref.getweakrefs(record):
            if isinstance(each, Mark) and each.subject == subject:
                return each
    return None


def carry_mark(record: object, later: object, subject: Subject) -> None:
    """Put the mark of a record on a later one, too."""
    if (mark := find_mark(record, subject)) is not None:
        mark.owner.put(later, subject, mark.note)


class _Replacement(NamedTuple):
    """The note of a mark."""

    name: str  # name of the block's function
    line: str  # line that opens the block
    steps: bool  # whether the block itself steps the tensors


@contextlib.contextmanager
def replaced(tensors: Iterable[torch.Tensor], name: str, line: str, *, steps: bool = False) -> Generator[None]:
    """Mark tensors in this block, which replaces their values and puts them back at its end. Blocks may nest.

    Args:
        tensors: live tensors that get other values.
        name, line: name of the block's function and the line that opens it, for errors.
        steps: whether steps of the tensors belong to the block, so that only saves and loads are refused.
    """
    marks = Marks()
    held = list(tensors)
    memory = [each for each in map(_memory, held) if each is not None]
    for each in (*held, *memory):
        marks.put(each, "replaced", _Replacement(name, line, steps))
    try:
        yield
    finally:
        marks.clear("replaced")


def is_replaced(tensor: torch.Tensor) -> bool:
    """Return whether a block holds other values in a tensor."""
    return next(_blocks(tensor), None) is not None


def refuse_replaced(tensors: Iterable[torch.Tensor], call: str, where: str = "") -> None:
    """Raise `StepError` if a block holds other values in some of these tensors. For steps: no look at their memory.

    Args:
        tensors: live tensors that the call changes.
        call: name of the refused function.
        where: argument or item that holds the tensors.
    """
    tensors = list(tensors)
    if any(map(weakref.getweakrefcount, tensors)):  # 17 ns for each; most parameters have none
        _refuse((block for each in tensors for block in _blocks(each) if not block.steps), call, where)


def refuse_replaced_memory(tensors: Iterable[torch.Tensor], call: str, where: str = "") -> None:
    """Raise `StepError` as `refuse_replaced`, for saves and loads: looks at the memory of the tensors, too."""
    for each in tensors:
        _refuse(_blocks(each), call, where)
        if (memory := _memory(each)) is not None:
            _refuse(_blocks(memory), call, where)


def _refuse(blocks: Iterable[_Replacement], call: str, where: str) -> None:
    for block in blocks:
        raise StepError(
            f"the weights are replaced until the end of a block: leave {block.name} first",
            expected=f"{call} after the block `with {block.line}:`, which puts the weights back",
            got=f"{call} inside of it",
            where=where or call,
            fix=f"End the block `with {block.line}:` before the line that calls {call}.",
        )


def _blocks(record: object) -> Iterator[_Replacement]:
    for each in weakref.getweakrefs(record):
        # An error that someone keeps may hold a mark beyond its block: it counts while its owner has it.
        if (
            isinstance(each, Mark)
            and isinstance(each.note, _Replacement)
            and each.owner.find(record, "replaced") is each
        ):
            yield each.note


def _memory(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of this rank's part; None of a tensor without one, such as a sparse one."""
    part = local_part(tensor)
    try:
        return part.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
