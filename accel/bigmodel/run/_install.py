# SPDX-License-Identifier: Apache-2.0
"""Changes of a model that is dispatched, each with the way back, and the sources of its absent weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

import accel.tree._walk as trees
from accel.bigmodel.plan import STORES
from accel.bigmodel.run._absent import AbsentTensor, absent_parameter, refuse_copy, refuse_pickle
from accel.bigmodel.run._places import WeightPlace, has_values, kind_of, put, set_memory
from accel.bigmodel.run._slots import Block, CastTransfer, Slot, StreamedWeight, transfer_to
from accel.bigmodel.run._sources import ScratchSource
from accel.bigmodel.run._stats import Fetches
from accel.bigmodel.run._stream import Stream, closed_model
from accel.bigmodel.run._supplies import Supply, Task, check_mapped, fill
from accel.comm._streams import DeviceStreams
from accel.errors import TreeError
from accel.parallel._private import untraced
from accel.tensors import is_absent, is_dtensor


class TableOrigin:
    """A weight that is fetched for each use: rows of a table away from its device, or all of it."""

    def __init__(self, name: str, supply: Supply, fetches: Fetches, device: torch.device):
        self.name = name
        self._supply = supply
        self._fetches = fetches
        self._device = device
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the model is no longer dispatched."""
        return self._closed

    def values(self) -> torch.Tensor:
        """Return the values on the computing device."""
        self._check_open()
        self._fetches.fetched(self._supply.nbytes)
        return self._supply.fetch(self._device)

    def rows(self, index: torch.Tensor) -> torch.Tensor | None:
        """Return rows; None where only all values can be read."""
        self._check_open()
        return _gather(self._supply, index, self._device, self._fetches)

    def stored(self) -> torch.Tensor:
        """Return the values on the host."""
        self._check_open()
        return _stored(self._supply)

    def close(self) -> None:
        """Refuse every use from now on."""
        self._closed = True

    def _check_open(self) -> None:
        if self.is_closed:
            raise closed_model(self.name)


class BlockOrigin(TableOrigin):
    """A weight of a streamed block: on the block's slot if one holds it, else fetched for this use."""

    def __init__(self, task: Task, supply: Supply, fetches: Fetches, stream: Stream, block: Block, at: int):
        super().__init__(task.weight.name, supply, fetches, task.device)
        self._stream = stream
        self._block = block
        self._at = at  # the weight's number in the block

    @property
    @override
    def is_closed(self) -> bool:
        return self._stream.is_closed

    @override
    def values(self) -> torch.Tensor:
        found = self._stream.here(self._block, self._at)
        return super().values() if found is None else found

    @override
    def rows(self, index: torch.Tensor) -> torch.Tensor | None:
        return None if self._stream.is_in_call(self._block) else super().rows(index)  # the slot has all of them


def _gather(supply: Supply, index: torch.Tensor, device: torch.device, fetches: Fetches) -> torch.Tensor | None:
    table = supply.tensor
    if table is None or table.device.type != "cpu":
        return None
    with torch.no_grad():
        # The host waits for the index here: rows are looked up in its memory, and only they are copied.
        rows = nn.functional.embedding(index.to("cpu"), table).to(supply.dtype)
    # After the rows were read: a file that was rewritten in between is found.
    supply.check()
    fetches.gathered(rows, index.numel())
    return rows.to(device)


def _stored(supply: Supply) -> torch.Tensor:
    tensor = supply.tensor if supply.tensor is not None else supply.mapped()
    supply.check()
    return tensor if tensor is not None and tensor.dtype == supply.dtype else supply.fetch(torch.device("cpu"))


