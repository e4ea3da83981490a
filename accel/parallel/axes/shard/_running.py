# SPDX-License-Identifier: Apache-2.0
"""What units do while they run: they note themselves for the errors of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from accel.comm import SUM_OF, Comm, in_unit
from accel.parallel._leftovers import unit_groups
from accel.parallel._modules import written_class

# methods of torch's groups of parameters in which a rank waits for others
_CALLS = {"unshard": "the gather of", "wait_for_unshard": "the gather of", "post_backward": SUM_OF}


def note_units(comm: Comm, units: Mapping[str, nn.Module]) -> None:
    """Note from now on each unit that this rank runs, and name it in errors of lost connections. Mutates the units, by
    path."""
    for path, unit in units.items():
        name = path or written_class(unit).__name__
        for at, group in enumerate(unit_groups(unit)):
            if at == 0:
                group.pre_forward = partial(_enter, comm, name, group.pre_forward)
            for method, call in _CALLS.items():
                setattr(group, method, partial(in_unit, comm, f"{call} {name}", getattr(group, method)))


def _enter(comm: Comm, name: str, pre_forward: Callable[..., Any], *inputs: Any) -> Any:
    comm.units.add(name)
    return pre_forward(*inputs)


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
    elif type(value) in (tuple, list):
        for each in cast("Sequence[object]", value):
            yield from _tensors(each)


def _with_gradient(value: Any) -> Any:
    """Return a value whose first tensor with a derivative requires a gradient; None without such a tensor."""
    if isinstance(value, torch.Tensor):
        differentiable = value.is_floating_point() or value.is_complex()
        return value.detach().requires_grad_() if differentiable else None
    for at, each in enumerate(cast("tuple[Any, ...]", value) if type(value) is tuple else ()):
        if (found := _with_gradient(each)) is not None:
            return (*value[:at], found, *value[at + 1 :])
    return None
