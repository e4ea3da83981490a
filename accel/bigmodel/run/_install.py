# SPDX-License-Identifier: Apache-2.0
"""Changes of a model that is dispatched, each with the way back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import nn

from accel.bigmodel._dtypes import dtype_of
from accel.bigmodel.plan import STORES
from accel.bigmodel.run._absent import absent_parameter
from accel.bigmodel.run._hooks import hook_block
from accel.bigmodel.run._origins import BlockOrigin, Fetches, TableOrigin
from accel.bigmodel.run._places import Place, has_values, kind_of, put, set_memory
from accel.bigmodel.run._scratch import ScratchSource
from accel.bigmodel.run._slots import Block, Holder, Slot, StreamedWeight
from accel.bigmodel.run._stream import Stream
from accel.bigmodel.run._supplies import Task
from accel.bigmodel.run._supply import Supply, fill
from accel.bigmodel.run._transfer import CastTransfer, transfer_to
from accel.tensors import is_dtensor

Close = Callable[[], None]


def settle(task: Task, read: torch.Tensor | None, opened: ExitStack) -> None:
    """Put a resident weight on its device, in its dtype.

    Args:
        task: the weight.
        read: the values, where the model has none.
        opened: receives the way back: to the device and dtype that it came from. A weight that was read stays.
    """
    if read is not None:
        put(task.places, read)
        return
    before = task.places[0].tensor
    dtype = dtype_of(task.weight.dtype)
    if before.device == task.device and before.dtype == dtype:
        return
    device, former = before.device, before.dtype
    if isinstance(before, nn.Parameter) and not is_dtensor(before):
        _move(before, before.data.to(task.device, dtype))

        def back() -> None:
            _move(before, _wide(before.data, device, former))
    else:
        put(task.places, before.to(task.device, dtype))

        def back() -> None:
            put(task.places, _wide(task.places[0].tensor, device, former))

    opened.callback(back)


def put_mapped(task: Task, supply: Supply, opened: ExitStack) -> None:
    """Put a mapped file's tensor into the model; values that the model has stay."""
    assert supply.tensor is not None
    if has_values(task.places[0].tensor):
        settle(task, None, opened)
    else:
        put(task.places, supply.tensor)


def put_table(task: Task, supply: Supply, fetches: Fetches, opened: ExitStack) -> None:
    """Put a placeholder for a table of which rows alone move into the model."""
    origin = TableOrigin(task.weight.name, supply, fetches, task.device)
    absent = absent_parameter(kind_of(task.weight, task.places), origin, task.device)
    _put_absent(task, absent, supply, opened)
    opened.callback(origin.close)


class Streaming(NamedTuple):
    """The streamed segments of one device.

    Attributes:
        segments: tasks of the weights that move, by segment, in the planned order.
        supplies: supplies of weights by name.
        fetches: counts by segment.
        slots: the device's slots.
        device: the computing device.
        prefetch: whether blocks are fetched ahead of their use.
        casts: whether the blocks lie on the device, and are cast there.
    """

    segments: dict[str, list[Task]]
    supplies: dict[str, Supply]
    fetches: dict[str, Fetches]
    slots: list[Slot]
    device: torch.device
    prefetch: bool
    casts: bool = False


