# SPDX-License-Identifier: Apache-2.0
"""Real processes of a test: free ports, ends that are waited for, and limits that follow the machine's load."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

# Below the ports that systems hand out themselves (Linux: from 32768), so that no client takes one between the test's
# look and the bind of rank 0.
_PORTS = range(15_000, 32_000)
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_MOST = 10.0  # times a limit of a quiet machine


def free_ports(count: int) -> list[int]:
    """Different ports of this machine that nobody listens on, out of this worker's own share of them."""
    each = len(_PORTS) // _WORKERS
    ours = _PORTS[_WORKER * each : (_WORKER + 1) * each]
    with contextlib.ExitStack() as probes:
        ports: list[int] = []
        while len(ports) < count:
            probe = probes.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # taken
                probe.bind(("", random.SystemRandom().choice(ours)))  # whatever a test has seeded
                ports.append(probe.getsockname()[1])
        return ports


def free_port() -> int:
    return free_ports(1)[0]


def patience(seconds: float) -> float:
    """A limit of a quiet machine, longer by as many times as more threads want to run now than there are cores."""
    return seconds * min(max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0), _MOST)


def same_path() -> dict[str, str]:
    """The environment of a process that imports what this one can: tests and their helpers."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until a condition holds, up to so long on a quiet machine."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < patience(seconds), "waited in vain"
        time.sleep(0.02)


# What the process that forks has imported, once for all tests; the packages that training imports late, too.
_IMPORTED = ["pytest", "hypothesis", "torch._dynamo", "accel.training", "accel.testing", "tests.helpers.frozen"]


def run_ranks(worker: Callable[..., None], *args: object, count: int = 2) -> None:
    """Run `worker(rank, *args)` in processes that are forked from one that has imported torch."""
    multiprocessing.set_forkserver_preload(_IMPORTED)
    mp.start_processes(worker, args, nprocs=count, start_method="forkserver")


def job(count: int, **settings: str) -> list[dict[str, str]]:
    """What a launcher on this machine tells so many ranks, and further variables for all of them."""
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", **settings}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


class ScriptRank:
    """A process that runs a script as `python script.py` would, forked from one that has imported torch.

    Its interpreter ends as multiprocessing's do; a test of how processes end starts real ones.

    Args:
        script: the script.
        arguments: what follows it on the command line.
        environ: the whole environment.
        out: a file for what it prints, on both streams.
    """

    def __init__(self, script: Path, arguments: Sequence[object], environ: Mapping[str, str], out: Path) -> None:
        multiprocessing.set_forkserver_preload(_IMPORTED)
        words = [str(script), *map(str, arguments)]
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_run_script, args=(words, dict(environ), str(out)))
        self._out = out
        self._process.start()

    def wait(self, seconds: float) -> int:
        """Wait up to so long on a quiet machine; return the status, that of a signal below 0."""
        self._process.join(patience(seconds))
        if self._process.exitcode is None:
            assert self._process.pid is not None
            os.kill(self._process.pid, signal.SIGABRT)  # it prints what its threads do
            self._process.join(5)
            raise AssertionError(f"still runs:\n{self.said()}")
        return self._process.exitcode

    def said(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    def end(self) -> None:
        """Kill it and wait until it is gone."""
        self._process.kill()
        self._process.join()
        self._process.close()


@contextlib.contextmanager
def script_ranks(
    script: Path, environs: Iterable[Mapping[str, str]], *arguments: object, folder: Path
) -> Generator[list[ScriptRank]]:
    """Run a script once for each environment, which is added to this one's; end what still runs behind the block."""
    ranks: list[ScriptRank] = []
    try:
        for at, environ in enumerate(environs):
            ranks.append(ScriptRank(script, arguments, os.environ | environ, folder / f"out-{at}"))
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


def _run_script(words: list[str], environ: dict[str, str], out: str) -> None:
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environ)
    multiprocessing.set_start_method(None, force=True)  # the system's own, as in a process that nobody forked
    if threads := environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))  # which was read as torch was imported
    sys.argv = words
    sys.path.insert(0, os.path.dirname(words[0]))
    runpy.run_path(words[0], run_name="__main__")


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process and wait until it is gone."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


@contextlib.contextmanager
def ending(processes: Iterable[subprocess.Popen[Any]]) -> Generator[None]:
    """End the processes behind the block, whatever happens in it."""
    try:
        yield
    finally:
        for process in processes:
            end(process)


def children() -> dict[int, str]:
    """The processes that this one has started and not waited for: number and command line."""
    found: dict[int, str] = {}
    try:  # one call of the system, for most tests, instead of reads of each thread's file
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, AttributeError):  # macOS has neither the call nor /proc
        return found
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for pid in map(int, path.read_text().split()):
                with contextlib.suppress(OSError):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") or "no command line"
    return found
