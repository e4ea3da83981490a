# SPDX-License-Identifier: Apache-2.0
"""What this machine has to start processes on, learnt without torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection, Generator, Iterable
from pathlib import Path
from typing import Any

import msgspec

from accel.launching._tpu import count_chips

_OTHER_GPUS = ("/dev/kfd", "/dev/dxg", "/dev/nvhost-gpu")  # of AMD, below Windows, on a Jetson


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of NVIDIA's.

    Attributes:
        name: its model.
        generation: the first number of its compute capability, 8 for Ampere and 9 for Hopper.
    """

    name: str
    generation: int


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What processes on this machine share.

    Attributes:
        cores: CPU cores that this process may use.
        gpus: the GPUs that NVIDIA's driver knows; None where GPUs are of a kind that nobody here can count.
        tpu_chips: the TPU chips that are one device of XLA's each.
        core_ids: those cores by their numbers, those that share memory beside each other; empty if nobody looked.
    """

    cores: int
    gpus: tuple[Gpu, ...] | None = ()
    core_ids: tuple[int, ...] = ()
    tpu_chips: int = 0


def read_machine() -> Machine:
    """Look at this machine: its usable cores, and the GPUs of NVIDIA's driver."""
    try:
        gpus = read_gpus(ctypes.CDLL("libnvidia-ml.so.1"))
    except OSError:
        gpus = None if any(map(os.path.exists, _OTHER_GPUS)) else ()
    usable = os.sched_getaffinity(0)
    core_ids = order_cores(usable, _read_nodes())
    return Machine(cores=len(usable), gpus=gpus, core_ids=core_ids, tpu_chips=count_chips())


def order_cores(usable: Collection[int], nodes: Iterable[str]) -> tuple[int, ...]:
    """Return cores so that those of one memory node stand together.

    Args:
        usable: the cores, by number.
        nodes: each node's cores as Linux lists them, such as "0-3,8-11"; none if nobody knows.
    """
    listed: list[int] = []
    for text in nodes:
        for part in filter(None, text.strip().split(",")):
            first, _, last = part.partition("-")
            listed += range(int(first), int(last or first) + 1)
    known = [core for core in dict.fromkeys(listed) if core in usable]
    return (*known, *sorted(set(usable) - set(known)))


def read_gpus(nvml: Any) -> tuple[Gpu, ...]:
    """Ask NVIDIA's management library, https://docs.nvidia.com/deploy/nvml-api, which GPUs there are."""
    with _opened(nvml) as usable:
        count = ctypes.c_uint()
        if not usable or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return ()
        return tuple(_read_gpu(nvml, index) for index in range(count.value))


def visible_gpus(variable: str | None, count: int | None) -> tuple[str, ...] | None:
    """Return what CUDA shows a process of the GPUs, each as CUDA_VISIBLE_DEVICES names it.

    Like CUDA, it stops at the first name that is none. A name that begins with letters is taken as it is.

    Args:
        variable: the value of CUDA_VISIBLE_DEVICES; None if it is not set.
        count: how many GPUs there are; None if nobody knows.

    Returns:
        The names; None if nobody knows them.
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


def _read_nodes() -> list[str]:
    """Return what /sys says of memory nodes' cores; nothing where it says nothing."""
    found = Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")
    return [path.read_text() for path in sorted(found, key=lambda path: int(path.parent.name[4:]))]


@contextlib.contextmanager
def _opened(nvml: Any) -> Generator[bool]:
    usable = nvml.nvmlInit_v2() == 0
    try:
        yield usable
    finally:
        if usable:
            nvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int) -> Gpu:
    handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    major, minor = ctypes.c_int(), ctypes.c_int()
    # A call that fails leaves its result empty: the GPU counts, and nothing more is known of it.
    nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return Gpu(name=name.value.decode(errors="replace") or "GPU", generation=major.value)
