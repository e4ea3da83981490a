# SPDX-License-Identifier: Apache-2.0
"""Randomness: keys derived by name, and the state of the streams that libraries draw from.

A `Key` is a value: folding names and numbers into it gives other keys, equal on every machine, so numbers drawn from
a key need no state in a checkpoint. Code of others, such as dropout, draws from global streams (python, numpy, torch,
the devices'). `capture_rng` and `restore_rng` carry these through a checkpoint, `isolated_rng` and `rng_scope` past a
block. They touch only the devices passed, never all visible ones.

Counter-based keys: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import random as python_random
import sys
from collections import OrderedDict
from collections.abc import Generator, Sequence
from typing import Any, cast

import msgspec
import torch

from accel.devices import get_random_state, seed_device, set_random_state
from accel.errors import ConfigError


class Key(msgspec.Struct, frozen=True):
    """A source of randomness as a value.

    Attributes:
        seed: start of the key.
        path: names and numbers folded in.
    """

    seed: int
    path: tuple[str | int, ...] = ()

    def fold_in(self, *names: str | int) -> Key:
        """Return the key with more names or numbers folded in; different names give unrelated keys."""
        return Key(self.seed, (*self.path, *map(_plain, names)))

    def split(self, count: int) -> tuple[Key, ...]:
        """Return `count` keys, unrelated to each other and to the keys of `fold_in`."""
        return tuple(self.fold_in("accel.random.split", i) for i in range(count))

    def integers(self, count: int, *, bits: int = 64) -> list[int]:
        """Return `count` integers of at most 64 `bits`; equal keys give equal integers on every machine."""
        text = repr((int(operator.index(self.seed)), tuple(map(_plain, self.path)))).encode()
        words: list[int] = []
        for block in range((count + 7) // 8):
            digest = hashlib.blake2b(text, digest_size=64, salt=block.to_bytes(8, "little")).digest()
            words += [int.from_bytes(digest[i : i + 8], "little") >> (64 - bits) for i in range(0, 64, 8)]
        return words[:count]

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a torch generator seeded by this key."""
        return torch.Generator(device).manual_seed(self.integers(1, bits=63)[0])


class RngState(msgspec.Struct, frozen=True):
    """The state of this process's global random streams."""

    python: tuple[int, tuple[int, ...], float | None]  # version, 625 words and the pending gaussian of `random`
    torch: bytes  # state of the CPU generator
    # Type, such as "cuda", and generator state of each device in use, in the order passed.
    devices: tuple[tuple[str, bytes], ...] = ()
    # Key, position and pending gaussian of the legacy global generator; None if numpy was not imported.
    numpy: tuple[bytes, int, int, float] | None = None


def capture_rng(*devices: torch.device) -> RngState:
    """Return the state of the global streams of python, numpy, torch and some devices of this rank.

    A type of device without access to its stream in torch is a `DeviceError`.
    """
    version, words, gauss = python_random.getstate()
    return RngState(
        python=(version, words, gauss),
        torch=_to_bytes(torch.get_rng_state()),
        devices=tuple((device.type, _to_bytes(get_random_state(device))) for device in _own(devices)),
        numpy=_capture_numpy(),
    )


def host_streams() -> tuple[object, object]:
    """Return the states of python's and numpy's global streams, to compare."""
    return python_random.getstate(), _capture_numpy()


# types of most attributes of modules; a step may ask for the stream of each
_NO_GENERATORS = frozenset({bool, int, float, str, type(None), dict, OrderedDict, list, tuple, set, torch.Tensor})


def stream_state(value: object) -> object:
    """Return the state of a generator of torch, python or numpy that somebody holds; None for another value, or for
    one without a state."""
    if type(value) in _NO_GENERATORS:
        return None
    if isinstance(value, torch.Generator):
        return _to_bytes(value.get_state())
    if isinstance(value, python_random.SystemRandom):
        return None
    if isinstance(value, python_random.Random):
        return value.getstate()
    random: Any = getattr(sys.modules.get("numpy"), "random", None)
    if random is None:
        return None
    if isinstance(value, random.RandomState):
        return cast(Any, value).get_state(legacy=False)
    return cast(Any, value).bit_generator.state if isinstance(value, random.Generator) else None


