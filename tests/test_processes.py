# SPDX-License-Identifier: Apache-2.0
"""The helper for real processes: what ends is gone, ports are free, limits grow with the machine's load."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from processes import children, end, ending, free_ports, patience, wait_for

PIPED: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], **PIPED)


@pytest.mark.skipif(not os.path.exists(f"/proc/self/task/{os.getpid()}/children"), reason="needs Linux's /proc")
def test_a_process_counts_until_it_was_waited_for() -> None:
    process = sleeper()
    assert process.stdout is not None
    process.stdout.readline()  # it runs
    assert "input()" in children()[process.pid]
    process.kill()
    assert process.pid in children()
    end(process)
    assert process.pid not in children()


def test_processes_end_when_their_test_fails() -> None:
    processes = [sleeper(), sleeper()]
    with pytest.raises(ValueError, match="the test"), ending(processes):
        raise ValueError("the test")
    assert [process.returncode for process in processes] == [-9, -9]


def test_ports_differ_and_can_be_bound() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


@pytest.mark.parametrize(("load", "times"), [(0.0, 1.0), (1.0, 1.0), (3.0, 3.0), (1e6, 10.0)])
def test_limits_grow_with_the_load_up_to_an_end(monkeypatch: pytest.MonkeyPatch, load: float, times: float) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load * (os.cpu_count() or 1), 0.0, 0.0))
    assert patience(5) == pytest.approx(5 * times)


def test_a_condition_that_never_holds_is_waited_for_in_vain() -> None:
    with pytest.raises(AssertionError, match="in vain"):
        wait_for(lambda: False, seconds=0.01)
