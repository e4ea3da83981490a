# SPDX-License-Identifier: Apache-2.0
"""Each launcher's variables as a place in the job. Every function is pure, and returns None for another's variables."""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, cast

import msgspec

from accel.env._launch_env import LaunchEnv, below, integer
from accel.errors import EnvError

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_FIRST = re.compile(r"((?:[^\[\],\s]|\[[^\]]*\])+)(,|$)")
_RANGE = re.compile(r"\[(\d+)[^\]]*\]")


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node: "2(x3),1" is [2, 2, 2, 1]. Raises `EnvError` for another text."""
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None:
            where = "SLURM_STEP_TASKS_PER_NODE"
            raise EnvError(
                "the list of tasks per node is not valid", expected="such as 2(x3),1", got=repr(text), where=where
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(text: str) -> str:
    """Return the first host of a list: of "n[08-10,12],login" it is "n08". Raises `EnvError` for another text."""
    first = _FIRST.match(text)
    host = _RANGE.sub(r"\1", first[1]) if first else ""
    if not host or "[" in host:
        wanted = "such as n[08-10,12],login"
        raise EnvError("the list of hosts is not valid", expected=wanted, got=repr(text), where="SLURM_STEP_NODELIST")
    return host


class TpuPod(NamedTuple):
    """This host among the hosts of a slice of TPUs."""

    worker: int  # number of this host
    hosts: tuple[str, ...]  # names of all hosts, in order of their numbers


def pod_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of the slice of TPUs that this machine belongs to; none where no variable names them."""
    return tuple(_host(name) for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip())


def read_pod(environ: Mapping[str, str]) -> TpuPod | None:
    """Return the position among several TPU hosts, or raise `EnvError` for a host without a number; None for a host
    alone, or without variables."""
    hosts = pod_hosts(environ)
    if len(hosts) < 2:
        return None
    worker = integer(environ, "TPU_WORKER_ID", related=("TPU_WORKER_HOSTNAMES",))
    below("TPU_WORKER_ID", worker, "the hosts in TPU_WORKER_HOSTNAMES", len(hosts))
    return TpuPod(worker, hosts)


def process_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the host of each process that `torch_xla.launch` has started; none for other processes.

    Raises `EnvError` where processes do not fill one host after another, or hosts have different numbers of them.
    """
    if "CLOUD_TPU_TASK_ID" not in environ:
        return []
    hosts = [_host(each) for each in environ.get("TPU_PROCESS_ADDRESSES", "").split(",") if each.strip()]
    local = hosts.count(hosts[0]) if hosts else 1
    if len(hosts) % local or hosts != [hosts[at] for at in range(0, len(hosts), local) for _ in range(local)]:
        raise EnvError(
            "the processes do not fill one host after another, as many on each",
            got=f"TPU_PROCESS_ADDRESSES={environ['TPU_PROCESS_ADDRESSES']}",
            where="the environment",
            fix="Let `accel launch --device xla` or torch_xla.launch start them, on every host.",
        )
    return hosts


def _host(address: str) -> str:
    """Return a host's name or number without the port behind it."""
    host, separator, port = address.strip().rpartition(":")
    if not separator or not port.isdecimal() or (":" in host and not host.startswith("[")):  # or IPv6 without a port
        return address.strip()
    return host.strip("[]")


_PORT = 29500
_LOCALHOST = "127.0.0.1"
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
_SET_ADDRESS = "Set MASTER_ADDR to the host of rank 0."


class _Names(NamedTuple):
    """An MPI's names of a process's place."""

    launcher: Literal["openmpi", "mpich", "mvapich"]
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    job: str = ""  # a variable that all ranks of a job share, and no other job has


_OPEN_MPI = _Names(
    "openmpi",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE",
)
_MVAPICH = _Names(
    "mvapich",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)
