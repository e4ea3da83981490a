# SPDX-License-Identifier: Apache-2.0
"""Hooks of units while they run: their places for the errors of other ranks, and outputs of any class."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from accel.comm import SUM_OF, Comm, in_unit
from accel.errors import ConfigError, PrepareError
from accel.mixins import Mixin
from accel.parallel._containers import known_parts
from accel.parallel._copies import NotPickled
from accel.parallel._modules import note_module, note_tensor, notes_of, tensor_notes, written_class
from accel.parallel._private import in_function_transform, runs_in_backward
from accel.parallel._sharded import load_plain
from accel.parallel._torch_fsdp import (
    SUMS,
    around_calls,
    end_failed_forward,
    gather_at,
    gather_before,
    gather_in_new_dtype,
    is_within_hooks,
    shards_of,
    sum_at_end,
)


class CalledUnit(Mixin, nn.Module):
    """Mixin of units: a forward that a model calls itself, as `block.forward(x)`, is a call of the unit. torch gathers
    in hooks, which only run in calls."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the unit's own forward within its hooks."""
        if is_dynamo_compiling() or is_within_hooks(self):
            return super().forward(*args, **kwargs)
        return self(*args, **kwargs)


class EndedUnit(NotPickled, nn.Module):
    """Mixin of units: a forward that raises has ended for later backwards. torch notes an end only in a hook. Calls
    that torch does not support on shards are refused with what to do."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if is_dynamo_compiling():
            return super().__call__(*args, **kwargs)
        try:
            return super().__call__(*args, **kwargs)
        except BaseException as error:
            end_failed_forward(self)
            if isinstance(error, AttributeError) and in_function_transform():
                raise _with_other_parameters(self) from error
            raise

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Apply a function to all tensors, as `to` does."""
        applied = cast(Any, super())._apply(*args, **kwargs)
        gather_in_new_dtype(self)
        return applied

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict, or refuse one of plain tensors."""
        return load_plain(super().load_state_dict, *args, **kwargs)

    def __deepcopy__(self, memo: object) -> Any:
        """Refuse: torch's state of a unit has no copy."""
        raise PrepareError(
            "fully_shard has sharded the module, and it cannot be copied",
            expected="a copy of the plain model, or of its values",
            got="copy.deepcopy(model)",
            where=f"copy.deepcopy, {written_class(self).__name__}",
            fix="Copy before accel.prepare, and prepare both: frozen = accel.prepare_model(ctx, copy.deepcopy(model)). "
            "For averaged weights use accel.training.Ema; for the values accel.get_state_dict(ctx, model).",
        )


def _with_other_parameters(unit: nn.Module) -> ConfigError:
    return ConfigError(
        "a transform of torch.func gives a sharded module other parameters, and torch gathers shards only",
        expected="vmap, grad or jacrev of functions of the inputs",
        got=f"torch.func.functional_call of {written_class(unit).__name__}",
        where="forward of a model by the strategy fsdp",
        fix="Compute it with a plain copy, made before accel.prepare: plain.load_state_dict(accel.get_state_dict(ctx, "
        "model, dst=None)). Under the strategy ddp, accel.unwrap_model(model) is plain.",
    )


def note_units(comm: Comm, units: Mapping[str, nn.Module]) -> None:
    """Note from now on each unit that this rank runs, and name it in errors of lost connections. Mutates the units, by
    path."""
    for path, unit in units.items():
        around_calls(unit, *_notes(comm, path or written_class(unit).__name__))


