# SPDX-License-Identifier: Apache-2.0
"""Bytes of tensor storages that are alive, and their peak, by a dispatch mode: what a device would have to hold."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages that operators have made since the start; `peak` is the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def now(self) -> int:
        self._known = {key: each for key, each in self._known.items() if not each[0].expired()}
        return sum(size for _, size in self._known.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inside = {_key(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.device.type != "meta" and _key(each) not in inside - set(self._known):
                storage: Any = each.untyped_storage()
                self._known[_key(each)] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now)
        return out


def _key(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return storage._cdata
