# SPDX-License-Identifier: Apache-2.0
"""The agent of one host in a launch over several: meets the other hosts, and supervises the ranks of its own.

It runs as a process of its own, by path: only here, and in the rendezvous, does a launch import torch. Hosts meet in
torch's rendezvous, https://docs.pytorch.org/docs/stable/elastic/rendezvous.html; the ranks of a host are supervised as
those of a launch on one host.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from typing import NoReturn

import msgspec

from accel.errors import AccelError
from accel.launching._attempts import run_attempts
from accel.launching._host_terms import describe_hosts
from accel.launching._hosts import AgentOrder
from accel.launching._journal import Journal, open_journal
from accel.launching._launch import plan_here, record_dir
from accel.launching._plan import HostPosition, LaunchPlan
from accel.launching._rendezvous import NotMetError, Rendezvous
from accel.launching._report import tell
from accel.launching._signals import listening
from accel.launching._supervisor import Ending, Peers
from accel.launching._target import Target
from accel.launching._worker import die_with

_CLOSE_S = 2.0


def run(order: AgentOrder) -> int:
    """Carry an order out; return the exit status.

    Raises:
        LaunchError: the hosts do not come together, do not agree, or a process cannot be started.
    """
    config = order.config
    environ = {name: value for name, value in os.environ.items() if name not in order.added}
    with listening() as signals, record_dir() as folder:

        def plan(position: HostPosition, port: int) -> LaunchPlan:
            records = f"{folder}/{time.monotonic_ns()}"
            os.mkdir(records)
            return plan_here(order.target, config, environ, record_dir=records, position=position, port=port)

        processes = len(plan(HostPosition(num_nodes=config.hosts[0]), 1).processes)
        rendezvous = Rendezvous(config, processes, _contents(order.target))

        def start(failed: int, last: Ending) -> tuple[LaunchPlan, Peers] | Ending:
            try:
                joined = rendezvous.join(signals)
            except NotMetError as error:
                if not failed:
                    raise
                return Ending(last.status, f"accel: no restart: {error.got}\n", last.first)
            if isinstance(joined, Ending):
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
                tell(f"accel: {describe_hosts(peers.hosts, processes)}{again}\n")
            return plan(position, port), peers

        with open_journal(order.target, order.record) if order.record else Journal() as journal:
            ending = run_attempts(
                start, signals, max_restarts=config.max_restarts, summary=order.summary, journal=journal
            )
        if not ending.stopped:
            rendezvous.leave(_CLOSE_S)
        return ending.status


def _contents(target: Target) -> str:
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
        tell(f"accel: error: {error}\n")
        status = 2
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
