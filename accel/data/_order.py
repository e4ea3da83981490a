# SPDX-License-Identifier: Apache-2.0
"""Shuffling as a keyed permutation: any position of any epoch without generating the others.

A generalised Feistel network over Z_a x Z_b with a * b just above n, and cycle walking for the few values beyond n
(Black and Rogaway 2002, "Ciphers with arbitrary finite domains"), so memory is O(1) and access is random.
"""

from __future__ import annotations

import math
from typing import cast

import msgspec
import torch

from accel.errors import ConfigError
from accel.random import Key, check_seed

_ROUNDS = 8
_TABLE = 1024  # samples up to which a whole permutation is cheaper than the network
_MASK = 0xFFFFFFFF


class Order(msgspec.Struct, frozen=True):
    """A permutation of `range(n)` that is evaluated where it is asked.

    Attributes:
        n: how many samples.
        keys: one 32-bit key a round; none leaves the samples in sequence.
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

    def at(self, positions: torch.Tensor) -> list[int]:
        """Return the samples at several positions.

        Args:
            positions: shape [k], int64, each from 0 to n - 1; overwritten.
        """
        if self.keys and self.n <= _TABLE:
            positions = _ranked(self.n, self.keys)[positions]
        elif self.keys:
            rows = math.isqrt(self.n - 1) + 1
            columns = -(-self.n // rows)
            positions = _permute(positions, rows, columns, self.keys)
            while bool((beyond := positions >= self.n).any()):
                positions[beyond] = _permute(positions[beyond], rows, columns, self.keys)
        return cast(list[int], positions.tolist())  # pyright: ignore[reportUnknownMemberType]


def order(seed: int, epoch: int, n: int, *, shuffle: bool = True) -> Order:
    """Return the order of one epoch's samples: a permutation with random access and O(1) memory.

    Args:
        seed: of the run.
        epoch: each has its own permutation.
        n: how many samples, at most 10**15.
        shuffle: False for the dataset's own sequence.

    Raises:
        ConfigError: n below 1 or too large, or a seed or epoch outside its range.
    """
    if not 1 <= n <= 10**15:
        raise ConfigError("cannot order so many samples", expected="1 to 10**15", got=str(n), where="order(n=)")
    key = Key(check_seed(seed, where="order(seed=)")).fold_in("data", check_seed(epoch, where="order(epoch=)"))
    return Order(n, tuple(key.integers(_ROUNDS, bits=32)) if shuffle else ())


def _ranked(n: int, keys: tuple[int, ...]) -> torch.Tensor:
    """A table for small n, where a network of few values favours some permutations."""
    hashes = torch.arange(n)
    for key in keys:
        hashes = _mix(hashes, key)
    return torch.argsort(hashes)


def _permute(x: torch.Tensor, rows: int, columns: int, keys: tuple[int, ...]) -> torch.Tensor:
    left, right = torch.div(x, columns, rounding_mode="floor"), x % columns
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        left = left.add_(_mix(right, first)).remainder_(rows)
        right = right.add_(_mix(left, second)).remainder_(columns)
    return left.mul_(columns).add_(right)


def _mix(x: torch.Tensor, key: int) -> torch.Tensor:
    """Hash integers below 2**32 to integers below 2**32; the constants are murmur3's finaliser's."""
    y = (x * 0x9E3779B1).add_(key).bitwise_and_(_MASK)
    y.bitwise_xor_(y >> 16).mul_(0x85EBCA6B).bitwise_and_(_MASK)
    y.bitwise_xor_(y >> 13).mul_(0xC2B2AE35).bitwise_and_(_MASK)
    return y.bitwise_xor_(y >> 16)
