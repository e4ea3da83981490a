# SPDX-License-Identifier: Apache-2.0
"""Hooks around the calls of streamed blocks, and inputs that move once to each device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

import accel.tree._walk as trees
from accel.bigmodel.plan import DeviceMap
from accel.bigmodel.run._absent import AbsentTensor, refuse_copy, refuse_pickle
from accel.bigmodel.run._slots import Block
from accel.bigmodel.run._stream import Stream
from accel.bigmodel.run._supplies import Supply, check_mapped
from accel.errors import TreeError
from accel.parallel._containers import fill_containers
from accel.parallel._private import untraced
from accel.tensors import is_absent


class _BlockHooks:
    """The hooks of a block. A model is copied and pickled with its hooks, before its weights."""

    def __init__(self, stream: Stream, block: Block) -> None:
        self._stream = stream
        self._block = block
        self._begin = untraced(stream.enter)
        self._end = untraced(self._leave)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._begin(self._block)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self._end(output)

    def _leave(self, output: Any) -> Any:
        try:
            # Copied while the call holds the slot, which may be filled anew as soon as it is given back.
            return own_output(output, self._block)
        finally:
            self._stream.leave(self._block)

    def __deepcopy__(self, memo: object) -> NoReturn:
        refuse_copy(self._block.name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_pickle(self._block.name)


def hook_block(stream: Stream, block: Block) -> list[RemovableHandle]:
    """Register the hooks of a block; return what removes them."""
    hooks = _BlockHooks(stream, block)
    # First of the pre-hooks, so that other hooks find weights; and after an error too, or the slot stays in use.
    return [
        block.module.register_forward_pre_hook(hooks.before, prepend=True),
        block.module.register_forward_hook(hooks.after, always_call=True),
    ]


class _Apply:
    """`Module._apply` of a module with absent weights: what would be refused is refused before anything changes."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = module
        self._name = name

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        rehearsal: Any = nn.Module()
        for held, tensors in (
            (rehearsal._parameters, self._module.named_parameters(recurse=recurse)),
            (rehearsal._buffers, self._module.named_buffers(recurse=recurse)),
        ):
            held.update((name, each) for name, each in tensors if is_absent(each))
        rehearsal._apply(fn)  # absent weights take no change
        return cast(Any, type(self._module))._apply(self._module, fn, recurse)

    def __deepcopy__(self, memo: object) -> NoReturn:
        refuse_copy(self._name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_pickle(self._name)


def guard_casts(model: nn.Module) -> Callable[[], None]:
    """Let `half()`, `to()` and their like change all of a module with absent weights, or nothing. Returns the undo."""
    guarded = {
        module: next((key for key, each in _tensors(module) if is_absent(each)), None) for module in model.modules()
    }
    holders = [(module, name) for module, name in guarded.items() if name is not None]
    for module, name in holders:
        vars(module)["_apply"] = _Apply(module, name)

    def undo() -> None:
        for module, _ in holders:
            _ = vars(module).pop("_apply", None)

    return undo


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


class _FileCheck:
    """A hook after the calls of a module that computes from mapped files in place. Copies of the module have none."""

    def __init__(self, supplies: Sequence[Supply]) -> None:
        self._supplies = supplies

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling():  # a graph has no place for it; those around it look
            check_mapped(self._supplies)

    def __deepcopy__(self, memo: object) -> _FileCheck:
        return _FileCheck(())

    def __reduce__(self) -> tuple[Any, ...]:
        return _FileCheck, ((),)


def hook_mapped(module: nn.Module, supplies: Sequence[Supply]) -> RemovableHandle:
    """Let the calls of a module raise if mapped files that it computes from have been rewritten."""
    return module.register_forward_hook(_FileCheck(supplies))


def own_output(output: Any, block: Block) -> Any:
    """Return a block's output with copies of its tensors on the slot, which will hold others; None without any."""
    slot = block.slot
    if slot is None:
        return None
    memory = slot.memory.untyped_storage().data_ptr()
    if isinstance(output, torch.Tensor):
        return output.clone() if _lies_at(memory, output) else None
    try:
        leaves, _ = trees.flatten(output)
    except TreeError:  # a container of the user, which cannot be flattened
        return None
    if not any(_lies_at(memory, leaf) for leaf in leaves):
        return None
    return trees.map_tensors(lambda tensor: tensor.clone() if _lies_at(memory, tensor) else tensor, output)


def _lies_at(memory: int, leaf: object) -> bool:
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, AbsentTensor):
        return False
    try:
        return leaf.untyped_storage().data_ptr() == memory
    except (NotImplementedError, RuntimeError):  # sparse tensors and tensors of torch.func have no storage
        return False


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
    # With one device nothing crosses, and hooks would cost each call.
    if len(device_map.devices) < 2:
        return
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
