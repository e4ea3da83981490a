# SPDX-License-Identifier: Apache-2.0
"""Randomness: keys derived by name, and the state of the streams that libraries draw from.

A `Key` is a value: folding names and numbers into it gives other keys, the same on every machine, so whatever is
drawn from a key needs no state in a checkpoint. Global streams (python, numpy, torch, the device's) are drawn from by
code that is not ours, such as dropout; `capture_rng` and `restore_rng` carry them through a checkpoint.

Counter-based keys: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import random as python_random
import sys
from collections.abc import Generator
from typing import cast

import msgspec
import torch

from accel.errors import ConfigError


class Key(msgspec.Struct, frozen=True):
    """A source of randomness as a value.

    Attributes:
        seed: what the key starts from.
        path: names and numbers folded in since.
    """

    seed: int
    path: tuple[str | int, ...] = ()

    def fold_in(self, *names: str | int) -> Key:
        """Return the key with more names or numbers folded in; different names give unrelated keys."""
        return Key(self.seed, (*self.path, *names))

    def integers(self, count: int, *, bits: int = 64) -> list[int]:
        """Return `count` integers of at most 64 `bits`, the same for equal keys on every machine."""
        names = tuple(name if isinstance(name, str) else int(operator.index(name)) for name in self.path)
        text = repr((int(operator.index(self.seed)), names)).encode()  # numpy's integers and True print differently
        words: list[int] = []
        for block in range((count + 7) // 8):
            digest = hashlib.blake2b(text, digest_size=64, salt=block.to_bytes(8, "little")).digest()
            words += [int.from_bytes(digest[i : i + 8], "little") >> (64 - bits) for i in range(0, 64, 8)]
        return words[:count]

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a torch generator seeded by this key."""
        return torch.Generator(device).manual_seed(self.integers(1, bits=63)[0])


class RngState(msgspec.Struct, frozen=True):
    """The state of this process's global random streams.

    Attributes:
        python: version, 625 words and the pending gaussian of `random`.
        torch: the CPU generator's state.
        device: the CUDA generator's state of this rank's device, None on CPU.
        numpy: the legacy global generator's key, position and pending gaussian; None if numpy was not imported.
    """

    python: tuple[int, tuple[int, ...], float | None]
    torch: bytes
    device: bytes | None = None
    numpy: tuple[bytes, int, int, float] | None = None


def capture_rng(device: torch.device) -> RngState:
    """Return the state of python's, numpy's, torch's and the device's global streams.

    Args:
        device: this rank's device; other devices' streams are not touched.
    """
    version, words, gauss = python_random.getstate()
    on_cuda = device.type == "cuda"
    return RngState(
        python=(version, words, gauss),
        torch=_to_bytes(torch.get_rng_state()),
        device=_to_bytes(torch.cuda.get_rng_state(device)) if on_cuda else None,
        numpy=_capture_numpy(),
    )


def restore_rng(state: RngState, device: torch.device) -> None:
    """Put the global streams back to a captured state. Mutates them.

    Args:
        state: from `capture_rng`.
        device: this rank's device.
    """
    version, words, gauss = state.python
    python_random.setstate((version, words, gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(state.torch), dtype=torch.uint8))
    if state.device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state.device), dtype=torch.uint8), device)
    _restore_numpy(state.numpy)


def seed_rng(key: Key, device: torch.device) -> None:
    """Seed the global streams of python, numpy (when imported), torch and the device from a key. Mutates them."""
    python_seed, numpy_seed, torch_seed, device_seed = key.integers(4, bits=63)
    python_random.seed(python_seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(numpy_seed % 2**32)
    torch.default_generator.manual_seed(torch_seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(device_seed)


@contextlib.contextmanager
def isolated_rng() -> Generator[None]:
    """Put the global streams of python, numpy (when imported) and torch on the CPU back at the end of the block."""
    numpy = sys.modules.get("numpy")
    python_state, torch_state = python_random.getstate(), torch.get_rng_state()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        python_random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def check_seed(seed: int, *, where: str) -> int:
    """Return the seed if it is an integer of 63 bits, else raise `ConfigError`."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError("not a seed", expected="an integer from 0 to 2**63 - 1", got=repr(seed), where=where)
    return seed


def _to_bytes(state: torch.Tensor) -> bytes:
    return bytes(cast(list[int], state.tolist()))  # pyright: ignore[reportUnknownMemberType]


def _capture_numpy() -> tuple[bytes, int, int, float] | None:
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    _, words, position, has_gauss, gauss = numpy.random.get_state()
    return words.tobytes(), int(position), int(has_gauss), float(gauss)


def _restore_numpy(state: tuple[bytes, int, int, float] | None) -> None:
    if state is None:
        return
    import numpy  # the state says that the run used it

    words, position, has_gauss, gauss = state
    numpy.random.set_state(("MT19937", numpy.frombuffer(words, dtype=numpy.uint32), position, has_gauss, gauss))
