# SPDX-License-Identifier: Apache-2.0
"""Objects with `state_dict` and `load_state_dict` as items, such as optimizers with a state dict of another form than
torch's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.lr_scheduler import LRScheduler

from accel.checkpoint._encoding import Kept, encode
from accel.checkpoint._manifest import Item, is_list, is_object
from accel.comm import refuse_replaced_memory
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.items._source import Captured, Change, ItemHandler, ItemLoad, facts, fields_in, join_fields
from accel.optim import parameters_of
from accel.parallel._leftovers import clear_parameters
from accel.tensors import dtensor_like, is_dtensor, local_part


@runtime_checkable
class Stateful(Protocol):
    """An object that returns its state as plain values and tensors, and loads it in place."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Load a state from `state_dict`."""
        ...


def _capture(name: str, live: Stateful, to: Captured) -> Item:
    """Return an object's entry in a checkpoint."""
    if isinstance(live, torch.optim.Optimizer) and any(map(is_dtensor, parameters_of([live]))):
        raise _divided(name, "sharded parameters")
    return Item("stateful", _type_of(live), encode(live.state_dict(), name, to.loose, to.kept))


def _is_staged(ctx: DistContext, live: Stateful) -> bool:
    """Raise for an optimizer that a pipeline divides."""
    if isinstance(live, torch.optim.Optimizer) and ctx.axis("pp").size > 1:
        raise _divided(type(live).__name__, "a pipeline")
    return False


def _divided(where: str, got: str) -> CheckpointError:
    """Return the error for an optimizer whose state does not follow its parameters."""
    return CheckpointError(
        "an optimizer whose state dict is not in torch's form is divided among ranks",
        expected="a state dict with state and param_groups, as torch's, which belong to parameters by their positions",
        got=got,
        where=where,
        fix='Replicate the parameters, as by strategy="ddp", or let state_dict() return torch\'s form.',
    )


def _drop_gradients(live: Stateful) -> None:
    if isinstance(live, torch.optim.Optimizer):
        clear_parameters(parameters_of([live]))


def _type_of(live: Stateful) -> str:
    return type(live).__qualname__


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

    def read(self) -> Sequence[Change]:
        """Make the state."""
        state = self.source.decode(self.name, self._stored, self._tensors, self._kept)
        if isinstance(self.live, LRScheduler) and not self.source.options.strict:
            state = _with_live_groups(state, self._before)
        put = self.live.load_state_dict
        is_part = self.name in self.source.parts
        before = _copies(self._before) if is_part else copy.deepcopy(self._before)
        return [Change(f"item {self.name}", partial(put, state), partial(put, before))]

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
    type_of=_type_of,
    capture=_capture,
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
