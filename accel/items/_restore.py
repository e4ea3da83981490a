# SPDX-License-Identifier: Apache-2.0
"""A checkpoint and live items: compare everything, then read, then change what can fail, then what cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from accel.checkpoint import (
    Item,
    Kept,
    Making,
    MisfitError,
    Saved,
    decode,
    encode,
    encode_record,
    has_records,
    is_record,
    is_sharded,
    like,
    local_part,
    tensors_in,
)
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.items._bases import BASE, compare_base
from accel.items._items import module_states, parameter_names
from accel.items._kinds import Stateful, compare_class, follow, same_kind, without_wrappers
from accel.items._loading import Action, Changes, read_like, read_parts
from accel.items._modules import ModuleState
from accel.items._optimizers import (
    OptimizerValue,
    compare_optimizer,
    decode_optimizer,
    encode_optimizer,
    held_state,
    load_optimizer,
    part_of_value,
    read_value,
)
from accel.items._overlaps import memory_under, overlaps, put_under, unwritable
from accel.items._parts import part_names, without_parts
from accel.items._problems import Facts, Problems, facts, is_floating
from accel.items._records import compare_fields, make_item, making
from accel.items._renaming import LoadTransform, transformed_names
from accel.items._rng import apply_rng, check_rng
from accel.items._rows import Row, read_row, row_part, with_own_part
from accel.items._slots import loadable_in_place
from accel.items._zero import contents, inner, put_back
from accel.random import RngState


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a checkpoint may differ from what it is loaded into; see `load_state`."""

    strict: bool
    cast: bool
    transform: LoadTransform | None


@dataclass(frozen=True, slots=True)
class _Owner:
    """The live parameter that a tensor of an optimizer's state belongs to, and the dtype that it was saved with."""

    parameter: torch.Tensor
    stored_dtype: str


