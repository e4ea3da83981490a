# SPDX-License-Identifier: Apache-2.0
"""Values of records that are no fields and never compared; and marks that guards put on records and tensors."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Literal


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
    "followed", "spent", "left", "watched", "passed", "broken off", "deferred", "replaced", "narrow", "stepped"
]


class Mark(weakref.ref[object]):
    """A mark on a record.

    Attributes:
        owner: holds the mark.
        subject: name of the guard's fact.
        note: the rest of the fact.
    """

    __slots__ = ("note", "owner", "subject")

    owner: Marks
    subject: Subject
    note: object


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
