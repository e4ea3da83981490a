# SPDX-License-Identifier: Apache-2.0
"""Notebooks that Colab and Kaggle host: how they are recognized, and what a launch does differently there.

Ranks are fresh interpreters there as anywhere, so nothing that the kernel has imported or begun is in their way. Their
GPUs are counted as anywhere. A TPU is chosen by nobody but torch_xla, and by one process at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Literal, NamedTuple

import msgspec

from accel.config import LaunchConfig
from accel.errors import LaunchError
from accel.launching._machine import read_machine
from accel.xla import has_begun, not_installed

_KAGGLE = "KAGGLE_KERNEL_RUN_TYPE"
_COLAB = ("COLAB_RELEASE_TAG", "COLAB_GPU", "COLAB_TPU_1VM")
_REMOTE = ("COLAB_TPU_ADDR", "XRT_TPU_CONFIG")  # a TPU behind the network, which torch_xla left with its release 2.1
# Kaggle sets the first to "local": with it, processes of XLA look for each other there (pytorch/xla issue 8215). With
# the second, a process counts as one that torch_xla has started.
_MISLEADING = ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID")


class HostedNotebook(NamedTuple):
    """The host of a notebook.

    Attributes:
        name: its name.
        tpu: type of its TPU, such as v5e-8; "a TPU" if unknown, empty without one.
        is_remote: whether the TPU is behind the network.
    """

    name: Literal["Colab", "Kaggle"]
    tpu: str = ""
    is_remote: bool = False


def read_hosted(environ: Mapping[str, str]) -> HostedNotebook | None:
    """Return the host of this notebook from its variables; None elsewhere."""
    if _KAGGLE in environ:
        name = "Kaggle"
    elif any(variable in environ for variable in _COLAB):
        name = "Colab"
    else:
        return None
    has_tpu = environ.get("COLAB_TPU_1VM") == "1" or environ.get("PJRT_DEVICE", "").upper() == "TPU"
    tpu = environ.get("TPU_ACCELERATOR_TYPE") or ("a TPU" if has_tpu else "")
    is_remote = not tpu and any(environ.get(variable) for variable in _REMOTE)
    return HostedNotebook(name, "a TPU" if is_remote else tpu, is_remote)


def choose_device(
    config: LaunchConfig, hosted: HostedNotebook | None, modules: Mapping[str, ModuleType]
) -> LaunchConfig:
    """Return the settings of a launch for the TPU of a hosted notebook, where it has one and nobody chose a device.

    Args:
        config: settings of the launch.
        hosted: host of this notebook; None elsewhere.
        modules: modules that this process has imported.

    Raises:
        MissingExtraError: torch_xla is not installed.
        LaunchError: the TPU cannot be reached, its chips cannot be counted, or this process has begun to use it.
    """
    on_xla = config.device.partition(":")[0] == "xla"
    if hosted is None or not hosted.tpu or not (on_xla or config.device == "auto"):
        return config
    where = f"{hosted.name}, {hosted.tpu}"
    on_cpu = 'config=LaunchConfig(device="cpu")'
    if hosted.is_remote:
        raise LaunchError(
            "the TPU of this notebook is behind the network, where torch_xla no longer reaches it",
            where=where,
            fix=f"Choose a runtime with a TPU VM, or compute on the CPU with {on_cpu}.",
        )
    if find_spec("torch_xla") is None:
        raise not_installed(
            "only torch_xla drives the TPU of this notebook, and it is not installed", where, f"or pass {on_cpu}"
        )
    if has_begun(modules):
        raise LaunchError(
            "this process holds the TPU, which one process at a time can use",
            got="XLA devices in use before the launch",
            where=where,
            fix="Restart the kernel, and use XLA devices in the launched function only.",
        )
    if config.nproc_per_node not in ("auto", 1) and not read_machine().tpu_chips:
        raise LaunchError(
            "the chips of this TPU are two devices of XLA's each, or cannot be seen, and take one process",
            expected="nproc=1",
            got=f"nproc={config.nproc_per_node}",
            where=where,
        )
    return config if on_xla else msgspec.structs.replace(config, device="xla")


def rank_environ(environ: Mapping[str, str], hosted: HostedNotebook | None) -> Mapping[str, str]:
    """Return the variables for ranks: those of a hosted notebook, without what misleads XLA there."""
    if hosted is None or not hosted.tpu:
        return environ
    return {name: text for name, text in environ.items() if name not in _MISLEADING}
