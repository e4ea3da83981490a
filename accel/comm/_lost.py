# SPDX-License-Identifier: Apache-2.0
"""Lost ranks: the alarm that interrupts waiting peers, and notes in the group's store that name who is missing."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

from accel.comm._call import public_call
from accel.comm._units import RankPlace, UnitLog, described, read_place, way_out
from accel.errors import PeerError
from accel.terminal import show_limit

T = TypeVar("T")

SILENCE_S = 2.0  # limit for the answer of a store


def bare_store(store: Store) -> Store:
    """Return the store inside of prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def append_note(store: Store, key: str, note: str) -> None:
    """Add a note without spaces to those under a key."""
    cast(Any, store).append(key, f"{note} ")


def read_notes(store: Store, key: str) -> list[str]:
    """Return the notes under a key, in the order of their coming."""
    return store.get(key).decode().split() if store.check([key]) else []


def answer_of(question: Callable[[], T], seconds: float = SILENCE_S) -> T | None:
    """Return the answer of a store, None after the limit. A thread asks: a stopped server would block for ever."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(question()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


_LOOK_S = 0.05
_LOOKS_IN_TURN = 128  # ranks that look as often; more look less often, as one thread answers them all
_GRACE_S = 1.0  # ranks notice a failed collective at most this far apart


class Notes(NamedTuple):
    """Notes of the ranks on a failed collective."""

    # Seconds that each rank waited in it, by rank; 0 if it was cut off earlier. Missing ranks have none.
    waited: dict[int, float]
    left: set[int]  # ranks with a closed context
    answered: bool  # whether the store could be read to the end
    places: Mapping[int, RankPlace] = MappingProxyType({})  # places of the ranks that wait in this or another call


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
        self._subjects = 0

    def leave(self) -> None:
        """Note that this rank makes no further calls."""
        # at most one note a rank, never removed: the group ends with it
        if self._store is not None and _is_served(self._store):
            with contextlib.suppress(RuntimeError):  # no rank is left to read it
                append_note(self._store, "left", str(self._rank))

    def ask(self, number: int, waited_s: float, place: RankPlace | None = None) -> Notes:
        """Note that this rank reached a collective, and waited so long; 0 if it was cut off earlier. Return the notes
        of all ranks, within 3 s. `place`: where it waited, for ranks that wait elsewhere."""
        notes = [Notes({}, set(), answered=False)]
        if self._store is not None:
            store = self._store
            _ = answer_of(lambda: self._ask(store, number, waited_s, place, notes), _GRACE_S + SILENCE_S)
        # a store that did not answer once would cost 3 s at every later error
        if not notes[-1].answered:
            self._store = None
        return notes[-1]

    def exchange_notes(self, subject: str, note: str) -> dict[int, str]:
        """Leave a note, one word; return the notes of all ranks that leave theirs within 1 s of this one, by rank.

        No collective: ranks that do not come are not waited for longer. Repetitions of a subject are numbered.
        """
        self._subjects += 1
        return self._notes(f"{subject}, {self._subjects}", note)

    def exchange_places(self, place: RankPlace) -> Mapping[int, RankPlace]:
        """Leave this rank's place; return the places that ranks leave within 1 s of this one, by rank."""
        found = self._notes(_PLACES, place.word())
        if self._store is not None:
            time.sleep(2 * _LOOK_S)  # the store may end with this rank: the others still read
        return {rank: read_place(word) for rank, word in found.items()}

    def _notes(self, subject: str, note: str) -> dict[int, str]:
        found = {self._rank: note}
        if self._store is not None:
            store = self._store
            _ = answer_of(lambda: self._exchange_notes(store, subject, note, found), _GRACE_S + SILENCE_S)
        return dict(found)

    def _exchange_notes(self, store: Store, subject: str, note: str, found: dict[int, str]) -> None:
        until = time.monotonic() + _GRACE_S
        if not _is_served(store):
            return
        with contextlib.suppress(RuntimeError):
            append_note(store, subject, f"{self._rank}:{note}")
            while len(found) < self._size and time.monotonic() < until:
                found.update(_by_rank(read_notes(store, subject)))
                if len(found) < self._size:
                    time.sleep(_LOOK_S * max(1.0, self._size / _LOOKS_IN_TURN))

    def _ask(self, store: Store, number: int, waited_s: float, place: RankPlace | None, notes: list[Notes]) -> None:
        until = time.monotonic() + _GRACE_S
        if not _is_served(store):
            return
        with contextlib.suppress(RuntimeError):
            if place is not None:
                append_note(store, _PLACES, f"{self._rank}:{place.word()}")
            append_note(store, f"came to {number}", f"{self._rank}:{waited_s:.3f}")
            while not notes[-1].answered and _is_served(store):
                came = _by_rank(read_notes(store, f"came to {number}"))
                waited = {rank: float(seconds) for rank, seconds in came.items()}
                # a rank may reach the failed call and close its context before we look
                left = set(map(int, read_notes(store, "left"))) - set(waited)
                places = {rank: read_place(word) for rank, word in _by_rank(read_notes(store, _PLACES)).items()}
                known = waited.keys() | left | places.keys()
                complete = len(known) == self._size or time.monotonic() > until
                notes.append(Notes(waited, left, answered=complete, places=places))
                time.sleep(_LOOK_S * max(1.0, self._size / _LOOKS_IN_TURN))


