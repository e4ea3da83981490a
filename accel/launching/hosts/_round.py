# SPDX-License-Identifier: Apache-2.0
"""One round of a launch over several hosts: failures, places, heartbeats and ends, through their store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import msgspec
from torch.distributed import (
    DistError,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.elastic.rendezvous import RendezvousError

from accel.errors import LaunchError
from accel.launching.local._hang import Whereabouts
from accel.launching.local._supervisor import Exchange, Peers
from accel.launching.reports._failure import Failure, repeats
from accel.terminal import show_limit

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]


SILENT_S = 60.0  # without a heartbeat, after which a host is lost
_LISTEN_S = 5.0  # between two reads, as each host reads the heartbeats of all others


class Heartbeats:
    """The heartbeats of a round: this host counts its own, and watches the others'."""

    def __init__(self, store: Store, node_rank: int, others: Sequence[int]) -> None:
        self._store = store
        self._node_rank = node_rank
        self._others = others
        self._heard: dict[int, tuple[int, float]] = {}  # the last count of each host, and when it was new
        self._due_s = 0.0

    def beat(self) -> None:
        """Count one more of this host."""
        _ = self._store.add(f"heartbeats/{self._node_rank}", 1)

    def find_silent(self) -> list[int]:
        """Return the hosts without a heartbeat for `SILENT_S`, counted from the first call at the earliest."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + _LISTEN_S
            for at in self._others:
                count = self._store.add(f"heartbeats/{at}", 0)
                if at not in self._heard or count != self._heard[at][0]:
                    self._heard[at] = count, now_s
        return [at for at, (_, heard_s) in self._heard.items() if now_s - heard_s > SILENT_S]


T = TypeVar("T")
_POLL_S = 0.1


def in_background(act: Callable[[], T]) -> Future[T]:
    """Start something in a separate thread, which does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="accel-launch-store", daemon=True).start()
    return future


def within(seconds: float, act: Callable[[], object]) -> bool:
    """Do something with the store; return False if the store fails or has not answered after `seconds`."""
    try:
        _ = in_background(act).result(seconds)
    except (TimeoutError, DistError, RendezvousError):
        return False
    return True


