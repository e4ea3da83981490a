# SPDX-License-Identifier: Apache-2.0
"""A launch of a script: checks, a plan for this machine, and its supervision or an agent for several hosts."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from accel.config import LaunchConfig, Source, resolve
from accel.errors import LaunchError
from accel.launching._attempts import run_attempts
from accel.launching._hosts import await_first_host, await_name, check_endpoint, run_agent
from accel.launching._journal import open_journal
from accel.launching._machine import read_machine
from accel.launching._plan import HostPosition, LaunchPlan, check_mesh, plan_launch
from accel.launching._record_changes import first_record
from accel.launching._report import tell
from accel.launching._signals import listening
from accel.launching._supervisor import Ending, Peers
from accel.launching._target import Target, check_target
from accel.launching._tpu import on_pod

WORKER_PATH = str(Path(__file__).with_name("_worker.py"))


def run_launch(
    script: str,
    args: Sequence[str] = (),
    *,
    config: LaunchConfig | None = None,
    sources: Mapping[str, Source] = MappingProxyType({}),
    kind: Literal["script", "module", "program"] = "script",
    environ: Mapping[str, str],
    summary: bool = False,
) -> int:
    """Run a script on N processes of this machine, alone or together with launches on other hosts, and wait for them.

    Args:
        script: path of the script; with `kind`, a module's dotted name or a program.
        args: arguments of the script, passed on unchanged.
        config: settings of the launch; None for those of `environ`, as `accel launch` resolves them.
        sources: source of each setting, for the record of the launch.
        kind: kind of `script`.
        environ: base environment of each process; `os.environ` is never written.
        summary: whether the last line on stderr reports the end of a run of several ranks, or of one with log files.

    Returns:
        The exit status: 0, the failing rank's, or 128 plus the number of the signal that stopped the launch.

    Raises:
        LaunchError: the script cannot be run, the machine has too few GPUs, or the system refuses a process; or the
            first of several hosts does not resolve, or does not answer.
        ConfigError: a variable has an invalid value.
        EnvError: `environ` has another setting that the processes would refuse.
    """
    target = Target(kind=kind, name=script, args=tuple(args))
    if config is None:
        resolved = resolve({}, environ)
        config = on_pod(resolved, environ)
        sources = resolved.sources
    check_target(target, environ)
    if config.hosts[1] > 1:
        return _launch_on_hosts(target, config, environ, sources, summary=summary)
    first = first_record(target, config, sources)
    with record_dir() as folder, listening() as signals, open_journal(target, first) as journal:

        def start(failed: int, _last: Ending) -> tuple[LaunchPlan, Peers]:
            plan = plan_here(target, config, environ, record_dir=folder, position=HostPosition(restarts=failed))
            if failed:
                tell(f"accel: all ranks start again, restart {failed} of {config.max_restarts}\n")
            make_log_dir(config.log_dir)
            return plan, Peers()

        return run_attempts(start, signals, max_restarts=config.max_restarts, summary=summary, journal=journal).status


def _launch_on_hosts(
    target: Target, config: LaunchConfig, environ: Mapping[str, str], sources: Mapping[str, Source], *, summary: bool
) -> int:
    fewest, most = config.hosts  # raises now what the agent would raise
    plan = plan_here(target, config, environ, record_dir="", port=1, position=HostPosition(num_nodes=fewest))
    for hosts in range(fewest + 1, most + 1):
        check_mesh(config, hosts * len(plan.processes))
    with listening() as signals:
        if stopped := await_name(config, environ, signals):
            return 128 + stopped
        _ = check_endpoint(config)
        make_log_dir(config.log_dir)
        if stopped := await_first_host(config, signals):
            return 128 + stopped
        record = first_record(target, config, sources)
        return run_agent(target, config, environ, signals, record, summary=summary)


def plan_here(
    target: Target,
    config: LaunchConfig,
    environ: Mapping[str, str],
    *,
    record_dir: str,
    position: HostPosition = HostPosition(),  # noqa: B008 - a frozen value
    port: int | None = None,
) -> LaunchPlan:
    """Plan a launch on this machine: its cores and GPUs, a free port, this process as the parent.

    Raises:
        LaunchError, EnvError: as `plan_launch` does, or there is no free port.
    """
    return plan_launch(
        target,
        config,
        environ=environ,
        machine=read_machine(),
        interpreter=(sys.executable, WORKER_PATH),
        parent_pid=os.getpid(),
        port=free_port() if port is None else port,
        record_dir=record_dir,
        position=position,
    )


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free at the moment.

    Raises:
        LaunchError: there is none.
    """
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]
    except OSError as error:
        raise LaunchError(
            "rank 0 has no port to listen on",
            expected="a free TCP port on 127.0.0.1",
            got=str(error),
            fix="Check the loopback device with `ip addr show lo`.",
        ) from error


def make_log_dir(folder: str) -> None:
    """Make the folder for log files, if one is wanted.

    Raises:
        LaunchError: it cannot be made.
    """
    try:
        if folder:
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            "there is no folder for log files",
            expected="a folder that can be written",
            got=str(error.strerror),
            where=f"log_dir={folder}",
            fix="Name another one with --log-dir.",
        ) from error


def record_dir() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="accel-launch-", ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchError(
            "there is no folder for failure records",
            expected="a temporary folder that can be written",
            got=str(error),
            fix="Make room in it, or set TMPDIR to another one.",
        ) from error
