# SPDX-License-Identifier: Apache-2.0
"""One rank of a launched function that another program, such as Ray, has placed on some host of its own.

The worker process of that program starts the rank, hands on its output, signals and files, and takes it with it when it
dies. The program of the launch keeps the same records and values in its folder as a launch on one machine does.
"""

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
from pathlib import Path

import msgspec

from accel.config import LaunchConfig
from accel.launching._launch import WORKER_PATH
from accel.launching._machine import read_machine
from accel.launching._plan import HostPosition, plan_launch
from accel.launching._target import Target

CALLED = "accel.launching._function_rank"
_CHUNK_BYTES = 1 << 20
_REACT_S = 0.1
_ENDING_S = 5.0  # between the end of the output and that of the process


class RankPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The position of one placed rank.

    Attributes:
        rank, world_size: of the job.
        local_rank, local_world_size: of its host.
        node_rank: rank of its host.
        master_addr, port: address of rank 0.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    port: int


class RankNews(msgspec.Struct, frozen=True, kw_only=True):
    """News of a rank since the last look.

    Attributes:
        out, err: output.
        status: exit status, or minus the number of the signal that killed it; None while it runs.
        files: content of the files that it has left, by name; empty while it runs.
    """

    out: bytes = b""
    err: bytes = b""
    status: int | None = None
    files: dict[str, bytes] = {}


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
        """Start the process of the rank.

        Args:
            position: its position.
            config: settings of the launch.
            call: packed function, as `send_call` wrote it.

        Raises:
            LaunchError, EnvError: as `plan_launch` does.
            OSError: the system refuses the process.
        """
        folder = self._folder.name
        _ = Path(folder, "call").write_bytes(call)
        plan = plan_launch(
            Target(kind="module", name=CALLED, args=(folder,)),
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
