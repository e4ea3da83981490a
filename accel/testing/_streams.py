# SPDX-License-Identifier: Apache-2.0
"""Global random streams, kept apart for each simulated rank: every rank starts from the caller's state."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any, NamedTuple

import torch


class _State(NamedTuple):
    torch: torch.Tensor
    python: tuple[Any, ...]
    numpy: dict[str, Any] | None


class RankStreams:
    """Swaps python's, torch's and (when it is imported) numpy's global streams when another rank goes on.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._numpy = _NumpyStream() if "numpy" in sys.modules else None
        self._caller = self._capture()
        self._ranks = [self._caller] * size

    def save(self, rank: int) -> None:
        """Remember the streams as the state of `rank`, which stops running."""
        self._ranks[rank] = self._capture()

    def load(self, rank: int) -> None:
        """Set the streams to the state of `rank`, which goes on."""
        self._restore(self._ranks[rank])

    def close(self) -> None:
        """Set the streams to what the caller had."""
        self._restore(self._caller)

    def _capture(self) -> _State:
        return _State(torch.get_rng_state(), random.getstate(), self._numpy and self._numpy.capture())

    def _restore(self, state: _State) -> None:
        torch.set_rng_state(state.torch)
        random.setstate(state.python)
        if self._numpy is not None and state.numpy is not None:
            self._numpy.restore(state.numpy)


class _NumpyStream:
    """numpy's global stream, read and written only after it was drawn from.

    Reading or writing that state takes numpy 30 us and more, as long as all else at a hand-over together. So its memory
    (at the documented `state_address`) is compared first. A pending gaussian is kept elsewhere, but only drawing from
    the generator makes one; while one is pending, the state is always read.
    """

    _MT19937_BYTES = 625 * 4  # 624 words and a position

    def __init__(self) -> None:
        self._random: Any = sys.modules["numpy"].random
        self._state: dict[str, Any] = {}
        self._memory: tuple[int, bytes] | None = None

    def capture(self) -> dict[str, Any]:
        """Return the state; the same object as long as nothing was drawn."""
        memory = self._read_memory()
        if memory is None or memory != self._memory or self._state["has_gauss"]:
            self._state, self._memory = self._random.get_state(legacy=False), memory
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a captured state."""
        if self.capture() is not state:
            self._random.set_state(state)
            self._state, self._memory = state, self._read_memory()

    def _read_memory(self) -> tuple[int, bytes] | None:
        generator = self._random.get_bit_generator()
        if not isinstance(generator, self._random.MT19937):
            return None
        address: int = generator.ctypes.state_address
        return address, ctypes.string_at(address, self._MT19937_BYTES)
