# SPDX-License-Identifier: Apache-2.0
"""Ranks of one host meet at an address that no other host can reach."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import job, script_ranks

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="Linux lists the listening sockets there"),
]

SCRIPT = """
import os, sys
import torch
import accel

port = int(os.environ["MASTER_PORT"])
for turn in range(2):  # the second opening finds the address free again
    with accel.session(device="cpu", timeout_s=20) as ctx:
        tables = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
        listening = {row[1].split(":")[0] for row in tables if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
        with open(f"{sys.argv[1]}-{ctx.rank}-{turn}", "w") as file:
            file.write(" ".join(listening))
        accel.wait_for_everyone(ctx)
"""


def test_the_store_of_one_host_listens_on_its_loopback_interface_only(tmp_path: Path) -> None:
    script = tmp_path / "listens.py"
    script.write_text(SCRIPT)
    with script_ranks(script, job(2), tmp_path / "seen", folder=tmp_path) as ranks:
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    assert {file.read_text() for file in tmp_path.glob("seen-*")} == {"0100007F"}
