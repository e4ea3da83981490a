# SPDX-License-Identifier: Apache-2.0
"""torch's operators as work of a simulated device: a dispatch mode gives each one to the current stream."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from accel.testing._device_memory import Access, MemoryBlock, UnknownCopy, span, storage_key
from accel.testing._process import outside_of_modes

if TYPE_CHECKING:
    from accel.testing._device import SimulatedDevice

Touched = list[tuple[MemoryBlock, int, int, bool]]

_aten = torch.ops.aten
_PLAIN = {Tensor, nn.Parameter}
# Values that the host reads, or shapes that depend on values, by torch's tags
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Of a mask that chooses elements, the host reads the number; of indices it reads nothing.
_CHOOSES = {_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index, _aten._unsafe_index_put}
_MASKS = (torch.bool, torch.uint8)
# These look at memory and shapes, not at values.
_LOOKS = {_aten.is_set_to.default, _aten.is_same_size.default}


def host_reads(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator makes the host wait for a value or a shape."""
    if func.overloadpacket in _CHOOSES:
        is_fill = len(args) > 2 and args[2].numel() == 1  # `tensor[mask] = number` chooses nothing
        return not is_fill and any(isinstance(each, Tensor) and each.dtype in _MASKS for each in args[1])
    return (
        (not _READS.isdisjoint(func.tags) and kwargs.get("output_size") is None)  # of repeat_interleave: known
        or func is _aten.is_nonzero.default
    )


