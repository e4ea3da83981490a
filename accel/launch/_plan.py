# SPDX-License-Identifier: Apache-2.0
"""What a launch will start: plain values in, a frozen plan out. Nothing here touches the system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from accel.env import read_env
from accel.errors import LaunchError

# Another launcher's notes to its own children. One of them makes torch look for a store that its agent holds open,
# and there is no such agent here.
_FOREIGN = "TORCHELASTIC_"


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a launch.

    Attributes:
        rank: its position among all processes.
        command: what to execute, program first.
        environ: its whole environment.
        record: the file it writes its failure to, should it fail.
    """

    rank: int
    command: tuple[str, ...]
    environ: dict[str, str]
    record: str


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All processes of a launch, in order of rank."""

    processes: tuple[ProcessPlan, ...]


def plan_launch(
    script: str,
    args: Sequence[str] = (),
    *,
    nproc_per_node: int = 1,
    environ: Mapping[str, str],
    interpreter: Sequence[str],
    parent_pid: int,
    port: int,
    cores: int,
    record_dir: str,
) -> LaunchPlan:
    """Plan the processes of a launch on one node.

    Args:
        script: path of the script every process runs.
        args: the script's own arguments, handed on as they are.
        nproc_per_node: how many processes.
        environ: the environment that each process's own one starts from.
        interpreter: the command that runs the worker: program and leading arguments.
        parent_pid: the process that will start them; they end when it does.
        port: where rank 0 is to listen, on 127.0.0.1.
        cores: how many CPU cores the processes share.
        record_dir: the folder for failure records.

    Returns:
        The plan; planning the same values twice gives equal plans.

    Raises:
        LaunchError: `nproc_per_node` is below 1.
        EnvError: `environ` holds an `ACCEL_*` setting that the processes would refuse.
    """
    if nproc_per_node < 1:
        raise LaunchError(
            "a launch needs a process",
            expected="an integer of at least 1",
            got=str(nproc_per_node),
            where="--nproc-per-node",
            fix="Give the number of processes to start on this machine.",
        )
    shared = {name: value for name, value in environ.items() if not name.startswith(_FOREIGN)}
    shared.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc_per_node)))
    processes: list[ProcessPlan] = []
    for rank in range(nproc_per_node):
        record = f"{record_dir}/rank-{rank}.json"
        processes.append(
            ProcessPlan(
                rank=rank,
                command=(*interpreter, record, str(parent_pid), script, *args),
                environ=shared | _variables(rank, nproc_per_node, port),
                record=record,
            )
        )
    _ = read_env(processes[0].environ)  # refuses here, once, what every rank would refuse
    return LaunchPlan(processes=tuple(processes))


def _variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
    }
