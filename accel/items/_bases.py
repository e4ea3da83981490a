# SPDX-License-Identifier: Apache-2.0
"""Models of which only a part trains: a checkpoint holds that part, and a digest of each frozen parameter."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, cast

import torch

from accel.errors import CheckpointError, ConfigError
from accel.items._source import Problems, facts
from accel.tensors import is_dtensor

BASE = "$base"  # the key in a module's value; "$" keeps it apart from any name
_RUN = 1 << 24  # elements at a time, so that a digest takes little memory


def without_base(name: str, parameters: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the parameters of a module that train, and a digest of each of the others.

    Args:
        name: the item's, for errors.
        parameters: by name.

    Raises:
        CheckpointError: a frozen parameter is sharded.
        ConfigError: no parameter trains.
    """
    trained = {key: each for key, each in parameters.items() if each.requires_grad}
    if not trained:
        fix = "Let some parameter have requires_grad=True before the save."
        raise ConfigError("TrainableOnly of a model of which nothing trains", where=f"item {name}", fix=fix)
    frozen = {key: each for key, each in parameters.items() if key not in trained}
    return trained, {key: _digest(f"{name}.{key}", tensor) for key, tensor in frozen.items()}


def compare_base(
    name: str, parameters: Mapping[str, torch.Tensor], stored: object, problems: Problems
) -> frozenset[str]:
    """Compare frozen parameters with the digests that a checkpoint holds; return their names.

    Raises:
        CheckpointError: it is nothing that was saved.
    """
    shown = repr(stored)[:80]
    digests = cast("dict[str, Any]", stored) if isinstance(stored, dict) else {"": None}
    if not all(isinstance(digest, str) for digest in digests.values()):
        raise CheckpointError("not digests of a base", got=shown, where=f"item {name}")
    found = parameters.keys() & digests.keys()
    problems.compare_names(found, digests.keys(), f"{name}.")
    for key in found:
        if _digest(f"{name}.{key}", parameters[key]) != digests[key]:
            problems.wrong_type(f"{name}.{key}", "the base that the checkpoint was trained on", "other values")
    return frozenset(digests)


def _digest(name: str, tensor: torch.Tensor) -> str:
    """A digest of dtype, shape and bits, the same on every device; bits are summed there, by their places."""
    if is_dtensor(tensor):
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
