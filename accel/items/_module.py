# SPDX-License-Identifier: Apache-2.0
"""Modules as items: parameters, buffers and extra state, by names without wrappers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn

from accel.checkpoint._encoding import Kept, encode
from accel.checkpoint._live_tensors import check_tensor
from accel.checkpoint._manifest import Item, TensorEntry, has_records
from accel.errors import CheckpointError, ConfigError
from accel.items._bases import BASE, compare_base, join_bases
from accel.items._source import (
    Captured,
    CheckpointSource,
    ItemHandler,
    ItemLoad,
    LoadTransform,
    ModuleState,
    SaveTransform,
    StateChange,
    Stored,
    belongs,
    facts,
    fields_in,
    join_fields,
)
from accel.parallel._leftovers import clear_gradients
from accel.parallel._modules import is_divided, is_pipelined, name_and_owner, prepared_of, reshard, unwrap_model
from accel.parallel.axes.pipeline import pipeline_of
from accel.tensors import is_absent, is_dtensor, local_part, part_names, state_tensors, stored_values

T = TypeVar("T")


def transformed_names(entries: Mapping[str, TensorEntry], transform: LoadTransform) -> dict[str, str]:
    """Return the names to load the tensors of modules by, aliases included, each with its name in the file."""
    given = {name: Stored(name, each.dtype, each.shape) for name, each in entries.items()}
    found = _checked(transform(given), Stored, "load_state")
    for name, stored in found.items():
        if given.get(stored.name) != stored:
            raise _refusal("load_state", f"{stored!r} as {name!r}")
    return {name: stored.name for name, stored in found.items()}


def transformed_tensors(
    tensors: Mapping[str, torch.Tensor], modules: Iterable[str], transform: SaveTransform
) -> dict[str, torch.Tensor]:
    """Return the tensors to save of modules, by name; each name must begin with a module's."""
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
        "the transform returned an invalid result",
        expected="some of what it was given, by names that begin with an item's",
        got=got,
        where=f"{caller}, transform=",
        fix="Return a new dict, such as {name.replace('old.', 'new.'): value for name, value in tensors.items()}.",
    )


def overlap_change(where: str, live: torch.Tensor, value: torch.Tensor) -> StateChange | None:
    """Return the change of a live tensor to a value; None if elements with shared memory would differ."""
    reach = sum(stride * (size - 1) for stride, size in zip(live.stride(), live.shape, strict=True))
    memory = live.detach().as_strided((reach + 1,), (1,))
    before = memory.clone()
    after = memory.clone()
    value = value.to(memory.device, memory.dtype)
    places = torch.arange(memory.numel(), device=memory.device).as_strided(live.shape, live.stride())
    after[places.reshape(-1)] = value.reshape(-1)
    same = torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (after[places], value)))
    return StateChange(where, partial(memory.copy_, after), partial(memory.copy_, before)) if same else None


_OfItem = tuple[str, torch.Tensor]  # a tensor after the item that it is of

EXTRA_STATE = "_extra_state"  # the key that torch gives to what get_extra_state() returns


def module_states(items: Mapping[str, object]) -> dict[str, ModuleState]:
    """Return the live state of every module among the items."""
    return {name: module_state(item, name) for name, item in items.items() if isinstance(item, nn.Module)}


def module_state(module: nn.Module, item: str) -> ModuleState:
    """List a module's parameters, persistent buffers and extra state; wrappers, of all or of parts, leave no trace in
    the names."""
    reshard(module)
    live = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    parts = part_names(module)
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    extras: dict[str, Any] = {}
    owners: dict[str, nn.Module] = {}
    for raw, value in cast("dict[str, Any]", state_tensors(module)).items():
        name, owner = name_and_owner(module, raw)
        if raw.rpartition(".")[2] == EXTRA_STATE:
            extras[name], owners[name] = value, owner
            continue
        check_tensor(value, f"{item}.{name}")
        if raw in parts:
            parameters[name] = value
            continue
        if id(value) not in live:
            raise CheckpointError(
                "state_dict() gives a tensor that is neither a parameter nor a buffer, so it could not be loaded",
                where=f"{item}.{name}",
                fix="Let get_extra_state() and set_extra_state() carry it.",
            )
        (parameters if isinstance(value, nn.Parameter) else buffers)[name] = value
    twins: dict[str, str] = {}
    if is_pipelined(inner := unwrap_model(module)) and (pipeline := pipeline_of(inner)) is not None:
        twins = {name: min(names) for names in pipeline.names for name in names}
    return ModuleState(parameters, buffers, extras, owners, twins)


