# SPDX-License-Identifier: Apache-2.0
"""The way from a script's name to an exit status: look at the system, plan, run."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from accel.errors import LaunchError, did_you_mean
from accel.launch._plan import plan_launch
from accel.launch._run import run_plan

_WORKER = str(Path(__file__).with_name("_worker.py"))


def launch(script: str, args: Sequence[str] = (), *, nproc_per_node: int = 1, environ: Mapping[str, str]) -> int:
    """Run a script on N processes of this machine and wait for them.

    Args:
        script: path of the script every process runs.
        args: the script's own arguments, handed on as they are.
        nproc_per_node: how many processes.
        environ: the environment that each process's own one starts from; `os.environ` is never written.

    Returns:
        The exit status: 0, the failing rank's, or 128 plus the number of the signal that stopped the launch.

    Raises:
        LaunchError: the script cannot be read, `nproc_per_node` is below 1, or the system refuses.
        EnvError: `environ` holds an `ACCEL_*` setting that the processes would refuse.
    """
    check_script(script)
    with _record_dir() as record_dir:
        plan = plan_launch(
            script,
            args,
            nproc_per_node=nproc_per_node,
            environ=environ,
            interpreter=(sys.executable, _WORKER),
            parent_pid=os.getpid(),
            port=free_port(),
            cores=len(os.sched_getaffinity(0)),
            record_dir=record_dir,
        )
        return run_plan(plan)


def check_script(script: str) -> None:
    """Refuse a script that no process could run.

    Raises:
        LaunchError: it is not there, is no file, or may not be read.
    """
    path = Path(script)
    if path.is_file() and os.access(path, os.R_OK):
        return
    if path.is_dir():
        problem, got, fix = "the script is a folder", script, "Name the script inside it."
    elif path.exists():
        problem, got, fix = "the script cannot be read", script, "Check its type and permissions with `ls -l`."
    else:
        problem, got, fix = "there is no such script", script, _nearest(path)
    raise LaunchError(problem, expected="the path of a Python file", got=repr(got), where=os.getcwd(), fix=fix)


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody uses at the moment.

    Raises:
        LaunchError: the machine gives none.
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


def _record_dir() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="accel-launch-", ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchError(
            "there is no folder for failure records",
            expected="a temporary folder that can be written",
            got=str(error),
            fix="Make room in it, or set TMPDIR to another one.",
        ) from error


def _nearest(path: Path) -> str:
    hint = did_you_mean(path.name, (near.name for near in path.parent.glob("*.py")))
    return hint if hint.startswith("Did you mean") else "Check the path."
