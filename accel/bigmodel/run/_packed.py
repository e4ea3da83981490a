# SPDX-License-Identifier: Apache-2.0
"""Packed weights of a model that is dispatched: put together anew whenever one of their parts goes elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel.bigmodel.run._absent import AbsentTensor
from accel.parallel import named_modules
from accel.tensors import MARK, Packed, packed


@dataclass(eq=False, slots=True)
class PackedWeight:
    """A quantizer's parameter in its places.

    Attributes:
        places: dicts of parameters, each with the key in it; several where the weight is tied.
        packed: its parts now.
        before: the parameter and its parts as they were found; None once these are to lose their memory.
    """

    places: list[tuple[dict[str, Any], str]]
    packed: Packed
    before: tuple[nn.Parameter, Mapping[str, torch.Tensor]] | None

    def put(self, part: str, tensor: torch.Tensor) -> None:
        """Put another tensor in the place of a part, into the model."""
        self.packed = self.packed.replaced(part, tensor)
        made = self.made({})
        if self.before is not None and all(self.packed.parts[name] is old for name, old in self.before[1].items()):
            made = self.before[0]
        for registry, key in self.places:
            registry[key] = made

    def made(self, others: Mapping[str, torch.Tensor]) -> nn.Parameter:
        """Return the parameter with other tensors for some parts."""
        made = self.packed.make({**self.packed.parts, **others})
        if isinstance(made, AbsentTensor):
            setattr(made, MARK, self.packed)
        return made

    def release(self) -> None:
        """Let the parameter that was found go, so that its memory is free once no part uses it."""
        self.before = None


def find_packed(model: nn.Module) -> list[tuple[PackedWeight, list[str]]]:
    """Return the packed weights of a model, each with its paths."""
    found: dict[int, tuple[PackedWeight, list[str]]] = {}
    for path, module in named_modules(model, every_path=True):
        registry: dict[str, Any] = module._parameters  # pyright: ignore[reportPrivateUsage]
        for key, tensor in registry.items():
            if id(tensor) not in found:
                weight = packed(module, key, tensor)
                if weight is None:
                    continue
                found[id(tensor)] = PackedWeight([], weight, (tensor, weight.parts)), []
            whole, paths = found[id(tensor)]
            if not any(registry is other and key == name for other, name in whole.places):
                whole.places.append((registry, key))
            paths.append(f"{path}.{key}" if path else key)
    return list(found.values())
