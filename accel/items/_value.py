# SPDX-License-Identifier: Apache-2.0
"""Plain values and records as items: made anew, in the classes of the live ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from accel.checkpoint import (
    Item,
    Kept,
    MisfitError,
    decode,
    encode,
    encode_record,
    is_record,
    make_record,
    record_tag,
    stored_names,
)
from accel.items._kinds import are_numbers, kind_of, type_name
from accel.items._source import Change, ItemLoad, Problems, fields_in


def capture_value(name: str, live: object, tensors: dict[str, torch.Tensor], kept: Kept) -> Item:
    """Return the entry of a record or plain value in a checkpoint.

    Args:
        name: name of the item.
        live: the value.
        tensors: receives the tensors in it by name.
        kept: receives the records in it by path, itself included.

    Raises:
        CheckpointError: a value in it cannot be stored.
    """
    if kind_of(live) == "record":
        return Item("record", type_name(live), record_tag(live) | encode_record(live, name, tensors, kept))
    return Item("value", type_name(live), encode(live, name, tensors, kept))


@dataclass(kw_only=True, slots=True)
class ValueLoad(ItemLoad):
    """A record or a plain value: the live one does not change, a new one is returned."""

    live: object
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    _kept: Kept = field(default_factory=Kept)

    def compare(self) -> None:
        """Compare the fields of a record; make a value without tensors at once, to find other differences."""
        if is_record(self.live):
            encode_record(self.live, self.name, self._tensors, self._kept)
            _compare_fields(self.name, self.live, fields_in(self.item.value, self.name), self.problems)
        else:
            encode(self.live, self.name, self._tensors, self._kept)
        names = self.source.names_in(self.name, self.item.value)
        self.wanted = self.source.want(names, self._tensors)
        if not names and not self.problems:
            self._make(self.problems)

    def read(self) -> Sequence[Change]:
        """Make the value, with this rank's parts of the records in it."""
        problems = Problems()
        value = self._make(problems)
        self.source.judge(problems)
        if not problems:
            self.result = value
        return []

    def _make(self, problems: Problems) -> object:
        try:
            if is_record(self.live):
                return self._make_record()
            value = self.source.decode(self.name, self.item.value, self._tensors, self._kept)
            _compare_class(self.name, self.live, value, problems)
        except MisfitError as misfit:
            problems.wrong_type(misfit.where, misfit.expected, misfit.got)
            return None
        return value

    def _make_record(self) -> object:
        """Make a record that is an item.

        Raises:
            MisfitError: the live record's class refuses the fields.
            CheckpointError: not a stored record.
        """
        name = self.name
        stored = fields_in(self.item.value, self.name)
        tag = record_tag(self.live)
        if any(stored.get(key) != value for key, value in tag.items()):
            raise MisfitError(name, expected=str(tag), got=str({key: stored.get(key) for key in tag}))
        tensors = self.source.tensors(name, stored, self._tensors, self.source.ctx.device)
        making = self.source.making(self._kept)
        fields = {
            key: decode(value, f"item {name}", tensors, f"{name}.{key}", making)
            for key, value in stored.items()
            if key not in tag
        }
        return making.own(name, make_record(type(self.live), fields, name, exact=making.exact))


def _compare_fields(name: str, live: object, fields: Mapping[str, Any], problems: Problems) -> None:
    """Note the fields in only one of record and checkpoint; a stored None may lack a live field."""
    names = {*stored_names(type(live)), *record_tag(live)}
    gone = {key for key in fields.keys() - names if fields[key] is None}
    if type(live).__module__.partition(".")[0] == "accel":
        names &= fields.keys()  # what an older accel did not know takes its default
    problems.compare_names(names, fields.keys() - gone, f"{name}.")


def _compare_class(name: str, live: object, value: object, problems: Problems) -> None:
    """Note a value of another class than the live one; a live None accepts any, a number any number."""
    classes = [torch.Tensor if isinstance(each, torch.Tensor) else type(each) for each in (live, value)]
    if live is not None and classes[0] is not classes[1] and not are_numbers(each.__name__ for each in classes):
        problems.wrong_type(f"item {name}", classes[0].__name__, classes[1].__name__)
