# SPDX-License-Identifier: Apache-2.0
"""Threads for ranks, each with separate global random streams."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

import torch

from accel.compiling import CompilerState, compiler_state, set_compiler_state
from accel.testing._sites import SimulationError

Job = Callable[[], None]

_NAME = "accel-simulated-rank"


class RankThread:
    """A daemon thread that does one job after another until it is retired."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=_NAME, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; a fork of the process has none of its threads."""
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Do this job after those submitted before; it must not raise."""
        self._jobs.put(job)

    def retire(self) -> None:
        """End the thread after the jobs submitted so far."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, at most `timeout_s` seconds."""
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # else what the job holds lives until the next one
        drop_thread_caches()


def drop_thread_caches() -> None:
    """Empty DTensor's cache of this thread, while it holds the interpreter's lock.

    At the end of a thread torch takes a lock to empty the cache, and the interpreter's lock for tensors in it:
    two threads that end at once can wait for each other (seen with torch 2.12).
    """
    empty: Any = getattr(cast(Any, torch)._C, "_clear_DTensor_sharding_propagator_cache", None)
    if empty is not None and "torch.distributed.tensor" in sys.modules:
        empty()


class RankThreads:
    """Threads for the ranks of one run after another; `close` ends them."""

    def __init__(self) -> None:
        self._idle: list[RankThread] = []

    def take(self, count: int) -> list[RankThread]:
        """Return `count` threads, new ones if too few are idle; `SimulationError` if the system has no more."""
        taken: list[RankThread] = []
        try:
            while len(taken) < count:
                taken.append(self._idle_thread() or RankThread())
        except RuntimeError as error:
            self.give_back(taken, free=True)
            raise SimulationError(
                f"no thread for rank {len(taken)} of {count}",
                got=str(error),
                fix="Simulate fewer ranks, or raise the user's limit.",
            ) from error
        return taken

    def give_back(self, threads: list[RankThread], *, free: bool) -> None:
        """Keep threads for later if their jobs have ended, or are about to; others end after their job."""
        if free:
            self._idle.extend(threads)
        else:
            for each in threads:
                each.retire()

    def _idle_thread(self) -> RankThread | None:
        while True:
            try:
                thread = self._idle.pop()
            except IndexError:  # none left, or another thread took the last
                return None
            if thread.alive:
                return thread

    def close(self) -> None:
        """End all idle threads and wait for them."""
        threads, self._idle = self._idle, []
        for each in threads:
            each.retire()
        for each in threads:
            each.join(timeout_s=10.0)


def interrupt(thread: int, error: type[BaseException]) -> None:
    """Raise an error class in a running thread at its next Python instruction, as Ctrl-C does in the main thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


class _State(NamedTuple):
    torch: torch.Tensor
    python: Any
    numpy: Any
    compiler: CompilerState


class GlobalStreams:
    """Reads and writes python's, torch's and (when it is imported) numpy's global streams, and the state of
    torch.compile.

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
        return _State(torch.default_generator.get_state(), self._python.capture(), numpy, compiler_state())

    def restore(self, state: _State) -> None:
        """Go back to a captured state."""
        _ = self.swap(state)

    def swap(self, state: _State) -> _State:
        """Go to a captured state, and return the one before."""
        before = self.capture()
        torch.default_generator.set_state(state.torch)
        if before.compiler != state.compiler:
            set_compiler_state(state.compiler)
        if before.python is not state.python:
            self._python.write(state.python)
        if before.numpy is not state.numpy and self._numpy is not None and state.numpy is not None:
            self._numpy.write(state.numpy)
        return before


class RankStreams:
    """Swaps the global streams when another rank continues.

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
        """Remember the streams as the state of `rank`, which stops running, and load the streams of `following`."""
        if not self._closed:
            self._ranks[rank] = self._streams.swap(self._ranks[following])

    def load(self, rank: int) -> None:
        """Set the streams to the state of `rank`, which continues; not for ranks that outlive their run."""
        if not self._closed:
            self._streams.restore(self._ranks[rank])

    def close(self) -> None:
        """Set the streams to what the caller had, for good."""
        self._closed = True
        self._streams.restore(self._caller)


class _Watched(ABC):
    """A random stream; its state is read and written only after something was drawn.

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
        """Memory that differs once something was drawn or seeded; None where that is unknown."""

    @abstractmethod
    def _get(self) -> Any: ...

    @abstractmethod
    def _set(self, state: Any) -> None: ...


_WORDS, _WORD_BYTES = 624, 4  # of a Mersenne Twister, which also has a position among them
# The position and 16 words next to it: a draw moves the position; seeding and a whole round of draws change all words.
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
