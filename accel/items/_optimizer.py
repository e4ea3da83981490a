# SPDX-License-Identifier: Apache-2.0
"""Optimizers as items: state by names of parameters, loaded on any mesh, where possible in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, cast

import msgspec
import torch

from accel.checkpoint._encoding import Kept, Making, decode, encode
from accel.checkpoint._live_tensors import memory_id
from accel.checkpoint._manifest import Item, has_records, is_object, tensors_in
from accel.checkpoint._records import is_record_class, named_classes
from accel.errors import CheckpointError
from accel.errors._checks import with_article
from accel.items import _packed_state
from accel.items._packed_state import (
    classes_of,
    flatten_objects,
    is_zero,
    local_optimizer,
    objects_in,
    objects_together,
    optimizer_change,
    unspread_in,
    with_own_flags,
)
from accel.items._source import Captured, ItemHandler, ItemLoad, StateChange, facts, is_floating
from accel.optim import MASTER, streamed_state
from accel.parallel._labels import has_state_on_host
from accel.parallel._leftovers import clear_parameters
from accel.storage import dtype_name
from accel.tensors import (
    dtensor_like,
    has_wide_gradient,
    is_dtensor,
    local_part,
    mesh_of,
    parameters_of,
    placements_of,
)

Names = Mapping[int, str]

_NAMING = ("params", "param_names")  # a group's own account of its parameters, which names replace here


class ParameterGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter group: names in order, and its encoded options."""

    params: tuple[str, ...]
    options: dict[str, Any]


class ParamFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape and kind of a parameter when it was saved."""

    dtype: str
    shape: tuple[int, ...]


class OptimizerValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An optimizer's entry in a manifest."""

    groups: tuple[ParameterGroup, ...]  # parameter groups
    params: dict[str, ParamFacts]  # dtype and shape of every parameter
    state: dict[str, Any]  # encoded state by parameter
    rest: dict[str, Any]  # further encoded state of some optimizers; its `state` belongs to no parameter

    def encoded(self) -> list[Any]:
        """Return all encoded values."""
        return [self.state, self.rest, [group.options for group in self.groups]]

    def named(self, name_of: Callable[[str], str | None]) -> OptimizerValue:
        """Return the value with other names for its parameters, without the parameters that get None."""
        groups = [
            ParameterGroup(tuple(new for name in group.params if (new := name_of(name)) is not None), group.options)
            for group in self.groups
        ]
        params = {new: held for name, held in self.params.items() if (new := name_of(name)) is not None}
        state = {new: held for name, held in self.state.items() if (new := name_of(name)) is not None}
        return OptimizerValue(tuple(groups), params, state, self.rest)


def bare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside of wrappers that share its state, as the wrappers of Accelerate and Fabric do."""
    held = getattr(optimizer, "optimizer", None)
    if not isinstance(held, torch.optim.Optimizer) or held is optimizer:
        return optimizer
    shares = held.state is optimizer.state and held.param_groups is optimizer.param_groups
    return bare_optimizer(held) if shares else optimizer


def named_parameters(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, torch.Tensor]:
    """Return an optimizer's parameters by name, in torch's own order; those without a name get their position."""
    return {names.get(id(p), str(index)): p for index, p in enumerate(parameters_of([optimizer]))}


def state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state in torch's form, of all groups and of the parameters that this rank holds."""
    return _packed_state.state_dict(optimizer) if is_zero(optimizer) else optimizer.state_dict()


