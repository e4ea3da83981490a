# SPDX-License-Identifier: Apache-2.0
"""Weights in files, as a `WeightSource`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from accel.bigmodel._dtypes import dtype_of
from accel.bigmodel._source import StoredTensor
from accel.bigmodel.load._jobs import page_offset, plan_jobs
from accel.checkpoint import Box, Strided, cut
from accel.errors import ConfigError, did_you_mean
from accel.storage import ByteRanges, LocalRanges


class FileWeights:
    """Tensors of open files, by name. Its owner closes it.

    Attributes:
        entries: tensors by name, in the order of the files.
        stored: their bytes.
        ranges: the open files.
    """

    def __init__(self, stored: Mapping[str, Strided], ranges: ByteRanges, where: str) -> None:
        """Take over open files.

        Args:
            stored: tensors by name.
            ranges: the open files; closed with the source.
            where: the folder, for errors.
        """
        self._where = where
        self.stored = stored
        self.ranges = ranges
        self.entries: Mapping[str, StoredTensor] = {name: _entry(each, where) for name, each in stored.items()}

    def parts(self, boxes: Mapping[str, Box]) -> FileWeights:
        """Return a source of parts of some tensors, of the same open files, which stay this one's to close.

        Args:
            boxes: part by name; other tensors are whole.
        """
        stored = {name: cut(each, boxes[name]) if name in boxes else each for name, each in self.stored.items()}
        return FileWeights(stored, self.ranges, self._where)

    def read(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill tensors; see `WeightSource`."""
        for name, target in targets:
            self._check(name, target)
        jobs = (plan_jobs(self.stored[name], target, name=name) for name, target in targets)
        self.ranges.read(job for each in jobs for job in each)

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor in mapped memory: its pages are read when they are touched. It outlives `close`.

        Raises:
            CheckpointError: the file has changed since it was opened.
            ConfigError: no such weight, one that lies in several parts, or in a store.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise ConfigError("no such weight", got=repr(name), where="mapped", fix=did_you_mean(name, self.entries))
        dtype = dtype_of(entry.dtype)
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        parts = self.stored[name].parts
        part = parts[0]
        if len(parts) > 1 or any(at % dtype.itemsize for at in (part.start, *part.strides)):
            problem = f"{name!r} cannot be mapped, as its bytes lie apart or between the addresses that torch reads"
            raise ConfigError(problem, where=entry.where, fix="Use the home 'disk' or 'cpu'.")
        if not isinstance(self.ranges, LocalRanges):
            raise ConfigError(
                "files of a store cannot be mapped", where=entry.where, fix="Use the home 'disk' or 'cpu'."
            )
        reach = sum((size - 1) * stride for size, stride in zip(entry.shape, part.strides, strict=True))
        memory = self.ranges.mapped(part.file)[part.start : part.start + reach + dtype.itemsize]
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
        return flat.as_strided(entry.shape, [stride // dtype.itemsize for stride in part.strides])

    def close(self) -> None:
        """Close the files."""
        self.ranges.close()

    def __enter__(self) -> FileWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, name: str, target: torch.Tensor) -> None:
        entry = self.entries.get(name)
        if entry is None:
            raise ConfigError("no such weight", got=repr(name), where="read", fix=did_you_mean(name, self.entries))
        fits = target.dtype == dtype_of(entry.dtype) and tuple(target.shape) == entry.shape
        if not fits or target.device.type != "cpu" or not target.is_contiguous():
            expected = f"a contiguous CPU tensor of {entry.dtype} {list(entry.shape)}"
            got = f"{target.dtype} {list(target.shape)} on {target.device}"
            raise ConfigError("a tensor that does not fit", expected=expected, got=got, where=f"read, {name}")


def _entry(stored: Strided, where: str) -> StoredTensor:
    itemsize = dtype_of(stored.dtype).itemsize
    return StoredTensor(
        shape=stored.shape,
        dtype=stored.dtype,
        nbytes=math.prod(stored.shape) * itemsize,
        where=f"{where}/{stored.parts[0].file}" if stored.parts else where,
        page_offset=page_offset(stored, itemsize),
    )
