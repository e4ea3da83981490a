# SPDX-License-Identifier: Apache-2.0
"""Plain values and records as items: made anew, in the classes of the live ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accel.checkpoint._encoding import Kept, decode, encode, encode_record
from accel.checkpoint._manifest import Item
from accel.checkpoint._records import MisfitError, is_record, make_record, record_tag, stored_names
from accel.items._source import Captured, Change, ItemHandler, ItemLoad, Problems, fields_in
from accel.tensors import is_dtensor

_BITS = ("8", "16", "32", "64")
_NUMBERS = frozenset({"int", "float", "longdouble", *(kind + n for kind in ("int", "uint", "float") for n in _BITS)})


def _capture_record(name: str, live: object, to: Captured) -> Item:
    return Item("record", _type_of(live), record_tag(live) | encode_record(live, name, to.loose, to.kept))


def _capture_value(name: str, live: object, to: Captured) -> Item:
    return Item("value", _type_of(live), encode(live, name, to.loose, to.kept))


def _type_of(live: object) -> str:
    if isinstance(live, torch.Tensor) and is_dtensor(live):
        return "Tensor"  # what a mesh spreads, another mesh or none takes back
    return "Path" if isinstance(live, Path) else type(live).__qualname__  # a path of any system


def _fits(live: str, stored: str) -> bool:
    return live == stored or _are_numbers([live, stored])


def _are_numbers(type_names: Iterable[str]) -> bool:
    """Return whether all classes are of real numbers: a saved 0 may have become 0.5."""
    return _NUMBERS.issuperset(type_names)


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
        """Make a record that is an item; raises `MisfitError` if the live record's class refuses the fields."""
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


RECORD = ItemHandler(
    kind="record", takes=is_record, type_of=_type_of, capture=_capture_record, load=ValueLoad, fits=_fits
)
VALUE = ItemHandler(kind="value", takes=object, type_of=_type_of, capture=_capture_value, load=ValueLoad, fits=_fits)


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
    if live is not None and classes[0] is not classes[1] and not _are_numbers(each.__name__ for each in classes):
        problems.wrong_type(f"item {name}", classes[0].__name__, classes[1].__name__)
