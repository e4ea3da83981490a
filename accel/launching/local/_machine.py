# SPDX-License-Identifier: Apache-2.0
"""Cores, GPUs and TPU chips of this machine, read without torch, and the cores of each process near its GPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from accel.config import LaunchConfig
from accel.config._resolve import Resolved
from accel.env import read_pod
from accel.errors import LaunchError

_NO_NODE = -1  # Linux's own number for "no node"

# Cores of each memory node; a core is the numbers of its hardware threads.
MemoryNodes = Mapping[int, tuple[tuple[int, ...], ...]]


class Binding(NamedTuple):
    """The cores that each process is bound to."""

    cores: tuple[tuple[int, ...], ...]  # numbers of the hardware threads of each process; empty for all
    unbound: str = ""  # reason why no process is bound; empty if they are


def bind_processes(count: int, nodes: MemoryNodes, near: Sequence[int | None] = ()) -> Binding:
    """Choose the cores of each process, given the memory node of its GPU: of all processes or of none.

    Processes at one memory node share its cores evenly; those without a GPU share all cores, node after node."""
    if not any(nodes.values()):
        return Binding(((),) * count, "the system does not list its cores")
    if len(nodes) == 1 or not near:
        every = [core for cores in nodes.values() for core in cores]
        return Binding(tuple(share_cores(every, each, count) for each in range(count)))
    shares: list[tuple[int, ...]] = []
    for local_rank, node in enumerate(near):
        if node is None:
            return Binding(
                ((),) * count, f"the system does not report the memory node of local rank {local_rank}'s GPU"
            )
        if not nodes.get(node):
            reason = f"no core of memory node {node}, where local rank {local_rank}'s GPU is, may be used"
            return Binding(((),) * count, reason)
        sharing = [other for other, its_node in enumerate(near) if its_node == node]
        shares.append(share_cores(nodes[node], sharing.index(local_rank), len(sharing)))
    return Binding(tuple(shares))


def share_cores(cores: Sequence[tuple[int, ...]], part: int, count: int) -> tuple[int, ...]:
    """Return one part of the cores, in one piece, as numbers of hardware threads.

    Parts share a core only if there are fewer cores than parts, and a thread only if there are fewer of those."""
    if len(cores) < count:
        cores = [(thread,) for core in cores for thread in core]
    if len(cores) < count:
        return cores[part % len(cores)]
    each, extra = divmod(len(cores), count)
    start = part * each + min(part, extra)
    return tuple(thread for core in cores[start : start + each + (part < extra)] for thread in core)


def describe_cores(cores: Collection[int]) -> str:
    """Return core numbers as Linux lists them: "0-3,8"."""
    pieces: list[list[int]] = []
    for core in sorted(cores):
        if pieces and core == pieces[-1][-1] + 1:
            pieces[-1].append(core)
        else:
            pieces.append([core])
    return ",".join(str(piece[0]) if len(piece) == 1 else f"{piece[0]}-{piece[-1]}" for piece in pieces)


def list_cores(text: str) -> list[int]:
    """Return the numbers in a list of cores as Linux writes it: "0-3,8"."""
    listed: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        listed += range(int(first), int(last or first) + 1)
    return listed


def read_memory_nodes(usable: Collection[int], sys: Path) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Read the usable cores of each memory node; one node has all of them where the system lists no nodes."""
    left = set(usable)
    nodes: dict[int, tuple[tuple[int, ...], ...]] = {}
    listed = {int(path.name[4:]): path for path in sys.glob("devices/system/node/node[0-9]*")}
    for node, path in sorted(listed.items()):
        if found := _cores_among(_read_list(path / "cpulist"), left, sys):
            nodes[node] = found
    if rest := _cores_among(sorted(left), left, sys):
        nodes[_NO_NODE] = rest
    return nodes


