# SPDX-License-Identifier: Apache-2.0
"""Steps on float32 copies of 16-bit parameters, the master weights, which are part of the optimizer's state.

Micikevicius et al. 2018, "Mixed precision training", arXiv:1710.03740.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.optim import Optimizer

from accel.optim._gradients import parameters_of
from accel.tensors import has_wide_gradient

MASTER = "accel_master"  # name of the copy in a parameter's state
_SEEN = "accel_seen"  # attribute of a copy: versions of parameter and copy after the latest step


class _Pair(NamedTuple):
    """A parameter, its float32 copy, and its state without the copy."""

    parameter: torch.Tensor
    master: torch.Tensor
    state: dict[str, Any]


def step_masters(optimizer: Optimizer) -> None:
    """Step an optimizer on float32 copies of its 16-bit parameters, and round the copies into these. Mutates both.

    A copy begins with the parameter's values, and adopts elements that something else has changed since the latest
    step, such as a load of the weights; torch does not count changes through `.data`.
    """
    stepped = [each for each in parameters_of([optimizer]) if each.grad is not None and has_wide_gradient(each)]
    pairs = [_pair(each, optimizer.state) for each in stepped]
    masters = {id(pair.parameter): pair.master for pair in pairs}
    own = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, params in own:
            group["params"] = [masters.get(id(each), each) for each in params]
        for parameter, master, state in pairs:
            if state:  # optimizers begin where there is none
                optimizer.state[master] = state
            _ = optimizer.state.pop(parameter, None)
            master.grad = parameter.grad
        _ = optimizer.step()
    finally:
        for group, params in own:
            group["params"] = params
        for parameter, master, state in pairs:
            master.grad = None
            optimizer.state[parameter] = {**optimizer.state.pop(master, state), MASTER: master}
    _round(pairs)


def _pair(parameter: torch.Tensor, states: Any) -> _Pair:
    state: dict[str, Any] = dict(states.get(parameter, {}))
    master = state.pop(MASTER, None)
    values = parameter.detach()
    if not isinstance(master, torch.Tensor) or master.dtype != torch.float32:
        wide = {key: value.float() for key, value in state.items() if _is_like(value, parameter)}
        return _Pair(parameter, values.float(), state | wide)
    if getattr(master, _SEEN, None) != _versions(parameter, master):
        _ = master.copy_(torch.where(values == master.to(values.dtype), master, values.float()))
    return _Pair(parameter, master, state)


def _is_like(value: object, parameter: torch.Tensor) -> bool:
    """Return whether a value of a state has its parameter's shape and 16 bits."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dtype == parameter.dtype


def _round(pairs: Sequence[_Pair]) -> None:
    if pairs:
        parameters = [pair.parameter.detach() for pair in pairs]
        cast(Any, torch)._foreach_copy_(parameters, [pair.master for pair in pairs])  # of any dtype
    for parameter, master, _ in pairs:
        setattr(master, _SEEN, _versions(parameter, master))


def _versions(parameter: torch.Tensor, master: torch.Tensor) -> tuple[int, int]:
    """Return torch's counts of changes in place."""
    return parameter._version, master._version
