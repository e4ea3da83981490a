# SPDX-License-Identifier: Apache-2.0
"""Shuffling as a keyed permutation: any position of any epoch without generating the others.

A generalised Feistel network over Z_a x Z_b with a * b just above n, and cycle walking for the few values beyond n
(Black and Rogaway 2002, "Ciphers with arbitrary finite domains"), so memory is O(1) and access is random.
"""

from __future__ import annotations

import math
from typing import Any, cast

import msgspec
import torch

from accel.errors import ConfigError
from accel.random import Key, check_seed

_ROUNDS = 6
_TABLE = 1024  # samples up to which a whole permutation is cheaper than the network
_GOLDEN, _MIXER = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64  # as signed integers
_MASK = 2**31 - 1


class Order(msgspec.Struct, frozen=True):
    """A permutation of `range(n)` that is evaluated where it is asked.

    Attributes:
        n: how many samples.
        keys: one 63-bit key a round; none leaves the samples in sequence.
    """

    n: int
    keys: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: int) -> int:
        """Return the sample at a position of the epoch."""
        if not 0 <= position < self.n:
            raise IndexError(f"position {position} of an order of {self.n}")
        return self.at(torch.tensor([position]))[0]

    def at(self, positions: torch.Tensor) -> Any:
        """Return the samples at several positions, as nested lists of the positions' shape.

        Args:
            positions: any shape, int64, each from 0 to n - 1; overwritten.
        """
        if self.keys and self.n <= _TABLE:
            positions = _ranked(self.n, self.keys)[positions]
        elif self.keys:
            rows = math.isqrt(self.n - 1) + 1
            columns = -(-self.n // rows)
            positions = _permute(positions, rows, columns, self.keys)
            while bool((beyond := positions >= self.n).any()):
                positions[beyond] = _permute(positions[beyond], rows, columns, self.keys)
        return cast(Any, positions).tolist()


class Drawn(msgspec.Struct, frozen=True, eq=False):
    """The samples of one epoch as a sampler gave them.

    Attributes:
        samples: shape [n], int64.
    """

    samples: torch.Tensor

    def at(self, positions: torch.Tensor) -> Any:
        """Return the samples at several positions, as nested lists of the positions' shape."""
        return cast(Any, self.samples[positions]).tolist()


def order(seed: int, epoch: int, n: int, *, shuffle: bool = True, salt: int | None = None) -> Order:
    """Return the order of one epoch's samples: a permutation with random access and O(1) memory.

    Args:
        seed: of the run.
        epoch: each has its own permutation.
        n: how many samples, at most 10**15.
        shuffle: False for the dataset's own sequence.
        salt: a second seed, such as that of a loader's own generator.

    Raises:
        ConfigError: n below 1 or too large, or a seed or epoch outside its range.
    """
    if type(n) is not int or not 1 <= n <= 10**15:
        expected = "an integer from 1 to 10**15"
        raise ConfigError("cannot order so many samples", expected=expected, got=repr(n), where="order(n=)")
    key = Key(check_seed(seed, where="order(seed=)")).fold_in("data", check_seed(epoch, where="order(epoch=)"))
    key = key if salt is None else key.fold_in("salt", salt)
    return Order(n, tuple(key.integers(_ROUNDS, bits=63)) if shuffle else ())


def _ranked(n: int, keys: tuple[int, ...]) -> torch.Tensor:
    """A table for small n, where a network of few values favours some permutations."""
    hashes = torch.arange(n)
    for key in keys:
        hashes = _mix(hashes, key)
    return torch.argsort(hashes, stable=True)


def _permute(x: torch.Tensor, rows: int, columns: int, keys: tuple[int, ...]) -> torch.Tensor:
    left = torch.div(x, columns, rounding_mode="floor")
    right = x - left * columns
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        left.add_(_mix(right, first)).remainder_(rows)
        right.add_(_mix(left, second)).remainder_(columns)
    return left.mul_(columns).add_(right)


def _mix(x: torch.Tensor, key: int) -> torch.Tensor:
    """Hash to integers below 2**31; products wrap around, and the constants are SplitMix64's."""
    y = (x + key).mul_(_GOLDEN)
    y.bitwise_xor_(y >> 32).mul_(_MIXER)
    return y.bitwise_right_shift_(33).bitwise_and_(_MASK)
