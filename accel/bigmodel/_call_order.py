# SPDX-License-Identifier: Apache-2.0
"""The order in which a model calls its modules, observed in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def call_order(model: M, modules: Mapping[str, nn.Module], call: Callable[[M], object]) -> Sequence[str]:
    """Return the names of the modules in the order of their first calls. No gradients; hooks are removed at the end.

    Modules that are not called stand before the module that they were before.

    Args:
        model: the model.
        modules: some of its modules by name.
        call: calls the model once.
    """
    first: dict[str, int] = {}

    def note(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            _ = first.setdefault(name, len(first))

        return hook

    handles = [module.register_forward_pre_hook(note(name)) for name, module in modules.items()]
    try:
        with torch.no_grad():
            _ = call(model)
    finally:
        for handle in handles:
            handle.remove()
    places: list[tuple[int, int, str]] = []
    following = len(first)
    names = list(modules)
    for at in reversed(range(len(names))):
        following = first.get(names[at], following)
        places.append((following, at, names[at]))
    return [name for _, _, name in sorted(places)]