def settle(task: Task, read: torch.Tensor | None, opened: ExitStack) -> None:
    """Put a resident weight on its device, in its dtype; `opened` gets the way back, unless it was read."""
    if read is not None:
        put(task.places, read)
        return
    before = task.places[0].tensor
    if before.device == task.device and before.dtype == task.dtype:
        return
    device, former = before.device, before.dtype
    if isinstance(before, nn.Parameter) and not is_dtensor(before):
        # The parameter stays the same object, which an optimizer or the user may hold.
        _move(before, before.data.to(task.device, task.dtype))

        def back() -> None:
            _move(before, _wide(before.data, device, former))
    else:
        put(task.places, before.to(task.device, task.dtype))

        def back() -> None:
            if places := tuple(place for place in task.places if place.is_held):
                put(places, _wide(places[0].tensor, device, former))

    opened.callback(back)


def put_mapped(task: Task, supply: Supply, opened: ExitStack) -> None:
    """Put a mapped file's tensor into the model; values that the model has stay."""
    assert supply.tensor is not None
    if has_values(task.places[0].tensor):
        settle(task, None, opened)
    else:
        put(task.places, supply.tensor)


def put_table(task: Task, supply: Supply, fetches: Fetches, opened: ExitStack) -> None:
    """Install a placeholder for a table; its rows are fetched on demand."""
    origin = TableOrigin(task.weight.name, supply, fetches, task.device)
    absent = absent_parameter(kind_of(task.weight, task.places), origin, task.device)
    _put_absent(task, absent, supply, opened)
    opened.callback(origin.close)


class Streaming(NamedTuple):
    """The streamed segments of one device."""

    segments: dict[str, list[Task]]  # tasks of the weights that move, by segment, in the planned order
    supplies: dict[str, Supply]  # supplies of weights by name
    fetches: dict[str, Fetches]  # counts by segment
    slots: list[Slot]  # the device's slots
    streams: DeviceStreams  # the door to the computing device
    prefetch: bool  # whether blocks are fetched ahead of their use
    casts: bool = False  # whether the blocks stay on the device, and are cast there


def put_blocks(model: nn.Module, streaming: Streaming, opened: ExitStack) -> dict[str, Block]:
    """Put placeholders for streamed blocks into the model, and hook the blocks; return them by segment."""
    blocks = {name: Block(at, name, model.get_submodule(name)) for at, name in enumerate(streaming.segments)}
    device, casts = streaming.streams.device, streaming.casts
    transfer = CastTransfer(streaming.streams) if casts else transfer_to(streaming.streams)
    stream = Stream(tuple(blocks.values()), streaming.slots, transfer, feeds=not casts)
    for name, tasks in streaming.segments.items():
        block, fetches = blocks[name], streaming.fetches[name]
        offsets = tasks[0].segment.offsets(resident=casts)
        for at, task in enumerate(tasks):
            supply = streaming.supplies[task.weight.name]
            origin = BlockOrigin(task, supply, fetches, stream, block, at)
            _put_absent(task, absent_parameter(kind_of(task.weight, task.places), origin, device), supply, opened)
        block.weights = tuple(
            StreamedWeight(
                supply=streaming.supplies[task.weight.name],
                offset=offsets[task.weight.name],
                places=task.places,
                absent=task.places[0].registry[task.places[0].key],
            )
            for task in tasks  # a packed weight's placeholder is complete once all of its parts are away
        )
    for block in blocks.values():
        for handle in hook_block(stream, block):
            opened.callback(handle.remove)
    # Registered last, so closed first: no thread fills slots while weights go back into the model.
    opened.callback(stream.close)
    stream.start(prefetch=streaming.prefetch)
    return blocks


def _put_absent(task: Task, absent: torch.Tensor, supply: Supply, opened: ExitStack) -> None:
    """Put a placeholder into the model; `opened` receives the way back to a weight in memory, if there is one."""
    before = task.places[0].tensor
    device = before.device
    dtype = (
        absent.dtype if before.dtype == task.home_dtype else before.dtype
    )  # a load may have left it in its home's dtype
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


def _still_absent(task: Task, absent: torch.Tensor) -> tuple[WeightPlace, ...]:
    """Return the places of a weight that hold the placeholder; the others hold what was put there since, or nothing."""
    return tuple(place for place in task.places if place.is_held and place.tensor is absent)


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