def _notes(comm: Comm, name: str) -> tuple[Callable[[], None], Callable[[str, Callable[..., Any]], Callable[..., Any]]]:
    """Return a note of a unit's forward, and what makes its waits note the unit, on the communicator."""

    def waits(method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return partial(in_unit, comm, f"{SUM_OF if method == SUMS else 'the gather of'} {name}", call)

    return partial(comm.units.add, name), waits


def reduce_in_one_order(units: Sequence[nn.Module]) -> None:
    """Let ranks sum the gradients of units in one order, also if the inputs of a unit need a gradient on some ranks
    only. The model itself is the last unit.

    torch sums a unit's gradients when its backward reaches the inputs, but at the end of the backward if none of them
    needs a gradient.
    """
    for unit in units[:-1]:
        _ = unit.register_forward_pre_hook(
            cast(Any, torch.compiler).disable(_need_gradient), prepend=True, with_kwargs=True
        )


def _need_gradient(unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled() or not any(each.requires_grad for each in unit.parameters()):
        return None
    inputs = (args, tuple(kwargs.values()))
    if any(each.requires_grad for each in _tensors(inputs)) or (found := _with_gradient(inputs)) is None:
        return None
    return found[0], dict(zip(kwargs, found[1], strict=True))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for each in known_parts(value) or ():
            yield from _tensors(each)


def _with_gradient(value: Any) -> Any:
    """Return a value in which the first differentiable tensor requires a gradient; None without such a tensor."""
    if isinstance(value, torch.Tensor):
        differentiable = value.is_floating_point() or value.is_complex()
        return value.detach().requires_grad_() if differentiable else None
    for at, each in enumerate(cast("tuple[Any, ...]", value) if type(value) is tuple else ()):
        if (found := _with_gradient(each)) is not None:
            return (*value[:at], found, *value[at + 1 :])
    return None


_LOG = logging.getLogger("accel.parallel")
_DEEPEST = 16
_ATOMS = (str, bytes, int, float, complex, torch.dtype, torch.device, type, nn.Module)
_LATER = (Iterator, FunctionType, MethodType, partial)  # what may read parameters after the forward


class _Output:
    """The output of a unit, as torch and as we see it.

    Attributes:
        reached: whether torch finds a tensor that requires a gradient, in containers that it knows.
        views: tensors that require a gradient and are views: torch's hook is lost when they are changed in place.
        hidden: tensors that require a gradient, in other objects.
        opaque: whether there are such objects.
        later: whether something in it may compute after the forward.
    """

    def __init__(self, value: object) -> None:
        self.reached = self.opaque = self.later = False
        self.views: list[torch.Tensor] = []
        self.hidden: list[torch.Tensor] = []
        self._seen: set[int] = set()
        self._look(value, depth=0, inside=False)

    def _look(self, value: object, depth: int, inside: bool) -> None:
        if isinstance(value, torch.Tensor):
            if value.requires_grad and value._base is not None:
                self.views.append(value)
            if value.requires_grad and not inside:
                self.reached = True
                self._seen.add(id(value))
            elif value.requires_grad and id(value) not in self._seen and "reached" not in tensor_notes(value):
                self.hidden.append(value)
        elif value is None or isinstance(value, _ATOMS) or depth == _DEEPEST or id(value) in self._seen:
            return
        elif isinstance(value, _LATER):
            self.later = True
        else:
            self._seen.add(id(value))
            known = known_parts(value)
            self.opaque = self.opaque or known is None
            for each in known or ():
                self._look(each, depth + 1, inside)
            for each in () if type(value) in (dict, list, tuple) else _other_parts(value):
                self._look(each, depth + 1, inside=True)


def _other_parts(value: Any) -> Iterator[object]:
    yield from getattr(value, "__dict__", {}).values()
    classes: Sequence[type] = type(value).__mro__
    for kind in classes:
        slots = vars(kind).get("__slots__", ())
        yield from (getattr(value, name, None) for name in ((slots,) if isinstance(slots, str) else slots))
    if isinstance(value, Mapping):
        yield from cast("Mapping[object, object]", value).values()
    elif isinstance(value, Sequence | Set | deque):
        yield from cast("Iterable[object]", value)


def reach_outputs(units: Mapping[str, nn.Module]) -> None:
    """Let units return objects in which torch finds no tensors, such as a cache or an output class. Mutates the units,
    by path, the model itself last.

    torch gathers a unit for its backward when a gradient of its output comes. It looks for outputs in dicts, lists,
    tuples and dataclasses alone.
    """
    for path, unit in units.items():
        look = partial(_reach, path or written_class(unit).__name__)
        _ = unit.register_forward_hook(cast(Any, torch.compiler).disable(look), prepend=True, with_kwargs=True)


def _reach(name: str, unit: nn.Module, args: Any, kwargs: Mapping[str, object], value: Any) -> None:
    listed: Sequence[Any] = cast("tuple[Any, ...]", value) if type(value) is tuple else (value,)
    if all(each is None or (type(each) is torch.Tensor and each._base is None) for each in listed):
        return  # as most modules do: a look at others takes microseconds
    found = _Output(cast(object, value))
    trains = torch.is_grad_enabled()
    if trains and found.views and not runs_in_backward():
        given = {id(_behind(each)) for each in _tensors((*args, *kwargs.values()))}
        for each in found.views:
            function = _behind(each).grad_fn
            if function is not None and id(_behind(each)) not in given:  # else it is one of the module before
                gather_before(unit, function)
    if found.later or (trains and found.opaque and not (found.reached or found.hidden)):
        _keep_gathered(name, unit)
    elif trains and found.hidden and not runs_in_backward():
        for each in found.hidden:
            note_tensor(each, reached=True)
            gather_at(unit, each)


def _behind(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _keep_gathered(name: str, unit: nn.Module) -> None:
    """Let a unit keep its parameters after the forward, from this one on."""
    if "kept_gathered" not in notes_of(unit):
        note_module(unit, kept_gathered=True)
        cast(Any, unit).set_reshard_after_forward(False, recurse=False)
        for _, whole, _ in shards_of(unit):
            if whole is not None and whole.requires_grad:
                sum_at_end(unit, whole)
        _LOG.warning(
            "%s returns an object with tensors that cannot be found, such as a generator: its parameters stay gathered "
            "between forward and backward. Return tensors, or containers of them, to save the memory.",
            name,
        )
