# SPDX-License-Identifier: Apache-2.0
"""Variables of TPU hosts: those of Google Kubernetes Engine's pods, and those that torch_xla hands its processes.

Their names are in torch_xla/core/xla_env_vars.py; https://cloud.google.com/tpu/docs describes the hosts' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from accel.env._values import below, integer
from accel.errors import EnvError


class TpuPod(NamedTuple):
    """This host among those of a slice of TPUs.

    Attributes:
        worker: number of this host.
        hosts: names of all hosts, in order of their numbers.
    """

    worker: int
    hosts: tuple[str, ...]


def pod_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of the slice of TPUs that this machine belongs to; none where no variable names them."""
    return tuple(_host(name) for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip())


def read_pod(environ: Mapping[str, str]) -> TpuPod | None:
    """Return which of several TPU hosts this is; None for a host alone, and for one that says nothing.

    Raises:
        EnvError: a host without a number among the others.
    """
    hosts = pod_hosts(environ)
    if len(hosts) < 2:
        return None
    worker = integer(environ, "TPU_WORKER_ID", beside=("TPU_WORKER_HOSTNAMES",))
    below("TPU_WORKER_ID", worker, "the hosts in TPU_WORKER_HOSTNAMES", len(hosts))
    return TpuPod(worker, hosts)


def process_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the host of each process that `torch_xla.launch` has started; none for other processes.

    Raises:
        EnvError: processes do not fill one host after another, or hosts have different numbers of them.
    """
    if "CLOUD_TPU_TASK_ID" not in environ:
        return []
    hosts = [_host(each) for each in environ.get("TPU_PROCESS_ADDRESSES", "").split(",") if each.strip()]
    local = hosts.count(hosts[0]) if hosts else 1
    if len(hosts) % local or hosts != [hosts[at] for at in range(0, len(hosts), local) for _ in range(local)]:
        raise EnvError(
            "the processes do not fill one host after another, as many on each",
            got=f"TPU_PROCESS_ADDRESSES={environ['TPU_PROCESS_ADDRESSES']}",
            where="the environment",
            fix="Let `accel launch --device xla` or torch_xla.launch start them, on every host.",
        )
    return hosts


def _host(address: str) -> str:
    """Return a host's name or number without the port behind it."""
    host, separator, port = address.strip().rpartition(":")
    if not separator or not port.isdecimal() or (":" in host and not host.startswith("[")):  # or IPv6 without a port
        return address.strip()
    return host.strip("[]")
