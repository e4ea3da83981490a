# SPDX-License-Identifier: Apache-2.0
"""Models of which only a part trains: a checkpoint holds that part, and a digest of each frozen parameter."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from accel.checkpoint import is_sharded
from accel.errors import CheckpointError, ConfigError
from accel.items._modules import ModuleState
from accel.items._problems import Problems, facts

BASE = "$base"  # the key in a module's value; "$" keeps it apart from any name
_RUN = 1 << 24  # elements at a time, so that a digest takes little memory


@dataclasses.dataclass(frozen=True, slots=True)
class TrainableOnly:
    """A module of which a checkpoint holds only what trains: for `save_state`.

    Saved are the parameters with `requires_grad`, buffers and extra state; of each other parameter a digest, with which
    `load_state` compares the live one.

    Attributes:
        model: plain or from `prepare`; frozen parameters are not sharded.
    """

    model: nn.Module


def trainable_names(items: Mapping[str, object]) -> frozenset[str]:
    """Return the names of items that are `TrainableOnly`.

    Raises:
        ConfigError: one of something else than a module.
    """
    found = {name: item.model for name, item in items.items() if isinstance(item, TrainableOnly)}
    for name, model in found.items():
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError("not a module", got=type(model).__name__, where=f"item {name}, TrainableOnly")
    return frozenset(found)


def without_base(name: str, state: ModuleState) -> tuple[ModuleState, dict[str, str]]:
    """Return the state of a module that trains in part, without its frozen parameters, and a digest of each of those.

    Raises:
        CheckpointError: a frozen parameter is sharded.
        ConfigError: no parameter trains.
    """
    frozen = {key: each for key, each in state.parameters.items() if not each.requires_grad}
    if len(frozen) == len(state.parameters):
        fix = "Let some parameter have requires_grad=True before the save."
        raise ConfigError("TrainableOnly of a model of which nothing trains", where=f"item {name}", fix=fix)
    trained = {key: each for key, each in state.parameters.items() if key not in frozen}
    return dataclasses.replace(state, parameters=trained), {
        key: _digest(f"{name}.{key}", tensor) for key, tensor in frozen.items()
    }


def compare_base(name: str, live: ModuleState, stored: object, problems: Problems) -> frozenset[str]:
    """Compare frozen parameters with the digests that a checkpoint holds; return their names.

    Raises:
        CheckpointError: it is nothing that was saved.
    """
    shown = repr(stored)[:80]
    digests = cast("dict[str, Any]", stored) if isinstance(stored, dict) else {"": None}
    if not all(isinstance(digest, str) for digest in digests.values()):
        raise CheckpointError("not digests of a base", got=shown, where=f"item {name}")
    problems.compare_names(live.parameters.keys() & digests.keys(), digests.keys(), f"{name}.")
    for key in live.parameters.keys() & digests.keys():
        if _digest(f"{name}.{key}", live.parameters[key]) != digests[key]:
            problems.wrong_type(f"{name}.{key}", "the base that the checkpoint was trained on", "other values")
    return frozenset(digests)


def _digest(name: str, tensor: torch.Tensor) -> str:
    """A digest of dtype, shape and bits, the same on every device; bits are summed there, by their places."""
    if is_sharded(tensor):
        raise CheckpointError(
            "a frozen parameter that is sharded has no digest",
            where=name,
            fix="Save the whole model, without TrainableOnly, or keep the base whole on each rank.",
        )
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64)
    sums = [torch.zeros(2, dtype=torch.int64, device=flat.device)]
    for start in range(0, words.numel(), _RUN):
        run = words[start : start + _RUN]
        places = torch.arange(start, start + run.numel(), device=flat.device)
        mixed = (run ^ (run >> 29)) * (2 * places + 1)
        sums.append(torch.stack([run.sum(), (mixed ^ (mixed >> 32)).sum()]))
    bits = [int(each) for each in torch.stack(sums).sum(0)]
    return hashlib.sha256(repr((facts(tensor), bits)).encode()).hexdigest()