def parameter_names(modules: Mapping[str, ModuleState]) -> dict[int, str]:
    """Return the full name of every parameter of the modules, by `id`; the first in sorted order of a tied one."""
    names: dict[int, str] = {}
    for item, state in sorted(modules.items()):
        for name, parameter in sorted(state.parameters.items()):
            names.setdefault(id(parameter), f"{item}.{state.twins.get(name, name)}")
    return names


def capture_tensors(
    modules: Mapping[str, ModuleState], transform: SaveTransform | None
) -> tuple[dict[str, _OfItem], dict[str, _OfItem], dict[int, str]]:
    """Return the tensors to save of modules by name, each with its item: parameters, and others; and the parameters'
    names by `id`."""
    named: dict[str, torch.Tensor] = {}
    parameters: set[str] = set()
    once: dict[int, torch.Tensor] = {}  # tied tensors stay one object
    for item, state in modules.items():
        parameters |= {f"{item}.{key}" for key in state.parameters}
        for key, tensor in {**state.parameters, **state.buffers}.items():
            named[f"{item}.{key}"] = once.setdefault(id(tensor), stored_values(tensor).detach())
    found = dict(named) if transform is None else transformed_tensors(named, modules, transform)
    old_names = {id(tensor): name for name, tensor in reversed(named.items())}
    kept: dict[str, _OfItem] = {}
    rest: dict[str, _OfItem] = {}
    moved: dict[str, str] = {}
    for name, tensor in sorted(found.items()):
        old = name if name in named else old_names.get(id(tensor), name)
        moved.setdefault(old_names.get(id(tensor), name), name)
        (kept if old in parameters else rest)[name] = old.partition(".")[0], tensor
    return kept, rest, {key: moved.get(name, name) for key, name in parameter_names(modules).items()}


def _capture(name: str, live: nn.Module, to: Captured) -> Item:
    """Return a module's entry in a checkpoint, without its tensors."""
    held = to.modules[name].extras
    extras = {key: encode(extra, f"{name}.{key}", to.loose, to.kept) for key, extra in held.items()}
    return Item(kind="module", type=_type_of(live), value=extras)


