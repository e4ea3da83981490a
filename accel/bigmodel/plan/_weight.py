# SPDX-License-Identifier: Apache-2.0
"""A weight without its values: its name, shape, dtype and ties, and its bytes in each place."""

from __future__ import annotations

import math

import msgspec

from accel.errors import ConfigError, did_you_mean
from accel.storage import ITEM_BITS

ALIGNMENT = 512  # bytes to which torch's CUDA allocator rounds each tensor
_BITS = {**ITEM_BITS, "C128": 128}  # not in files, but in memory
FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
_STORED = FLOATS | {"F8_E4M3", "F8_E5M2"}


class Weight(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter or buffer.

    Attributes:
        name: its path in the model; the first one, if it has several.
        shape: sizes.
        dtype: safetensors' name of the dtype that it has in memory, such as "BF16"; "C128" for complex128.
        tied: its further paths.
        stored: whether checkpoints hold it; False for a non-persistent buffer.
        moves: whether it streams with its segment. Others stay on the segment's computing device: buffers below 1 MiB,
            buffers that are not stored, and weights that another segment uses too.
        storage_dtype: dtype that it has in its home; a computing device is such a home for a smaller dtype alone. None
            for `dtype`.

    Raises:
        ConfigError: an unknown dtype, a negative size, a weight that moves but is not stored, or a storage dtype of a
            weight that does not move or is not of floating point.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tied: tuple[str, ...] = ()
    stored: bool = True
    moves: bool = True
    storage_dtype: str | None = None

    def __post_init__(self) -> None:
        where = f"Weight {self.name!r}"
        if self.dtype not in _BITS:
            raise ConfigError("unknown dtype", got=repr(self.dtype), where=where, fix=did_you_mean(self.dtype, _BITS))
        if any(type(size) is not int or size < 0 for size in self.shape):
            raise ConfigError("not a shape", expected="sizes from 0", got=repr(self.shape), where=where)
        if self.moves and not self.stored:
            raise ConfigError("a weight that moves must be stored", got="stored=False, moves=True", where=where)
        if self.storage_dtype is not None:
            _check_storage(self, where)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return _nbytes(self.shape, self.dtype)

    @property
    def memory(self) -> int:
        """Bytes that it takes in memory: `nbytes` rounded up to 512."""
        return _aligned(self.nbytes)

    @property
    def is_cast(self) -> bool:
        """Whether it has another dtype in its home than where it computes."""
        return self.storage_dtype not in (None, self.dtype)

    @property
    def narrows(self) -> bool:
        """Whether its storage dtype has fewer bits than its own."""
        return self.storage_dtype is not None and _BITS[self.storage_dtype] < _BITS[self.dtype]

    @property
    def home_memory(self) -> int:
        """Bytes that it takes in a home other than its computing device, in units of 512."""
        return _aligned(_nbytes(self.shape, self.storage_dtype or self.dtype))


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return -(-math.prod(shape) * _BITS[dtype] // 8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _check_storage(weight: Weight, where: str) -> None:
    if weight.storage_dtype not in _STORED:
        raise ConfigError(
            "not a dtype to store a weight in",
            expected=", ".join(sorted(_STORED)),
            got=repr(weight.storage_dtype),
            where=f"{where}, storage_dtype",
        )
    if weight.dtype not in FLOATS or not weight.moves:
        what = f"dtype={weight.dtype!r}, moves={weight.moves}"
        raise ConfigError("a storage dtype is for floating-point weights that move", got=what, where=where)
