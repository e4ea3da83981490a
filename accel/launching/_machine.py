# SPDX-License-Identifier: Apache-2.0
"""Cores, GPUs and TPU chips of this machine, read without torch."""

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
    """An NVIDIA GPU.

    Attributes:
        name: model name.
        generation: the first number of its compute capability, 8 for Ampere and 9 for Hopper.
    """

    name: str
    generation: int


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that processes on this machine share.

    Attributes:
        cores: CPU cores that this process may use.
        gpus: GPUs of NVIDIA's driver; None where there are GPUs of another vendor, which cannot be counted.
        tpu_chips: number of TPU chips that are one XLA device each.
        core_ids: numbers of those cores, grouped by memory node; empty if unknown.
    """

    cores: int
    gpus: tuple[Gpu, ...] | None = ()
    core_ids: tuple[int, ...] = ()
    tpu_chips: int = 0


def read_machine() -> Machine:
    """Read the resources of this machine: usable cores, GPUs of NVIDIA's driver, TPU chips."""
    try:
        gpus = read_gpus(ctypes.CDLL("libnvidia-ml.so.1"))
    except OSError:
        gpus = None if any(map(os.path.exists, _OTHER_GPUS)) else ()
    usable = os.sched_getaffinity(0)
    core_ids = order_cores(usable, _read_nodes())
    return Machine(cores=len(usable), gpus=gpus, core_ids=core_ids, tpu_chips=count_chips())


def order_cores(usable: Collection[int], nodes: Iterable[str]) -> tuple[int, ...]:
    """Return cores grouped by memory node.

    Args:
        usable: numbers of the cores.
        nodes: cores of each node as Linux lists them, such as "0-3,8-11"; empty if unknown.
    """
    listed: list[int] = []
    for text in nodes:
        for part in filter(None, text.strip().split(",")):
            first, _, last = part.partition("-")
            listed += range(int(first), int(last or first) + 1)
    known = [core for core in dict.fromkeys(listed) if core in usable]
    return (*known, *sorted(set(usable) - set(known)))


def read_gpus(nvml: Any) -> tuple[Gpu, ...]:
    """Ask NVIDIA's management library, https://docs.nvidia.com/deploy/nvml-api, for its GPUs."""
    with _opened(nvml) as usable:
        count = ctypes.c_uint()
        if not usable or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return ()
        return tuple(_read_gpu(nvml, index) for index in range(count.value))


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


def _read_nodes() -> list[str]:
    """Return the cores of each memory node from /sys; empty where it lists none."""
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
    handle = ctypes.c_void_p()
    name = ctypes.create_string_buffer(96)
    major = ctypes.c_int()
    minor = ctypes.c_int()
    # A call that fails leaves its result empty: the GPU counts, and nothing more is known of it.
    nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return Gpu(name=name.value.decode(errors="replace") or "GPU", generation=major.value)
