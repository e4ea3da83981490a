# SPDX-License-Identifier: Apache-2.0
"""The alarm: one rank's failure interrupts peers that wait in a collective of torch, by cutting their group.

Inside DDP's backward a rank waits in C++ for a peer that may have raised, and reads no message of this package. The
failing rank leaves a note in the group's store. A thread of each rank looks for it and cuts the rank's connections, so
that the wait raises. All ranks then open the group again.

NCCL can abort a group. gloo's `abort` does nothing, and a group with references left keeps its connections, so its
sockets are shut down.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

from accel.comm._idle import await_idle_threads
from accel.comm._stores import SILENCE_S, answer_of, bare_store
from accel.errors import PeerError

_LOOK_S = 0.2
_KEY = "alarm"
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
        before = _open_sockets()
        self._open_group(self._store)
        own = {at: number for at, number in _open_sockets().items() if before.get(at) != number}
        self._sockets = {at: number for at, number in own.items() if not _is_of(self._store, at)}

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_LOOK_S):
                with self._lock:
                    if _is_noted(self._store):
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
        first = self._store.compare_set(_KEY, "", note.decode())
        self.cut()
        return first

    def rung(self) -> bool:
        return self._watchers > 0 and answer_of(lambda: _is_noted(self._store)) is True

    def renew(self) -> None:
        self._times += 1
        with self._lock:
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
                group.abort()
        for at, number in self._sockets.items():
            _shut_down(at, number)


def _is_noted(store: Store) -> bool:
    try:
        return store.check([_KEY])
    except RuntimeError:  # the server is gone
        return False


def _open_sockets() -> dict[int, int]:
    """Return the inode number of each socket of this process, by descriptor."""
    found: dict[int, int] = {}
    for name in os.listdir(_SOCKETS) if os.path.isdir(_SOCKETS) else []:
        with contextlib.suppress(OSError):  # closed since, as that of the listing itself
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
