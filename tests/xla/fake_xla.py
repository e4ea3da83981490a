# SPDX-License-Identifier: Apache-2.0
"""As much of torch_xla as this package calls, without XLA: a device count, an order of devices, a backend by gloo."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist

DEVICES, ORDINAL = "FAKE_XLA_DEVICES", "FAKE_XLA_ORDINAL"  # how many there are, and which is this process's


class FakeGroup(dist.ProcessGroup):
    """As torch_xla's: it stands for all that torch could have beside it, and carries nothing from the CPU."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.timeout = timeout

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name
        return "xla"


def modules() -> dict[str, ModuleType]:
    """Return the modules by name, new ones each time."""
    names = (
        "core",
        "core.xla_model",
        "distributed",
        "distributed.xla_backend",
        "runtime",
        "_internal",
        "_internal.pjrt",
    )
    found: dict[str, Any] = {name: ModuleType(name) for name in ("torch_xla", *(f"torch_xla.{each}" for each in names))}
    states: dict[str, Any] = {}
    root, runtime, model = found["torch_xla"], found["torch_xla.runtime"], found["torch_xla.core.xla_model"]
    root.steps, root.joined = [], []
    root._XLAC = SimpleNamespace(_xla_runtime_is_initialized=lambda: states.get("begun", False))
    root.begin = lambda: states.update(begun=True)
    root.sync = lambda: root.steps.append(len(root.steps))
    runtime.world_size = lambda: int(os.environ.get(DEVICES, "1"))
    runtime.global_ordinal = lambda: int(os.environ.get(ORDINAL, "0"))
    runtime.device_type = lambda: "TPU"
    model.get_rng_state = lambda device: states.get(device, 0)
    model.set_rng_state = lambda seed, device: states.update({device: seed})
    found["torch_xla._internal.pjrt"].initialize_multiprocess = lambda *place: root.joined.append(place)
    return found


def install() -> ModuleType:
    """Put the modules in torch_xla's place, and register the backend, for the rest of the process."""
    found = modules()
    sys.modules.update(found)
    dist.Backend.register_backend("xla", FakeGroup, devices=["xla"])
    return found["torch_xla"]
