# SPDX-License-Identifier: Apache-2.0
"""Launchers on several hosts, each started by a remote shell such as ssh, and ended together."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from accel.errors import LaunchError
from accel.launching._hostfile import HostCommand
from accel.launching._report import tell
from accel.launching._signals import STOPPING, Signals, listening

_NO_CONNECTION = 255  # of ssh
_KILL_AFTER_S = 20.0  # over the grace of the launchers themselves


def read_hostfile(path: str) -> str:
    """Return the text of a file of hosts.

    Raises:
        LaunchError: it cannot be read.
    """
    try:
        return Path(path).read_bytes().decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise LaunchError("the file of hosts cannot be read", got=str(reason), where=path) from None


def run_on_hosts(
    commands: Sequence[HostCommand], shell: Sequence[str], environ: Mapping[str, str], *, grace_s: float
) -> int:
    """Start every host's launcher, and wait for all. A stop here, or a host that cannot be reached, ends the others.

    Args:
        commands: commands by host.
        shell: words of the remote shell, before a host and its command.
        environ: the environment of the remote shell.
        grace_s: seconds that launchers have to end their ranks.

    Returns:
        The status of the first host that failed, else 0; 128 and the signal after a stop.

    Raises:
        LaunchError: there is no such remote shell.
    """
    with listening() as signals:
        started: list[subprocess.Popen[bytes]] = []
        try:
            for each in commands:
                words = [*shell, each.host, each.command]
                started.append(subprocess.Popen(words, env=dict(environ), stdin=subprocess.PIPE))
        except OSError as error:
            _end(started)
            raise LaunchError(
                "the remote shell cannot be started", got=str(error), where=f"--remote-shell {' '.join(shell)}"
            ) from None
        return _wait(commands, started, signals, grace_s)


def _wait(
    commands: Sequence[HostCommand], started: Sequence[subprocess.Popen[bytes]], signals: Signals, grace_s: float
) -> int:
    """Wait for all; the end of one that had no connection ends the others, which would wait for it."""
    failed = stopped = 0
    deadline: float | None = None
    open_ones = dict(zip((each.host for each in commands), started, strict=True))
    while open_ones:
        number = signals.wait(0.5 if deadline is None else max(0.0, min(0.5, deadline - time.monotonic())))
        if number in STOPPING and not stopped:
            stopped = number
            tell(f"accel: {signal.Signals(number).name} stops the launchers of all hosts\n")
        for host, process in list(open_ones.items()):
            if (status := process.poll()) is None:
                continue
            del open_ones[host]
            failed = failed or status
            if status == _NO_CONNECTION:
                tell(f"accel: no connection to {host}, exit status {status}\n")
                stopped = stopped or -1
        if stopped and deadline is None:
            deadline = time.monotonic() + grace_s + _KILL_AFTER_S
            _cut_off(started)
        if deadline is not None and time.monotonic() > deadline:
            _end(started)
    return 128 + stopped if stopped > 0 else abs(failed)


def _cut_off(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Close the connections' ends here, on which the launchers end their ranks."""
    for process in started:
        if process.stdin is not None and not process.stdin.closed:
            process.stdin.close()


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    _cut_off(started)
    for process in started:
        process.kill()
        _ = process.wait()
