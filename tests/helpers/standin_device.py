# SPDX-License-Identifier: Apache-2.0
"""A script: a device of another vendor, registered through torch's privateuse1 backend, is found and used by its table.

Registration is for the whole process, so a test runs this in a child. The device computes nothing; it records calls.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration


class Standin:
    """The module `torch.standin`."""

    def __init__(self) -> None:
        self.current = 0
        self.streams = {0: torch.zeros(4, dtype=torch.uint8), 1: torch.ones(4, dtype=torch.uint8)}

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        del seed

    def current_device(self) -> int:
        return self.current

    def device_count(self) -> int:
        return 2

    def set_device(self, device: torch.device) -> None:
        self.current = device.index

    def get_device_name(self, device: torch.device) -> str:
        return f"Standin {device.index}"

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.streams[device.index].clone()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.streams[device.index] = state.clone()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def main() -> None:
    module: Any = Standin()
    # torch's experimental way to register a device without C++; this script fails when torch changes it
    register: Any = vars(backend_registration)["_setup_privateuseone_for_python_backend"]
    register("standin", module)
    dist.Backend.register_backend("standccl", lambda *_: None, devices=["standin"])  # type: ignore[arg-type]

    from accel import devices, random
    from accel.context._make import choose_device
    from accel.env import LaunchEnv
    from accel.errors import DeviceError
    from accel.precision._fp8 import check_compute

    device = choose_device(None, LaunchEnv(local_rank=1))
    devices.select_device(device)
    found: dict[str, Any] = {
        "auto": str(device),
        "selected": module.current,
        "count": devices.count_devices("standin"),
        "backend": devices.backend_of(device),
        "name": devices.name_of_device(device),
        "wide": str(devices.wide_dtype(device)),
        "peak": devices.peak_memory(device),
    }
    state = random.capture_rng(device)
    module.streams[1] = torch.full((4,), 7, dtype=torch.uint8)
    random.restore_rng(state, device)
    found["stream"] = module.streams[1].tolist()
    for what, call in (
        ("third", lambda: choose_device(None, LaunchEnv(local_rank=2))),
        ("bf16", lambda: check_compute(device, "bf16")),
        ("fp16", lambda: check_compute(device, "fp16")),
    ):
        try:
            call()
            found[what] = ""
        except DeviceError as error:
            found[what] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