_PLACES = "places"


def _by_rank(notes: Sequence[str]) -> dict[int, str]:
    """Return the texts of notes such as "3:text" by rank."""
    pairs = [note.split(":") for note in notes]
    return {int(rank): text for rank, text in pairs}


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
    roll: RollCall | None, rank: int, size: int, number: int, waited_s: float, error: BaseException, units: UnitLog
) -> PeerError:
    """Make the error of a collective that did not complete; it names the missing ranks where a store knows them, and
    what each of them waits for instead. `units`: those that this rank has run."""
    label = public_call()
    # a rank that was cut off waited for less than the time-out, which proves nothing about the missing rank
    timed_out = "imed out" in str(error) or isinstance(error, dist.DistBackendError)
    here = units.at(f"in {label}")
    seconds = waited_s if timed_out else 0.0
    notes = roll.ask(number, seconds, here) if roll is not None else Notes({}, set(), answered=True)
    waited = max([seconds, *notes.waited.values()])
    came = f"{_names(sorted(notes.waited))} only" if notes.waited else str(error).splitlines()[0]
    elsewhere: Mapping[int, RankPlace] = notes.places if notes.places.keys() - notes.waited.keys() else {}
    return PeerError(
        _problem(notes, size, waited, known=roll is not None),
        expected=f"all {size} ranks in collective {number}",
        got=f"{came}; {described(elsewhere)}" if elsewhere else came,
        where=f"rank {rank}, {label}",
        fix=way_out(elsewhere)
        or "See what the missing rank did last: its error, its other branch, or what it waits for.",
    )


def _problem(notes: Notes, size: int, waited_s: float, *, known: bool) -> str:
    absent = sorted(set(range(size)) - set(notes.waited))
    if not known:
        return "another rank has left or hangs; which one is not known, because this group has no store to ask"
    # rank 0 serves the store of most launches
    if not notes.answered and 0 in absent:
        return "rank 0 has left or hangs: it keeps the list of who came, and does not answer"
    if notes.left:
        return f"{_names(sorted(notes.left))} left: the context there is closed"
    if not absent:
        return "the connection between ranks broke, though all of them came"
    if waited_s:
        return f"{_names(absent)} did not reach the collective within {show_limit(round(waited_s))}"
    # ranks without a connection to the lost one notice when their neighbours raise
    return f"{'one of ' * (len(absent) > 1)}{_names(absent)} left: the connection is gone"


