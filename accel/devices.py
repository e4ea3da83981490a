# SPDX-License-Identifier: Apache-2.0
"""Kinds of devices: the one place that knows how they differ; everything else asks it about a torch device.

torch names one accelerator a machine, `torch.accelerator`, whatever its vendor: cuda (of AMD too), xpu, mps, and those
that packages register, such as npu, hpu or mlu. A kind without an entry below is taken to do what CUDA does, through
the module that torch has for it, `torch.get_device_module`.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from accel import xla
from accel.errors import DeviceError

NEWEST_TORCH = "2.14.1"  # the newest on which all tests pass; docs/torch-versions.md has the others


def untried_torch(version: str = torch.__version__) -> str:
    """Return a remark on a torch that is newer than those that accel's tests ran on; "" for another. Pure."""
    if _numbers(version) <= _numbers(NEWEST_TORCH):
        return ""
    return f"newer than {NEWEST_TORCH}, the newest that accel's tests ran on: see docs/torch-versions.md"


def _numbers(version: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", version)[:3]]


class DeviceKind(msgspec.Struct, frozen=True):
    """Abilities of the devices of a kind."""

    float64: bool = True  # whether they compute in float64
    numbered: bool = True  # whether a machine may have several, distinguished by numbers
    counts_memory: bool = True  # whether torch counts the bytes that tensors take there
    backend: str = ""  # c10d backend for their tensors; "" for that which torch or the vendor's package registers


_OTHER = DeviceKind()
_KINDS = {
    "cpu": DeviceKind(numbered=False, counts_memory=False, backend="gloo"),
    "mps": DeviceKind(float64=False, numbered=False, counts_memory=False, backend="gloo"),
    "xla": DeviceKind(float64=False, counts_memory=False, backend=xla.BACKEND),
}


def kind_of_device(device: torch.device | str) -> DeviceKind:
    """Return the abilities of devices of this kind, given a device or a type such as "mps"."""
    return _KINDS.get(device if isinstance(device, str) else device.type, _OTHER)


def find_accelerator() -> str:
    """Return the type of this machine's accelerator, "cpu" if it has none that works."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def count_devices(device_type: str) -> int:
    """Return the number of visible devices of a type; 0 if torch knows none of it."""
    try:
        module: Any = torch.get_device_module(device_type)
    except (RuntimeError, ImportError):  # the latter for a kind that torch names and a package brings
        return 0
    return int(module.device_count()) if hasattr(module, "device_count") else 0


def select_device(device: torch.device) -> None:
    """Make a device the current one of its kind, where a kind has several. Mutates torch's choice for this thread."""
    if device.type == "xla" or not kind_of_device(device).numbered:
        return
    module: Any = torch.get_device_module(device)
    if hasattr(module, "set_device"):
        module.set_device(device)


def backend_of(device: torch.device) -> str:
    """Return the c10d backend for tensors on a device: gloo where none is registered."""
    known = kind_of_device(device).backend
    if known:
        return known
    try:
        return dist.get_default_backend_for_device(device)
    except ValueError:
        return "gloo"


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on devices without it."""
    return torch.float64 if kind_of_device(device).float64 else torch.float32


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype in which autocast computes products on a kind of device; None where it is off.

    It is off for "meta", for which `torch.is_autocast_enabled` raises. torch.compile traces this function.
    """
    is_on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else None


def as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the dtype in which autocast computes products, where it is on; float64 stays, as in torch."""
    dtype = autocast_dtype(tensor.device.type)
    return tensor if dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)


def wait_for_device(device: torch.device) -> None:
    """Return once the device has done all its work; at once on the CPU and on XLA, which works when it is read."""
    if device.type not in ("cpu", "xla"):
        torch.accelerator.synchronize(device)


def name_of_device(device: torch.device) -> str:
    """Return the model's name, as "NVIDIA H100 80GB HBM3"; the device's type where torch does not know it."""
    module: Any = torch.get_device_module(device) if device.type not in ("cpu", "xla") else None
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that tensors have taken on a device; 0 where torch does not count them."""
    if not kind_of_device(device).counts_memory:
        return 0
    try:
        return torch.accelerator.max_memory_allocated(device)
    except (RuntimeError, NotImplementedError):  # a backend without counts
        return 0


def free_memory(device: torch.device) -> int:
    """Return the bytes that tensors can still take on an accelerator; what torch has cached counts as free.

    Raises:
        RuntimeError, ValueError, AssertionError, NotImplementedError: the backend does not report it.
    """
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    free, _ = torch.accelerator.get_memory_info(device)
    return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)


def get_random_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's random stream, as bytes on the CPU; `DeviceError` if its kind gives none."""
    if device.type == "xla":
        return torch.frombuffer(bytearray(xla.get_random_state(str(device))), dtype=torch.uint8)
    module = _with_streams(device)
    return module.get_rng_state(device) if kind_of_device(device).numbered else module.get_rng_state()


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of a device's random stream; `DeviceError` if its kind takes none. Mutates it."""
    if device.type == "xla":
        xla.set_random_state(str(device), bytes(state.numpy()))
        return
    module = _with_streams(device)
    module.set_rng_state(state, device) if kind_of_device(device).numbered else module.set_rng_state(state)


def seed_device(device: torch.device, seed: int) -> None:
    """Seed a device's random stream; `DeviceError` if its kind takes no state. Mutates it."""
    if device.type == "xla":
        xla.set_random_state(str(device), seed.to_bytes(xla.STATE_BYTES, "little"))
    else:
        set_random_state(device, torch.Generator(device).manual_seed(seed).get_state())


def _with_streams(device: torch.device) -> Any:
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "get_rng_state") or not hasattr(module, "set_rng_state"):
        raise DeviceError(
            "this kind of device does not give its random stream",
            expected="cuda, xla, xpu, mps or another with get_rng_state",
            got=str(device),
            where="random streams",
        )
    return module
