# SPDX-License-Identifier: Apache-2.0
"""One rank of a large mesh in one process: collectives that do nothing, and tensors without memory, both counted."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OPERATIONS = {
    "_allgather_base": "all-gather",
    "_reduce_scatter_base": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall_base": "all-to-all",
    "send": "send",
}


@contextmanager
def fake_mesh(sizes: Mapping[str, int], rank: int = 0) -> Iterator[DeviceMesh]:
    """Open a mesh of fake ranks, of which this process is one."""
    dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes.values()), store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


def _group_of(args: tuple[Any, ...]) -> Any:
    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.ProcessGroup.unbox(each)
    raise AssertionError(args)


class Counted(TorchDispatchMode):
    """Counts bytes of the larger side of each collective, by group and operation; none of a group of one rank."""

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        super().__init__()
        self._names = {group.group_name: name for name, group in groups.items()}
        self.bytes = Counter[tuple[str, str]]()
        self.calls = Counter[tuple[str, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        operation = OPERATIONS.get(name.rstrip("_"))
        if space == "c10d" and operation and (group := _group_of(args)).size() > 1:
            key = (self._names.get(group.group_name, group.group_name), operation)
            sizes = [each.numel() * each.element_size() for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
            self.bytes[key] += max(sizes)
            self.calls[key] += 1
        return func(*args, **(kwargs or {}))


class Live(TorchDispatchMode):
    """Finds the most bytes that tensors take at a time: those made while it is on, and `known` ones."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._held: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._bytes = 0
        self.peak = 0
        for tensor in known:
            self._note(tensor)

    def restart(self) -> None:
        """Forget the peak."""
        self._look_again()
        self.peak = self._bytes

    def _note(self, tensor: torch.Tensor) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
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
        for key, (held, before) in list(self._held.items()):
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
