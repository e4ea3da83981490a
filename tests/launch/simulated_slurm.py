# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of this machine's own, with as many nodes as asked, all of its state in one folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from processes import end, free_ports, patience, wait_for


def require_slurm() -> None:
    """Skip the test where Slurm cannot be started."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "srun", "sbatch") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root and the packages slurm-wlm and munge: {', '.join(missing) or 'not root'}")


class Slurm:
    """Daemons for nodes n1, n2, ..., and the environment in which its commands find them."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        for name in ("state", "spool", "log", "munge", "run"):
            (folder / name).mkdir(parents=True)
        (folder / "munge").chmod(0o700)
        for part in (folder, folder / "run"):
            part.chmod(0o755)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        munge_socket = folder / "run" / "munge.sock"
        (folder / "slurm.conf").write_text(_configuration(folder, munge_socket, nodes))
        self._start(
            "munged",
            f"--key-file={key}",
            f"--socket={munge_socket}",
            f"--pid-file={folder}/run/munged.pid",
            f"--log-file={folder}/log/munged.log",
            f"--seed-file={folder}/munge/seed",
            "--force",
            "-F",
        )
        wait_for(munge_socket.exists)
        self._start("slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for at in range(nodes):
            self._start("slurmd", "-D", "-f", f"{folder}/slurm.conf", "-N", f"n{at + 1}")
        wait_for(lambda: self.run("sinfo", "-h", "-o", "%T").stdout.split() == ["idle"], 40)

    def run(self, *words: object, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in words],
            cwd=cwd,
            env=os.environ | self.environ | environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=patience(120),
            check=False,
        )

    def close(self) -> None:
        for daemon in reversed(self._daemons):  # munged last: the others need it
            daemon.terminate()
            try:
                daemon.wait(patience(10))
            except subprocess.TimeoutExpired:
                end(daemon)

    def _start(self, *words: str) -> None:
        environ = os.environ | self.environ
        self._daemons.append(subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))


def _configuration(folder: Path, munge_socket: Path, nodes: int) -> str:
    host = socket.gethostname().partition(".")[0]
    ports = free_ports(nodes + 1)
    lines = [
        "ClusterName=tests",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={munge_socket}",
        "CredType=cred/munge",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdLogFile={folder}/log/slurmd-%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SlurmdParameters=config_overrides",
        "MpiDefault=none",
        "SwitchType=switch/none",
        "ReturnToService=2",
        "KillWait=5",
    ]
    for at in range(nodes):
        place = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[at + 1]}"
        lines.append(f"NodeName=n{at + 1} {place} CPUs=4 RealMemory=2000 State=UNKNOWN")
    lines.append("PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:4")
    return "\n".join(lines) + "\n"
