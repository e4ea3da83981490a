# SPDX-License-Identifier: Apache-2.0
"""Values, records and objects with a state as items: values and records are made anew, objects load their state.

An optimizer with a state dict in another form than torch's is such an object.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.lr_scheduler import LRScheduler

from accel.checkpoint._encoding import Kept, decode, encode, encode_record
from accel.checkpoint._manifest import Item, is_list, is_object
from accel.checkpoint._records import MisfitError, is_record, make_record, record_tag, stored_names
from accel.comm import refuse_replaced_memory
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.items._source import Captured, ItemHandler, ItemLoad, Problems, StateChange, facts, fields_in, join_fields
from accel.parallel._leftovers import clear_parameters
from accel.tensors import dtensor_like, is_dtensor, local_part, parameters_of

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

    def read(self) -> Sequence[StateChange]:
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


@runtime_checkable
class Stateful(Protocol):
    """An object that returns its state as plain values and tensors, and loads it in place."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Load a state from `state_dict`."""
        ...


def _capture_stateful(name: str, live: Stateful, to: Captured) -> Item:
    """Return an object's entry in a checkpoint."""
    if isinstance(live, torch.optim.Optimizer) and any(map(is_dtensor, parameters_of([live]))):
        raise _divided(name, "sharded parameters")
    return Item("stateful", type(live).__qualname__, encode(live.state_dict(), name, to.loose, to.kept))


def _is_staged(ctx: DistContext, live: Stateful) -> bool:
    """Raise for an optimizer that a pipeline divides."""
    if isinstance(live, torch.optim.Optimizer) and ctx.axis("pp").size > 1:
        raise _divided(type(live).__name__, "a pipeline")
    return False


def _divided(where: str, got: str) -> CheckpointError:
    """Return the error for an optimizer that does not keep state by parameter."""
    return CheckpointError(
        "an optimizer with a state dict that is not in torch's form is divided among ranks",
        expected="a state dict with state and param_groups, as torch's, which belong to parameters by their positions",
        got=got,
        where=where,
        fix='Replicate the parameters, as by strategy="ddp", or let state_dict() return torch\'s form.',
    )


def _drop_gradients(live: Stateful) -> None:
    if isinstance(live, torch.optim.Optimizer):
        clear_parameters(parameters_of([live]))


@dataclass(kw_only=True, slots=True)
class StatefulLoad(ItemLoad):
    """An object that loads its state by `load_state_dict`."""

    live: Stateful
    _before: dict[str, Any] = field(default_factory=dict[str, Any])
    _stored: Any = None
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    _kept: Kept = field(default_factory=Kept)

    def compare(self) -> None:
        """Compare the tensors in both states, and the groups of schedulers; the object itself judges the rest."""
        self._before = self.live.state_dict()
        encode(self._before, self.name, self._tensors, self._kept)
        refuse_replaced_memory(self._tensors.values(), "accel.load_state", f"item {self.name}")
        self._stored = self._own_part() if self.name in self.source.parts else self.item.value
        if isinstance(self.live, LRScheduler) and not self.source.options.strict:
            old = _groups_of(self._stored)
            now = _groups_of(self._before)
            if old != now:
                self.source.skipped.wrong_type(f"{self.name}: values of groups", f"{now} groups", f"{old} groups")
        names = self.source.names_in(self.name, self._stored)
        self.wanted = self.source.want(names, self._tensors)
        for key in names & self._tensors.keys():
            if self._tensors[key].numel():  # what is empty now has yet to grow
                self.problems.compare_tensor(key, facts(self._tensors[key]), self.source.facts(key))

    def read(self) -> Sequence[StateChange]:
        """Make the state."""
        state = self.source.decode(self.name, self._stored, self._tensors, self._kept)
        if isinstance(self.live, LRScheduler) and not self.source.options.strict:
            state = _with_live_groups(state, self._before)
        put = self.live.load_state_dict
        is_part = self.name in self.source.parts
        before = _copies(self._before) if is_part else copy.deepcopy(self._before)
        return [StateChange(f"item {self.name}", partial(put, state), partial(put, before))]

    def _own_part(self) -> dict[str, Any]:
        """Return the stored values of a `Part` that this rank holds."""
        stored = fields_in(self.item.value, self.name)
        self.source.left |= {f"{self.name}.{key}" for key in stored.keys() - self._before.keys()}
        own = {key: value for key, value in stored.items() if key in self._before}
        self.problems.compare_names(self._before.keys(), own.keys(), f"{self.name}.")
        return own


STATEFUL = ItemHandler(
    kind="stateful",
    takes=Stateful,
    type_of=lambda live: type(live).__qualname__,
    capture=_capture_stateful,
    load=StatefulLoad,
    join=join_fields,
    is_part=True,
    is_staged=_is_staged,
    begin_again=_drop_gradients,
)


def _with_live_groups(stored: dict[str, Any], live: dict[str, Any]) -> dict[str, Any]:
    """Return a scheduler's stored state, with the live lists of a value for each group where the number differs."""
    sizes = [_groups_of(stored), _groups_of(live)]
    found = dict(stored)
    for key in stored.keys() & live.keys():
        values = stored[key], live[key]
        if not all(map(is_list, values)):
            continue
        if [len(each) for each in values] == sizes and sizes[0] != sizes[1]:
            found[key] = live[key]
        elif all(is_object(each) for value in values for each in value):  # schedulers inside of one
            found[key] = [_with_live_groups(*pair) for pair in zip(*values, strict=False)]
    return found


def _groups_of(state: Any) -> int:
    """Return the number of parameter groups of a scheduler's state."""
    rates = state.get("_last_lr") if is_object(state) else None
    return len(rates) if is_list(rates) else 0


def _copies(state: dict[str, Any]) -> dict[str, Any]:
    """Return copies of the values of a `Part`: tensors without the memory around them, DTensors on the same mesh."""
    found = dict[str, Any]()
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            found[key] = copy.deepcopy(value)
        elif is_dtensor(value):
            found[key] = dtensor_like(local_part(value).clone(), value, value.shape)
        else:
            found[key] = value.detach().clone()
    return found
