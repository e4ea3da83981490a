# SPDX-License-Identifier: Apache-2.0
"""A launch of a script, or of one placed rank: checks, a plan for this machine, and its supervision or an agent."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from accel.config import LaunchConfig, resolve
from accel.config._resolve import Source
from accel.errors import LaunchError
from accel.launching._target import LaunchTarget, check_target
from accel.launching.hosts._hosts import await_first_host, await_name, check_endpoint, check_tasks, run_agent
from accel.launching.local._launch_plan import HostPosition, LaunchPlan, check_mesh, plan_launch
from accel.launching.local._machine import on_pod, read_machine
from accel.launching.local._signals import Orphans, listening
from accel.launching.local._supervisor import LaunchEnd, Peers, run_attempts
from accel.launching.reports._journal import first_record, open_journal
from accel.launching.reports._report import notify, warn_of_surroundings
from accel.system import Helpers
from accel.terminal import terminal_columns

WORKER_PATH = str(Path(__file__).with_name("local") / "_worker.py")


def run_launch(
    script: str,
    args: Sequence[str] = (),
    *,
    config: LaunchConfig | None = None,
    sources: Mapping[str, Source] = MappingProxyType({}),
    kind: Literal["script", "module", "program"] = "script",
    environ: Mapping[str, str],
    summary: bool = False,
    is_command: bool = False,
) -> int:
    """Run a script on N processes of this machine, alone or together with launches on other hosts, and wait for them.

    Args:
        script: path of the script; with `kind`, a module's dotted name or a program.
        args: arguments of the script, passed on unchanged.
        config: settings of the launch; None for the settings of `environ`, as `accel launch` resolves them.
        sources: source of each setting, for the record of the launch.
        kind: kind of `script`.
        environ: base environment of each process; `os.environ` is never written.
        summary: whether the last line on stderr reports the end of a run of several ranks, or of one with log files.
        is_command: whether this process does nothing but launch. Then it adopts, on Linux, what ranks leave behind, and
            ends it after a failure; and a signal ends it even while it is stuck.

    Returns:
        The exit status: 0, the failing rank's, or 128 plus the number of the signal that stopped the launch.

    Raises:
        LaunchError: the script cannot be run, the machine has too few GPUs, or the system refuses a process; or the
            first of several hosts does not resolve, or does not answer; or several tasks of a scheduler start a launch
            each, and it is unknown whether they are one job.
        ConfigError: a variable has an invalid value.
        EnvError: `environ` has another setting that the processes would refuse.
    """
    target = LaunchTarget(kind=kind, name=script, args=tuple(args))
    if config is None:
        resolved = resolve({}, environ)
        config = on_pod(resolved, environ)
        sources = resolved.sources
    check_target(target, environ)
    warn_of_surroundings()
    if config.hosts[1] > 1:
        return _launch_on_hosts(target, config, environ, sources, summary=summary, is_command=is_command)
    check_tasks(sources, environ)
    first = first_record(target, config, sources)
    helpers = Helpers()
    # In this order: the journal still reads what ranks announced in `folder`, and orphans are released last.
    with (
        Orphans(helpers=helpers) if is_command else contextlib.nullcontext() as orphans,
        record_dir() as folder,
        listening(is_guarded=is_command) as signals,
        open_journal(target, first, config, helpers) as journal,
    ):

        def start(failed: int, _last: LaunchEnd) -> tuple[LaunchPlan, Peers]:
            plan = plan_here(target, config, environ, record_dir=folder, position=HostPosition(restarts=failed))
            if failed:
                notify(f"accel: all ranks start again, restart {failed} of {config.max_restarts}\n")
            make_log_dir(config.log_dir)
            return plan, Peers()

        ending = run_attempts(
            start, signals, max_restarts=config.max_restarts, summary=summary, journal=journal, orphans=orphans
        )
        return ending.status


def _launch_on_hosts(
    target: LaunchTarget,
    config: LaunchConfig,
    environ: Mapping[str, str],
    sources: Mapping[str, Source],
    *,
    summary: bool,
    is_command: bool,
) -> int:
    fewest, most = config.hosts  # raises now what the agent would raise
    # Nothing starts from this plan: the user's own launcher refuses here what its agent would refuse.
    plan = plan_here(target, config, environ, record_dir="", port=1, position=HostPosition(num_nodes=fewest))
    # A mesh must fit every number of hosts that an elastic launch may continue with.
    for hosts in range(fewest + 1, most + 1):
        check_mesh(config, hosts * len(plan.processes))
    with listening(is_guarded=is_command) as signals:
        # The name first: a pod's resolves only once it runs, and `check_endpoint` refuses names that do not.
        if stopped := await_name(config, environ, signals):
            return 128 + stopped
        _ = check_endpoint(config)
        make_log_dir(config.log_dir)
        if stopped := await_first_host(config, signals):
            return 128 + stopped
        record = first_record(target, config, sources)
        return run_agent(target, config, environ, signals, record, summary=summary, is_command=is_command)


def plan_here(
    target: LaunchTarget,
    config: LaunchConfig,
    environ: Mapping[str, str],
    *,
    record_dir: str,
    position: HostPosition = HostPosition(),  # noqa: B008 - a frozen value
    port: int | None = None,
) -> LaunchPlan:
    """Plan a launch on this machine: its cores and GPUs, a free port, this process as the parent."""
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
        columns=terminal_columns(sys.stderr),
    )


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free at the moment."""
    try:
        with socket.socket() as probe:
            # Closed with the block: rank 0 must bind the port before anybody else does, and reports if it cannot.
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
    """Make the folder for log files, if one is wanted."""
    try:
        if folder:
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            "the folder for log files cannot be used",
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
            "the folder for failure records cannot be used",
            expected="a temporary folder that can be written",
            got=str(error),
            fix="Make room in it, or set TMPDIR to another one.",
        ) from error


