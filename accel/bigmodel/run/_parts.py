# SPDX-License-Identifier: Apache-2.0
"""Parts that this rank holds of a model divided over ranks, read from sources of whole weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from accel.bigmodel._dtypes import dtype_of
from accel.bigmodel._source import StoredTensor, WeightSource
from accel.bigmodel.load import FileWeights
from accel.bigmodel.run._places import has_values
from accel.bigmodel.run._supplies import Task
from accel.checkpoint import Box, held_box
from accel.errors import ConfigError
from accel.tensors import is_dtensor


class PartSource:
    """Parts of the tensors of a source that reads them whole.

    Attributes:
        entries: tensors by name; of parts their own shapes.
    """

    def __init__(self, source: WeightSource, boxes: Mapping[str, Box]) -> None:
        """Wrap a source, which stays its owner's to close.

        Args:
            source: whole tensors.
            boxes: part by name; other tensors are whole.
        """
        self._source = source
        self._boxes = boxes
        self.entries = {name: _entry(entry, boxes.get(name)) for name, entry in source.entries.items()}

    def read(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill tensors; a part by way of its whole tensor, one at a time. See `WeightSource`."""
        self._source.read([each for each in targets if each[0] not in self._boxes])
        for name, target in targets:
            if name in self._boxes:
                entry, box = self._source.entries[name], self._boxes[name]
                whole = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
                self._source.read([(name, whole)])
                inside = tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
                _ = target.copy_(whole[inside])

    def close(self) -> None:
        """Do nothing: the source is its owner's."""


def with_parts(tasks: Sequence[Task], source: WeightSource | None) -> WeightSource | None:
    """Return a source of the parts that this rank holds, for a model whose weights are DTensors.

    Raises:
        ConfigError: parts with values that a map puts elsewhere.
    """
    _check_stay(tasks)
    if source is None:
        return None
    boxes: dict[str, Box] = {}
    for task in tasks:
        live = task.places[0].tensor
        if is_dtensor(live):
            box = held_box(live, task.weight.name) or Box((0,) * live.dim(), task.weight.shape)
            names = [name for name in (task.weight.name, *task.weight.tied) if name in source.entries]
            boxes |= {name: box for name in names if source.entries[name].shape == tuple(live.shape)}
    if not boxes:
        return source
    return source.parts(boxes) if isinstance(source, FileWeights) else PartSource(source, boxes)


def _check_stay(tasks: Sequence[Task]) -> None:
    for task in tasks:
        live = task.places[0].tensor
        if not is_dtensor(live) or task.way == "resident" or not has_values(live):
            continue
        if live.device.type != "cpu" or task.home == "disk" or task.weight.is_cast:
            raise ConfigError(
                "this rank's part of a weight has values, and cannot give their memory free",
                expected="a divided model without values",
                got=f"a part on {live.device}, for the home {task.home!r}",
                where=f"dispatch_model, {task.weight.name!r}",
                fix="Build it by accel.init_empty_weights, divide it by prepare_model(ctx, model, allocate=False), and "
                "call accel.load_checkpoint_and_dispatch.",
            )


def _entry(entry: StoredTensor, box: Box | None) -> StoredTensor:
    if box is None:
        return entry
    nbytes = math.prod(box.shape) * dtype_of(entry.dtype).itemsize
    return StoredTensor(shape=tuple(box.shape), dtype=entry.dtype, nbytes=nbytes, where=entry.where)
