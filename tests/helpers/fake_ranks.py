# SPDX-License-Identifier: Apache-2.0
"""One rank of a large mesh in one process: collectives that do nothing, and tensors without memory, both counted."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import accel
from accel.tensors import local_part, same_memory
from accel.topology import Axes, rank_rows

OPERATIONS = {
    "_allgather_base": "all-gather",
    "_reduce_scatter_base": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall_base": "all-to-all",
    "send": "send",
}


@contextmanager
def fake_rank(
    monkeypatch: pytest.MonkeyPatch, axes: Axes, rank: int = 0, **settings: Any
) -> Iterator[accel.DistContext]:
    """Open the context of one rank of a mesh, of which no other rank exists.

    Agreements find that all ranks have said what this one says. Modules stay where they are: tensors without memory can
    be moved in their mode alone, in which torch's meshes cannot be made.
    """
    monkeypatch.setattr("accel.comm._exchange.start", _agree)
    # batches without memory have no values to compare
    monkeypatch.setattr("accel.parallel._same_batches.SameBatches.compare", lambda *_args, **_named: None)
    # tensors without memory look like those of the meta device
    monkeypatch.setattr("accel.parallel._prepare_model.stays_empty", lambda *_: False)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_args, **_named: self)
    _let_parts_be_fake(monkeypatch)
    dist.init_process_group("fake", rank=rank, world_size=axes.world_size, store=FakeStore())
    try:
        ctx = accel.from_group(dist.group.WORLD, precision="bf16")
        yield accel.replace(ctx, mesh=str(axes), **settings)
    finally:
        dist.destroy_process_group()


@functools.cache
def _without_memory(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """A kind of tensor without memory: torch makes no subclass of a fake tensor."""

    def called(_: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "prim":  # as torch asks fakes for the device
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return kind.__torch_function__(func, types, args, kwargs)

    general = [_without_memory(each) for each in kind.__bases__ if each is not torch.Tensor] or [FakeTensor]
    return type(f"Fake{kind.__name__}", (kind, *general), {"__torch_function__": classmethod(called)})


def _let_parts_be_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model without memory compute with parts, along cp without a proof, which would compare values."""

    def as_subclass(self: torch.Tensor, kind: type) -> torch.Tensor:
        found = same_memory(self)  # no view, which `fully_shard` would warn of where it leaves a block
        if kind is not torch.Tensor:
            found.__class__ = _without_memory(kind)
        return found

    def prove(self: Any, *_: Any) -> None:
        self.guard([])
        self.is_proved = True

    monkeypatch.setattr("accel.parallel.logits._vocabulary._waits", lambda _: True)  # as on GPUs
    monkeypatch.setattr(FakeTensor, "as_subclass", as_subclass, raising=False)
    monkeypatch.setattr("accel.parallel.axes.context._positions.PositionRanks.hold_alike", lambda *_: False)
    monkeypatch.setattr("accel.parallel.axes.context._forward.Positions.prove", prove)
    monkeypatch.setattr("accel.parallel.axes.context._forward.refuse_fake", lambda _: None)


def _agree(
    comm: Any, call: Any, message: bytearray | None = None, payload_bytes: int = 0, *_: Any, **_named: Any
) -> Any:
    from accel.comm import Answers, blank

    sent = blank(comm) if message is None else message
    return lambda: Answers(True, payload_bytes, [payload_bytes] * comm.size, sent * comm.size)


def axes_by_ranks(axes: Axes, rank: int) -> dict[tuple[int, ...], str]:
    """Names of axes, and of several joined by "+", by the ranks along them that a rank is among."""
    names = [*axes.sizes]
    found: dict[tuple[int, ...], str] = {}
    for count in range(1, len(names) + 1):
        for some in itertools.combinations(names, count):
            found[next(row for row in rank_rows(axes, *some) if rank in row)] = "+".join(some)
    if axes.ep > 1:
        for name in ("ep", "efsdp"):
            found.setdefault(next(row for row in rank_rows(axes, name) if rank in row), name)
    return found


def _group_of(args: tuple[Any, ...]) -> Any:
    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.ProcessGroup.unbox(each)
    raise AssertionError(args)


class Counted(TorchDispatchMode):
    """Counts bytes of the larger side of each collective, by axis and operation; none of a group of one rank."""

    def __init__(self, axes: Axes, rank: int = 0) -> None:
        super().__init__()
        self._names = axes_by_ranks(axes, rank)
        self.bytes = Counter[tuple[str, str]]()
        self.calls = Counter[tuple[str, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        operation = OPERATIONS.get(name.rstrip("_"))
        if space == "c10d" and operation and (group := _group_of(args)).size() > 1:
            key = (self._names[tuple(dist.get_process_group_ranks(group))], operation)
            sizes = [each.numel() * each.element_size() for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
            self.bytes[key] += max(sizes)
            self.calls[key] += 1
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


class Live(TorchDispatchMode):
    """Finds the most bytes that tensors take at a time: those made while it is on, and `known` ones.

    Tensors without memory count if they are among the known ones, and the run is one without memory.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._held: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._bytes = 0
        self.peak = 0
        tensors = [*known]
        self._counts_empty = any(_storage(each).device.type == "meta" for each in tensors)
        for tensor in tensors:
            self._note(tensor)

    def restart(self) -> None:
        """Forget the peak."""
        self._look_again()
        self.peak = self._bytes

    def _note(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage.device.type == "meta" and not self._counts_empty:
            return
        key = id(storage)
        held, before = self._held.get(key, (None, 0))
        if held is None or held() is not storage:
            held = weakref.ref(storage, self._dropped(key))
            before = 0
        self._held[key] = held, storage.nbytes()
        self._bytes += storage.nbytes() - before
        if self._bytes > self.peak:
            self._look_again()
            self.peak = max(self.peak, self._bytes)

    def _look_again(self) -> None:
        """`fully_shard` empties storages without an operation."""
        for key, (held, before) in self._held.copy().items():  # other threads drop some
            if (storage := held()) is not None:
                self._held[key] = held, storage.nbytes()
                self._bytes += storage.nbytes() - before

    def _dropped(self, key: int) -> Callable[[Any], None]:
        def drop(held: Any) -> None:
            if self._held.get(key, (None, 0))[0] is held:
                self._bytes -= self._held.pop(key)[1]

        return drop

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves((result, args)):
            if isinstance(each, torch.Tensor):
                self._note(each)
        return result


Loop = tuple[Iterable[torch.Tensor], Callable[[], object]]  # parameters, and a step


def peak(loop: Loop) -> int:
    """The most bytes of the third step."""
    parameters, step = loop
    with torch.autograd.set_multithreading_enabled(False), Live(map(local_part, parameters)) as live:
        for _ in range(3):
            live.restart()
            _ = step()
    return live.peak