def encode_optimizer(
    optimizer: torch.optim.Optimizer,
    item: str,
    names: Names,
    tensors: dict[str, torch.Tensor],
    loose: dict[str, torch.Tensor],
    kept: Kept | None = None,
) -> OptimizerValue:
    """Encode an optimizer's state by names of parameters, or positions where `names` has none. Tensors and records go
    to `tensors` and `kept`; to `loose` those in objects, and of no parameter, which may differ between ranks."""
    listed = named_parameters(optimizer, names)
    packed = flatten_objects(_state_of(optimizer, item), classes_of(optimizer))
    order = list(listed)
    state = dict[str, Any]()
    others = dict[Any, Any]()
    for index, entries in packed["state"].items():
        if type(index) is not int or not 0 <= index < len(order):
            others[index] = entries
            continue
        path = f"{item}.state.{order[index]}"
        into = loose if objects_in(entries) else tensors
        state[order[index]] = encode(_packed_state.take_apart(entries, path), path, into, kept)
    groups = tuple(
        ParameterGroup(
            params=tuple(order[index] for index in cast("list[int]", group["params"])),
            options={
                key: encode(value, f"{item}.param_groups[{i}].{key}", tensors, kept)
                for key, value in group.items()
                if key not in _NAMING
            },
        )
        for i, group in enumerate(packed["param_groups"])
    )
    beside = {k: v for k, v in packed.items() if k not in ("state", "param_groups")}
    beside |= {"state": others} if others else {}
    rest = {k: encode(v, f"{item}.{k}", loose, kept) for k, v in beside.items()}
    params = {name: ParamFacts(dtype_name(p.dtype), tuple(p.shape)) for name, p in listed.items()}
    return OptimizerValue(groups, params, state, rest)


def decode_optimizer(
    optimizer: torch.optim.Optimizer,
    stored: OptimizerValue,
    item: str,
    names: Names,
    tensors: Mapping[str, torch.Tensor],
    making: Making | None = None,
    keeps: frozenset[str] | None = None,
) -> dict[str, Any]:
    """Return a state dict in torch's form, for a live optimizer that fits and may keep the tensors.

    `keeps`: parameters that keep their live state, of an optimizer that fits in part; options without a stored value
    stay too. None for one that fits.
    """
    listed, where = named_parameters(optimizer, names), f"item {item}"
    now = state_dict(optimizer)
    rest = {key: decode(value, where, tensors, f"{item}.{key}", making) for key, value in stored.rest.items()}
    state: Any = rest.pop("state", {})
    if not isinstance(state, dict):
        raise CheckpointError("the state does not map keys to values", got=type(state).__name__, where=f"{where}, rest")
    for index, name in enumerate(listed):
        if keeps is not None and name in keeps and index in now["state"]:
            state[index] = now["state"][index]
        elif name in stored.state:
            path = f"{item}.state.{name}"
            entries = decode(stored.state[name], where, tensors, path, making)
            state[index] = _packed_state.put_together(entries, listed[name], path)
    live = now["param_groups"]
    groups: list[dict[str, Any]] = []
    for i, (group, mine) in enumerate(zip(stored.groups, live, strict=True)):
        options: dict[str, Any] = {} if keeps is None else dict(mine)
        for key, value in group.options.items():
            option = decode(value, where, tensors, f"{item}.param_groups[{i}].{key}", making)
            options[key] = _beside(option, mine.get(key))
        groups.append(options | {key: mine[key] for key in _NAMING if key in mine})
    return objects_together(rest | {"state": state, "param_groups": groups}, classes_of(optimizer), where)


def _state_of(optimizer: torch.optim.Optimizer, item: str) -> dict[str, Any]:
    try:
        return state_dict(optimizer)
    except Exception as error:  # an optimizer may shard its state itself
        raise CheckpointError(
            f"{with_article(type(optimizer).__name__)} that does not give its state: {type(error).__name__}: {error}",
            where=item,
            fix="Shard the model by fully_shard: any optimizer's state is sharded then, and can be saved.",
        ) from error


def _beside(value: Any, live: object) -> Any:
    """Move an option that is a tensor to the device of the live one."""
    return value.to(live.device) if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor) else value


def _has_torch_form(item: object) -> bool:
    """Return whether an item is an optimizer with a state dict of torch's form, or of none; others, such as
    Lookahead's, are stored as objects."""
    if not isinstance(item, torch.optim.Optimizer):
        return False
    optimizer = bare_optimizer(item)
    if is_zero(item) or type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return True
    try:
        form = cast("Mapping[str, Any]", optimizer.state_dict())
    except Exception:  # any error of the user's code; a save reports it
        return True
    return {"state", "param_groups"} <= form.keys()


_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


def _capture(name: str, live: torch.optim.Optimizer, to: Captured) -> Item:
    """Return an optimizer's entry in a checkpoint."""
    value = encode_optimizer(bare_optimizer(live), name, to.names, to.equal, to.loose, to.kept)
    return Item(kind="optimizer", type=_type_of(live), value=msgspec.to_builtins(value))


@dataclass(frozen=True, slots=True)
class _Owner:
    """Live parameter of a state tensor, and its stored dtype."""

    parameter: torch.Tensor
    stored_dtype: str


