# SPDX-License-Identifier: Apache-2.0
"""The state of one rank as tensors and values, and back into live objects of the same rank of another group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
from torch import nn

from accel.checkpoint import decode, encode
from accel.data import Cursor
from accel.errors import ConfigError
from accel.optim import Accumulation
from accel.precision import LossScale
from accel.tensors import is_dtensor
from accel.training import TrainState

_STATE = "state"


@runtime_checkable
class Stateful(Protocol):
    """An object with a state, such as a module, an optimizer or a scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take a state up."""
        ...


def check_items(items: Mapping[str, object]) -> None:
    """Raise `ConfigError` unless a group that joins can take all of these up."""
    wrong = [f"{name}: {type(item).__name__}" for name, item in items.items() if not isinstance(item, Stateful)]
    if wrong or _STATE in items:
        raise ConfigError(
            "items that a joining group cannot take up",
            expected=f"objects with state_dict and load_state_dict, by other names than {_STATE!r}",
            got=", ".join(wrong) or f"{_STATE!r} among the items, where the TrainState itself stands",
            where="begin_step, items",
        )


def capture(items: Mapping[str, object], state: TrainState) -> dict[str, Any]:
    """Return all items and the state as tensors and values. No communication.

    Raises:
        ConfigError: a model is sharded.
    """
    tensors: dict[str, torch.Tensor] = {}
    values = {
        name: encode(item.state_dict(), name, tensors) for name, item in items.items() if isinstance(item, Stateful)
    }
    parts = {"cursor": state.cursor, "accum": state.accum, "scaler": state.scaler}
    values[_STATE] = {name: msgspec.to_builtins(part) for name, part in parts.items()}
    if sharded := [name for name, tensor in tensors.items() if is_dtensor(tensor)]:
        raise ConfigError(
            "replica groups that shard their model",
            expected="ranks of a group that replicate it: strategy ddp, or one rank",
            got=f"{len(sharded)} sharded tensors, the first {sharded[0]}",
            where="begin_step, items",
        )
    return {"tensors": tensors, "values": values}


def restore(items: Mapping[str, object], taken: Mapping[str, Any]) -> TrainState:
    """Put another group's state into live objects; return its `TrainState`. No communication.

    Raises:
        ConfigError: that group has other items.
    """
    values, tensors = dict(taken["values"]), taken["tensors"]
    state = values.pop(_STATE)
    if values.keys() != items.keys():
        raise ConfigError(
            "replica groups differ in their items",
            expected=", ".join(sorted(values)),
            got=", ".join(sorted(items)),
            where="begin_step, items",
        )
    for name, item in items.items():
        assert isinstance(item, Stateful)
        live: dict[str, torch.Tensor] = {}
        _ = encode(item.state_dict(), name, live)
        mine = {key: part for key, part in tensors.items() if _belongs(key, name)}
        if isinstance(item, nn.Module):
            _copy(live, mine)
        else:
            _ = item.load_state_dict(decode(values[name], name, mine, name))
    return TrainState(
        cursor=msgspec.convert(state["cursor"], Cursor),
        accum=msgspec.convert(state["accum"], Accumulation),
        scaler=msgspec.convert(state["scaler"], LossScale),
    )


def _copy(live: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor]) -> None:
    if live.keys() != mine.keys():
        raise ConfigError(
            "replica groups differ in their models",
            expected=", ".join(sorted(mine.keys() - live.keys())) or "no other tensors",
            got=", ".join(sorted(live.keys() - mine.keys())),
            where="begin_step, items",
        )
    if odd := [key for key, tensor in live.items() if _facts(tensor) != _facts(mine[key])]:
        raise ConfigError(
            "replica groups differ in their models",
            expected=", ".join(f"{key} {_facts(mine[key])}" for key in odd),
            got=", ".join(f"{key} {_facts(live[key])}" for key in odd),
            where="begin_step, items",
        )
    with torch.no_grad():
        for key, tensor in live.items():
            _ = tensor.copy_(mine[key])


def _facts(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"


def _belongs(key: str, name: str) -> bool:
    return key.startswith((f"{name}.", f"{name}[")) or key == name
