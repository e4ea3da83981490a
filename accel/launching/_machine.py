# SPDX-License-Identifier: Apache-2.0
"""Cores, GPUs and TPU chips of this machine, read without torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from accel.launching._cores import read_memory_node, read_memory_nodes
from accel.launching._tpu import count_chips

_OTHER_GPUS = ("/dev/kfd", "/dev/dxg", "/dev/nvhost-gpu")  # of AMD, below Windows, on a Jetson
_SYS = Path("/sys")


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """An NVIDIA GPU.

    Attributes:
        name: model name.
        generation: the first number of its compute capability, 8 for Ampere and 9 for Hopper.
        uuid: name of this one GPU, "GPU-..."; empty if unknown.
        memory_node: memory node that it belongs to; None if unknown.
    """

    name: str
    generation: int
    uuid: str = ""
    memory_node: int | None = None


class _PciInfo(ctypes.Structure):
    """NVML's record nvmlPciInfo_t."""

    _fields_ = (
        ("legacy_bus_id", ctypes.c_char * 16),
        ("numbers", ctypes.c_uint * 5),
        ("bus_id", ctypes.c_char * 32),
    )


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that processes on this machine share.

    Attributes:
        cores: CPU cores that this process may use.
        gpus: GPUs of NVIDIA's driver; None where there are GPUs of another vendor, which cannot be counted.
        tpu_chips: number of TPU chips that are one XLA device each.
        memory_nodes: those cores by memory node, each as the numbers of its hardware threads; empty if unknown.
    """

    cores: int
    gpus: tuple[Gpu, ...] | None = ()
    memory_nodes: dict[int, tuple[tuple[int, ...], ...]] = {}
    tpu_chips: int = 0


def read_machine(sys: Path = _SYS) -> Machine:
    """Read the resources of this machine: usable cores, GPUs of NVIDIA's driver, TPU chips.

    Args:
        sys: the folder in which Linux lists them.
    """
    try:
        gpus = read_gpus(ctypes.CDLL("libnvidia-ml.so.1"), sys)
    except OSError:
        gpus = None if any(map(os.path.exists, _OTHER_GPUS)) else ()
    usable = os.sched_getaffinity(0)
    nodes = read_memory_nodes(usable, sys)
    return Machine(cores=len(usable), gpus=gpus, memory_nodes=nodes, tpu_chips=count_chips())


def read_gpus(nvml: Any, sys: Path = _SYS) -> tuple[Gpu, ...]:
    """Ask NVIDIA's management library, https://docs.nvidia.com/deploy/nvml-api, for its GPUs."""
    with _opened(nvml) as usable:
        count = ctypes.c_uint()
        if not usable or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return ()
        return tuple(_read_gpu(nvml, index, sys) for index in range(count.value))


def memory_nodes_of(names: Sequence[str], gpus: Sequence[Gpu], *, by_bus: bool) -> tuple[int | None, ...]:
    """Return the memory node of each GPU, None if unknown.

    Args:
        names: names of GPUs as `visible_gpus` returns them.
        gpus: the machine's, in the order of the bus.
        by_bus: whether CUDA counts them in that order; else its fastest come first, and cards of several models have no
            known order.
    """
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
    """Return the GPUs that CUDA shows to a process, as CUDA_VISIBLE_DEVICES names them.

    Like CUDA, it stops at the first invalid index. A name that begins with letters is not checked.

    Args:
        variable: the value of CUDA_VISIBLE_DEVICES; None if it is not set.
        count: number of GPUs; None if unknown.

    Returns:
        The names; None if unknown.
    """
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