CALLED = "accel.launching.local._function_rank"
_CHUNK_BYTES = 1 << 20
_REACT_S = 0.1
_ENDING_S = 5.0  # between the end of the output and the end of the process


class RankPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The position of one placed rank."""

    rank: int  # rank in the job
    world_size: int  # number of ranks of the job
    local_rank: int  # rank on its host
    local_world_size: int  # number of ranks of its host
    node_rank: int  # rank of its host
    master_addr: str  # address of rank 0
    port: int  # port of that address


class RankNews(msgspec.Struct, frozen=True, kw_only=True):
    """News of a rank since the last look."""

    out: bytes = b""  # output on stdout
    err: bytes = b""  # output on stderr
    status: int | None = None  # exit status, or minus the number of the signal that killed it; None while it runs
    files: dict[str, bytes] = {}  # content of the files that it has left, by name; empty while it runs


class PlacedRank:
    """A rank as the worker process on its host holds it. No torch, no communication."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="accel-rank-", ignore_cleanup_errors=True)
        self._open: dict[int, str] = {}

    def free_port(self) -> int:
        """Return a TCP port of this host that is free at the moment."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def start(self, position: RankPosition, config: LaunchConfig, call: bytes) -> None:
        """Start the rank's process at its position, with the packed function that `send_call` wrote."""
        folder = self._folder.name
        _ = Path(folder, "call").write_bytes(call)
        # Planned as a host of one process; the launcher, on another host, keeps the log files.
        plan = plan_launch(
            LaunchTarget(kind="module", name=CALLED, args=(folder,)),
            msgspec.structs.replace(config, nproc_per_node=1, log_dir=""),
            environ=os.environ,
            machine=read_machine(),
            interpreter=(sys.executable, WORKER_PATH),
            parent_pid=os.getpid(),
            port=position.port,
            record_dir=folder,
            position=HostPosition(
                node_rank=position.rank, num_nodes=position.world_size, master_addr=position.master_addr
            ),
        ).processes[0]
        # Where several ranks share a host, that plan counts places wrong.
        place = {
            "LOCAL_RANK": position.local_rank,
            "LOCAL_WORLD_SIZE": position.local_world_size,
            "NODE_RANK": position.node_rank,
            "GROUP_RANK": position.node_rank,
            "GROUP_WORLD_SIZE": position.world_size // position.local_world_size,
        }
        self._process = subprocess.Popen(
            plan.command,
            env=plan.environ | {name: str(value) for name, value in place.items()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._open = {self._process.stdout.fileno(): "out", self._process.stderr.fileno(): "err"}

    def look(self) -> RankNews:
        """Return what has come from the rank; wait a moment if nothing has."""
        process = self._process
        if process is None:
            return RankNews()
        read = {"out": b"", "err": b""}
        # Waits a moment, so that a caller who asks again and again does not spin.
        ready, _, _ = select.select(list(self._open), [], [], _REACT_S)
        for fd in ready:
            chunk = os.read(fd, _CHUNK_BYTES)
            read[self._open[fd]] += chunk
            if not chunk:
                del self._open[fd]
        if not self._open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                _ = process.wait(_REACT_S)
        status = process.poll()
        if status is not None and ready and self._open:
            status = None  # its last output comes first
        files = {} if status is None else {each.name: each.read_bytes() for each in self._left()}
        return RankNews(out=read["out"], err=read["err"], status=status, files=files)

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the rank if it has not ended; with `group`, also to processes that it has started."""
        if self._process is None:
            return
        if not group:
            self._process.send_signal(number)
            return
        # The rank leads a session, so its pid names the group of all that it has started.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Kill what is left, and remove the files."""
        self.signal(signal.SIGKILL, group=True)
        deadline = time.monotonic() + _ENDING_S
        while self._process is not None and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(_REACT_S)
        self._folder.cleanup()

    def _left(self) -> list[Path]:
        return [each for each in Path(self._folder.name).iterdir() if each.is_file() and each.name != "call"]
