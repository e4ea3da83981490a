# SPDX-License-Identifier: Apache-2.0
"""Missing ranks of a failed collective: each rank notes in the group's store where it was, and reads the others."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

from accel.comm._call import public_call
from accel.comm._stores import SILENCE_S, answer_of, append_note, bare_store, read_notes
from accel.errors import PeerError

_LOOK_S = 0.05
_LOOKS_IN_TURN = 128  # ranks that look as often; more look less often, as one thread answers them all
_GRACE_S = 1.0  # ranks notice a failed collective at most this far apart


class Notes(NamedTuple):
    """Notes of the ranks on a failed collective.

    Attributes:
        waited: seconds that each rank waited in it, by rank; 0 if it was cut off earlier. Missing ranks have none.
        left: ranks whose context is closed.
        answered: whether the store could be read to the end.
    """

    waited: dict[int, float]
    left: set[int]
    answered: bool


class RollCall:
    """The notes of one group, as one rank writes and reads them.

    Args:
        store: the group's, served by a rank or a launcher.
        rank, size: rank of this process and number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store: Store | None = store
        self._rank = rank
        self._size = size

    def leave(self) -> None:
        """Note that this rank makes no further calls."""
        if self._store is not None and _is_served(self._store):
            with contextlib.suppress(RuntimeError):  # no rank is left to read it
                append_note(self._store, "left", str(self._rank))

    def ask(self, number: int, waited_s: float) -> Notes:
        """Note that this rank reached a collective; return the notes of all ranks, within 3 s.

        Args:
            number: of the collective.
            waited_s: seconds that this rank waited; 0 if it was cut off earlier.
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
            append_note(store, f"came to {number}", f"{self._rank}:{waited_s:.3f}")
            while not notes[-1].answered and _is_served(store):
                pairs = [note.split(":") for note in read_notes(store, f"came to {number}")]
                waited = {int(rank): float(seconds) for rank, seconds in pairs}
                left = set(map(int, read_notes(store, "left"))) - set(waited)
                complete = len(waited) + len(left) == self._size or time.monotonic() > until
                notes.append(Notes(waited, left, answered=complete))
                time.sleep(_LOOK_S * max(1.0, self._size / _LOOKS_IN_TURN))


def _is_served(store: Store) -> bool:
    """Whether the store's address is served; if not, torch's client would print a stack of C++ frames."""
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
    """Make the error of a collective that did not complete; it names the missing ranks where they are known.

    Args:
        roll: notes of the ranks; None without a store.
        rank, size: rank of this process and number of ranks.
        number: of the collective.
        waited_s: duration of the collective, in seconds.
        error: the backend's.
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
    # ranks without a connection to the lost one notice when their neighbours raise
    return f"{'one of ' * (len(absent) > 1)}{_names(absent)} left: the connection is gone"


def _names(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