def put_blocks(model: nn.Module, streaming: Streaming, opened: ExitStack) -> dict[str, Block]:
    """Put placeholders for streamed blocks into the model, and register the hooks of the blocks.

    Returns:
        The blocks by segment.
    """
    blocks = {name: Block(at, name, model.get_submodule(name)) for at, name in enumerate(streaming.segments)}
    device, casts = streaming.device, streaming.casts
    transfer = CastTransfer(device) if casts else transfer_to(device)
    stream = Stream(tuple(blocks.values()), streaming.slots, transfer, feeds=not casts)
    for name, tasks in streaming.segments.items():
        block, fetches = blocks[name], streaming.fetches[name]
        offsets = tasks[0].segment.offsets(resident=casts)
        for at, task in enumerate(tasks):
            origin = BlockOrigin(task.weight.name, block, at, stream, fetches, device)
            absent = absent_parameter(kind_of(task.weight, task.places), origin, device)
            _put_absent(task, absent, streaming.supplies[task.weight.name], opened)
        block.weights = tuple(
            StreamedWeight(streaming.supplies[task.weight.name], offsets[task.weight.name], _holders(task))
            for task in tasks  # a packed weight's placeholder is complete once all of its parts are away
        )
    for block in blocks.values():
        for handle in hook_block(stream, block):
            opened.callback(handle.remove)
    opened.callback(stream.close)
    stream.start(prefetch=streaming.prefetch)
    return blocks


def _holders(task: Task) -> tuple[Holder, ...]:
    return tuple(
        Holder(place.registry, place.key, place.registry[place.key], place.whole, place.part) for place in task.places
    )


def _put_absent(task: Task, absent: torch.Tensor, supply: Supply, opened: ExitStack) -> None:
    """Put a placeholder into the model; `opened` receives the way back to a weight in memory, if there is one."""
    before = task.places[0].tensor
    device = before.device
    at_home = dtype_of(task.weight.storage_dtype or task.weight.dtype)
    dtype = absent.dtype if before.dtype == at_home else before.dtype  # a load may have left it in its home's dtype
    absent = put(task.places, absent)
    if isinstance(supply.source, ScratchSource) and supply.name in supply.source.written:
        set_memory(before, before.data.new_empty(0))  # gives the memory free that it had

        def back() -> None:
            values = torch.empty(supply.shape, dtype=dtype)
            fill([(supply, values)])
            set_memory(before, _wide(values, device, dtype))
            if places := _still_absent(task, absent):
                _hand_over(absent, put(places, before))
    elif not has_values(before) or task.home == "disk":
        found = supply.tensor
        in_memory = task.weight.is_cast and task.home not in STORES
        if found is None or is_dtensor(before) or not (found.dtype == absent.dtype or in_memory):
            return  # the placeholder stays: the model has no values to go back to

        def back() -> None:
            if places := _still_absent(task, absent):
                _hand_over(absent, put(places, _wide(found, found.device, absent.dtype)))
    else:
        if supply.tensor is not None and (device.type != "cpu" or task.weight.is_cast):
            set_memory(before, supply.tensor)  # gives the memory free that it had
            if (whole := task.places[0].whole) is not None:
                whole.release()

        def back() -> None:
            if before.device != device or task.weight.is_cast:
                set_memory(before, _wide(before.data, device, dtype))
            if places := _still_absent(task, absent):
                _hand_over(absent, put(places, before))

    opened.callback(back)


def _still_absent(task: Task, absent: torch.Tensor) -> tuple[Place, ...]:
    """Return the places of a weight that hold the placeholder; the others hold what a call has put there since."""
    return tuple(place for place in task.places if place.tensor is absent)


def _wide(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight in the model's dtype; on the host where its device has no room for it."""
    try:
        return tensor.to(device, dtype)
    except torch.OutOfMemoryError:
        return tensor.to("cpu").to(dtype)


def _hand_over(absent: torch.Tensor, restored: torch.Tensor) -> None:
    """Give a weight that is back what its placeholder has received: a gradient, and whether it asks for one."""
    if not isinstance(restored, nn.Parameter):
        return
    if restored.requires_grad != absent.requires_grad:  # torch refuses to set one that was made in inference mode
        restored.requires_grad_(absent.requires_grad)
    if absent.grad is not None:
        restored.grad = absent.grad.to(restored.device, restored.dtype)


def _move(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give a parameter other memory, and its gradient the same device and dtype."""
    gradient = parameter.grad
    parameter.grad = None
    set_memory(parameter, values)
    if gradient is not None:
        parameter.grad = gradient.to(values.device, values.dtype)
