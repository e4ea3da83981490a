# SPDX-License-Identifier: Apache-2.0
"""The plan of a launch on one host, a pure function of plain values."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import msgspec

from accel.config import LaunchConfig
from accel.config._resolve import TORCHRUN_VARIABLES
from accel.config._schema import to_text
from accel.config._settings import COLUMNS_VARIABLE, FIELDS, SETTINGS
from accel.env import read_env
from accel.errors import LaunchError
from accel.launching._target import LaunchTarget
from accel.launching.local._machine import (
    Binding,
    Machine,
    bind_processes,
    count_processes,
    memory_nodes_of,
    visible_gpus,
)
from accel.topology import fit_axes

# Variables of torchrun for its own workers. One of them makes torch look for a store of torchrun's agent, and there is
# no such agent here.
_FOREIGN = "TORCHELASTIC_"
_NO_PEERS = "RTX 40"  # consumer cards with a driver without peer-to-peer copies, at which NCCL hangs or fails


class HostPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The position of this host's ranks in the launch; all hosts have equally many."""

    node_rank: int = 0  # rank of this host
    num_nodes: int = 1  # number of hosts
    master_addr: str = "127.0.0.1"  # address of rank 0
    restarts: int = 0  # number of times that all ranks have started again
    roles: tuple[str, ...] = ()  # role of each host's ranks; empty if all have this host's

    def count_role(self, role: str) -> tuple[int, int]:
        """Return the number of hosts of a role in front of this host, and in all."""
        roles = self.roles or (role,) * self.num_nodes
        return roles[: self.node_rank].count(role), roles.count(role)


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a launch."""

    rank: int  # rank of the process
    program: tuple[str, ...]  # command line as a user would type it
    command: tuple[str, ...]  # command line to execute
    environ: dict[str, str]  # complete environment
    record: str  # path of its failure record
    cores: tuple[int, ...] = ()  # CPU cores that it may use; empty for all


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All processes of a launch on one host, in order of rank, and the settings of their supervisor."""

    processes: tuple[ProcessPlan, ...]  # processes to start
    log_dir: str = ""  # folder for a log file of each process; empty for none
    prefix: bool = True  # whether lines of output begin with their rank, if there are several processes
    quiet: bool = False  # whether only rank 0's output is shown
    stop_grace_s: float = 10.0  # seconds between a signal to stop and SIGKILL
    restarts: int = 0  # number of times that all ranks have started again
    hang_timeout_s: float | None = None  # seconds without output until ranks are asked where they are; None for never
    unbound: str = ""  # reason why processes are not bound to cores although they should be; empty for none
    idle: str = ""  # GPUs that no process uses, in words; empty for none
    redraw_s: float = 0.0  # least number of seconds between two states of a progress bar that are shown


