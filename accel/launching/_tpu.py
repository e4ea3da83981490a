# SPDX-License-Identifier: Apache-2.0
"""Launches on TPU hosts: the hosts of a slice, and the number of processes for its chips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from accel.config import LaunchConfig, Resolved
from accel.env import read_pod
from accel.errors import LaunchError

_PORT = 29400  # torchrun's
_GOOGLE = "0x1ae0"
# v4, v5p, v5e and v6e, as jax/_src/hardware_utils.py names them; a chip of v2, v3 or v7 is two devices of XLA's
_CHIPS = ("0x005e", "0x0062", "0x0063", "0x006f")


def count_chips(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """Return the number of TPU chips of this machine that are one device each.

    Args:
        devices: folder in which Linux lists PCI devices.
    """
    return sum(
        _read(device / "vendor") == _GOOGLE and _read(device / "device") in _CHIPS for device in _listed(devices)
    )


def on_pod(resolved: Resolved, environ: Mapping[str, str]) -> LaunchConfig:
    """Return a configuration with the hosts of this host's TPU slice, unless hosts are set already.

    Args:
        resolved: settings of the launch, and the source of each.
        environ: the variables of the host.

    Raises:
        EnvError: the slice's hosts are named, and which of them this is cannot be read.
    """
    config, sources = resolved
    told = any(sources[name].kind != "default" for name in ("nnodes", "node_rank", "rdzv_endpoint"))
    pod = read_pod(environ) if _on_xla(config) and not told else None
    if pod is None:
        return config
    first = f"[{pod.hosts[0]}]" if ":" in pod.hosts[0] else pod.hosts[0]
    return msgspec.structs.replace(
        config, nnodes=len(pod.hosts), node_rank=pod.worker, rdzv_endpoint=f"{first}:{_PORT}"
    )


def count_processes(config: LaunchConfig, chips: int) -> int | None:
    """Return the number of processes for the TPU chips of a host; None without TPUs.

    Args:
        config: settings of the launch.
        chips: number of chips of this host.

    Raises:
        LaunchError: neither a process for each, which XLA connects, nor one alone.
    """
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
