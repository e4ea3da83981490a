# SPDX-License-Identifier: Apache-2.0
"""Inputs that move once to each device that computes segments, and outputs that move back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

import accel.tree._walk as trees
from accel.bigmodel.plan import DeviceMap
from accel.bigmodel.run._absent import refuse_pickle
from accel.parallel._containers import fill_containers
from accel.parallel._private import untraced


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
            return _sent(tensor, self.device)  # versions are unknown, or autograd records the way
        # By identity and version: a mask that was written to since then is copied again.
        version, copy = self._arrived.get(tensor, (None, None))
        if version != tensor._version:
            copy = _sent(tensor, self.device)
            self._arrived[tensor] = (tensor._version, copy)
        return copy

    def inputs(self, given: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return positional and keyword arguments on the device."""
        return trees.map_tensors(self.take, given)


def move_inputs(model: nn.Module, device_map: DeviceMap, opened: ExitStack) -> None:
    """Send inputs of segments to the devices that compute them, and the model's outputs to the device of its inputs."""
    crossings = {device: _Crossing(Arrivals(torch.device(device))) for device in device_map.devices}
    for segment in device_map.skeleton.segments:
        module = model.get_submodule(segment.name)
        taking = crossings[device_map.runs[segment.name]]
        _ = opened.callback(module.register_forward_pre_hook(taking.before, with_kwargs=True, prepend=True).remove)
    segments = [model.get_submodule(segment.name) for segment in device_map.skeleton.segments]
    _ = opened.callback(fill_containers(segments))
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
    return trees.map_tensors(lambda tensor: _sent(tensor, given[0].device), output)


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device. The host waits for what comes to it, as it may read that at once."""
    return tensor.to(device, non_blocking=device.type != "cpu")
