# SPDX-License-Identifier: Apache-2.0
"""Who was missing in a collective that failed: ranks note in their group's store where they were, and read it."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

from accel.comm._call import public_call
from accel.comm._stores import SILENCE_S, answer_of, bare_store
from accel.errors import PeerError

_GRACE_S = 1.0  # what ranks of one failed collective may lie apart in noticing it


class Notes(NamedTuple):
    """What ranks noted about a collective that failed.

    Attributes:
        waited: by rank that came to it, the seconds that it waited in vain; 0 if it was cut off earlier.
        left: ranks whose context is closed.
        answered: whether the store could be read to the end.
    """

    waited: dict[int, float]
    left: set[int]
    answered: bool


class RollCall:
    """The place where one rank of a group notes and reads.

    Args:
        store: the group's, which some rank or a launcher serves.
        rank, size: this rank's place.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store: Store | None = store
        self._rank = rank
        self._size = size

    def leave(self) -> None:
        """Note that this rank makes no more calls."""
        if self._store is not None and _is_served(self._store):
            with contextlib.suppress(RuntimeError):  # nobody is left to read it
                _append(self._store, "left", str(self._rank))

    def ask(self, number: int, waited_s: float) -> Notes:
        """Note that this rank came to a collective, and read who else did and who left. Takes 3 s at most.

        Args:
            number: of the collective.
            waited_s: how long this rank waited in vain, 0 if it was cut off earlier.
        """
        notes = [Notes({}, set(), answered=False)]
        if self._store is not None:
            store = self._store
            _ = answer_of(lambda: self._ask(store, number, waited_s, notes), _GRACE_S + SILENCE_S)
        if not notes[-1].answered:
            self._store = None
        return notes[-1]

    def _ask(self, store: Store, number: int, waited_s: float, notes: list[Notes]) -> None:
        until = time.monotonic() + _GRACE_S
        if not _is_served(store):
            return
        with contextlib.suppress(RuntimeError):
            _append(store, f"came to {number}", f"{self._rank}:{waited_s:.3f}")
            while not notes[-1].answered and _is_served(store):
                pairs = [note.split(":") for note in _read(store, f"came to {number}")]
                waited = {int(rank): float(seconds) for rank, seconds in pairs}
                left = set(map(int, _read(store, "left"))) - set(waited)
                complete = len(waited) + len(left) == self._size or time.monotonic() > until
                notes.append(Notes(waited, left, answered=complete))
                time.sleep(0.05)


def _append(store: Store, key: str, note: str) -> None:
    cast(Any, store).append(key, f"{note} ")


def _read(store: Store, key: str) -> list[str]:
    return store.get(key).decode().split() if store.check([key]) else []


def _is_served(store: Store) -> bool:
    """Whether somebody listens at the store's address; torch's client prints a stack of C++ frames if nobody does."""
    store = bare_store(store)
    if isinstance(store, TCPStore):
        try:
            socket.create_connection((store.host, store.port), timeout=_GRACE_S).close()
        except OSError:
            return False
    return True


def absence(
    roll: RollCall | None, rank: int, size: int, number: int, waited_s: float, error: BaseException
) -> PeerError:
    """Make the error of a collective that did not complete, naming who was missing where that can be known.

    Args:
        roll: where ranks note themselves; None where no store can be reached.
        rank, size: this rank's place.
        number: of the collective.
        waited_s: how long it lasted.
        error: what the backend said.
    """
    label = public_call()
    timed_out = "imed out" in str(error) or isinstance(error, dist.DistBackendError)
    notes = roll.ask(number, waited_s if timed_out else 0.0) if roll is not None else Notes({}, set(), answered=True)
    waited = max([waited_s if timed_out else 0.0, *notes.waited.values()])
    return PeerError(
        _problem(notes, size, waited, known=roll is not None),
        expected=f"all {size} ranks in collective {number}",
        got=f"{_names(sorted(notes.waited))} only" if notes.waited else str(error).splitlines()[0],
        where=f"rank {rank}, {label}",
        fix="See what the missing rank did last: its error, its other branch, or what it waits for.",
    )


def _problem(notes: Notes, size: int, waited_s: float, *, known: bool) -> str:
    absent = sorted(set(range(size)) - set(notes.waited))
    if not known:
        return "another rank has left or hangs; which one is not known, because this group has no store to ask"
    if not notes.answered and 0 in absent:
        return "rank 0 has left or hangs: it keeps the list of who came, and does not answer"
    if notes.left:
        return f"{_names(sorted(notes.left))} left: the context there is closed"
    if not absent:
        return "the connection between ranks broke, though all of them came"
    if waited_s:
        return f"{_names(absent)} did not come within {waited_s:.0f} s"
    # among more than a few ranks, those that do not talk to the lost one notice when their neighbours raise
    return f"{'one of ' * (len(absent) > 1)}{_names(absent)} left: the connection is gone"


def _names(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
