# SPDX-License-Identifier: Apache-2.0
"""Sources of a run: its own files for values with the home "disk", and this rank's parts of full weights."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from accel.bigmodel._arguments import dtype_of
from accel.bigmodel._describe import StoredTensor, WeightSource
from accel.bigmodel.load import FileWeights, open_weights
from accel.bigmodel.run._places import has_values
from accel.bigmodel.run._supplies import Mappable, Task, Watched, stored_as
from accel.checkpoint._boxes import Box
from accel.checkpoint._live_tensors import held_box
from accel.errors import CheckpointError, ConfigError
from accel.storage import write_tensors
from accel.tensors import is_dtensor


class ScratchSource:
    """Files of values of the model, before another source.

    Attributes:
        entries: tensors by name, of both.
        written: names of those in the files.
    """

    def __init__(self, files: WeightSource, other: WeightSource | None) -> None:
        self._files = files
        self._other = other
        self.written = frozenset(files.entries)
        self.entries: Mapping[str, StoredTensor] = {**(other.entries if other is not None else {}), **files.entries}

    def read(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill tensors; see `WeightSource`."""
        self._files.read([each for each in targets if each[0] in self.written])
        if self._other is not None:
            self._other.read([each for each in targets if each[0] not in self.written])

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor in mapped memory: its pages are read when they are touched. See `Mappable`."""
        source = self._files if name in self.written else self._other
        if not isinstance(source, Mappable):
            raise ConfigError("a source that maps no files", where=name, fix="Use the home 'disk' or 'cpu'.")
        return source.mapped(name)

    def watch(self, names: Iterable[str]) -> None:
        """Let the other source note bytes; nobody else can write to these files."""
        if isinstance(self._other, Watched):
            self._other.watch(name for name in names if name not in self.written)

    def check(self, names: Iterable[str]) -> None:
        """Raise `CheckpointError` if files of the other source have changed."""
        if isinstance(self._other, Watched):
            self._other.check(name for name in names if name not in self.written)

    def close(self) -> None:
        """Close the files, which frees their space."""
        self._files.close()


def with_scratch(
    tasks: Sequence[Task], source: WeightSource | None, folder: str | os.PathLike[str], opened: ExitStack
) -> WeightSource | None:
    """Write the model's values with the home "disk" to files; return a source that has them before others.

    The files have no names once they are open, so that their space is free after the run, however it ends.
    """
    groups: dict[str, dict[str, torch.Tensor]] = {}
    # A file a segment, in the order in which blocks stream.
    for task in tasks:
        if task.home == "disk" and task.way != "resident" and has_values(task.places[0].tensor):
            groups.setdefault(task.segment.name, {})[task.weight.name] = stored_as(task, task.places[0].tensor.detach())
    if not groups:
        return source
    try:
        stage = Path(tempfile.mkdtemp(prefix="accel-scratch-", dir=folder))
    except OSError as error:
        raise _refused(folder, str(error)) from error
    try:
        for at, tensors in enumerate(groups.values()):
            write_tensors(stage, f"weights-{at:06d}.safetensors", tensors)
        files = open_weights(stage)
    except CheckpointError as error:
        raise _refused(folder, error.problem) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    opened.callback(files.close)
    return ScratchSource(files, source)


def _refused(folder: object, problem: str) -> CheckpointError:
    return CheckpointError(
        "values of the model cannot be written for the home 'disk'",
        got=problem,
        where=f"dispatch_model(scratch={str(folder)!r})",
        fix="Free space there or name another folder; or give files that have these values: source=path.",
    )


class PartSource:
    """Parts of the tensors of a source that reads them whole.

    Attributes:
        entries: tensors by name; of parts their own shapes.
    """

    def __init__(self, source: WeightSource, boxes: Mapping[str, Box]) -> None:
        """Wrap a source, which stays its owner's to close, with the parts of some of its tensors."""
        self._source = source
        self._boxes = boxes
        self.entries = {name: _entry(entry, boxes.get(name)) for name, entry in source.entries.items()}

    def read(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill tensors; a part by way of its whole tensor, one at a time. See `WeightSource`."""
        self._source.read([each for each in targets if each[0] not in self._boxes])
        for name, target in targets:
            if name in self._boxes:
                entry, box = self._source.entries[name], self._boxes[name]
                # Whole, as the source reads nothing less; one at a time, so that the host holds one.
                whole = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
                self._source.read([(name, whole)])
                inside = tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
                _ = target.copy_(whole[inside])

    def close(self) -> None:
        """Do nothing: the source is its owner's."""


def with_parts(tasks: Sequence[Task], source: WeightSource | None) -> WeightSource | None:
    """Return a source of the parts that this rank holds, for a model of DTensors."""
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