# with Intel's, which alone names the job
_MPICH = _Names("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "I_MPI_HYDRA_UUID")


def find_place(environ: Mapping[str, str]) -> LaunchEnv | None:
    """Return this process's place by the first launcher that left its variables; None if none did.

    Incomplete, contradictory or invalid variables are an `EnvError`.
    """
    return (
        _kubernetes(environ)
        or _torchrun(environ)
        or _mpi(environ, _OPEN_MPI)  # before Slurm, which sees an MPI's daemons and not its ranks
        or _mpi(environ, _MVAPICH)
        or _mpi(environ, _MPICH)
        or _slurm(environ)
        or _sagemaker(environ)
        or _torch_xla(environ)
    )


def check_unplaced(environ: Mapping[str, str]) -> None:
    """Raise `EnvError` for a rank with an unknown place on its host: it would run as rank 0 of 1.

    That is where an MPI names a rank or a number of ranks above one, and not the rank's place on its host.
    """
    for names in (_OPEN_MPI, _MVAPICH, _MPICH):
        present = [name for name in (names.rank, names.world_size) if name in environ]
        if present and environ.get(names.world_size, "").strip() != "1":
            wanted = (names.rank, names.world_size, names.local_rank, names.local_world_size)
            raise EnvError(
                "the launcher's variables are incomplete",
                expected=", ".join(wanted),
                got=f"{', '.join(present)} without {', '.join(name for name in wanted if name not in environ)}",
                where="the environment",
                fix="Let the launcher set the missing ones, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; "
                f"for a single process, unset {', '.join(present)}.",
            )


def _torchrun(environ: Mapping[str, str]) -> LaunchEnv | None:
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    rank, world_size = _position(environ, "RANK", "WORLD_SIZE", related=_TORCHRUN)
    local_world_size = integer(environ, "LOCAL_WORLD_SIZE", least=1, default=world_size)
    num_nodes = _nodes(world_size, local_world_size, "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    local_rank = integer(environ, "LOCAL_RANK", default=rank % local_world_size)
    below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    node_rank = integer(environ, "GROUP_RANK", default=rank // local_world_size)
    below("GROUP_RANK", node_rank, "the number of nodes", num_nodes)
    place = _place(rank, world_size, local_world_size, local_rank=local_rank, node_rank=node_rank)
    fix = "Start the script with `accel launch` or `torchrun`."
    return _with_address(environ, place, "torchrun", fix=fix, port=None)


def _mpi(environ: Mapping[str, str], names: _Names) -> LaunchEnv | None:
    # Slurm sets variables of PMI, too, but its own have more.
    if names.rank not in environ or names.local_rank not in environ:
        return None
    related = (names.rank, names.local_rank)
    rank, world_size = _position(environ, names.rank, names.world_size, related=related)
    local_rank, local_world_size = _position(environ, names.local_rank, names.local_world_size, related=related)
    num_nodes = _nodes(world_size, local_world_size, names.local_world_size, names.world_size)
    if rank % local_world_size != local_rank:
        raise EnvError(
            "ranks do not fill one host after another",
            expected=f"{names.local_rank}={rank % local_world_size} for {names.rank}={rank}",
            got=f"{names.local_rank}={local_rank}",
            where="the environment",
            fix="Let mpirun place them so, with `--map-by slot` or `-ppn`.",
        )
    fix = "Tell all ranks the host of rank 0, such as by `mpirun -x MASTER_ADDR=node0` or `-env MASTER_ADDR node0`."
    place = _place(rank, world_size, local_world_size)
    found = _LOCALHOST if num_nodes == 1 else ""
    return _with_address(
        environ, place, names.launcher, fix=fix, found=found, port=_port_of(environ.get(names.job, ""))
    )


def _slurm(environ: Mapping[str, str]) -> LaunchEnv | None:
    # A batch script has all of them but the step's: it is no rank, whatever the value of SLURM_PROCID.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    related = ("SLURM_PROCID", "SLURM_STEP_ID")
    rank, world_size = _position(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", related=related)
    node_rank, num_nodes = _position(environ, "SLURM_NODEID", "SLURM_STEP_NUM_NODES", related=related)
    counts = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if counts != [world_size // num_nodes] * num_nodes:
        raise EnvError(
            "the processes do not divide into equal nodes",
            expected=f"as many of the {world_size} on each of {num_nodes} nodes",
            got=f"SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE', '')}",
            where="the environment",
            fix="Start as many on every node: `srun --ntasks-per-node`.",
        )
    local_rank = integer(environ, "SLURM_LOCALID", related=related)
    below("SLURM_LOCALID", local_rank, "the tasks of a node", counts[0])
    first = first_host(environ.get("SLURM_STEP_NODELIST", "")) if num_nodes > 1 else _LOCALHOST
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    place = _place(rank, world_size, counts[0], local_rank=local_rank, node_rank=node_rank)
    return _with_address(environ, place, "slurm", found=first, port=_port_of(job))


def _kubernetes(environ: Mapping[str, str]) -> LaunchEnv | None:
    # Kubeflow's operator counts pods where torchrun counts processes.
    if "PET_NNODES" not in environ or "RANK" not in environ or {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & environ.keys():
        return None
    per_pod = environ.get("PET_NPROC_PER_NODE", "1")
    if per_pod.isdecimal() and int(per_pod) != 1:
        raise EnvError(
            "one of this pod's processes has no rank",
            got=f"PET_NPROC_PER_NODE={per_pod}",
            where="the environment",
            fix="Let the pod's command be `torchrun train.py` or `accel launch`, or set nprocPerNode to 1.",
        )
    rank, world_size = _position(environ, "RANK", "WORLD_SIZE", related=_TORCHRUN)
    return _with_address(environ, _place(rank, world_size, 1), "kubernetes")


def _sagemaker(environ: Mapping[str, str]) -> LaunchEnv | None:
    if "SM_HOSTS" not in environ or "SM_CURRENT_HOST" not in environ:
        return None
    try:
        hosts = json.loads(environ["SM_HOSTS"])
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or environ["SM_CURRENT_HOST"] not in hosts:
        raise EnvError(
            "this host is not in the job",
            expected="SM_CURRENT_HOST in the JSON list SM_HOSTS",
            got=f"{environ['SM_CURRENT_HOST']} and {environ['SM_HOSTS']}",
            where="the environment",
        )
    named = sorted(map(str, cast(list[object], hosts)))  # in the same order everywhere
    place = _place(named.index(environ["SM_CURRENT_HOST"]), len(named), 1)
    return _with_address(environ, place, "sagemaker", found=named[0])


def _torch_xla(environ: Mapping[str, str]) -> LaunchEnv | None:
    hosts = process_hosts(environ)
    if not hosts:
        return None
    rank = integer(environ, "CLOUD_TPU_TASK_ID")
    below("CLOUD_TPU_TASK_ID", rank, "the processes in TPU_PROCESS_ADDRESSES", len(hosts))
    place = _place(rank, len(hosts), hosts.count(hosts[rank]))
    return _with_address(environ, place, "torch_xla", found=hosts[0])


def _position(environ: Mapping[str, str], name: str, count_name: str, *, related: Sequence[str]) -> tuple[int, int]:
    """Return a position and the number of positions, which must be above it."""
    at = integer(environ, name, related=related)
    count = integer(environ, count_name, least=1, related=related)
    below(name, at, count_name, count)
    return at, count


def _place(
    rank: int,
    world_size: int,
    local_world_size: int,
    *,
    local_rank: int | None = None,
    node_rank: int | None = None,
) -> LaunchEnv:
    """Return a place without an address; by default ranks fill one host after another."""
    return LaunchEnv(
        rank=rank,
        world_size=world_size,
        local_rank=rank % local_world_size if local_rank is None else local_rank,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size if node_rank is None else node_rank,
        num_nodes=world_size // local_world_size,
    )


def _nodes(world_size: int, local_world_size: int, local_name: str, name: str) -> int:
    if world_size % local_world_size:
        raise EnvError(
            "the processes do not divide into equal nodes",
            expected=f"a {local_name} that divides {name}={world_size}",
            got=f"{local_name}={local_world_size}",
            where="the environment",
            fix="Start as many processes on every node.",
        )
    return world_size // local_world_size


def _with_address(
    environ: Mapping[str, str],
    place: LaunchEnv,
    launcher: str,
    *,
    fix: str = _SET_ADDRESS,
    found: str = "",
    port: int | None = _PORT,
) -> LaunchEnv:
    """Return a launcher's place with the address of rank 0, by default `found` and `port`; one process needs none."""
    place = msgspec.structs.replace(place, launcher=launcher)
    if place.world_size == 1:
        return place
    address = environ.get("MASTER_ADDR") or found
    if not address:
        raise EnvError(
            "the address of rank 0 is unknown",
            expected=f"MASTER_ADDR for {place.world_size} processes",
            got="no MASTER_ADDR",
            where="the environment",
            fix=fix,
        )
    port = integer(environ, "MASTER_PORT", least=1, most=65535, default=port, related=_TORCHRUN)
    return msgspec.structs.replace(place, master_addr=address, master_port=port)


def _port_of(job: str) -> int:
    """Return a port that two jobs on a host are unlikely to share."""
    return 20000 + zlib.crc32(job.encode()) % 10000 if job else _PORT


_SLURM = "SLURM_STEP_NUM_TASKS"
_COUNTS = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")


class Tasks(NamedTuple):
    """Processes that run the same command."""

    variable: str  # the variable that shows it, with its value
    number: int  # number of processes
    first_host: str = ""  # host of the first; empty if unknown


def read_tasks(environ: Mapping[str, str]) -> Tasks | None:
    """Return the processes that Slurm, an MPI or SageMaker has started with this one; None if it is alone.

    A rank is alone: its own children belong to it. So is a batch script, which has its job's variables, and no step's.
    """
    if "RANK" in environ:
        return None
    if "SLURM_STEP_ID" in environ and (count := _count(environ, _SLURM)) > 1:
        with contextlib.suppress(EnvError):
            return Tasks(f"{_SLURM}={count}", count, first_host(environ.get("SLURM_STEP_NODELIST", "")))
        return Tasks(f"{_SLURM}={count}", count)
    for name in _COUNTS:
        if (count := _count(environ, name)) > 1:
            return Tasks(f"{name}={count}", count)
    with contextlib.suppress(ValueError, TypeError):
        hosts = sorted(map(str, json.loads(environ.get("SM_HOSTS", "[]"))))
        return Tasks(f"SM_HOSTS={environ['SM_HOSTS']}", len(hosts), hosts[0]) if len(hosts) > 1 else None
    return None


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 1
