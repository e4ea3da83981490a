# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: network namespaces with names and addresses of their own, joined by a bridge."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from processes import end


def require_hosts() -> None:
    """Skip the test where hosts cannot be simulated."""
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root and iproute2: {', '.join(missing) or 'not root'}")
    probe = f"accel-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces are not allowed here")
    subprocess.run(["ip", "netns", "del", probe], check=True)


class Hosts:
    """Hosts h0, h1, ... at 10.83.0.10, 10.83.0.11, ..."""

    def __init__(self, count: int, folder: Path) -> None:
        self.count = count
        self._tag = f"ac{secrets.token_hex(3)}"
        self._hosts_file = folder / "hosts"
        self._started: list[subprocess.Popen[str]] = []
        names = [f"10.83.0.{10 + at} h{at}\n" for at in range(count)]
        self._hosts_file.write_text("127.0.0.1 localhost\n" + "".join(names))
        bridge = f"b{self._tag}"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for at in range(count):
            space, cable = f"{self._tag}-h{at}", f"{self._tag}-{at}"
            _ip("netns", "add", space)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", cable, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"10.83.0.{10 + at}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def close(self) -> None:
        for popen in self._started:
            end(popen)
        for at in range(self.count):
            _ip("netns", "del", f"{self._tag}-h{at}")
        _ip("link", "del", f"b{self._tag}")

    def start(self, at: int, words: Sequence[object], *, folder: Path, **environ: str) -> subprocess.Popen[str]:
        """Start a program on a host, in a folder that all hosts share."""
        setup = f'hostname h{at}; mount --bind {self._hosts_file} /etc/hosts; exec "$@"'
        inside = ["unshare", "--uts", "--mount", "bash", "-c", setup, "_", *map(str, words)]
        popen = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{self._tag}-h{at}", *inside],
            cwd=folder,
            env=os.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(popen)
        return popen

    def remote_shell(self) -> Path:
        """Make a program that runs a command on a host, called as ssh is."""
        path = self._hosts_file.with_name("remote-shell")
        setup = f"hostname $host; mount --bind {self._hosts_file} /etc/hosts; $*"
        enter = f"nsenter --net=/run/netns/{self._tag}-$host unshare --uts --mount"
        path.write_text(
            f'#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nhost=$1; shift\nexec {enter} bash -c "{setup}"\n'
        )
        path.chmod(0o755)
        return path

    def cut_off(self, at: int) -> None:
        """Pull a host's network cable."""
        _ip("link", "set", f"{self._tag}-{at}", "down")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