@dataclass(kw_only=True, slots=True)
class OptimizerLoad(ItemLoad):
    """An optimizer: it gets a new state; tensors are copied into live ones at the end where these fit.

    Attributes:
        live: the optimizer without wrappers; `result` is the caller's.
        _stored: the state, by the names of live parameters.
        _owners: parameters of stored tensors.
        _packed: names of tensors that are parts of a packed one, and keep their dtype.
        _inside: names of tensors in objects and arrays, which are not spread as the parameter.
        _slots: live tensors to copy into, by the names of stored ones.
        _keeps: parameters that keep their live state, if the optimizer fits in part; None if it fits.
    """

    live: torch.optim.Optimizer
    _stored: OptimizerValue = field(default_factory=lambda: OptimizerValue((), {}, {}, {}))
    _owners: dict[str, _Owner] = field(default_factory=dict[str, _Owner])
    _packed: set[str] = field(default_factory=set[str])
    _inside: set[str] = field(default_factory=set[str])
    _slots: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    _keeps: frozenset[str] | None = None

    def compare(self) -> None:
        """Compare parameters and groups, and find the parameter of each stored tensor."""
        source, listed = self.source, named_parameters(self.live, self.source.parameters)
        moved = {old: new for new, old in reversed(source.file_names.items()) if old not in source.file_names}
        stored = self._read_value().named(lambda name: moved.get(name, name))
        if self.name in source.parts:
            source.left |= {f"{self.name}: parameter {each}" for each in stored.params.keys() - listed.keys()}
            stored = stored.named(lambda name: name if name in listed else None)
        fitting = self._compare_parameters(stored, listed)
        if self.problems and not source.options.strict:
            stored = self._in_part(stored, listed, fitting)
        held = {id(parameter) for parameter in parameters_of([local_optimizer(self.live)])}
        state = {name: each for name, each in stored.state.items() if name in listed and id(listed[name]) in held}
        self._stored = stored = msgspec.structs.replace(stored, state=state)
        owned = {name: listed[name] for name in state if name in stored.params}
        for name, parameter in owned.items():
            owner = _Owner(parameter, stored.params[name].dtype)
            self._owners |= dict.fromkeys(tensors_in(state[name]), owner)
        self._packed = {key for entries in state.values() for key in tensors_in(_packed_state.packed_of(entries))}
        self._inside = {key for entries in state.values() for key in tensors_in(unspread_in(entries))}
        live = {key: owner.parameter for key, owner in self._owners.items()}
        self.wanted = source.want(source.names_in(self.name, stored.encoded()), live)
        self._slots = _loadable_in_place(local_optimizer(self.live), state, owned)

    def read(self) -> Sequence[StateChange]:
        """Make the state, from new tensors and live ones."""
        if self._keeps is not None and not self._stored.state and not any(each.options for each in self._stored.groups):
            return []  # nothing fits
        tensors: dict[str, torch.Tensor] = {}
        for key in self.source.names_in(self.name, self._stored.encoded()):
            owner = self._owners.get(key)
            slot = self._slots.get(key)
            if owner is None:
                tensors[key] = self.source.saved.read(key)
            elif slot is not None and self._fits(slot, key, owner):
                tensors[key] = slot
                self.copies.append((slot, key))
            else:
                tensors[key] = self._state_tensor(key, owner)
        kept, names = Kept(), self.source.parameters
        if has_records(self._stored.encoded()):
            encode_optimizer(self.live, self.name, names, {}, {}, kept)
        making = self.source.making(kept)
        records = (each for each in classes_of(self.live).values() if is_record_class(each) or issubclass(each, Enum))
        making = replace(making, classes={**named_classes(records), **making.classes})
        state = decode_optimizer(self.live, self._stored, self.name, names, tensors, making, self._keeps)
        state, kept_flags = with_own_flags(self.live, state)
        self.source.flags += [f"{self.name}: {line}" for line in kept_flags]
        wrapper = cast("torch.optim.Optimizer", self.result)
        return [optimizer_change(f"item {self.name}", self.live, wrapper, state)]

    def _read_value(self) -> OptimizerValue:
        try:
            return msgspec.convert(self.item.value, OptimizerValue)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"the optimizer's state is not valid: {error}", where=f"item {self.name}") from error

    def _compare_parameters(self, stored: OptimizerValue, listed: Mapping[str, torch.Tensor]) -> set[str]:
        """Compare parameters, groups and master weights; return the parameters with a state that fits."""
        problems, title = self.problems, f"{self.name}: parameter "
        problems.compare_names(listed.keys(), stored.params.keys(), title)
        fitting = set[str]()
        for name in listed.keys() & stored.params.keys():
            old = stored.params[name]
            fits = problems.compare_tensor(f"{title}{name}", facts(listed[name]), (old.dtype, old.shape))
            follows = self._follows_master(name, listed[name], stored.state.get(name))
            if fits and follows:
                fitting.add(name)
        by_id = {id(p): name for name, p in listed.items()}
        groups = [{by_id[id(p)] for p in group["params"]} for group in self.live.param_groups]
        stored_groups = [set(group.params) for group in stored.groups]
        if listed.keys() == stored.params.keys() and stored_groups != groups:
            sizes = [[len(group) for group in each] for each in (groups, stored_groups)]
            expected, got = f"groups of {sizes[0]}", f"other groups, of {sizes[1]}"
            problems.wrong_type(f"{self.name}: groups of parameters", expected, got)
        problems.compare_names(set[str](), stored.state.keys() - stored.params.keys(), f"{self.name}: state of ")
        return fitting

    def _in_part(self, stored: OptimizerValue, listed: Mapping[str, torch.Tensor], fitting: set[str]) -> OptimizerValue:
        """Return what fits of a stored state, in the live groups, and summarize it: the state of `fitting` parameters,
        and options of groups that hold the same of the parameters on both sides."""
        both = listed.keys() & stored.params.keys()
        if any(name.isdigit() for name in both):  # positions, which mean other parameters where their number differs
            both = fitting = set[str]()
        names = {id(parameter): name for name, parameter in listed.items()}
        groups: list[ParameterGroup] = []
        for group in self.live.param_groups:
            own = tuple(names[id(parameter)] for parameter in group["params"])
            common = both.intersection(own)
            same = (each.options for each in stored.groups if common and common == both.intersection(each.params))
            groups.append(ParameterGroup(own, next(same, dict[str, Any]())))
        state = {name: each for name, each in stored.state.items() if name in fitting}
        taken = sum(bool(group.options) for group in groups)
        self._keeps = frozenset(listed.keys() - fitting)
        loaded = f"loaded {len(state)} of {len(stored.state)} states, and options of {taken} of {len(groups)} groups"
        kept = f"{len(self._keeps)} of {len(listed)} parameters and {len(groups) - taken} groups keep their live values"
        self.summary = f"{self.name}: {loaded}; {kept}"
        return OptimizerValue(tuple(groups), {name: stored.params[name] for name in fitting}, state, stored.rest)

    def _follows_master(self, name: str, parameter: torch.Tensor, state: object) -> bool:
        """Return whether this run steps or follows a parameter's stored master weights, if any; note a difference."""
        if not is_object(state) or MASTER not in state or has_wide_gradient(parameter):
            return True
        expected = "none, as this run's precision has none: Precision(master_weights='fp32')"
        self.problems.wrong_type(f"{self.name}: master weights of {name}", expected, "float32 copies")
        return False

    def _fits(self, slot: torch.Tensor, key: str, owner: _Owner) -> bool:
        return slot.dtype == self._state_dtype(key, owner) and tuple(slot.shape) == self.source.facts(key)[1]

    def _state_tensor(self, key: str, owner: _Owner) -> torch.Tensor:
        """Return a tensor of a parameter's state, spread as the parameter, and cast with it if it had its dtype."""
        parameter = owner.parameter
        read = self.source.read_like(key, {key: parameter})
        if not is_dtensor(read) and is_dtensor(parameter) and read.dim() and key not in self._inside:
            read = dtensor_like(read, parameter)  # what belongs to rows, columns or blocks
        read = read.to(self._state_dtype(key, owner))
        if not read.dim():
            return read
        if has_state_on_host(self.live):
            return streamed_state(self.live, self.source.ctx.streams).on_host(read)
        return read.to(local_part(parameter).device)

    def _state_dtype(self, key: str, owner: _Owner) -> torch.dtype:
        stored, shape = self.source.facts(key)
        cast = stored == owner.stored_dtype and is_floating(stored) and shape and key not in self._packed
        return owner.parameter.dtype if cast else self.source.saved.stub(key).dtype


