# SPDX-License-Identifier: Apache-2.0
"""torch's rendezvous, in which hosts also compare notes. Only the agent of a launch over several hosts imports this."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from ipaddress import ip_address

import msgspec
import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from accel.config import LaunchConfig
from accel.endpoints import split_endpoint
from accel.errors import LaunchError
from accel.launching._hosts import is_here
from accel.launching._meeting import Note, compare, note_of, seats
from accel.launching._run import tell

_JOB = "accel"
_RUNNING = "accel/running"  # the notes of the hosts that run; who comes later must fit them, or they would all end
_STORE_TIMEOUT = timedelta(seconds=60)
_LAST_CALL_S = 30.0  # torch's, for more hosts than there must be
_SILENT_S = 1.0  # until the user is told that others are waited for
_WATCH_S = 1.0
_LINGER_S = 1.5  # for others to read what the store of this process has
_ANSWER_S = 10.0


class Meeting(RendezvousHandler):
    """torch's rendezvous, in which hosts also compare notes, and whose look-outs never wait for a host that is gone."""

    def __init__(
        self, inner: RendezvousHandler, shared: Store, note: Note, address: str, *, serves: bool, wait: str
    ) -> None:
        self._inner = inner
        self._shared = shared
        self._serves = serves
        self._wait = wait
        self._note = note
        self._address = address
        self._waiting = 0
        self._lock = threading.Lock()
        self._watch: threading.Thread | None = None
        self.hosts: list[str] = []
        self.place = 0
        self.store: Store | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        if self.store is None and self._shared.check([_RUNNING]):
            running = msgspec.json.decode(self._shared.get(_RUNNING), type=list[Note])
            compare([*running, self._note], "The job goes on without this host; launch alike here.")
        waiting = threading.Timer(_SILENT_S, tell, (f"accel: waiting for other hosts {self._wait}\n",))
        waiting.daemon = True
        waiting.start()
        try:
            with self._lock:
                info = self._inner.next_rendezvous()
                self._waiting = 0
        finally:
            waiting.cancel()
        store, rank = PrefixStore(_JOB, info.store), info.rank
        store.set(f"note/{rank}", msgspec.json.encode(self._note).decode())
        notes = [msgspec.json.decode(store.get(f"note/{at}"), type=Note) for at in range(info.world_size)]
        _ = store.add("read", 1)
        try:
            places = seats(notes)
        except LaunchError:
            _ = within(_LINGER_S, lambda: until(lambda: store.add("read", 0) == len(notes)))
            raise
        self.place, self.store = places[rank], store
        if self.place == 0:
            self._shared.set(_RUNNING, msgspec.json.encode(notes).decode())
        self.hosts = [notes[places.index(place)].host for place in range(len(places))]
        if self._watch is None:
            self._watch = threading.Thread(target=self._keep_watch, name="accel-launch-watch", daemon=True)
            self._watch.start()
        bootstrap = RendezvousStoreInfo.build(self.place, store, local_addr=self._address)
        return RendezvousInfo(info.store, self.place, info.world_size, bootstrap)

    def leave(self, noted_s: float) -> None:
        """End the job for all hosts; who serves the store lets the others read it first.

        Args:
            noted_s: when the last thing was written that they might read, as `time.monotonic` tells it.
        """
        if self.store is not None:
            _ = self.store.add("left", 1)
            if self._serves:
                left_s = max(0.0, noted_s + _LINGER_S - time.monotonic())
                _ = within(left_s, lambda: until(lambda: self._left() >= len(self.hosts)))
        _ = self.shutdown()

    def _left(self) -> int:
        return self.store.add("left", 0) if self.store is not None else 0

    def num_nodes_waiting(self) -> int:
        return self._waiting

    def _keep_watch(self) -> None:
        while True:
            time.sleep(_WATCH_S)
            with self._lock, contextlib.suppress(RendezvousError):
                self._waiting = self._inner.num_nodes_waiting()

    def get_backend(self) -> str:
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()

    @property
    def use_agent_store(self) -> bool:
        return False


def within(seconds: float, act: Callable[[], object]) -> bool:
    """Do something that may wait for a host which is gone, and wait for it no longer than that; tell if it was done."""
    done = threading.Event()

    def guarded() -> None:
        with contextlib.suppress(DistError, RendezvousError):
            _ = act()
            done.set()

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(seconds)
    return done.is_set()


def until(done: Callable[[], bool]) -> None:
    """Wait for something to become true."""
    while not done():
        time.sleep(0.1)


def meet(config: LaunchConfig, processes: int, script: str) -> Meeting:
    """Open or find the store where the hosts meet.

    Args:
        config: how this host was told to launch.
        processes: how many it will start.
        script: what tells its script from others.

    Raises:
        LaunchError: its port is taken by something else, or nobody answers.
    """
    host, port = split_endpoint(config.rdzv_endpoint)
    serves = config.node_rank == 0 or is_here(host, port)
    store, serves = _store(host, port, serves)
    fewest, most = config.hosts
    with socket.create_connection((host, port)) as probe:
        address = probe.getsockname()[0]  # where the others reach this host
    backend = C10dRendezvousBackend(store, _JOB)
    last_call_s = _LAST_CALL_S if fewest < most else 0.0
    join = RendezvousTimeout(join=timedelta(seconds=config.rdzv_timeout_s + last_call_s))
    inner = DynamicRendezvousHandler.from_backend(_JOB, store, backend, fewest, most, local_addr=address, timeout=join)
    contents = {"torch": torch.__version__.partition("+")[0], "the script": script}
    note = note_of(os.uname().nodename, config, processes=processes, contents=contents)
    alone = ", which only launchers on this machine can reach" if ip_address(address).is_loopback else ""
    wait = f"at {config.rdzv_endpoint}{alone}, up to {config.rdzv_timeout_s:g} s (--rdzv-timeout-s)"
    return Meeting(inner, store, note, address, serves=serves, wait=wait)


def _store(host: str, port: int, may_serve: bool) -> tuple[TCPStore, bool]:
    """Return the store, and whether this process serves it: another launcher on this machine may do so already."""
    if may_serve:
        with contextlib.suppress(DistError):
            return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT), True
    found: list[TCPStore] = []
    # Where something else listens, torch waits for an answer beyond any time-out.
    _ = within(_ANSWER_S, lambda: found.append(TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT)))
    if not found:
        raise LaunchError(
            "the port where hosts meet is taken" if may_serve else "the first host does not answer",
            got="something that is no launcher",
            where=f"--rdzv-endpoint {host}:{port}",
            fix="Choose another port, on all hosts.",
        )
    return found[0], False