class DeviceMode(TorchDispatchMode):
    """Sees each operator of a thread, below autograd and autocast."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not _PLAIN.issuperset(types):  # a tensor of another kind first unwraps itself
            return NotImplemented
        with self._device.locked():
            return _Call(self._device, func, args, dict(kwargs or {})).run()


def copy_to_device(device: SimulatedDevice, target: Tensor, source: Tensor, *, waits: bool) -> None:
    """Copy between the device and the host on the current stream.

    The host waits for what comes to memory that is not pinned; of what it sends from there the device has a copy.
    """
    with device.locked():
        device.settle()
        to = device.memory.block_of(target)
        of = device.memory.block_of(source)
        if to is None or (waits and to.kind == "pinned"):
            device.host_waits(device.current(), "copy to the host")
            with outside_of_modes():
                _ = target.copy_(source)
            return
        with outside_of_modes():
            there = to.alias(target)
            sent = source.detach().clone() if of is None else of.alias(source)
        touched = [(to, *span(target), True)]
        if of is not None:
            touched.append((of, *span(source), False))
        stream = device.current()
        if device.watch is None:
            _ = device.queue(stream, lambda: there.copy_(sent), touched, "copy")
        else:
            count = device.queue(stream, lambda: None, touched, "copy")
            _copy_watched(device, (stream.number, count), (there, to), (sent, of))
        if waits and of is not None and of.kind == "pinned":
            device.host_waits(stream, "copy from pinned memory")


def _copy_watched(
    device: SimulatedDevice, at: tuple[int, int], to: tuple[Tensor, MemoryBlock], of: tuple[Tensor, MemoryBlock | None]
) -> None:
    """Copy in program order, but so that the host sees too early a use of pinned memory."""
    assert device.watch is not None
    watch, (there, block), (sent, source) = device.watch, to, of
    with outside_of_modes():
        is_from_pinned = source is not None and source.kind == "pinned"
        values = source.read_by_device(sent) if source is not None and is_from_pinned else sent
        if block.kind == "pinned":
            if not block.settled_reads(there):
                watch.races.append(_REWRITTEN)
            copy = block.begin_copy(there, values, writes=True)
            watch.once_known(*at, functools.partial(_end_copy, device, block, copy))
        else:
            _ = there.copy_(values)
        if source is not None and is_from_pinned:
            copy = source.begin_copy(sent, values, writes=False)
            watch.once_known(*at, functools.partial(_end_copy, device, source, copy))


_REWRITTEN = "pinned memory was written to before the host knew the end of a copy from it"


def _end_copy(device: SimulatedDevice, block: MemoryBlock, copy: UnknownCopy) -> None:
    assert device.watch is not None
    with outside_of_modes():
        if not block.end_copy(copy):
            device.watch.races.append(_REWRITTEN)


class _Call:
    """One call of an operator."""

    def __init__(self, device: SimulatedDevice, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.device, self.func, self.args, self.kwargs = device, func, args, kwargs
        self.flat, self.spec = tree_flatten((args, kwargs))
        device.settle()
        self.tensors = [
            (at, each, device.memory.block_of(each)) for at, each in enumerate(self.flat) if isinstance(each, Tensor)
        ]
        self.name = str(func).removesuffix(".default")

    def run(self) -> Any:
        """Run it on the host, at once on the device, or queue it."""
        func, device = self.func, self.device
        kinds = {block.kind for _, _, block in self.tensors if block is not None}
        if func is _aten.copy_.default and "device" in kinds and not self._is_within_device():
            waits = not (self.args[2] if len(self.args) > 2 else self.kwargs.get("non_blocking", False))
            copy_to_device(device, self.args[0], self.args[1], waits=waits)
            return self.args[0]
        if "device" not in kinds or func.is_view or func in _LOOKS or torch.Tag.inplace_view in func.tags:
            if kinds and "device" not in kinds and not func.is_view and func not in _LOOKS:
                device.look_by_host(self._touched(), self.name)
            return func(*self.args, **self.kwargs)
        written = _written(func, self.args, self.kwargs)
        # DDP's buckets are of the host here: torch makes them on its own, on the CPU
        if host_reads(func, self.args, self.kwargs) or any(
            block is None and id(each) in written for _, each, block in self.tensors
        ):
            return self._at_once(waits=True)
        return self._at_once(waits=False) if device.watch is not None else self._late()

    def _is_within_device(self) -> bool:
        blocks = [self.device.memory.block_of(each) for each in self.args[:2]]
        return all(block is not None and block.kind == "device" for block in blocks)

    def _touched(self) -> Touched:
        written = _written(self.func, self.args, self.kwargs)
        return [(block, *span(each), id(each) in written) for _, each, block in self.tensors if block is not None]

    def _at_once(self, *, waits: bool) -> Any:
        """Run now, as in program order, or as the host waits for the value or its shape."""
        device, stream = self.device, self.device.current()
        touched = self._touched()
        if waits:
            device.host_waits(stream, self.name)
        count = device.queue(stream, lambda: None, touched, self.name)
        if waits:
            device.host_waits(stream, self.name)
            _ = device.waits.pop()  # counted above
        seed = self._seed() if device.watch is not None else None
        if seed is None:
            result = self.func(*self.args, **self.kwargs)
        else:
            result = _seeded(seed, self.func, self.args, self.kwargs)
        given = {storage_key(each) for _, each, _ in self.tensors}

        def adopt(each: Any) -> Any:
            if not isinstance(each, Tensor) or storage_key(each) in given:
                return each
            mine = device.new(each.shape, each.stride(), each.dtype, "device")
            block = device.memory.block_of(mine)
            assert block is not None
            _ = mine.copy_(each)
            block.log.append(Access(stream.number, count, *span(mine), True, self.name))
            return mine

        with outside_of_modes():
            return tree_map(adopt, result)

    def _late(self) -> Any:
        """Queue the operator, and return tensors that it will write."""
        made = self._made()
        if made is None:  # such as nonzero: its shape depends on values
            return self._at_once(waits=True)
        outputs, spec, known = made
        taken = {storage_key(each) for each in known.metas}
        real = list[Any]()
        for output in outputs:
            if not isinstance(output, Tensor):
                real.append(output)
            elif id(output) in known.given:
                real.append(known.given[id(output)])
            elif storage_key(output) in taken:  # a view by another name, such as _unsafe_view
                return self.func(*self.args, **self.kwargs)
            else:
                real.append(self.device.new(output.shape, output.stride(), output.dtype, "device"))
        new = [
            at
            for at, output in enumerate(outputs)
            if isinstance(output, Tensor) and id(output) not in known.given
        ]  # fmt: skip
        self._queue(real, new)
        return tree_unflatten(real, spec)

    def _queue(self, real: Sequence[Any], new: Sequence[int]) -> None:
        device = self.device
        with outside_of_modes():
            aliases = list(self.flat)
            for at, each, block in self.tensors:
                # pageable memory of the host is read at the call
                aliases[at] = each.detach().clone() if block is None else block.alias(each)
            targets = list[tuple[int, Tensor]]()
            touched = self._touched()
            for at in new:
                block = device.memory.block_of(real[at])
                assert block is not None
                targets.append((at, block.alias(real[at])))
                touched.append((block, *span(real[at]), True))
        args, kwargs = tree_unflatten(aliases, self.spec)
        seed, func = self._seed(), self.func

        def run() -> None:
            result = func(*args, **kwargs) if seed is None else _seeded(seed, func, args, kwargs)
            values = tree_flatten(result)[0]
            for at, target in targets:
                _ = target.copy_(values[at])

        _ = device.queue(device.current(), run, touched, self.name)

    def _made(self) -> tuple[list[Any], Any, _OnMeta] | None:
        """Run on tensors without memory: the outputs, or None where their shapes depend on values."""
        known = _OnMeta()
        with outside_of_modes():
            flat: list[Any] = [torch.device("meta") if isinstance(each, torch.device) else each for each in self.flat]
            for at, each, _ in self.tensors:
                flat[at] = known.of(each)
            args, kwargs = tree_unflatten(flat, self.spec)
            try:
                outputs, spec = tree_flatten(self.func(*args, **kwargs))
            except (NotImplementedError, RuntimeError):
                return None
        return outputs, spec, known

    def _seed(self) -> int | None:
        """Return a seed for an operator that draws, so that each order draws the same; None for others."""
        if torch.Tag.nondeterministic_seeded not in self.func.tags:
            return None
        with outside_of_modes():
            return int(torch.randint(2**31, ()))


class _OnMeta:
    """Tensors without memory in place of a call's tensors, with storages shared as there."""

    def __init__(self) -> None:
        self.given = dict[int, Tensor]()
        self.metas = list[Tensor]()
        self._storages = dict[int, torch.UntypedStorage]()

    def of(self, tensor: Tensor) -> Tensor:
        """Return a tensor's placeholder."""
        key = storage_key(tensor)
        there = self._storages.get(key)
        if there is None:
            there = self._storages[key] = torch.UntypedStorage(tensor.untyped_storage().nbytes(), device="meta")
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        meta = cast(Any, meta).set_(there, tensor.storage_offset(), tensor.size(), tensor.stride())
        self.given[id(meta)] = tensor
        self.metas.append(meta)
        return meta


def _seeded(seed: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator from a seed, and leave the host's random stream as it was."""
    kept = torch.get_rng_state()
    _ = torch.default_generator.manual_seed(seed)
    try:
        return func(*args, **kwargs)
    finally:
        torch.set_rng_state(kept)


@functools.lru_cache(maxsize=4096)
def _written_places(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = func._schema.arguments
    return tuple(
        (at, each.name)
        for at, each in enumerate(arguments)
        if each.alias_info is not None and each.alias_info.is_write
    )  # fmt: skip


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """Return the identities of the tensors that an operator writes to."""
    found = set[int]()
    for at, name in _written_places(func):
        value = args[at] if at < len(args) else kwargs.get(name)
        given = cast(list[object], value if isinstance(value, list | tuple) else [value])
        found |= {id(each) for each in given if isinstance(each, Tensor)}
    return found
