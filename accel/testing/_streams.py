# SPDX-License-Identifier: Apache-2.0
"""Global random streams, kept apart for each simulated rank: every rank starts from the caller's state."""

from __future__ import annotations

import ctypes
import random
import sys
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch


class _State(NamedTuple):
    torch: torch.Tensor
    python: Any
    numpy: Any


class GlobalStreams:
    """Reads and writes python's, torch's and (when it is imported) numpy's global streams.

    It remembers what it read last, so that streams that nobody draws from cost little: keep one for several runs.
    """

    def __init__(self) -> None:
        self._python = _PythonStream()
        self._numpy: _NumpyStream | None = None

    def capture(self) -> _State:
        """Return the state of all streams."""
        if self._numpy is None and "numpy" in sys.modules:
            self._numpy = _NumpyStream()
        numpy = self._numpy and self._numpy.capture()
        return _State(torch.default_generator.get_state(), self._python.capture(), numpy)

    def restore(self, state: _State) -> None:
        """Go back to a captured state."""
        _ = self.swap(state)

    def swap(self, state: _State) -> _State:
        """Go to a captured state, and return the one before."""
        before = self.capture()
        torch.default_generator.set_state(state.torch)
        if before.python is not state.python:
            self._python.write(state.python)
        if before.numpy is not state.numpy and self._numpy is not None and state.numpy is not None:
            self._numpy.write(state.numpy)
        return before


class RankStreams:
    """Swaps the global streams when another rank goes on.

    Args:
        streams: the streams.
        size: number of ranks.
    """

    def __init__(self, streams: GlobalStreams, size: int) -> None:
        self._streams = streams
        self._caller = streams.capture()
        self._ranks = [self._caller] * size
        self._closed = False

    def swap(self, rank: int, following: int) -> None:
        """Remember the streams as the state of `rank`, which stops running, and load those of `following`."""
        if not self._closed:
            self._ranks[rank] = self._streams.swap(self._ranks[following])

    def load(self, rank: int) -> None:
        """Set the streams to the state of `rank`, which goes on; not for ranks that outlive their run."""
        if not self._closed:
            self._streams.restore(self._ranks[rank])

    def close(self) -> None:
        """Set the streams to what the caller had, for good."""
        self._closed = True
        self._streams.restore(self._caller)


class _Watched(ABC):
    """A stream whose state is read and written only after it was drawn from.

    Reading or writing it takes python 15 us and numpy 100, more than all else at a hand-over together. So its memory is
    compared first.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._memory: object = None

    def capture(self) -> Any:
        """Return the state; the same object as long as nothing was drawn."""
        memory = self._read_memory()
        if memory is None or memory != self._memory:
            self._state, self._memory = self._get(), memory
        return self._state

    def write(self, state: Any) -> None:
        """Go back to a captured state that differs from the present one."""
        self._set(state)
        self._state = state
        self._memory = self._read_memory()

    @abstractmethod
    def _read_memory(self) -> object:
        """Memory that differs once something was drawn or seeded; None where that cannot be told."""

    @abstractmethod
    def _get(self) -> Any: ...

    @abstractmethod
    def _set(self, state: Any) -> None: ...


_WORDS, _WORD_BYTES = 624, 4  # of a Mersenne Twister, which has a position among them besides
# The position and 16 words beside it: a draw moves the position; seeding and a whole round of draws change all words.
_SAMPLE_BYTES = 17 * _WORD_BYTES


class _PythonStream(_Watched):
    """python's: CPython keeps the words inside of the generator object, and a pending gaussian as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self._generator: Any = random.random.__self__
        base: type = next(kind for kind in type(self._generator).__mro__ if kind.__module__ == "_random")
        self._start = id(self._generator) + object.__basicsize__
        self._bytes = base.__basicsize__ - object.__basicsize__

    def _read_memory(self) -> object:
        if self._bytes < (_WORDS + 1) * _WORD_BYTES:
            return None
        return ctypes.string_at(self._start, _SAMPLE_BYTES), self._generator.gauss_next

    def _get(self) -> Any:
        return random.getstate()

    def _set(self, state: Any) -> None:
        random.setstate(state)


class _NumpyStream(_Watched):
    """numpy's: the words are at the documented `state_address`.

    A pending gaussian is kept elsewhere, but only drawing from the generator makes one; while one is pending, the state
    is always read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._random: Any = sys.modules["numpy"].random

    def _read_memory(self) -> object:
        generator = self._random.get_bit_generator()
        if not isinstance(generator, self._random.MT19937) or (self._state and self._state["has_gauss"]):
            return None
        address: int = generator.ctypes.state_address
        end = address + (_WORDS + 1) * _WORD_BYTES  # the position comes last
        return address, ctypes.string_at(end - _SAMPLE_BYTES, _SAMPLE_BYTES)

    def _get(self) -> Any:
        return self._random.get_state(legacy=False)

    def _set(self, state: Any) -> None:
        self._random.set_state(state)
