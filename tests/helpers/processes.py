# SPDX-License-Identifier: Apache-2.0
"""Real processes of a test: free ports, ends that are waited for, and limits that follow the machine's load."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

# Below the ports that systems hand out themselves (Linux: from 32768), so that no client takes one between the test's
# look and the bind of rank 0.
_PORTS = range(15_000, 32_000)
_MOST = 10.0  # times a limit of a quiet machine


def free_ports(count: int) -> list[int]:
    """Different ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as probes:
        ports: list[int] = []
        while len(ports) < count:
            probe = probes.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # taken
                probe.bind(("", random.SystemRandom().choice(_PORTS)))  # whatever a test has seeded
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


def run_ranks(worker: Callable[..., None], *args: object, count: int = 2) -> None:
    """Run `worker(rank, *args)` in processes that are forked from one that has imported torch, once for all tests."""
    multiprocessing.set_forkserver_preload(["pytest", "hypothesis", "torch._dynamo", "accel.training", "accel.testing"])
    mp.start_processes(worker, args, nprocs=count, start_method="forkserver")


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
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for pid in map(int, path.read_text().split()):
                with contextlib.suppress(OSError):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") or "no command line"
    return found
