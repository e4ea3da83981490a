# SPDX-License-Identifier: Apache-2.0
"""The started processes: their starts, ends and failures, and signals to them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO

from accel.errors import LaunchError
from accel.launching._cores import bound
from accel.launching._failure_record import Failure, file_beside, read_failure
from accel.launching._plan import LaunchPlan, ProcessPlan
from accel.launching._relay import Log, Pipe, Relay, Sink
from accel.launching._report import tell


class Children:
    """The processes of one launch, each in a session of its own."""

    def __init__(self) -> None:
        self._processes: list[tuple[ProcessPlan, subprocess.Popen[bytes]]] = []
        self._noticed_s: dict[int, float] = {}

    def start(self, plan: LaunchPlan) -> Relay | None:
        """Start every process of a plan; return the relay of their output, None if they write to our streams.

        Raises:
            LaunchError: a log file cannot be written, or the system refuses a process; those started have been killed.
        """
        alone = len(plan.processes) == 1
        logs = open_logs(plan)
        if plan.unbound and not plan.restarts:
            tell(f"accel: processes are not bound to cores: {plan.unbound}\n")
        piped = not alone or bool(logs) or plan.hang_timeout_s is not None or plan.redraw_s > 0
        for process in plan.processes:
            pipe = subprocess.PIPE if piped else None
            stdin = None if process.rank == 0 else subprocess.DEVNULL
            try:
                if plan.hang_timeout_s is not None:
                    os.mkfifo(file_beside(process.record, "ask"))
                with bound(process.cores):
                    popen = subprocess.Popen(
                        process.command,
                        env=process.environ,
                        stdin=stdin,
                        stdout=pipe,
                        stderr=pipe,
                        bufsize=0,
                        start_new_session=True,
                    )
            except (OSError, ValueError) as error:
                self._abandon()
                raise LaunchError(
                    f"rank {process.rank} of {len(plan.processes)} does not start",
                    got=str(error),
                    fix="Start fewer processes, or raise the limits that `ulimit -a` shows.",
                ) from error
            self._processes.append((process, popen))
        return self._relay(plan, logs) if piped else None

    def running(self) -> list[int]:
        """Return the ranks that have not ended."""
        return [process.rank for process, popen in self._processes if popen.poll() is None]

    def left(self) -> list[int]:
        """Return the ranks that have ended with status 0."""
        return [process.rank for process, popen in self._processes if popen.poll() == 0]

    def statuses(self) -> dict[int, int | None]:
        """Return the exit status of each rank; None for one that has not ended."""
        return {process.rank: popen.poll() for process, popen in self._processes}

    def failures(self) -> list[Failure]:
        """Return the failure of each rank that has ended with another status than 0."""
        now_s = time.time()
        return [
            read_failure(
                process.rank, popen.returncode, process.record, self._noticed_s.setdefault(process.rank, now_s)
            )
            for process, popen in self._processes
            if popen.poll()
        ]

    def recorded(self) -> list[Failure]:
        """Return the failures that running ranks have recorded; these ranks are about to end."""
        ending = [process for process, popen in self._processes if popen.poll() is None]
        return [
            read_failure(process.rank, 1, process.record, time.time())
            for process in ending
            if os.path.exists(process.record)
        ]

    def signal(self, number: int) -> None:
        """Send a signal to each rank that has not ended, but not to processes that it started itself."""
        for _, popen in self._processes:
            popen.send_signal(number)

    def signal_rank(self, rank: int, number: int) -> None:
        """Send a signal to one rank, if it has not ended."""
        for process, popen in self._processes:
            if process.rank == rank:
                popen.send_signal(number)

    def records(self) -> dict[int, str]:
        """Return the path of the failure record of each rank that has not ended."""
        return {process.rank: process.record for process, popen in self._processes if popen.poll() is None}

    def signal_groups(self, number: int) -> bool:
        """Send a signal (0 for none) to each rank and the processes it has started; return False if none is left."""
        reached = [_signal_group(popen.pid, number) for _, popen in self._processes]
        return any(reached)

    def _abandon(self) -> None:
        _ = self.signal_groups(signal.SIGKILL)
        for _, popen in self._processes:
            _ = popen.communicate()

    def _relay(self, plan: LaunchPlan, logs: Mapping[int, Log]) -> Relay:
        return start_relay(
            plan, logs, {process.rank: (popen.stdout, popen.stderr) for process, popen in self._processes}
        )


def start_relay(plan: LaunchPlan, logs: Mapping[int, Log], pipes: Mapping[int, Sequence[IO[bytes] | None]]) -> Relay:
    """Start to show what comes through the pipes of ranks.

    Args:
        plan: prefix and silence of the lines.
        logs: file of each rank, if any.
        pipes: standard output and error of each rank.
    """
    stdout = Sink(1, plan.redraw_s)
    is_shared = os.path.samestat(os.fstat(1), os.fstat(2))  # one terminal has one cursor
    stderr = stdout if is_shared else Sink(2, plan.redraw_s)
    prefixed = plan.prefix and len(plan.processes) > 1
    streams = [(rank, out, stdout) for rank, (out, _) in pipes.items()]
    streams += [(rank, err, stderr) for rank, (_, err) in pipes.items()]
    relay = Relay(
        (
            Pipe(
                pipe,
                None if plan.quiet and rank else sink,
                prefix=b"[rank %d] " % rank if prefixed else b"",
                log=logs.get(rank),
            )
            for rank, pipe, sink in streams
            if pipe is not None
        ),
        logs.values(),
    )
    relay.start()
    return relay


def open_logs(plan: LaunchPlan) -> dict[int, Log]:
    """Open the log file of each process, if there is a folder for them.

    Raises:
        LaunchError: one cannot be written.
    """
    try:
        return {process.rank: Log(plan.log_dir, process.rank) for process in plan.processes if plan.log_dir}
    except OSError as error:
        raise LaunchError(
            "a log file cannot be written",
            got=str(error.strerror),
            where=str(error.filename),
            fix="Name another folder with --log-dir.",
        ) from error


def _signal_group(pid: int, number: int) -> bool:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
