# SPDX-License-Identifier: Apache-2.0
"""Steps on other tensors in the places of parameters: float32 copies, or this rank's parts of complex ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.optim import Optimizer

from accel.tensors import dtensor_like, has_wide_gradient, is_dtensor, local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


MASTER = "accel_master"  # name of the copy in a parameter's state
_SEEN = "accel_seen"  # attribute of a copy: versions of parameter and copy after the latest step


class _Pair(NamedTuple):
    """A parameter, the tensor that an optimizer steps in its place, such as a float32 copy, and the state of that."""

    parameter: torch.Tensor
    master: torch.Tensor
    state: dict[str, Any]


def step_masters(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Step an optimizer on float32 copies of its 16-bit parameters, and round the copies into these. Mutates both.

    A copy adopts elements that something else has changed since the latest step; torch counts none through `.data`.
    """
    stepped = [each for each in parameters if each.grad is not None and has_wide_gradient(each)]
    pairs = [_pair(each, optimizer.state) for each in stepped]
    for parameter, master, _ in pairs:
        master.grad = parameter.grad
    try:
        _step_instead(optimizer, pairs)
    finally:
        for parameter, master, _ in pairs:
            optimizer.state[parameter] = {**optimizer.state[parameter], MASTER: master}
    _round(pairs)


def _step_instead(optimizer: Optimizer, pairs: Sequence[_Pair]) -> None:
    """Step an optimizer on other tensors in the places of parameters. Mutates both.

    The parameters keep the state that the tensors then have; the gradients of the tensors are dropped.
    """
    others = {id(pair.parameter): pair.master for pair in pairs}
    own = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, params in own:
            group["params"] = [others.get(id(each), each) for each in params]
        for parameter, other, state in pairs:
            if state:  # optimizers begin where there is none
                optimizer.state[other] = state
            _ = optimizer.state.pop(parameter, None)
        _ = optimizer.step()
    finally:
        for group, params in own:
            group["params"] = params
        for parameter, other, state in pairs:
            other.grad = None
            optimizer.state[parameter] = optimizer.state.pop(other, state)


def step_parts(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Step an optimizer on this rank's parts of complex parameters. Mutates both."""
    stepped = [each for each in parameters if each.grad is not None and each.is_complex() and is_dtensor(each)]
    pairs = [_Pair(each, local_part(each), _mapped(optimizer.state.get(each, {}), local_part)) for each in stepped]
    for parameter, part, _ in pairs:
        part.grad = local_part(cast(torch.Tensor, parameter.grad))
    try:
        _step_instead(optimizer, pairs)
    finally:
        for parameter, part, _ in pairs:
            whole = partial(_like_part, part, cast("DTensor", parameter))
            optimizer.state[parameter] = _mapped(optimizer.state[parameter], whole)


def _mapped(state: Mapping[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    return {key: change(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _like_part(part: torch.Tensor, parameter: DTensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value of a state as a DTensor, if it has an element for each of the part's."""
    return dtensor_like(value, parameter, parameter.shape) if value.ndim and value.shape == part.shape else value


def _pair(parameter: torch.Tensor, states: Any) -> _Pair:
    state: dict[str, Any] = dict(states.get(parameter, {}))
    master = state.pop(MASTER, None)
    values = parameter.detach()
    if not isinstance(master, torch.Tensor) or master.dtype != torch.float32:
        wide = {
            key: value.float()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (parameter.shape, parameter.dtype)
        }
        return _Pair(parameter, values.float(), state | wide)
    if getattr(master, _SEEN, None) != _versions(parameter, master):
        _ = master.copy_(torch.where(values == master.to(values.dtype), master, values.float()))
    return _Pair(parameter, master, state)


def _round(pairs: Sequence[_Pair]) -> None:
    if pairs:
        parameters = [pair.parameter.detach() for pair in pairs]
        cast(Any, torch)._foreach_copy_(parameters, [pair.master for pair in pairs])  # of any dtype
    for parameter, master, _ in pairs:
        setattr(master, _SEEN, _versions(parameter, master))


def _versions(parameter: torch.Tensor, master: torch.Tensor) -> tuple[int, int]:
    """Return torch's counts of changes in place."""
    return parameter._version, master._version
