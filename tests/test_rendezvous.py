# SPDX-License-Identifier: Apache-2.0
"""How real ranks come together: one group after another, and what they say when somebody does not come."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import accel

pytestmark = pytest.mark.multiprocess

SESSIONS = """
import accel, torch
for turn in range(3):
    with accel.session(device="cpu") as ctx:
        assert accel.gather(ctx, torch.tensor([ctx.rank + turn])).tolist() == [turn, turn + 1]
"""
ABSENT = """
import os, sys, time, accel
if os.environ["RANK"] == "1":
    time.sleep(60)
try:
    with accel.session(device="cpu", timeout_s=2):
        pass
except accel.PeerError as error:
    assert "did not come within 2 s" in str(error), error
    assert "2 ranks at 127.0.0.1" in str(error), error
    sys.exit(7)
"""


LEFT = """
import sys, torch, accel
with accel.session(device="cpu", timeout_s=20) as ctx:
    if ctx.rank == 1:
        sys.exit(0)
    try:
        accel.gather(ctx, torch.ones(1))
    except accel.PeerError as error:
        assert "rank 0, gather at left.py:7 in <module>" in str(error), error
        sys.exit(7)
"""


@pytest.mark.parametrize("launcher", [["accel.cli", "launch"], ["torch.distributed.run"]], ids=["accel", "torchrun"])
def test_one_session_after_another(tmp_path: Path, launcher: list[str]) -> None:
    script = tmp_path / "sessions.py"
    script.write_text(SESSIONS)
    command = [sys.executable, "-m", *launcher, "--nproc-per-node", "2", str(script)]
    subprocess.run(command, check=True, timeout=120)


def test_a_rank_that_does_not_come_is_told_of(tmp_path: Path) -> None:
    script = tmp_path / "absent.py"
    script.write_text(ABSENT)
    command = [sys.executable, "-m", "accel.cli", "launch", "--nproc-per-node", "2", str(script)]
    assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 7


def test_a_rank_that_leaves_is_missed_by_the_call_that_waited(tmp_path: Path) -> None:
    script = tmp_path / "left.py"
    script.write_text(LEFT)
    command = [sys.executable, "-m", "accel.cli", "launch", "--nproc-per-node", "2", str(script)]
    assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 7


def test_an_address_that_is_taken_or_empty_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with pytest.raises(accel.PeerError, match=rf"cannot serve the address.*127\.0\.0\.1:{port}"):
            accel.from_env(environ, device="cpu", timeout_s=2)
    with pytest.raises(accel.PeerError, match=rf"cannot reach the address.*127\.0\.0\.1:{port}"):
        accel.from_env({**environ, "RANK": "1"}, device="cpu", timeout_s=2)
    assert "MASTER_PORT" not in os.environ
