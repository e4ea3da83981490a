# SPDX-License-Identifier: Apache-2.0
"""Transforms: pure functions of the user that rename the tensors of modules in a save or a load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import msgspec
import torch

from accel.checkpoint import TensorEntry, check_tensor
from accel.errors import ConfigError

T = TypeVar("T")


class Stored(msgspec.Struct, frozen=True):
    """A stored tensor of a module, for a `transform` that gives it another name, several, or none.

    Attributes:
        name: name in the file.
        dtype: torch's name, such as "float32".
        shape: shape of the whole tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


SaveTransform = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
LoadTransform = Callable[[Mapping[str, Stored]], Mapping[str, Stored]]


def transformed_names(entries: Mapping[str, TensorEntry], transform: LoadTransform) -> dict[str, str]:
    """Return the names to load the tensors of modules by, each with its name in the file.

    Args:
        entries: the checkpoint's tensors of modules, aliases included.
        transform: the user's transform.

    Raises:
        ConfigError: the result is no dict of the function's arguments by name.
    """
    given = {name: Stored(name, each.dtype, each.shape) for name, each in entries.items()}
    found = _checked(transform(given), Stored, "load_state")
    for name, stored in found.items():
        if given.get(stored.name) != stored:
            raise _refusal("load_state", f"{stored!r} as {name!r}")
    return {name: stored.name for name, stored in found.items()}


def transformed_tensors(
    tensors: Mapping[str, torch.Tensor], modules: Iterable[str], transform: SaveTransform
) -> dict[str, torch.Tensor]:
    """Return the tensors to save of modules, by name.

    Args:
        tensors: tensors of modules, by name.
        modules: names of items.
        transform: the user's transform.

    Raises:
        CheckpointError: a tensor cannot be stored.
        ConfigError: the result is no dict of tensors by names that begin with a module's.
    """
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
        "a transform with an invalid result",
        expected="some of what it was given, by names that begin with an item's",
        got=got,
        where=f"{caller}, transform=",
        fix="Return a new dict, such as {name.replace('old.', 'new.'): value for name, value in tensors.items()}.",
    )