def read_memory_node(bus_id: str, sys: Path) -> int | None:
    """Read the memory node of the PCI device "DOMAIN:BUS:DEVICE.FUNCTION"; None if the system does not list it."""
    domain, colon, slot = bus_id.lower().partition(":")
    try:
        node = int((sys / f"bus/pci/devices/{int(domain, 16):04x}{colon}{slot}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node == _NO_NODE else node


def _cores_among(listed: Sequence[int], left: set[int], sys: Path) -> tuple[tuple[int, ...], ...]:
    """Take the listed threads out of those that are left, grouped by core."""
    cores: list[tuple[int, ...]] = []
    for thread in listed:
        if thread in left:
            siblings = _read_list(sys / f"devices/system/cpu/cpu{thread}/topology/thread_siblings_list")
            core = tuple(sorted({thread, *siblings} & left & {*listed}))
            left.difference_update(core)
            cores.append(core)
    return tuple(cores)


def _read_list(path: Path) -> list[int]:
    try:
        return list_cores(path.read_text())
    except (OSError, ValueError):
        return []


@contextlib.contextmanager
def bound(cores: Collection[int]) -> Generator[None]:
    """Bind this thread inside the block: a process that it starts there is bound from its first instruction."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    # A control group may have taken cores away since the plan: then the process runs unbound.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


_PORT = 29400  # torchrun's
_GOOGLE = "0x1ae0"
# v4, v5p, v5e and v6e, as jax/_src/hardware_utils.py names them; a chip of v2, v3 or v7 is two devices of XLA's
_CHIPS = ("0x005e", "0x0062", "0x0063", "0x006f")


def count_chips(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """Return the number of TPU chips of this machine that are one device each."""
    return sum(
        _read(device / "vendor") == _GOOGLE and _read(device / "device") in _CHIPS for device in _listed(devices)
    )


def on_pod(resolved: Resolved, environ: Mapping[str, str]) -> LaunchConfig:
    """Return a configuration with the hosts of this host's TPU slice, unless hosts are set already."""
    config, sources = resolved.config, resolved.sources
    is_set = any(sources[name].kind != "default" for name in ("nnodes", "node_rank", "rdzv_endpoint"))
    pod = read_pod(environ) if _on_xla(config) and not is_set else None
    if pod is None:
        return config
    # The port would else be read as the last part of an IPv6 address.
    first = f"[{pod.hosts[0]}]" if ":" in pod.hosts[0] else pod.hosts[0]
    return msgspec.structs.replace(
        config, nnodes=len(pod.hosts), node_rank=pod.worker, rdzv_endpoint=f"{first}:{_PORT}"
    )


def count_processes(config: LaunchConfig, chips: int) -> int | None:
    """Return the number of processes for a host's TPU chips, one for each or one alone; None without TPUs."""
    if not _on_xla(config) or not chips:
        return None
    if config.nproc_per_node == "auto":
        return chips
    if config.nproc_per_node != chips and (config.nproc_per_node > 1 or config.hosts[1] > 1):
        raise LaunchError(
            "TPUs take a process for each chip of every host",
            expected=f"nproc_per_node={chips} for {chips} chips",
            got=f"nproc_per_node={config.nproc_per_node}",
            fix="Leave it to nproc_per_node=auto.",
        )
    return config.nproc_per_node


def _on_xla(config: LaunchConfig) -> bool:
    return config.device.partition(":")[0] == "xla"


def _listed(folder: Path) -> Sequence[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else ()


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


_OTHER_GPUS = ("/dev/kfd", "/dev/dxg", "/dev/nvhost-gpu")  # of AMD, below Windows, on a Jetson
_SYS = Path("/sys")


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """An NVIDIA GPU."""

    name: str  # model name
    generation: int  # the first number of its compute capability, 8 for Ampere and 9 for Hopper
    uuid: str = ""  # name of this one GPU, "GPU-..."; empty if unknown
    memory_node: int | None = None  # memory node that it belongs to; None if unknown


class _PciInfo(ctypes.Structure):
    """NVML's record nvmlPciInfo_t."""

    _fields_ = (
        ("legacy_bus_id", ctypes.c_char * 16),
        ("numbers", ctypes.c_uint * 5),
        ("bus_id", ctypes.c_char * 32),
    )


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that processes on this machine share."""

    cores: int  # CPU cores that this process may use
    # GPUs of NVIDIA's driver; None where there are GPUs of another vendor, which cannot be counted.
    gpus: tuple[Gpu, ...] | None = ()
    # The cores by memory node, each as the numbers of its hardware threads; empty if unknown.
    memory_nodes: dict[int, tuple[tuple[int, ...], ...]] = {}
    tpu_chips: int = 0  # number of TPU chips that are one XLA device each


def read_machine() -> Machine:
    """Read the resources of this machine: usable cores, GPUs of NVIDIA's driver, TPU chips."""
    try:
        gpus = read_gpus(ctypes.CDLL("libnvidia-ml.so.1"))
    except OSError:
        # Unknown is not none: without a count, a given number of processes is taken as it is.
        gpus = None if any(map(os.path.exists, _OTHER_GPUS)) else ()
    # Not the number of CPUs: a scheduler or container leaves this process fewer.
    usable = os.sched_getaffinity(0)
    nodes = read_memory_nodes(usable, _SYS)
    return Machine(cores=len(usable), gpus=gpus, memory_nodes=nodes, tpu_chips=count_chips())


def read_gpus(nvml: Any, sys: Path = _SYS) -> tuple[Gpu, ...]:
    """Ask NVIDIA's management library, https://docs.nvidia.com/deploy/nvml-api, for its GPUs."""
    with _opened(nvml) as usable:
        count = ctypes.c_uint()
        if not usable or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return ()
        return tuple(_read_gpu(nvml, index, sys) for index in range(count.value))


def memory_nodes_of(names: Sequence[str], gpus: Sequence[Gpu], *, by_bus: bool) -> tuple[int | None, ...]:
    """Return the memory node of each named GPU, None if unknown; `by_bus` if CUDA counts GPUs in the bus's order."""
    # Else CUDA counts the fastest first, an order that is known only if all cards are of one model.
    counted = gpus if by_bus or len({gpu.name for gpu in gpus}) <= 1 else ()
    nodes: list[int | None] = []
    for name in names:
        if name.isdecimal():
            found = counted[int(name) : int(name) + 1]
        else:
            found = [gpu for gpu in gpus if gpu.uuid.startswith(name)]  # CUDA takes a beginning that is unique
        nodes.append(found[0].memory_node if len(found) == 1 else None)
    return tuple(nodes)


def visible_gpus(variable: str | None, count: int | None) -> tuple[str, ...] | None:
    """Return the GPUs that CUDA shows to a process, as CUDA_VISIBLE_DEVICES names them; None if unknown.

    Like CUDA, it stops at the first invalid index. A name that begins with letters is not checked."""
    if variable is None:
        return None if count is None else tuple(str(index) for index in range(count))
    shown: list[str] = []
    for name in variable.split(",") if count != 0 else ():
        name = name.strip()
        is_index = name.isdecimal() and (count is None or int(name) < count)
        if not (is_index or name.startswith(("GPU-", "MIG-"))):
            break
        shown.append(name)
    return tuple(shown)


@contextlib.contextmanager
def _opened(nvml: Any) -> Generator[bool]:
    usable = nvml.nvmlInit_v2() == 0
    try:
        yield usable
    finally:
        if usable:
            nvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int, sys: Path) -> Gpu:
    handle = ctypes.c_void_p()
    name = ctypes.create_string_buffer(96)
    major = ctypes.c_int()
    minor = ctypes.c_int()
    uuid = ctypes.create_string_buffer(96)
    pci = _PciInfo()
    # A call that fails leaves its result empty: the GPU counts, and nothing more is known of it.
    nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(len(uuid)))
    nvml.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci))
    return Gpu(
        name=name.value.decode(errors="replace") or "GPU",
        generation=major.value,
        uuid=uuid.value.decode(errors="replace"),
        memory_node=read_memory_node(pci.bus_id.decode(errors="replace"), sys),
    )
