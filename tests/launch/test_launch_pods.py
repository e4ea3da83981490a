# SPDX-License-Identifier: Apache-2.0
"""A command without flags in the pods of a Kubeflow job: here two launchers on one machine, told by PET_* alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from typing import Any, cast

import pytest
from launching import ACCEL, Workspace
from processes import free_port, patience

from accel.config import LaunchConfig
from accel.launching.hosts import _hosts
from accel.launching.hosts._hosts import await_name

SCRIPT = """
    import os
    import accel
    with accel.session(device="cpu") as ctx:
        told = [name for name in os.environ if name.startswith("PET_") and name != "PET_TEE"]
        print(ctx.rank, ctx.world_size, ctx.node_rank, tuple(ctx.mesh.shape), ctx.accumulation, told)
"""


POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


class Clock:
    """Stands for the signals of a launcher and for the time it waits for them: after `known_s` a name is known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, known_s: float, stop_s: float = 1e9) -> None:
        self.now_s, self.known_s, self.stop_s = 0.0, known_s, stop_s
        monkeypatch.setattr(socket, "getaddrinfo", self.getaddrinfo)
        monkeypatch.setattr(_hosts.time, "monotonic", lambda: self.now_s)

    def getaddrinfo(self, *_: object, **__: object) -> list[object]:
        if self.now_s < self.known_s:
            raise socket.gaierror(-2, "Name or service not known")
        return []

    def stop(self, timeout_s: float) -> int:
        self.now_s += timeout_s
        return signal.SIGTERM if self.now_s >= self.stop_s else 0


@pytest.mark.parametrize(
    ("pod", "known_s", "stop_s", "returned", "waited_s"),
    [
        (POD, 1.5, 1e9, 0, 1.5),
        (POD, 1e9, 1e9, 0, 7.0),  # it is refused then
        (POD, 1e9, 2.0, signal.SIGTERM, 2.0),
        ({}, 1e9, 1e9, 0, 0.0),
    ],
)
def test_the_name_of_the_first_pod_may_be_known_later(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pod: dict[str, str],
    known_s: float,
    stop_s: float,
    returned: int,
    waited_s: float,
) -> None:
    config = LaunchConfig(nnodes=2, rdzv_endpoint="train-master-0:23456", rdzv_timeout_s=7)
    clock = Clock(monkeypatch, known_s=known_s, stop_s=stop_s)
    assert await_name(config, pod, cast(Any, clock)) == returned
    assert clock.now_s == waited_s
    waiting = (
        "accel: waiting for the name train-master-0 to be known, up to 7 s (--rdzv-timeout-s): "
        "[Errno -2] Name or service not known\n"
    )
    assert capsys.readouterr().err == (waiting if pod else "")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_pods_need_no_flags_and_their_ranks_get_no_variables_of_the_launcher(workspace: Workspace) -> None:
    script = workspace.write(SCRIPT)
    port = str(free_port())
    job = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    job |= {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PET_TEE": "3"}
    job |= {"ACCEL_DEVICE": "cpu", "ACCEL_MESH": "dp=-1,tp=2", "ACCEL_ACCUMULATION": "3"}
    for at in range(2):
        environ = os.environ | job | {"RANK": str(at), "PET_NODE_RANK": str(at)}
        piped = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        pod = subprocess.Popen([*ACCEL, "launch", str(script)], env=environ, text=True, cwd=workspace.folder, **piped)
        workspace.started.append(pod)
    for at, pod in enumerate(workspace.started):
        out, err = pod.communicate(timeout=patience(240))
        assert pod.returncode == 0, err
        expected = [f"[rank {rank}] {rank} 4 {at} (2, 2) 3 []" for rank in (2 * at, 2 * at + 1)]
        assert sorted(out.splitlines()) == expected
