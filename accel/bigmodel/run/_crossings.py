# SPDX-License-Identifier: Apache-2.0
"""Inputs of segments that compute on several devices: each tensor goes to a device once."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from accel import tree as trees
from accel.bigmodel.plan import DeviceMap
from accel.bigmodel.run._hooks import untraced
from accel.bigmodel.run._no_memory import refuse_pickle


class Arrivals:
    """Tensors that went to a device, for as long as their originals live and are not written to.

    A mask that each of 40 blocks takes goes to their device once.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._arrived: Any = WeakIdKeyDictionary()  # tensor -> its version, and the copy

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device: itself if it is there."""
        if tensor.device == self.device:
            return tensor
        if tensor.is_inference() or (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor.to(self.device, non_blocking=True)  # versions are unknown, or autograd records the way
        version, copy = self._arrived.get(tensor, (None, None))
        if version != tensor._version:
            copy = tensor.to(self.device, non_blocking=True)
            self._arrived[tensor] = (tensor._version, copy)
        return copy

    def inputs(self, given: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return positional and keyword arguments on the device."""
        return trees.map_tensors(self.take, given)


def move_inputs(model: nn.Module, device_map: DeviceMap, opened: ExitStack) -> None:
    """Let inputs of segments go to the devices that compute them, and the model's outputs to that of its inputs.

    Hooks are torch's own. A map with one device needs none.

    Args:
        model: the model.
        device_map: the map.
        opened: removes the hooks.
    """
    if len(device_map.devices) < 2:
        return
    crossings = {device: _Crossing(Arrivals(torch.device(device))) for device in device_map.devices}
    for segment in device_map.skeleton.segments:
        module = model.get_submodule(segment.name)
        taking = crossings[device_map.runs[segment.name]]
        _ = opened.callback(module.register_forward_pre_hook(taking.before, with_kwargs=True, prepend=True).remove)
    after = crossings[device_map.devices[0]].after
    _ = opened.callback(model.register_forward_hook(after, with_kwargs=True).remove)


class _Crossing:
    """The hooks of one device. Copies of the model share them."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._device = arrivals.device
        self._move = untraced(arrivals.inputs)
        self._bring_back = untraced(_bring_back)

    def before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Bring a module's inputs to the device."""
        return self._move((args, kwargs))

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Bring a model's output to the device of its inputs."""
        return self._bring_back(module, args, kwargs, output)

    def __deepcopy__(self, memo: object) -> _Crossing:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_pickle(str(self._device), "a model that computes on several devices")


def _bring_back(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return a model's output on the device of its first tensor."""
    given = [tensor for _, tensor in trees.tensors((args, kwargs))]
    if not given:
        return output
    return trees.map_tensors(lambda tensor: tensor.to(given[0].device, non_blocking=True), output)