def _names(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


_NAME = "pt_gloo_runloop"
_LONGEST_S = 2.0
_PAUSE_S = 0.001


def await_idle_threads() -> None:
    """Wait until gloo's threads in this process are idle, for 2 s at most; return at once on systems but Linux."""
    # A thread that waits for the GIL looks idle. It gets the GIL in the pause, so a thread that looks idle twice is.
    idle = 0
    until = time.monotonic() + _LONGEST_S
    while idle < 2 and time.monotonic() < until and (states := thread_states()):
        idle = idle + 1 if set(states) == {"S"} else 0
        time.sleep(_PAUSE_S)


def thread_states() -> list[str]:
    """Return the kernel's state of each of gloo's threads: "S" for sleeping, "R" for running or runnable."""
    states: list[str] = []
    for path in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            head, _, tail = (path / "stat").read_text(errors="replace").rpartition(")")
            if head.endswith(f"({_NAME}"):
                states.append(tail.split()[0])
    return states


_WATCH_S = 0.2
_KEY = "alarm"
_ENDED = "ended"
_SOCKETS = "/dev/fd"


class Alarm(Protocol):
    """Interrupts the wait of all ranks of a group, and opens the group again."""

    def watching(self) -> contextlib.AbstractContextManager[object]:
        """Cut this rank's connections during the block as soon as any rank rings."""
        ...

    def ring(self, note: bytes) -> bytes:
        """Leave a note for all ranks and cut this rank's connections; return the first note left."""
        ...

    def cut(self) -> None:
        """Cut this rank's connections, so that peers which wait for it raise."""
        ...

    def rung(self) -> bool:
        """Return whether a rank has left a note during a `watching` block. Takes 2 s at most."""
        ...

    def renew(self) -> None:
        """Open the group again, over a store without notes. A collective."""
        ...


class StoreAlarm:
    """The alarm of a group that this process opened.

    Args:
        store: the group's; outlives it.
        open_group: opens the default group over a store. A collective.
        renewed: called with the store and the group of each reopening.
    """

    def __init__(
        self, store: Store, open_group: Callable[[Store], None], renewed: Callable[[Store, dist.ProcessGroup], None]
    ) -> None:
        self._whole = store
        self._store = store
        self._open_group = open_group
        self._renewed = renewed
        self._times = 0
        self._lock = threading.Lock()  # keeps the thread from cutting the next group
        self._watchers = 0
        self._sockets: Mapping[int, int] = {}

    def open(self) -> None:
        """Open the group and note its connections. A collective."""
        self._sockets = {}
        with self.opening():
            self._open_group(self._store)

    @contextlib.contextmanager
    def opening(self) -> Generator[None]:
        """Note the connections that are opened in the block, to cut them with the group's own."""
        before = _open_sockets()
        yield
        own = {at: number for at, number in _open_sockets().items() if before.get(at) != number}
        # by number, not by object: gloo opens its sockets in C++
        self._sockets = {**self._sockets, **{at: own[at] for at in own if not _is_of(self._store, at)}}

    @property
    def watched(self) -> bool:
        """Whether a block watches for notes; all ranks agree on its end."""
        return self._watchers > 0

    def end(self, note: bytes) -> None:
        """Leave a note of what ends the group for good, and cut this rank's connections."""
        # the first note stays: later ranks only report that their connection broke
        _ = self._store.compare_set(_ENDED, "", note.decode())
        self.cut()

    def ended(self) -> bytes:
        """Return the first note of what ended the group; empty without one. Takes 2 s at most."""
        return answer_of(lambda: _read(self._store, _ENDED)) or b""

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_WATCH_S):
                with self._lock:
                    # this thread runs while the rank waits inside of C++, where no exception could reach it
                    if _is_noted(self._store) or _is_noted(self._store, _ENDED):
                        self.cut()

        thread = threading.Thread(target=look, name="accel-alarm", daemon=True)
        self._watchers += 1
        if self._watchers == 1:  # nested blocks share one thread
            thread.start()
        try:
            yield
        finally:
            self._watchers -= 1
            ended.set()
            if thread.ident is not None:
                thread.join(SILENCE_S)  # a stopped server would keep the thread for ever

    def ring(self, note: bytes) -> bytes:
        # note before cut: a rank that loses its connection looks for the note at once
        first = self._store.compare_set(_KEY, "", note.decode())
        self.cut()
        return first

    def rung(self) -> bool:
        return self._watchers > 0 and answer_of(lambda: _is_noted(self._store)) is True

    def renew(self) -> None:
        self._times += 1
        with self._lock:
            # a new prefix: notes and counts of the group before must not be read again
            self._store = PrefixStore(f"renewed {self._times}", self._whole)
        gc.collect()  # a group still referenced when it is destroyed can abort the interpreter at exit
        dist.destroy_process_group()
        await_idle_threads()
        try:
            self.open()
        except RuntimeError as error:
            raise PeerError(
                "the process group could not be opened again after a rank had failed",
                expected="every rank",
                got=str(error).splitlines()[0],
                fix="See whether another rank has ended.",
            ) from error
        group = dist.group.WORLD
        assert group is not None  # it is open
        self._renewed(self._store, group)

    def cut(self) -> None:
        group = cast(Any, dist.group.WORLD)
        if hasattr(group, "abort"):  # torch 2.7
            with contextlib.suppress(RuntimeError):
                # NCCL: kernels in flight end with an error, and the host continues
                group.abort()
        for at, number in self._sockets.items():
            _shut_down(at, number)


def _is_noted(store: Store, key: str = _KEY) -> bool:
    try:
        return store.check([key])
    except RuntimeError:  # the server is gone
        return False


def _read(store: Store, key: str) -> bytes:
    return store.get(key) if _is_noted(store, key) else b""


def _open_sockets() -> dict[int, int]:
    """Return the inode number of each socket of this process, by descriptor."""
    found: dict[int, int] = {}
    for name in os.listdir(_SOCKETS) if os.path.isdir(_SOCKETS) else []:
        with contextlib.suppress(OSError):  # closed since, as the descriptor of the listing itself
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def _is_of(store: Store, descriptor: int) -> bool:
    """Whether a socket is a connection to the store, which must survive."""
    store = bare_store(store)
    if not isinstance(store, TCPStore):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as opened:
        try:
            return store.port in (opened.getsockname()[1], opened.getpeername()[1])
        except (OSError, IndexError):  # it listens, or belongs to no network
            return False


def _shut_down(descriptor: int, number: int) -> None:
    """End a connection if its descriptor is unchanged. Listening sockets stay, because gloo's thread needs them."""
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_ino != number:
            return
        with socket.socket(fileno=os.dup(descriptor)) as opened:
            _ = opened.getpeername()
            opened.shutdown(socket.SHUT_RDWR)
