# SPDX-License-Identifier: Apache-2.0
"""A launch over several hosts, before torch is imported: wait for the first host, and start this host's agent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from accel.config import LaunchConfig
from accel.config._resolve import Source
from accel.config._schema import to_text
from accel.config._settings import FIELDS
from accel.endpoints import probe, retry, split_endpoint, unresolved
from accel.env import read_tasks
from accel.errors import LaunchError
from accel.launching._target import LaunchTarget
from accel.launching.local._signals import LOOK_S, Signals
from accel.launching.reports._report import notify
from accel.run_folder import LaunchRecord
from accel.system import NOTICES, STOPPING
from accel.terminal import show_limit

ALERTS = next(field for field in FIELDS if field.name == "alerts")
_AGENT = str(Path(__file__).with_name("_agent.py"))
_RETRY_S = 0.5
_SILENT_S = 0.5  # until a line reports the wait
_KILL_AFTER_S = 10.0  # an agent may be waiting for a host that is cut off
# Without the first, a host that comes back finds nobody at the address that rank 0 once had (torch 2.13).
_AGENTS_OWN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class AgentOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The work of an agent."""

    target: LaunchTarget  # program of every process
    config: LaunchConfig  # settings of the launch
    parent: int  # process; the agent ends when it ends
    added: tuple[str, ...]  # variables of the agent alone, which its ranks do not get
    record: LaunchRecord | None = None  # record of the launch; None to keep none
    summary: bool = False  # whether the last line reports the end of the run
    is_command: bool = False  # whether what ranks leave behind ends with a failure


def check_endpoint(config: LaunchConfig) -> str:
    """Return the host of the rendezvous endpoint, or refuse an endpoint that no host can use."""
    if not config.rdzv_endpoint:
        raise LaunchError(
            "the hosts have no endpoint to meet at",
            expected="--rdzv-endpoint HOST:PORT",
            got=f"nnodes={config.nnodes} without it",
            fix="Name the first host and a free port of it, such as node0:29400, on every host.",
        )
    host, port = split_endpoint(config.rdzv_endpoint)
    if port > 65535:
        raise LaunchError("there is no such port", expected="1 to 65535", got=str(port), where="--rdzv-endpoint")
    _ = _addresses(host, port)
    return host


def check_tasks(sources: Mapping[str, Source], environ: Mapping[str, str]) -> None:
    """Refuse a launcher that runs in each of several tasks, if `--nnodes` does not decide whether they are one job."""
    source = sources.get("nnodes")
    tasks = read_tasks(environ) if source is not None and source.kind == "default" else None
    if tasks is None:
        return
    raise LaunchError(
        f"{tasks.number} tasks start this launch, and it is unknown whether they are one job",
        expected="--nnodes, written out",
        got=f"no --nnodes, with {tasks.variable}",
        where="the environment",
        fix=f"Write `--nnodes {tasks.number} --rdzv-endpoint {tasks.first_host or 'HOST'}:29400` for one job, with one "
        "task on each host; `--nnodes 1` for a job in each task.",
    )


def await_name(config: LaunchConfig, environ: Mapping[str, str], signals: Signals) -> int:
    """Wait in a pod until the name of the first one is known; return a signal that cut in, else 0."""
    if "KUBERNETES_SERVICE_HOST" not in environ or not config.rdzv_endpoint:
        return 0
    host, port = split_endpoint(config.rdzv_endpoint)
    with contextlib.suppress(OSError, UnicodeError):  # `check_endpoint` refuses a name that stays unknown
        return _await(f"the name {host} to be known", lambda _: unresolved(host, port), config, signals)
    return 0


def is_here(host: str, port: int) -> bool:
    """Return whether a host's name is one of this machine."""
    for family, kind, protocol, _, address in _addresses(host, port):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((address[0], 0, *address[2:]))
            except OSError:
                continue
            return True
    return False


def await_first_host(config: LaunchConfig, signals: Signals) -> int:
    """Wait until the first host listens at the endpoint, unless this one is to serve it.

    Returns a signal that cut in, else 0."""
    host, port = split_endpoint(config.rdzv_endpoint)
    if config.node_rank == 0 or is_here(host, port):
        return 0
    try:
        return _await(
            f"the first host at {config.rdzv_endpoint}", lambda limit_s: probe(host, port, limit_s), config, signals
        )
    except OSError as error:
        raise LaunchError(
            "the rendezvous endpoint does not answer",
            expected=f"the first host's launcher at {config.rdzv_endpoint}",
            got=str(error),
            where="--rdzv-endpoint",
            fix="Start the launch there, and check name, port and firewall.",
        ) from error


def run_agent(
    target: LaunchTarget,
    config: LaunchConfig,
    environ: Mapping[str, str],
    signals: Signals,
    record: LaunchRecord,
    *,
    summary: bool,
    is_command: bool,
) -> int:
    """Run this host's part of a launch, in a process that may import torch; return the exit status."""
    added = {name: value for name, value in _AGENTS_OWN.items() if name not in environ}
    # Other users see a command line; the alerts have the URL of a webhook.
    hidden = {} if config.alerts == "none" else {ALERTS.variable: to_text(config.alerts)}
    order = AgentOrder(
        target=target,
        config=msgspec.structs.replace(config, alerts="none"),
        parent=os.getpid(),
        added=tuple(added),
        record=record,
        summary=summary,
        is_command=is_command,
    )
    command = [sys.executable, _AGENT, msgspec.json.encode(order).decode()]
    # Another process, as torch takes a second to import, and this one must answer signals from the start.
    # Blocked until the agent listens: before, a notice would end it, and SIGINT would print a traceback.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPPING, *NOTICES))
    try:
        agent = subprocess.Popen(command, env={**environ, **added, **hidden}, start_new_session=True)
    finally:
        _ = signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return _wait(agent, signals, config.stop_grace_s + _KILL_AFTER_S)


def _wait(agent: subprocess.Popen[bytes], signals: Signals, patience_s: float) -> int:
    deadline = None
    while agent.poll() is None:
        number = signals.wait(LOOK_S if deadline is None else max(0.0, deadline - time.monotonic()))
        if number in (*STOPPING, *NOTICES):
            agent.send_signal(number)
        if number in STOPPING and deadline is None:
            deadline = time.monotonic() + patience_s
        if deadline is not None and time.monotonic() > deadline:
            agent.kill()  # which ends its ranks
    status = agent.wait()
    if -status in STOPPING:  # it was killed before it could print this
        notify(f"accel: stopped by {signal.Signals(-status).name}\n")
    return status if status >= 0 else 128 - status


def _await(
    awaited: str,
    attempt: Callable[[float], OSError | UnicodeError | None],
    config: LaunchConfig,
    signals: Signals,
) -> int:
    def notice(error: OSError, waited_s: float) -> bool:
        is_due = waited_s >= _SILENT_S
        if is_due:
            notify(
                f"accel: waiting for {awaited}, up to {show_limit(config.rdzv_timeout_s)} (--rdzv-timeout-s): {error}\n"
            )
        return is_due

    return retry(attempt, config.rdzv_timeout_s, notice=notice, pause=lambda _: signals.stop(_RETRY_S))


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            "the rendezvous host does not resolve here",
            expected="a name that resolves, or an address",
            got=repr(host),
            where="--rdzv-endpoint",
            fix=f"`getent hosts {host}` must print its address.",
        ) from error