def _load(*, live: torch.optim.Optimizer, **fields: Any) -> OptimizerLoad:
    return OptimizerLoad(live=bare_optimizer(live), **fields)


def _type_of(live: torch.optim.Optimizer) -> str:
    return type(local_optimizer(bare_optimizer(live))).__qualname__


def _fits(live: str, stored: str) -> bool:
    """Return whether the classes are one, or the stored one a wrapper, of Accelerate or Fabric, of an older version."""
    return live == stored or stored in ("AcceleratedOptimizer", "_FabricOptimizer") or stored.startswith("Fabric")


def _join(name: str, ranks: Sequence[Any]) -> Any:
    """Join the state of a divided optimizer. Where several ranks hold a value, the lowest rank wins."""
    values = [msgspec.convert(value, OptimizerValue) for value in ranks]
    counts = [len(value.groups) for value in values]
    if len(set(counts)) > 1:
        raise CheckpointError(
            "ranks have different numbers of parameter groups",
            expected="the same groups on every rank, empty if a rank has no such parameters",
            got=f"by rank: {', '.join(map(str, counts))}",
            where=name,
        )
    groups: list[ParameterGroup] = []
    for same in zip(*(value.groups for value in values), strict=True):
        names = dict.fromkeys(name for group in same for name in group.params)
        groups.append(ParameterGroup(tuple(names), same[0].options))
    params: dict[str, ParamFacts] = {}
    state: dict[str, Any] = {}
    for value in reversed(values):
        params |= value.params
        state |= value.state
    return msgspec.to_builtins(OptimizerValue(tuple(groups), params, state, values[0].rest))


