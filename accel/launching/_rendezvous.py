# SPDX-License-Identifier: Apache-2.0
"""Where hosts meet: torch's rendezvous, in which they also compare notes. Only the agent of a host imports this."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from datetime import timedelta
from ipaddress import ip_address

import msgspec
import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from accel.config import LaunchConfig
from accel.endpoints import split_endpoint
from accel.errors import LaunchError
from accel.launching._attempts import stopped_by
from accel.launching._background import in_background, until, within
from accel.launching._hosts import is_here
from accel.launching._meeting import Note, compare, note_of, seats
from accel.launching._report import tell
from accel.launching._round import Round
from accel.launching._signals import Signals
from accel.launching._supervisor import Ending

_JOB = "accel"
_RUNNING = "accel/running"  # the notes of the hosts that run; who comes later must fit them, or they would all end
_STORE_TIMEOUT = timedelta(seconds=60)
_LAST_CALL_S = 30.0  # torch's, for more hosts than there must be
_SILENT_S = 1.0  # until the user is told that others are waited for
_READ_S = 1.5  # for others to read the notes in the store of this process
_ANSWER_S = 10.0
_POLL_S = 0.1


class NotMetError(LaunchError):
    """The hosts did not come together."""


class Meeting:
    """torch's rendezvous, in which hosts also compare notes, one round after another.

    Args:
        inner: the rendezvous.
        shared: store of all rounds.
        note: facts about this host.
        address: address at which the others reach this host.
        serves: whether this process serves the store.
        config: settings of the launch.
        processes: number of ranks on each host.
    """

    def __init__(
        self,
        inner: RendezvousHandler,
        shared: Store,
        note: Note,
        address: str,
        *,
        serves: bool,
        config: LaunchConfig,
        processes: int,
    ) -> None:
        self._inner = inner
        self._shared = shared
        self._note = note
        self._address = address
        self._serves = serves
        self._config = config
        self._processes = processes
        self._lock = threading.Lock()
        self._round: Round | None = None

    def join(self, signals: Signals) -> tuple[Round, str, int] | Ending:
        """Join the next round, together with the other hosts.

        Args:
            signals: signals of this process; one that asks to stop ends the wait.

        Returns:
            The round, and address and port of rank 0; or the end of the launch if this host is not to take part.

        Raises:
            NotMetError: too few hosts came in time, the first one does not answer, or another has ended the job.
            LaunchError: the hosts were told different things.
        """
        is_first = self._round is None
        if self._round is not None:
            self._round.end()
        began_s = time.monotonic()
        is_told = False
        joined = in_background(lambda: self._join(is_first=is_first))
        while not joined.done():
            if stopped := signals.stop(_POLL_S):
                return stopped_by(stopped)
            if not is_told and time.monotonic() - began_s >= _SILENT_S:
                is_told = True
                tell(f"accel: waiting for other hosts {self._wait()}\n")
        try:
            self._round, address, port = joined.result()
        except RendezvousGracefulExitError:  # there were enough hosts without this one
            return Ending(0)
        except (RendezvousError, DistError) as error:
            raise NotMetError(
                "the hosts did not come together",
                expected=f"{self._config.nnodes} hosts at {self._config.rdzv_endpoint}",
                got=_reason(error),
                fix="See what the launchers on the other hosts printed.",
            ) from error
        return self._round, address, port

    def leave(self, seconds: float) -> None:
        """End the job for all hosts, within some seconds; the process that serves the store lets the others read."""
        current = self._round
        if current is None or current.noted_s is None:  # nobody can be told
            return

        def leave() -> None:
            current.leave(serves=self._serves)
            _ = self._inner.shutdown()

        _ = within(seconds, leave)

    def _join(self, *, is_first: bool) -> tuple[Round, str, int]:
        if is_first and self._shared.check([_RUNNING]):
            running = msgspec.json.decode(self._shared.get(_RUNNING), type=list[Note])
            compare([*running, self._note], "The job goes on without this host; launch alike here.")
        with self._lock:
            info = self._inner.next_rendezvous()
        store = PrefixStore(_JOB, info.store)
        store.set(f"note/{info.rank}", msgspec.json.encode(self._note).decode())
        notes = [msgspec.json.decode(store.get(f"note/{at}"), type=Note) for at in range(info.world_size)]
        _ = store.add("read", 1)
        try:
            places = seats(notes)
        except LaunchError:
            until(lambda: store.add("read", 0) == len(notes), _READ_S)
            raise
        place = places[info.rank]
        if place == 0:
            self._shared.set(_RUNNING, msgspec.json.encode(notes).decode())
        hosts = [notes[places.index(at)].host for at in range(len(places))]
        first = RendezvousStoreInfo.build(place, store, local_addr=self._address)
        current = Round(store, place, hosts, self._processes, self._count_waiting)
        return current, first.master_addr, first.master_port

    def _count_waiting(self) -> int:
        with self._lock:
            return self._inner.num_nodes_waiting()

    def _wait(self) -> str:
        config = self._config
        alone = ", which only launchers on this machine can reach" if ip_address(self._address).is_loopback else ""
        return f"at {config.rdzv_endpoint}{alone}, up to {config.rdzv_timeout_s:g} s (--rdzv-timeout-s)"


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
    return Meeting(inner, store, note, address, serves=serves, config=config, processes=processes)


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


def _reason(error: Exception) -> str:
    if isinstance(error, RendezvousClosedError):
        return "another host has ended the job"
    if isinstance(error, RendezvousTimeoutError):
        return "too few hosts came in time"
    return "the first host does not answer"
