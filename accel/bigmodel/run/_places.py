# SPDX-License-Identifier: Apache-2.0
"""Places of a weight in a model, under each of its names, packed weights among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from accel.bigmodel._arguments import dtype_of
from accel.bigmodel.plan import Skeleton, Weight
from accel.bigmodel.run._absent import AbsentTensor, in_form_of
from accel.errors import ConfigError, StreamError
from accel.parallel._modules import named_modules
from accel.tensors import MARK, Packed, is_dtensor, local_part, packed, packed_weights
from accel.terminal import show_names


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
        # All parts are back, so the parameter that was found is, too: others may hold it.
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


class WeightPlace(NamedTuple):
    """One place of a weight: a module's dict of parameters or buffers, and the key in it."""

    registry: dict[str, Any]  # the dict
    key: str  # the name in it
    whole: PackedWeight | None = None  # the packed weight that this one is a part of; None for a parameter or buffer
    part: str = ""  # name of the part

    @property
    def is_held(self) -> bool:
        """Whether the model still has the name: `del module.weight` takes it away."""
        return self.key in self.registry

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is there now."""
        return self.registry[self.key] if self.whole is None else self.whole.packed.parts[self.part]


def find_places(model: nn.Module, skeleton: Skeleton) -> Mapping[str, tuple[WeightPlace, ...]]:
    """Return the places of each weight by its name, several where it is tied; raise for the map of another model."""
    found: dict[str, tuple[WeightPlace, ...]] = {}
    problems: list[str] = []
    parts = packed_places(model)
    for weight in skeleton.weights():
        places = [parts.get(name) or _place(model, name) for name in (weight.name, *weight.tied)]
        here = tuple(place for place in places if place is not None)
        if len(here) < len(places):
            problems.append(f"no {weight.name!r}")
        elif (shape := tuple(held(here[0].tensor).shape)) != weight.shape:
            problems.append(f"{weight.name!r} of shape {shape}, not {weight.shape}")
        # A module under several paths has one dict, which counts once.
        found[weight.name] = tuple({(id(each.registry), each.key, each.part): each for each in here}.values())
    known = {name for weight in skeleton.weights() for name in (weight.name, *weight.tied)}
    here = {name for name, _ in _named(model)}
    problems += [f"{name!r}, which the map does not have" for name in sorted(here - known)]
    if problems:
        raise ConfigError(
            "the device map is of another model",
            got=show_names(problems, 5),
            where="dispatch_model",
            fix="Make the map of this model: infer_device_map(describe(model), ...).",
        )
    return found


def packed_places(model: nn.Module) -> dict[str, WeightPlace]:
    """Return the places of the parts of packed weights, by path."""
    found: dict[str, WeightPlace] = {}
    for whole, paths in find_packed(model):
        for path in paths:
            root, dot, _ = path.rpartition(".")
            found |= {root + dot + part: WeightPlace(*whole.places[0], whole, part) for part in whole.packed.parts}
    return found


def check_undispatched(model: nn.Module) -> None:
    """Raise `StreamError` for a model with weights that an open handle streams."""
    for name, tensor in _named(model):
        part = held(tensor)
        if isinstance(part, AbsentTensor) and not part.origin.is_closed:
            raise StreamError(
                "the model is dispatched already",
                where=f"dispatch_model, {name!r}",
                fix="Close that first: run.close().",
            )


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of a model has memory."""
    return not tensor.is_meta and not isinstance(held(tensor), AbsentTensor)


def held(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; any other tensor as it is."""
    return local_part(tensor) if is_dtensor(tensor) else tensor


def put(places: tuple[WeightPlace, ...], tensor: torch.Tensor) -> torch.Tensor:
    """Put a tensor into all places of a weight, in the form of the one that was there; return what was put.

    This rank's part of a DTensor becomes one, and a Parameter asks for a gradient as the one before it did.
    """
    if (whole := places[0].whole) is not None:
        whole.put(places[0].part, tensor)
        return tensor
    tensor = in_form_of(places[0].tensor, tensor)
    for place in places:
        place.registry[place.key] = tensor
    return tensor


def set_memory(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor the memory of another, and its dtype. One that was made in inference mode stays of that kind."""
    if tensor.is_inference() != values.is_inference():  # torch would leave a tensor that no operator takes
        with torch.inference_mode(tensor.is_inference()):
            alike = torch.empty(0, dtype=values.dtype, device=values.device)
            # A view of the same memory, made in the tensor's own mode.
            values = alike.set_(values.untyped_storage(), values.storage_offset(), values.shape, values.stride())
    tensor.data = values


def kind_of(weight: Weight, places: tuple[WeightPlace, ...]) -> torch.Tensor:
    """Return a meta tensor that is like a weight in the model: its class, shape and whether it asks for a gradient.

    Of a DTensor it is like this rank's part.
    """
    before = places[0].tensor
    blank = torch.empty(weight.shape, dtype=dtype_of(weight.dtype), device="meta")
    is_whole = isinstance(before, nn.Parameter) and not is_dtensor(before)
    return nn.Parameter(blank, requires_grad=before.requires_grad) if is_whole else blank


def _named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parts = {name: place.tensor for name, place in packed_places(model).items()}
    wholes = packed_weights(model)
    plain = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, tensor) for name, tensor in plain if name not in wholes] + list(parts.items())


def _place(model: nn.Module, name: str) -> WeightPlace | None:
    path, _, key = name.rpartition(".")
    try:
        module: Any = model.get_submodule(path)
    except AttributeError:
        return None
    for registry in (module._parameters, module._buffers):
        if registry.get(key) is not None:
            return WeightPlace(registry, key)
    return None