OPTIMIZER = ItemHandler(
    kind="optimizer",
    takes=_has_torch_form,
    type_of=_type_of,
    capture=_capture,
    load=_load,
    fits=_fits,
    join=_join,
    is_part=True,
    is_staged=lambda ctx, _: ctx.axis("pp").size > 1,  # a pipeline divides all optimizers of its mesh
    is_divided=is_zero,
    loads_partly=True,
    begin_again=lambda live: clear_parameters(parameters_of([live])),
    tensors=lambda live: parameters_of([live]),
)


def _loadable_in_place(
    optimizer: torch.optim.Optimizer, stored: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return live state tensors to copy into, by the names of stored tensors. They are loaded as the new state before
    their contents are read, so there are none for an optimizer with its own code to load."""
    if not _keeps_what_it_is_given(optimizer):
        return {}
    states = [held for held in optimizer.state.values() if isinstance(cast(object, held), dict)]
    slots = [slot for held in states for slot in held.values() if isinstance(slot, torch.Tensor)]
    memory = Counter(map(_address, [*parameters.values(), *slots]))
    found: dict[str, torch.Tensor] = {}
    for owner, parameter in parameters.items():
        state = stored[owner]
        held = optimizer.state.get(parameter, {})
        for key, slot in held.items() if is_object(held) else ():
            if is_object(state) and _lies_like(slot, parameter) and memory[_address(slot)] == 1:
                value = state.get(key)
                found |= {name: slot for name in tensors_in(value) if value == {"$tensor": name}}
    return found


def _keeps_what_it_is_given(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    hooks = [getattr(optimizer, name, None) for name in _HOOKS]
    loading = (kind.load_state_dict.__module__, kind.__setstate__.__module__)
    return all(module.startswith("torch.optim.") for module in loading) and hooks == [{}, {}]


def _lies_like(slot: object, parameter: torch.Tensor) -> bool:
    """Return whether a state tensor is sharded as its parameter, in separate memory."""
    if not isinstance(slot, torch.Tensor) or slot.shape != parameter.shape or slot.device != parameter.device:
        return False
    if (mesh_of(slot), placements_of(slot)) != (mesh_of(parameter), placements_of(parameter)):
        return False
    part = local_part(slot)
    return (
        slot.dim() > 0
        and type(part) is torch.Tensor
        and part.is_contiguous()
        and part.untyped_storage().nbytes() == part.nbytes
    )


def _address(tensor: torch.Tensor) -> int:
    part = local_part(tensor)
    return memory_id(part) if type(part) is torch.Tensor else 0
