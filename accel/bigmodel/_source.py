# SPDX-License-Identifier: Apache-2.0
"""Sources of weights: tensors by name, read on request into memory of the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    import torch


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of a source.

    Attributes:
        shape: its sizes.
        dtype: safetensors' name of its dtype, such as "BF16"; "C128" for complex128.
        nbytes: bytes of its elements.
        where: the file that holds it, for errors; the first of several.
        page_offset: offset of its first byte in a page of `accel.storage.PAGE` bytes; memory at an address with the
            same offset is filled without a copy. None where no memory fits better than other memory.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    where: str = ""
    page_offset: int | None = None


@runtime_checkable
class WeightSource(Protocol):
    """Weights by name. Its owner closes it.

    Attributes:
        entries: tensors by name, in the order in which they are stored.
    """

    @property
    def entries(self) -> Mapping[str, StoredTensor]: ...

    def read(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill tensors; return once every byte is there. Callable from several threads. Mutates the tensors.

        Args:
            targets: names, each with a contiguous CPU tensor of the stored shape and dtype, in any memory. Neighbours
                in a file are read together.

        Raises:
            CheckpointError: a file is too short, has changed since it was opened, or cannot be read; the tensors then
                hold anything.
            ConfigError: an unknown name, or a tensor that does not fit.
        """
        ...

    def close(self) -> None:
        """Close the files. A closed source reads no more."""
        ...
