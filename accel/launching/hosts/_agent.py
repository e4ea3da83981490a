# SPDX-License-Identifier: Apache-2.0
"""The agent of one host in a launch over several: meets the other hosts, and supervises the ranks of this one."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_address
from types import MappingProxyType
from typing import NoReturn

import msgspec
import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from accel.config import LaunchConfig
from accel.config._schema import from_text
from accel.endpoints import split_endpoint
from accel.errors import AccelError, LaunchError
from accel.launching._launch import plan_here, record_dir
from accel.launching._target import HostTerms, LaunchTarget, assign_node_ranks, compare, describe_hosts, terms_of
from accel.launching.hosts._hosts import ALERTS, AgentOrder, is_here
from accel.launching.hosts._round import HostRound, in_background, until, within
from accel.launching.local._launch_plan import HostPosition, LaunchPlan
from accel.launching.local._signals import Orphans, Signals, listening
from accel.launching.local._supervisor import LaunchEnd, Peers, run_attempts
from accel.launching.local._worker import die_with
from accel.launching.reports._journal import Journal, open_journal
from accel.launching.reports._report import notify, stop_report
from accel.system import Helpers
from accel.terminal import show_limit

_JOB = "accel"
_RUNNING = "accel/running"  # terms of the hosts that run; a later host must fit them, or all would end
_STORE_TIMEOUT = timedelta(seconds=60)
_OWNER = "accel/owner"  # name of the job that meets here
_SILENT_S = 1.0  # until a line reports the wait for other hosts
_READ_S = 1.5  # for others to read the terms in the store of this process
_ANSWER_S = 10.0
_POLL_S = 0.1
_REASONS: Mapping[type[Exception], str] = MappingProxyType(
    {
        RendezvousClosedError: "another host has ended the job",
        RendezvousTimeoutError: "too few hosts came in time",
    }
)


class NotMetError(LaunchError):
    """The hosts did not come together."""


class Rendezvous:
    """torch's rendezvous, in which hosts also compare their terms, one round after another."""

    def __init__(self, config: LaunchConfig, processes: int, script: str) -> None:
        host, port = split_endpoint(config.rdzv_endpoint)
        self._config = config
        self._processes = processes
        self._shared, self._serves = _open_store(host, port, config.node_rank == 0 or is_here(host, port))
        with socket.create_connection((host, port)) as connection:
            self._address = connection.getsockname()[0]  # at which the others reach this host
        claim(self._shared, config)
        fewest, most = config.hosts
        last_call_s = config.rdzv_last_call_s if fewest < most else 0.0
        self._inner = DynamicRendezvousHandler.from_backend(
            _JOB,
            self._shared,
            C10dRendezvousBackend(self._shared, _JOB),
            fewest,
            most,
            local_addr=self._address,
            timeout=RendezvousTimeout(
                join=timedelta(seconds=config.rdzv_timeout_s + last_call_s),
                last_call=timedelta(seconds=config.rdzv_last_call_s),
            ),
        )
        contents = {"torch": torch.__version__.partition("+")[0], "the script": script}
        self._terms = terms_of(os.uname().nodename, config, processes=processes, contents=contents)
        self._lock = threading.Lock()
        self._round: HostRound | None = None

    def join(self, signals: Signals) -> tuple[HostRound, str, int] | LaunchEnd:
        """Join the next round: return it with address and port of rank 0, or the launch's end without this host.

        Raises `NotMetError` if the hosts do not come together, another `LaunchError` if their settings differ."""
        is_first = self._round is None
        if self._round is not None:
            self._round.end()
        alone = ", which only launchers on this machine can reach" if ip_address(self._address).is_loopback else ""
        endpoint, patience_s = f"{self._config.rdzv_endpoint}{alone}", self._config.rdzv_timeout_s
        began_s = time.monotonic()
        is_logged = False
        joined = in_background(lambda: self._join(is_first=is_first))
        while not joined.done():
            if stopped := signals.stop(_POLL_S):
                return LaunchEnd(128 + stopped, stop_report(stopped, [], []), stopped=stopped)
            if not is_logged and time.monotonic() - began_s >= _SILENT_S:
                is_logged = True
                notify(
                    f"accel: waiting for other hosts at {endpoint}, up to {show_limit(patience_s)} (--rdzv-timeout-s)\n"
                )
        try:
            self._round, address, port = joined.result()
        except RendezvousGracefulExitError:  # there were enough hosts without this one
            return LaunchEnd(0)
        except (RendezvousError, DistError) as error:
            raise NotMetError(
                "the hosts did not all arrive",
                expected=f"{self._config.nnodes} hosts at {self._config.rdzv_endpoint}",
                got=_REASONS.get(type(error), "the first host does not answer"),
                fix="See what the launchers on the other hosts printed.",
            ) from error
        return self._round, address, port

    def leave(self, seconds: float) -> None:
        """End the launch for all hosts, within some seconds; the process that serves the store lets the others read."""
        current = self._round
        if current is None or current.noted_s is None:  # the store is lost, and with it the way to the others
            return

        def leave() -> None:
            current.leave(serves=self._serves)
            _ = self._inner.shutdown()

        _ = within(seconds, leave)

    def _join(self, *, is_first: bool) -> tuple[HostRound, str, int]:
        if is_first and self._shared.check([_RUNNING]):
            running = msgspec.json.decode(self._shared.get(_RUNNING), type=list[HostTerms])
            compare([*running, self._terms], "The job continues without this host; launch here with the same settings.")
        with self._lock:
            info = self._inner.next_rendezvous()
        store = PrefixStore(_JOB, info.store)
        store.set(f"terms/{info.rank}", msgspec.json.encode(self._terms).decode())
        terms = [msgspec.json.decode(store.get(f"terms/{at}"), type=HostTerms) for at in range(info.world_size)]
        _ = store.add("read", 1)
        try:
            node_ranks = assign_node_ranks(terms)
        except LaunchError:
            if self._serves:  # the store ends with this process
                until(lambda: store.add("read", 0) == len(terms), _READ_S)
            raise
        node_rank = node_ranks[info.rank]
        if node_rank == 0:
            self._shared.set(_RUNNING, msgspec.json.encode(terms).decode())
        placed = [terms[node_ranks.index(at)] for at in range(len(node_ranks))]
        hosts = [each.host for each in placed]
        roles = [each.role for each in placed]
        first = RendezvousStoreInfo.build(node_rank, store, local_addr=self._address)
        current = HostRound(store, node_rank, hosts, self._processes, self._count_waiting, roles)
        return current, first.master_addr, first.master_port

    def _count_waiting(self) -> int:
        with self._lock:
            return self._inner.num_nodes_waiting()