def set_stream_state(generator: object, state: object) -> None:
    """Put a generator back into a state of `stream_state`. Mutates it."""
    if isinstance(generator, torch.Generator):
        _ = generator.set_state(_from_bytes(cast(bytes, state)))
    elif isinstance(generator, python_random.Random):
        generator.setstate(cast(Any, state))
    elif hasattr(generator, "set_state"):  # of numpy's older kind
        cast(Any, generator).set_state(state)
    else:
        cast(Any, generator).bit_generator.state = state


def restore_rng(state: RngState, *devices: torch.device) -> None:
    """Restore all global streams to a captured state. Mutates them.

    `devices` are of the captured types, in the same order, or a `ConfigError` before any stream is touched.
    """
    kinds = [kind for kind, _ in state.devices]
    own = _own(devices)
    if kinds != [device.type for device in own]:
        raise ConfigError(
            "random streams of other devices",
            expected=", ".join(kinds) or "the CPU alone",
            got=", ".join(map(str, own)) or "the CPU alone",
            where="restore_rng",
        )
    version, words, gauss = state.python
    python_random.setstate((version, words, gauss))
    torch.set_rng_state(_from_bytes(state.torch))
    for device, (_, data) in zip(own, state.devices, strict=True):
        set_random_state(device, _from_bytes(data))
    _restore_numpy(state.numpy)


def seed_rng(key: Key, *devices: torch.device) -> None:
    """Seed the global streams of python, numpy (when imported), torch and the devices from a key. Mutates them."""
    own = _own(devices)
    python_seed, numpy_seed, torch_seed, *device_seeds = key.integers(3 + len(own), bits=63)
    python_random.seed(python_seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(numpy_seed % 2**32)
    torch.default_generator.manual_seed(torch_seed)
    for device, seed in zip(own, device_seeds, strict=True):
        seed_device(device, seed)


@contextlib.contextmanager
def isolated_rng(*devices: torch.device) -> Generator[None]:
    """Restore the global streams of python, numpy (when imported), torch and devices at the end of the block."""
    numpy = sys.modules.get("numpy")
    python_state = python_random.getstate()
    torch_state = torch.get_rng_state()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    device_states = [(device, get_random_state(device)) for device in _own(devices)]
    try:
        yield
    finally:
        python_random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for device, state in device_states:
            set_random_state(device, state)


@contextlib.contextmanager
def rng_scope(key: Key, *devices: torch.device) -> Generator[None]:
    """Seed the streams from a key during the block; afterwards they continue as if it had not run."""
    with isolated_rng(*devices):
        seed_rng(key, *devices)
        yield


@contextlib.contextmanager
def torch_rng_scope(key: Key, *devices: torch.device) -> Generator[None]:
    """Seed only torch's streams, such as for dropout; afterwards they continue as if the block had not run."""
    own = _own(devices)
    state = torch.get_rng_state()
    device_states = [(device, get_random_state(device)) for device in own]
    first, *seeds = key.integers(1 + len(own), bits=63)
    try:
        torch.default_generator.manual_seed(first)
        for device, seed in zip(own, seeds, strict=True):
            seed_device(device, seed)
        yield
    finally:
        torch.set_rng_state(state)
        for device, device_state in device_states:
            set_random_state(device, device_state)


def check_seed(seed: int, *, where: str) -> int:
    """Return the seed; raise `ConfigError` unless it is an integer of 63 bits."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            "the seed is not valid", expected="an integer from 0 to 2**63 - 1", got=repr(seed), where=where
        )
    return seed


def _plain(name: str | int) -> str | int:
    """Return a name, or an `int`: numpy's integers and True print and encode differently."""
    return name if isinstance(name, str) else int(operator.index(name))


def _own(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in devices if device.type not in ("cpu", "meta")]


def _to_bytes(state: torch.Tensor) -> bytes:
    return bytes(cast(list[int], state.tolist()))  # pyright: ignore[reportUnknownMemberType]


def _from_bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _capture_numpy() -> tuple[bytes, int, int, float] | None:
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    _, words, position, has_gauss, gauss = numpy.random.get_state()
    return words.tobytes(), int(position), int(has_gauss), float(gauss)


def _restore_numpy(state: tuple[bytes, int, int, float] | None) -> None:
    if state is None:
        return
    import numpy  # the run that was saved used it

    words, position, has_gauss, gauss = state
    numpy.random.set_state(("MT19937", numpy.frombuffer(words, dtype=numpy.uint32), position, has_gauss, gauss))