@dataclass(kw_only=True, slots=True)
class ModuleLoad(ItemLoad):
    """A module: tensors are copied in place at the end, extra state is set before."""

    live: ModuleState  # the module's state
    # Live tensors to load, by full name.
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    _extras: dict[str, Any] = field(default_factory=dict[str, Any])  # stored extra states to load

    def compare(self) -> None:
        """Compare names, shapes and dtypes, and a frozen base with its digests."""
        name, source, problems = self.name, self.source, self.problems
        extras = dict(fields_in(self.item.value, name))
        base = frozenset[str]()
        if BASE in extras:
            base, sharded = compare_base(name, self.live.parameters, extras.pop(BASE), problems)
            source.bases |= sharded
        held = {**self.live.parameters, **self.live.buffers}
        tensors = {f"{name}.{key}": tensor for key, tensor in held.items() if key not in base}
        inside = {f"{name}.{key}" for key in extras}
        stored = {
            key for key, old in source.file_names.items() if key.startswith(f"{name}.") and not belongs(old, inside)
        }
        if name in source.parts:
            source.left |= stored - tensors.keys()
            stored &= tensors.keys()
            extras = {key: extra for key, extra in extras.items() if key in self.live.extras}
        problems.compare_names(tensors.keys(), stored, "")
        problems.compare_names(self.live.extras.keys(), extras.keys(), f"{name}.")
        for key in sorted(tensors.keys() & stored):
            tensor, old = tensors[key], source.file_names[key]
            if not problems.compare_tensor(key, facts(tensor), source.facts(old)):
                continue
            if problem := _unwritable(tensor):
                problems.wrong_type(key, "a tensor that can be written to", problem)
                continue
            self._tensors[key] = tensor
            self.wanted += source.want([old], {old: tensor})
            if not overlaps(tensor):
                self.copies.append((tensor, old))
        self._extras = {key: extras[key] for key in self.live.extras.keys() & extras.keys()}
        for extra in self._extras.values():
            self.wanted += source.want(source.names_in(name, extra), {})

    def read(self) -> Sequence[StateChange]:
        """Read extra state, and check tensors that need more than a copy: tied ones, and those with shared memory."""
        entries = self.source.saved.entries
        changes = list[StateChange]()
        first = dict[int, str]()
        for key, tensor in self._tensors.items():
            old = self.source.file_names[key]
            if overlaps(tensor):
                change = overlap_change(key, tensor, self.source.saved.read(old))
                if change is None:
                    self.source.problems.wrong_type(key, "one value for elements that share memory", "several")
                else:
                    changes.append(change)
            twin = first.setdefault(id(tensor), key)
            if entries[self.source.file_names[twin]] is not entries[old]:
                self._compare_tied(tensor, twin, key)
        for key, stored in self._extras.items():
            path = f"{self.name}.{key}"
            kept = Kept()
            before = copy.deepcopy(self.live.extras[key])
            if has_records(stored):
                encode(before, path, {}, kept)
            value = self.source.decode(path, stored, {}, kept)
            put = self.live.owners[key].set_extra_state
            changes.append(StateChange(path, partial(put, value), partial(put, before)))
        return changes

    def _compare_tied(self, live: torch.Tensor, twin: str, key: str) -> None:
        """Note two different stored tensors of one live tensor."""
        stored = [self.source.file_names[each] for each in (twin, key)]
        one, other = (local_part(self.source.read_like(each, {each: live})) for each in stored)
        if not torch.equal(one, other):
            self.source.problems.wrong_type(key, f"the same tensor as {twin}", "another one")


def _load(*, live: nn.Module, name: str, source: CheckpointSource, **fields: Any) -> ModuleLoad:
    del live  # its state has been listed
    return ModuleLoad(live=source.modules[name], name=name, source=source, **fields)


def _live_tensors(live: nn.Module) -> list[torch.Tensor]:
    reshard(live)
    return [*live.parameters(), *live.buffers()]


def _type_of(live: nn.Module) -> str:
    return type(unwrap_model(live)).__qualname__


def _join(name: str, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join extra state, and the digests of frozen parameters."""
    joined = join_fields(name, ranks)
    return joined | {BASE: join_bases(name, [rank[BASE] for rank in ranks])} if BASE in joined else joined


def _begin_again(live: nn.Module) -> None:
    """Drop gradients of before the load, and compare the batch of the next forward with other ranks."""
    clear_gradients(live)
    if (watch := prepared_of(unwrap_model(live)).get("same_batches")) is not None:
        watch.begin_again()


MODULE = ItemHandler(
    kind="module",
    takes=nn.Module,
    type_of=_type_of,
    capture=_capture,
    load=_load,
    fits=lambda _live, _stored: True,  # a module is its tensors
    join=_join,
    is_part=True,
    is_staged=lambda _, live: is_divided(live),
    begin_again=_begin_again,
    tensors=_live_tensors,
    loads_partly=True,
)


def _unwritable(tensor: torch.Tensor) -> str:
    """Return the reason why a tensor cannot be loaded in place, "" for none."""
    if is_absent(tensor):
        return "a weight that is not in memory; load before dispatch_model"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "one that was made in inference mode; make the module outside of it, or load within it"
    return "a DTensor with elements that share memory; clone it" if is_dtensor(tensor) and overlaps(tensor) else ""


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether elements may share memory, as after `expand`. No communication."""
    part, reach = local_part(tensor), 0
    if part.layout != torch.strided or not part.numel():
        return False
    for stride, size in sorted(zip(part.stride(), part.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
