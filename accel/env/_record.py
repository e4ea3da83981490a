# SPDX-License-Identifier: Apache-2.0
"""The record of what the environment says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from accel.config import Settings


class LaunchEnv(Settings, frozen=True, kw_only=True):
    """This process's place in the job, and the settings that came by `ACCEL_*`.

    Attributes:
        device, precision, accumulation, strategy, mesh, backend, timeout_s: settings; "auto", or an empty mesh, where
            the environment says nothing.
        rank, world_size: position among all processes.
        local_rank, local_world_size: position among the processes of this node.
        node_rank, num_nodes: position of this node.
        master_addr, master_port: address where rank 0 listens for the rendezvous; None without a launcher.
        restarts: number of times that the launcher, or Slurm, has started the job again.
        launcher: program that set the variables.
        tpu_hosts: hosts of the TPU slice that this machine belongs to, as far as variables say.
        sources: for each setting of the environment the place where the user wrote it: a variable, or a flag or file
            of `accel launch`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    restarts: int = 0
    launcher: Literal[
        "torchrun", "slurm", "openmpi", "mpich", "mvapich", "kubernetes", "sagemaker", "torch_xla", "none"
    ] = "none"
    tpu_hosts: int = 1
    sources: Mapping[str, str] = {}