def claim(store: Store, config: LaunchConfig) -> None:
    """Refuse a rendezvous at which another job meets; its first host names the job."""
    owner = store.compare_set(_OWNER, "", f"job {config.rdzv_id}").decode().removeprefix("job ")
    if owner != config.rdzv_id:
        raise LaunchError(
            "another job uses this rendezvous",
            expected=f"rdzv_id={config.rdzv_id}",
            got=f"rdzv_id={owner}",
            where=f"--rdzv-endpoint {config.rdzv_endpoint}",
            fix="Choose another port for this job, or give all of its hosts the same --rdzv-id.",
        )


def _open_store(host: str, port: int, may_serve: bool) -> tuple[TCPStore, bool]:
    """Return the store, and whether this process serves it; another launcher on this machine may already serve it."""
    if may_serve:
        with contextlib.suppress(DistError):
            return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT), True
    found: list[TCPStore] = []
    # Where something else listens, torch waits for an answer beyond any time-out.
    _ = within(_ANSWER_S, lambda: found.append(TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT)))
    if not found:
        raise LaunchError(
            "the rendezvous port is in use" if may_serve else "the first host does not answer",
            got="a program that is not a launcher",
            where=f"--rdzv-endpoint {host}:{port}",
            fix="Choose another port, on all hosts.",
        )
    return found[0], False


_CLOSE_S = 2.0


def run(order: AgentOrder) -> int:
    """Carry an order out; return the exit status."""
    config = order.config
    if text := os.environ.get(ALERTS.variable):
        config = msgspec.structs.replace(config, alerts=from_text(ALERTS, text, where=ALERTS.variable))
    environ = {name: value for name, value in os.environ.items() if name not in order.added}
    helpers = Helpers()
    orphans = Orphans(helpers=helpers) if order.is_command else None
    with listening(is_guarded=True) as signals, record_dir() as folder:

        def plan(position: HostPosition, port: int) -> LaunchPlan:
            # A folder for each round: one that begins because a host came has the restarts, and names, of the last.
            records = f"{folder}/{time.monotonic_ns()}"
            os.mkdir(records)
            return plan_here(order.target, config, environ, record_dir=records, position=position, port=port)

        processes = len(plan(HostPosition(num_nodes=config.hosts[0]), 1).processes)
        rendezvous = Rendezvous(config, processes, _contents(order.target))

        def start(failed: int, last: LaunchEnd) -> tuple[LaunchPlan, Peers] | LaunchEnd:
            try:
                joined = rendezvous.join(signals)
            except NotMetError as error:
                if not failed:
                    raise
                return LaunchEnd(last.status, f"accel: no restart: {error.got}\n", last.first)
            if isinstance(joined, LaunchEnd):
                return joined
            peers, address, port = joined
            position = HostPosition(
                node_rank=peers.node_rank,
                num_nodes=len(peers.hosts),
                master_addr=address,
                restarts=failed,
                roles=tuple(peers.roles),
            )
            if failed or last.changed or peers.node_rank == 0:
                again = f", restart {failed} of {config.max_restarts}" if failed else ""
                notify(f"accel: {describe_hosts(peers.hosts, processes)}{again}\n")
            return plan(position, port), peers

        opened = open_journal(order.target, order.record, config, helpers) if order.record else Journal()
        with opened as journal:
            ending = run_attempts(
                start,
                signals,
                max_restarts=config.max_restarts,
                summary=order.summary,
                journal=journal,
                orphans=orphans,
            )
        # A stopped host leaves the job to the others, which may continue without it.
        if not ending.stopped:
            rendezvous.leave(_CLOSE_S)
        return ending.status


def _contents(target: LaunchTarget) -> str:
    """Return a text that differs for another script, or another version of it; modules and programs count by name."""
    if target.kind != "script":
        return os.path.basename(target.name)
    with open(target.name, "rb") as file:
        return f"version {hashlib.file_digest(file, 'sha256').hexdigest()[:8]}"


def main(words: list[str]) -> NoReturn:
    """Carry an order out, and end the process at once, as a thread may still wait for a lost host."""
    order = msgspec.json.decode(words[0], type=AgentOrder)
    die_with(order.parent)
    if "LOGLEVEL" not in os.environ:  # torch's own switch
        logging.disable(logging.CRITICAL)
    try:
        status = run(order)
    except AccelError as error:
        notify(f"accel: error: {error}\n")
        status = 2
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
