# SPDX-License-Identifier: Apache-2.0
"""The only door to torch_xla: its device, this process's rank among its devices, steps.

torch_xla is lazy: it records operations, and compiles and runs them as one graph when a value is needed or a step ends.
The functions called here are documented at https://docs.pytorch.org/xla.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from accel.errors import ConfigError, MissingExtraError

BACKEND = "xla"
STATE_BYTES = 8
_INSTALL = "Run `pip install 'torch_xla[tpu]==2.9.*' 'torch==2.9.*'`, then `pip install --no-deps accel-torch`"


def require_xla() -> None:
    """Import torch_xla, which registers the device with torch; one for another version of torch counts as missing."""
    _ = _package("torch_xla")


def has_begun(modules: Mapping[str, ModuleType]) -> bool:
    """Return whether a process with these modules has begun to use XLA's devices, which it then holds until it ends."""
    package: Any = modules.get("torch_xla")
    return package is not None and bool(package._XLAC._xla_runtime_is_initialized())


def not_installed(problem: str, where: str, otherwise: str = "") -> MissingExtraError:
    """Return the error of a device that needs torch_xla, with the commands that install it."""
    return MissingExtraError(
        problem,
        expected="torch_xla of the same minor version as torch",
        where=where,
        fix=f"{_INSTALL}{', ' if otherwise else ''}{otherwise}.",
    )


def join(local_rank: int, local_world_size: int, world_size: int) -> int:
    """Connect this process to one device of its host, and return the device's rank among all hosts' devices.

    The hardware determines that rank. On TPUs this waits for the processes of all hosts.
    """
    _ = _package("torch_xla.distributed.xla_backend")  # registers the backend with torch.distributed
    if world_size > 1:
        # as torch_xla's own rendezvous, which knows only torchrun
        _package("torch_xla._internal.pjrt").initialize_multiprocess(local_rank, local_world_size)
    runtime = _package("torch_xla.runtime")
    if runtime.world_size() != world_size:
        raise ConfigError(
            "XLA does not connect the job's processes, one device each",
            expected=f"{world_size} devices for {world_size} processes",
            got=f"{runtime.world_size()} of kind {runtime.device_type()}",
            where="device=xla",
            fix="Start a process for each TPU chip of every host; XLA's CPU devices serve a single process only.",
        )
    return int(runtime.global_ordinal())


def end_step() -> None:
    """Run the recorded operations, one graph that is the same on every rank; the host does not wait."""
    _package("torch_xla").sync()


def tensor_id(tensor: Any) -> int:
    """Return a number that identifies the memory of a tensor; XLA has no addresses."""
    return int(_package("torch_xla")._XLAC._xla_get_tensor_id(tensor))


def get_random_state(device: str) -> bytes:
    """Return the state of a device's random stream."""
    model = _package("torch_xla.core.xla_model")
    return int(model.get_rng_state(device)).to_bytes(STATE_BYTES, "little")


def set_random_state(device: str, state: bytes) -> None:
    """Set the state of a device's random stream."""
    _package("torch_xla.core.xla_model").set_rng_state(int.from_bytes(state, "little"), device)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: built for another torch, it lacks symbols
        raise MissingExtraError(
            "XLA devices need torch_xla, which does not import",
            expected="torch_xla of the same minor version as torch",
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else error!r}",
            where="device=xla",
            fix=f"{_INSTALL}.",
        ) from error