def plan_launch(
    target: LaunchTarget,
    config: LaunchConfig,
    *,
    environ: Mapping[str, str],
    machine: Machine,
    interpreter: Sequence[str],
    parent_pid: int,
    port: int,
    record_dir: str,
    position: HostPosition = HostPosition(),  # noqa: B008 - a frozen value
    columns: int = 0,
) -> LaunchPlan:
    """Plan the processes of a launch on one host; equal values give equal plans.

    Settings of `config` override the `ACCEL_*` variables of `environ`; the end of `parent_pid` ends the processes;
    `columns` is the width of the launcher's terminal, 0 for none."""
    known = None if machine.gpus is None else len(machine.gpus)
    gpus = _usable_gpus(config, visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"), known))
    tpus = count_processes(config, machine.tpu_chips)
    count = _count(config, gpus) if tpus is None else tpus
    check_mesh(config, position.num_nodes * count)
    binding = Binding(((),) * count)
    if config.bind_cores:
        near = _memory_nodes(config, environ, machine, gpus[:count])
        binding = bind_processes(count, machine.memory_nodes, near * count if len(near) == 1 else near)
    shared = _without_peers(machine, count) | _shared(config, environ, gpus)
    named = config.prefix and count > 1
    room = max(0, columns - len(f"[rank {position.num_nodes * count - 1}] ") * named)
    shared |= {COLUMNS_VARIABLE: str(room)} if room else {}
    launcher = {"script": (sys.executable,), "module": (sys.executable, "-m"), "program": ()}[target.kind]
    processes: list[ProcessPlan] = []
    for local_rank, cores in enumerate(binding.cores):
        threads = len(cores) or max(1, machine.cores // count)
        rank = position.node_rank * count + local_rank
        # A name for each attempt: a record of the last one would be read as a failure of this.
        record = f"{record_dir}/rank-{rank}-{position.restarts}.json"
        processes.append(
            ProcessPlan(
                rank=rank,
                program=(*launcher, target.name, *target.args),
                command=(*interpreter, record, str(parent_pid), target.kind, target.name, *target.args),
                # Later ones win: the user's variables over our threads, the place over what a shell has set.
                environ={"OMP_NUM_THREADS": str(threads)}
                | shared
                | _variables(config, local_rank, count, position, port),
                record=record,
                cores=cores,
            )
        )
    _ = read_env(processes[0].environ)  # refuses here, once, what every rank would refuse
    return LaunchPlan(
        processes=tuple(processes),
        log_dir=config.log_dir,
        prefix=config.prefix,
        quiet=config.quiet,
        stop_grace_s=config.stop_grace_s,
        restarts=position.restarts,
        hang_timeout_s=None if config.hang_timeout_s == "never" else config.hang_timeout_s,
        unbound=binding.unbound,
        idle=idle_gpus(len(gpus), count),
    )


def idle_gpus(gpus: int, used: int) -> str:
    """Return a sentence about the GPUs of a host that no process uses; empty if all are used."""
    return f"{gpus - used} of {gpus} GPUs of a host stay idle" if gpus > used else ""


def check_mesh(config: LaunchConfig, world_size: int) -> None:
    """Refuse a mesh of another number of processes than the launch has."""
    _ = fit_axes(config.mesh, world_size, where="--mesh", error=LaunchError)


def _usable_gpus(config: LaunchConfig, visible: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the names of the GPUs to give to processes; empty if they use other devices, or the GPUs are unknown."""
    if not config.device.startswith(("auto", "cuda")):
        return ()
    if visible is None:
        return () if config.gpu_ids == "all" else tuple(map(str, config.gpu_ids))
    if config.gpu_ids == "all":
        if config.device != "auto" and not visible:
            raise LaunchError(
                "no GPU is visible",
                got=f"device={config.device}",
                fix="Check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or compute on the CPU with --cpu.",
            )
        return visible if ":" not in config.device else ()
    if max(config.gpu_ids) >= len(visible):
        raise LaunchError(
            "there is no such GPU",
            expected=f"ids from 0 to {len(visible) - 1}" if visible else "a machine with a visible GPU",
            got=f"gpu_ids={to_text(config.gpu_ids)} and {len(visible)} visible GPUs",
            fix="Ids count the GPUs that CUDA_VISIBLE_DEVICES leaves visible, from 0.",
        )
    return tuple(visible[index] for index in config.gpu_ids)


def _memory_nodes(
    config: LaunchConfig, environ: Mapping[str, str], machine: Machine, gpus: tuple[str, ...]
) -> tuple[int | None, ...]:
    """Return the memory node of each process's accelerator, one for all if they share it; empty if they use none."""
    known = None if machine.gpus is None else len(machine.gpus)
    visible = visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"), known)
    if config.device == "cpu" or (config.device == "auto" and visible == () and not machine.tpu_chips):
        return ()
    if config.device.startswith("cuda:"):
        gpus = (visible or ())[int(config.device.partition(":")[2]) :][:1]
    by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return memory_nodes_of(gpus, machine.gpus or (), by_bus=by_bus) or (None,)


def _count(config: LaunchConfig, gpus: tuple[str, ...]) -> int:
    if config.nproc_per_node == "auto":
        return max(1, len(gpus))
    if gpus and config.nproc_per_node > len(gpus):
        raise LaunchError(
            "there are more processes than GPUs",
            expected=f"at most {len(gpus)}",
            got=f"nproc_per_node={config.nproc_per_node}",
            fix=f"Start {len(gpus)}, or compute on the CPU with --cpu.",
        )
    return config.nproc_per_node


def _shared(config: LaunchConfig, environ: Mapping[str, str], gpus: tuple[str, ...]) -> dict[str, str]:
    settled = {COLUMNS_VARIABLE, *(field.variable for field in FIELDS)}.union(
        TORCHRUN_VARIABLES
    )  # so that no launch inside follows them
    shared = {name: value for name, value in environ.items() if not name.startswith(_FOREIGN) and name not in settled}
    for field in SETTINGS:
        value = getattr(config, field.name)
        if value != field.default:
            shared[field.variable] = to_text(value)
    if config.gpu_ids != "all":
        shared["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if config.threads_per_process != "auto":
        shared["OMP_NUM_THREADS"] = str(config.threads_per_process)
    return shared


def _without_peers(machine: Machine, count: int) -> dict[str, str]:
    """Return the variables by which NCCL does without peer-to-peer copies, where several ranks' GPUs have none."""
    needed = count > 1 and any(_NO_PEERS in gpu.name for gpu in machine.gpus or ())
    return {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"} if needed else {}


def _variables(config: LaunchConfig, local_rank: int, count: int, position: HostPosition, port: int) -> dict[str, str]:
    before, of_role = position.count_role(config.role)
    named = {"TORCHELASTIC_RUN_ID": config.rdzv_id} if config.rdzv_id else {}
    return named | {
        "RANK": str(position.node_rank * count + local_rank),
        "WORLD_SIZE": str(position.num_nodes * count),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(count),
        "NODE_RANK": str(position.node_rank),
        "GROUP_RANK": str(position.node_rank),
        "GROUP_WORLD_SIZE": str(position.num_nodes),
        "ROLE_NAME": config.role,
        "ROLE_RANK": str(before * count + local_rank),
        "ROLE_WORLD_SIZE": str(of_role * count),
        "MASTER_ADDR": position.master_addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(position.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        # Python writes to a pipe in blocks, and a crash would lose the last one.
        "PYTHONUNBUFFERED": "1",
    }