def until(done: Callable[[], bool], seconds: float) -> None:
    """Poll until `done` returns true or the time is over."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


_NEWS_S = 2.5  # after a failure, for other hosts to report theirs, and the places of their ranks
_LEAST_NEWS_S = 0.3
_LOST_S = 1.0  # after which the store is taken not to answer
_LOOK_S = 0.5
_LAST_LOOK_S = 0.1  # once the ranks of this host are done
_LINGER_S = 1.5  # for others to read the store of this process


class HostRound(Peers):
    """The hosts that have met, from the start of their ranks to the end.

    Attributes:
        noted_s: time of the last write for other hosts, by `time.monotonic`; None once the store is lost.
    """

    tick_s = 0.1

    def __init__(
        self,
        store: Store,
        node_rank: int,
        hosts: Sequence[str],
        processes: int,
        count_waiting: Callable[[], int],
        roles: Sequence[str] = (),
    ) -> None:
        self.node_rank = node_rank
        self.hosts = hosts
        self.roles = roles
        self.noted_s: float | None = time.monotonic()
        self._store = store
        self._processes = processes
        self._count_waiting = count_waiting
        self._others = [at for at in range(len(hosts)) if at != node_rank]
        self._reported: set[int] = set()  # ranks with a failure that the other hosts can read
        self._done = False
        self._ended = threading.Event()
        # The latest observations of the look-out thread: the supervisor never waits for a store on a lost host.
        self._waiting = 0
        self._reports = 0
        self._hosts_done = 0
        self._lost: Exception | None = None
        self._heartbeats = Heartbeats(store, node_rank, self._others)
        self._silent: list[int] = []
        threading.Thread(target=self._look_out, name="accel-launch-lookout", daemon=True).start()

    def have_failed(self) -> bool:
        return self._reports > len(self._reported)

    def have_changed(self) -> bool:
        return self._waiting > 0

    def all_done(self) -> bool:
        self._done = True
        if self._lost is not None:
            raise LaunchError(
                "the first host does not answer",
                got=str(self._lost).splitlines()[0],
                fix="See what the launcher there printed.",
            ) from self._lost
        if self._hosts_done < len(self.hosts):
            if self._silent:
                names = ", ".join(self.hosts[at] for at in self._silent)
                raise LaunchError(
                    "another host does not answer, after the ranks of this host have finished",
                    expected="the end of its ranks",
                    got=f"nothing from {names} for {show_limit(SILENT_S)}",
                    fix="See what the launcher there printed; its ranks may not have ended.",
                )
            return False
        self.noted_s = time.monotonic()
        return True

    def report(self, failure: Failure) -> None:
        if not self._others or failure.rank in self._reported:
            return
        self._reported.add(failure.rank)

        def write() -> None:
            self._write("failure", failure)
            _ = self._store.add("reports", 1)

        self.noted_s = time.monotonic() if within(_LOST_S, write) else None

    def exchange(self, mine: Failure | None, find: Callable[[], Whereabouts]) -> Exchange:
        failures: dict[int, Failure] = {}
        found: dict[int, Whereabouts] = {}

        def repeat() -> bool:
            return all(map(repeats, failures.values())) and (mine is None or repeats(mine))

        def listen() -> bool:
            self._read("failure", Failure, failures)
            self._read("whereabouts", Whereabouts, found)
            return not repeat() or len(found) == len(self._others)

        if mine is not None:
            self.report(mine)
        is_reached = within(_LOST_S, lambda: self._read("failure", Failure, failures)) and self.noted_s is not None
        if not repeat():
            return [*failures.values()], []
        here = find()
        if is_reached and self._others:
            since_s = time.time() if mine is None else mine.time_s
            patience_s = max(_LEAST_NEWS_S, since_s + _NEWS_S - time.time())
            _ = within(_LOST_S, lambda: self._write("whereabouts", here))
            self.noted_s = time.monotonic()
            _ = within(patience_s, lambda: until(listen, patience_s))
        silent = [at for at in self._others if at not in found and at not in failures] if is_reached else []
        nowhere = Whereabouts(silent=[rank for at in silent for rank in self._ranks(at)])
        return [*failures.values()], [here, *found.values(), nowhere] if repeat() else []

    def end(self) -> None:
        """End the look-out."""
        self._ended.set()

    def leave(self, *, serves: bool) -> None:
        """Note that this host leaves; if its process serves the store, let the others read first."""
        _ = self._store.add("left", 1)
        if serves and self.noted_s is not None:
            until(lambda: self._store.add("left", 0) >= len(self.hosts), self.noted_s + _LINGER_S - time.monotonic())

    def _look_out(self) -> None:
        is_counted = False
        while not self._ended.wait(_LAST_LOOK_S if self._done else _LOOK_S):
            try:
                self._heartbeats.beat()
                self._waiting = self._count_waiting()
                # After the look at who waits: a host with a failed rank reports that before it waits for a restart.
                self._reports = self._store.add("reports", 0)
                if self._done:
                    self._hosts_done = self._store.add("done", 0 if is_counted else 1)
                    is_counted = True
                    self._silent = self._heartbeats.find_silent()
                self._lost = None
            except (DistError, RendezvousError) as error:
                self._lost = error

    def _ranks(self, node_rank: int) -> Iterable[int]:
        return range(node_rank * self._processes, (node_rank + 1) * self._processes)

    def _write(self, kind: str, record: msgspec.Struct) -> None:
        self._store.set(f"{kind}/{self.node_rank}", msgspec.json.encode(record).decode())

    def _read(self, kind: str, type_: type[T], into: dict[int, T]) -> None:
        """Read what other hosts have written since the last call."""
        for at in self._others:
            if at not in into and self._store.check([f"{kind}/{at}"]):
                into[at] = msgspec.json.decode(self._store.get(f"{kind}/{at}"), type=type_)