class Matching:
    """The comparison of one checkpoint with one set of items.

    Attributes:
        problems: in what they differ.
        skipped: in what they differ, and may.
        changes: what loading will do.
        left: what the checkpoint holds of `Part`s and this rank does not take.
    """

    def __init__(self, ctx: DistContext, saved: Saved, items: Mapping[str, object], options: LoadOptions) -> None:
        self.left, self._parts, passed = set[str](), part_names(items), without_parts(items)
        items, self._passed = without_wrappers(passed), passed
        self.problems, self.skipped, self.changes = Problems(options.cast), Problems(), Changes()
        self._options = options
        self._sources = transformed_names(saved.manifest, saved.entries, options.transform)
        self._ctx, self._saved, self._items = ctx, saved, items
        self._modules = module_states(items)
        self._names = parameter_names(self._modules)
        self._row: Row | None = None

    def compare(self) -> None:
        """Compare by what the manifest tells. Changes nothing, reads no tensor.

        Raises:
            CheckpointError: they do not fit, every difference listed; or it holds what `save_state` never writes.
        """
        stored, items = self._saved.manifest.items, self._items
        found = Problems()
        found.missing += [f"item {name}" for name in items.keys() - stored.keys()]
        found.unasked += stored.keys() - items.keys()
        self._judge(found)
        self.changes.values = {name: self._passed[name] for name in sorted(items)}
        for name in sorted(items.keys() & stored.keys()):
            self._compare_item(name, items[name], stored[name])
        if self.problems:
            raise self.problems.error(self._saved.path)
        if (part := row_part(self._ctx, self._saved)) is not None:
            self.changes.wanted.append(part)

    def read(self) -> RngState | None:
        """Read what is wanted, make of it the values and changes; return this rank's streams. Changes nothing.

        Raises:
            CheckpointError: something is not what was saved.
        """
        self._row = read_row(self._ctx, self._saved)
        for make in self.changes.makers:
            try:
                make()
            except MisfitError as misfit:
                self.problems.wrong_type(misfit.where, misfit.expected, misfit.got)
        if self.problems:
            raise self.problems.error(self._saved.path)
        return check_rng(self._ctx, self._saved, self._row)

    def _judge(self, found: Problems) -> None:
        (self.problems if self._options.strict else self.skipped).add(found)

    def _compare_item(self, name: str, live: object, item: Item) -> None:
        """Compare an item; if it does not fit and may be left out, it is, but for the tensors of a module that fit."""
        outer, self.problems = self.problems, Problems(self._options.cast)
        before, makers = len(self.changes.wanted), len(self.changes.makers)
        if same_kind(name, live, item, self.problems):
            if isinstance(live, nn.Module):
                self._module(name, self._modules[name], item)
            elif isinstance(live, torch.optim.Optimizer):
                self._optimizer(name, live, item)
            elif item.kind == "stateful" and isinstance(live, Stateful):
                self._stateful(name, live, item)
            else:
                self._value(name, live, item)
        found, self.problems = self.problems, outer
        if found and not isinstance(live, nn.Module):
            del self.changes.wanted[before:], self.changes.makers[makers:]
            self.changes.values[name] = self._passed[name]
        self._judge(found)

    def _module(self, name: str, live: ModuleState, item: Item) -> None:
        tensors = {f"{name}.{key}": tensor for key, tensor in {**live.parameters, **live.buffers}.items()}
        extras = dict(_fields(item.value, name))
        base = compare_base(name, live, extras.pop(BASE), self.problems) if BASE in extras else frozenset[str]()
        tensors = {key: tensor for key, tensor in tensors.items() if key.removeprefix(f"{name}.") not in base}
        inside = {f"{name}.{key}" for key in extras}
        entries, sources = self._saved.entries, self._sources
        stored = {key for key, old in sources.items() if key.startswith(f"{name}.") and not _belongs(old, inside)}
        if name in self._parts:
            self.left |= stored - tensors.keys()
            stored &= tensors.keys()
            extras = {key: extra for key, extra in extras.items() if key in live.extras}
        self.problems.compare_names(tensors.keys(), stored, "")
        self.problems.compare_names(live.extras.keys(), extras.keys(), f"{name}.")
        first: dict[int, str] = {}
        for key in sorted(tensors.keys() & stored):
            tensor, old = tensors[key], sources[key]
            if not self.problems.compare_tensor(key, facts(tensor), self._facts(old)):
                continue
            if problem := unwritable(tensor):
                self.problems.wrong_type(key, "a tensor that can be written to", problem)
                continue
            self.changes.want(old, tensor)
            if overlaps(tensor):
                self.changes.makers.append(_call(self._make_overlapping, key, tensor, old))
            else:
                self.changes.copies.append((tensor, old))
            twin = first.setdefault(id(tensor), key)
            if entries[sources[twin]] is not entries[old]:
                self.changes.makers.append(_call(self._compare_tied, tensor, twin, key))
        for key in live.extras.keys() & extras.keys():
            self._want_all(name, extras[key])
            owner, before = live.owners[key], copy.deepcopy(live.extras[key])
            self.changes.makers.append(_call(self._make_extra, f"{name}.{key}", extras[key], owner, before))

    def _compare_tied(self, live: torch.Tensor, twin: str, key: str) -> None:
        one, other = (local_part(read_like(self._saved, self._sources[each], live)) for each in (twin, key))
        if not torch.equal(one, other):
            self.problems.wrong_type(key, f"the same tensor as {twin}", "another one")

    def _make_overlapping(self, key: str, live: torch.Tensor, old: str) -> None:
        memory = memory_under(live)
        before, after = memory.clone(), memory.clone()
        if not put_under(after, live, self._saved.read(old).to(live.device)):
            self.problems.wrong_type(key, "one value for elements that share memory", "several")
        self.changes.risk(key, _call(memory.copy_, after), _call(memory.copy_, before))

    def _make_extra(self, path: str, stored: Any, owner: nn.Module, before: Any) -> None:
        kept = Kept()
        if has_records(stored):
            encode(before, path, {}, kept)
        value = self._decode(path, stored, {}, self._making(kept))
        self.changes.risk(path, _call(owner.set_extra_state, value), _call(owner.set_extra_state, before))

    def _optimizer(self, name: str, live: torch.optim.Optimizer, item: Item) -> None:
        moved = {old: new for new, old in reversed(self._sources.items()) if old not in self._sources}
        value = read_value(item.value, name, moved)
        if name in self._parts:
            value, left = part_of_value(live, value, self._names)
            self.left |= {f"{name}: parameter {each}" for each in left}
        compare_optimizer(live, value, name, self._names, self.problems)
        value = held_state(live, value, self._names)
        owners, parameters = dict[str, _Owner](), dict[str, torch.Tensor]()
        for parameter in (each for group in live.param_groups for each in group["params"]):
            owner = self._names.get(id(parameter), "")
            if owner in value.state and owner in value.params:
                mine, parameters[owner] = _Owner(parameter, value.params[owner].dtype), parameter
                owners |= dict.fromkeys(tensors_in(value.state[owner]), mine)
        tensors = self._names_in(name, [value.state, value.rest, [group.options for group in value.groups]])
        for key in tensors:
            self.changes.want(key, self._template(key, {key: owners[key].parameter} if key in owners else {}))
        slots = loadable_in_place(inner(live), value.state, parameters)
        self.changes.makers.append(_call(self._make_optimizer, name, live, tensors, value, owners, slots))

    def _make_optimizer(
        self,
        name: str,
        live: torch.optim.Optimizer,
        names: Set[str],
        value: OptimizerValue,
        owners: Mapping[str, _Owner],
        slots: Mapping[str, torch.Tensor],
    ) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for key in names:
            owner, slot = owners.get(key), slots.get(key)
            if owner is None:
                tensors[key] = self._saved.read(key)
            elif slot is None or (slot.dtype, tuple(slot.shape)) != (
                self._state_dtype(key, owner),
                self._facts(key)[1],
            ):
                tensors[key] = self._state_tensor(key, owner)
            else:
                tensors[key] = slot
                self.changes.copies.append((slot, key))
        kept = Kept()
        if has_records([value.state, value.rest, [group.options for group in value.groups]]):
            encode_optimizer(live, name, self._names, {}, kept)
        state = decode_optimizer(live, value, name, self._names, tensors, self._making(kept))
        before, passed = contents(live), self._passed[name]
        self.changes.risk(
            f"item {name}",
            lambda: (load_optimizer(live, state), follow(passed)),
            lambda: (put_back(before), follow(passed)),
        )

    def _state_tensor(self, key: str, owner: _Owner) -> torch.Tensor:
        """A tensor of a parameter's state: spread as that is, and cast as that is, where it was of its dtype."""
        parameter = owner.parameter
        template = self._template(key, {key: parameter})
        read = read_like(self._saved, key, template)
        if template is None and is_sharded(parameter) and read.dim():  # what belongs to rows, columns or blocks
            read = like(read, parameter)
        return read.to(self._state_dtype(key, owner))

    def _state_dtype(self, key: str, owner: _Owner) -> torch.dtype:
        stored, shape = self._facts(key)
        cast = stored == owner.stored_dtype and is_floating(stored) and shape
        return owner.parameter.dtype if cast else self._saved.stub(key).dtype

    def _stateful(self, name: str, live: Stateful, item: Item) -> None:
        mine, kept = dict[str, torch.Tensor](), Kept()
        before = live.state_dict()
        encode(before, name, mine, kept)
        for key in self._want_all(name, item.value, mine) & mine.keys():
            if mine[key].numel():  # what is empty now has yet to grow
                self.problems.compare_tensor(key, facts(mine[key]), self._facts(key))
        self.changes.makers.append(_call(self._make_stateful, name, live, item, before, mine, kept))

    def _make_stateful(
        self,
        name: str,
        live: Stateful,
        item: Item,
        before: dict[str, Any],
        mine: Mapping[str, torch.Tensor],
        kept: Kept,
    ) -> None:
        state = self._decode(name, item.value, mine, self._making(kept))
        back = _call(live.load_state_dict, copy.deepcopy(before))
        self.changes.risk(f"item {name}", _call(live.load_state_dict, state), back)

    def _value(self, name: str, live: object, item: Item) -> None:
        mine, kept = dict[str, torch.Tensor](), Kept()
        if is_record(live):
            encode_record(live, name, mine, kept)
            compare_fields(name, live, _fields(item.value, name), self.problems)
        else:
            encode(live, name, mine, kept)
        read_first = bool(self._want_all(name, item.value, mine))
        if read_first or self.problems or self._make_value(name, live, item, mine, kept):
            self.changes.makers.append(_call(self._make_value, name, live, item, mine, kept))

    def _make_value(self, name: str, live: object, item: Item, mine: Mapping[str, torch.Tensor], kept: Kept) -> bool:
        """Make a value; return whether it fits what was passed."""
        making, problems = self._making(kept), Problems()
        value = live
        try:
            if is_record(live):
                tensors = self._tensors(name, item.value, mine, self._ctx.device)
                value = make_item(live, _fields(item.value, name), name, tensors, making)
            else:
                value = self._decode(name, item.value, mine, making)
                compare_class(name, live, value, problems)
        except MisfitError as misfit:
            problems.wrong_type(misfit.where, misfit.expected, misfit.got)
        self.changes.values[name] = live if problems else value
        self._judge(problems)
        return not problems

    def _making(self, kept: Kept) -> Making:
        """How this rank makes records: with its own parts, once its row has been read."""
        return making(kept, lambda path, made: with_own_part(made, path, self._row), self._saved.manifest.format)

    def _facts(self, key: str) -> Facts:
        entry = self._saved.entries[key]
        return entry.dtype, entry.shape

    def _names_in(self, name: str, value: Any) -> set[str]:
        """The tensors that an item's value refers to, its own only."""
        found = tensors_in(value)
        for key in found:
            if key not in self._saved.entries or not _belongs(key, {name}):
                raise CheckpointError("not a stored value: $tensor", got=repr(key), where=f"item {name}")
        return found

    def _want_all(self, name: str, value: Any, mine: Mapping[str, torch.Tensor] | None = None) -> set[str]:
        """Note that a value is read, each tensor of it as its live namesake lies; return the tensors' names."""
        found = self._names_in(name, value)
        for key in found:
            self.changes.want(key, self._template(key, mine or {}))
        return found

    def _template(self, key: str, mine: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        live = mine.get(key)
        return live if live is not None and tuple(live.shape) == self._facts(key)[1] else None

    def _decode(self, path: str, value: Any, mine: Mapping[str, torch.Tensor], making: Making) -> Any:
        """Make a value with tensors of its own, each where its live namesake lies, others on the CPU."""
        return decode(value, f"item {path}", self._tensors(path, value, mine, torch.device("cpu")), path, making)

    def _tensors(
        self, path: str, value: Any, mine: Mapping[str, torch.Tensor], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Read the tensors of a value, each to where its live namesake lies, others to a device."""
        tensors: dict[str, torch.Tensor] = {}
        for key in self._names_in(path, value):
            read, namesake = read_like(self._saved, key, self._template(key, mine)), mine.get(key)
            if namesake is None:
                tensors[key] = read.to(device)
                continue
            if self._options.cast and read.is_floating_point() and namesake.is_floating_point():
                read = read.to(namesake.dtype)
            tensors[key] = read if is_sharded(read) else read.to(namesake.device)
        return tensors


def finish(ctx: DistContext, saved: Saved, changes: Changes, rng: RngState | None) -> None:
    """Make the changes that cannot fail unless the disk does: of tensors loaded in place, and random streams.

    Raises:
        CheckpointError: a file cannot be read any more.
    """
    read_parts(saved, changes.copies)
    apply_rng(ctx, saved, rng)


def _belongs(key: str, inside: set[str]) -> bool:
    return any(key == path or key.startswith((f"{path}.", f"{path}[")) for path in inside)


def _fields(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError("not a stored value", got=type(value).__name__, where=f"item {name}")
    return cast("dict[str, Any]", value)


def _call(function: Callable[..., object], *values: Any) -> Action:
    return lambda: function(*values)
