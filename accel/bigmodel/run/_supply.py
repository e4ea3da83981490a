# SPDX-License-Identifier: Apache-2.0
"""Supplies of weights: a tensor in host memory or in a mapped file, or bytes that a source reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch

from accel.bigmodel._dtypes import copy_in_range, dtype_of, name_of
from accel.bigmodel._source import StoredTensor, WeightSource
from accel.errors import ConfigError


@runtime_checkable
class Mappable(Protocol):
    """A source that gives tensors as mapped files."""

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor of the host whose pages are read when they are touched.

        Raises:
            ConfigError: one that cannot be mapped.
        """
        ...


def _check_has_values(name: str, tensor: object) -> None:
    if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
        return
    got = "one on the meta device" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
    raise ConfigError("a source without values", expected="a tensor for each name", got=got, where=f"source[{name!r}]")


class TensorSource:
    """A mapping of tensors as a `WeightSource`; each tensor is looked up when it is read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Look at shapes and dtypes.

        Raises:
            ConfigError: a value that is no tensor, or that has no memory.
        """
        for name, tensor in tensors.items():
            _check_has_values(name, tensor)
        self._tensors = tensors
        self._entries = {
            name: StoredTensor(shape=tuple(tensor.shape), dtype=name_of(tensor.dtype), nbytes=tensor.nbytes)
            for name, tensor in tensors.items()
        }

    @property
    def entries(self) -> Mapping[str, StoredTensor]:
        """Shapes and dtypes by name."""
        return self._entries

    def read(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors to the targets."""
        for name, target in targets:
            target.copy_(self._tensors[name].detach())

    def mapped(self, name: str) -> torch.Tensor:
        """Return the tensor itself."""
        return self._tensors[name].detach()

    def close(self) -> None:
        """Do nothing: the mapping is the caller's."""


@dataclass(frozen=True, eq=False, slots=True)
class Supply:
    """Place of a weight's bytes between uses.

    Attributes:
        name: name of the weight in the source.
        shape: sizes of the weight.
        dtype: dtype in which the model computes.
        tensor: the values, in host memory, a mapped file, or on the computing device; None where the source reads them.
        source: reads the values where `tensor` is None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: torch.Tensor | None
    source: WeightSource | None

    @property
    def nbytes(self) -> int:
        """Bytes that a fetch moves."""
        if self.tensor is not None:
            return self.tensor.nbytes
        assert self.source is not None
        return self.source.entries[self.name].nbytes

    def stored_dtype(self) -> torch.dtype:
        """Return the dtype of the stored values."""
        if self.tensor is not None:
            return self.tensor.dtype
        assert self.source is not None
        return dtype_of(self.source.entries[self.name].dtype)

    def mapped(self) -> torch.Tensor | None:
        """Return the values in a mapped file; None where the source maps none, or not this one."""
        if not isinstance(self.source, Mappable):
            return None
        try:
            return self.source.mapped(self.name)
        except ConfigError:  # in several parts, or in a store
            return None

    def fetch(self, device: torch.device) -> torch.Tensor:
        """Return the values in new memory of a device."""
        if self.tensor is not None and self.tensor.device.type != "cpu":
            return self.tensor.to(device, self.dtype, copy=True)
        target = torch.empty(self.shape, dtype=self.dtype)
        fill([(self, target)])
        return target.to(device)


def fill(targets: Sequence[tuple[Supply, torch.Tensor]]) -> None:
    """Fill tensors of the host; each source reads its own ones together.

    Args:
        targets: supplies, each with a contiguous CPU tensor of the weight's shape, of any dtype.

    Raises:
        CheckpointError: a file cannot be read.
        ConfigError: values that a target's dtype does not hold.
    """
    reads: dict[int, tuple[WeightSource, list[tuple[str, torch.Tensor]]]] = {}
    casts: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for supply, target in targets:
        if supply.tensor is not None:
            held.append((target, supply.tensor))
            continue
        assert supply.source is not None
        stored = supply.stored_dtype()
        read = target if stored == target.dtype else torch.empty(supply.shape, dtype=stored)
        if read is not target:
            casts.append((supply.name, target, read))
        reads.setdefault(id(supply.source), (supply.source, []))[1].append((supply.name, read))
    if held:  # by one call of torch's, for which the thread lets the interpreter go once
        cast(Any, torch)._foreach_copy_([target for target, _ in held], [tensor for _, tensor in held])
    for source, each in reads.values():
        source.read(each)
    for name, target, read in casts:
        copy_in_range(target, read, name=name)
