# SPDX-License-Identifier: Apache-2.0
"""The ways to a handle: open the default process group, adopt a group, or do without one."""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage] - documented names

from accel import xla
from accel.comm._absent import RollCall
from accel.comm._alarm import StoreAlarm
from accel.comm._handle import Comm, ThreadExchange
from accel.comm._rendezvous import open_store
from accel.devices import backend_of, select_device
from accel.env import LaunchEnv
from accel.errors import ConfigError, PeerError


def alone() -> Comm:
    """Return the handle of a single process without a group."""
    return Comm(None, 0, 1, backend="none", control=torch.device("cpu"), owned=False)


def connect(env: LaunchEnv, device: torch.device, backend: str | None, timeout_s: float) -> Comm:
    """Open the default process group, or adopt it if it is open. A collective.

    A single process gets a group, too. On XLA devices, XLA assigns ranks of its own.

    Args:
        env: from `read_env`.
        device: this rank's device.
        backend: c10d backend for tensors on that device; None for that of its kind, such as nccl on CUDA.
        timeout_s: time-out of collectives, in seconds.

    Raises:
        ConfigError: an open default group disagrees with the environment, or with the backend asked for; or XLA does
            not connect the processes.
        PeerError: other ranks cannot be reached.
    """
    if dist.is_initialized():
        return _adopt_default(env, device, backend)
    select_device(device)
    if device.type == "xla" and backend not in (None, xla.BACKEND):
        where = "backend=, ACCEL_BACKEND"
        raise ConfigError("XLA tensors travel by XLA alone", expected="xla, or none", got=backend, where=where)
    chosen = backend or backend_of(device)
    both = chosen if device.type in ("cpu", "xla") else f"cpu:gloo,{device.type}:{chosen}"
    # before the group is open: functions of this module keep the group of their import as a default argument
    _ = importlib.import_module("torch.distributed.nn.functional")
    store = open_store(env, timeout_s) if env.world_size > 1 else HashStore()
    timeout = timedelta(seconds=timeout_s)

    def open_group(store: Store) -> None:
        dist.init_process_group(both, store=store, rank=rank, world_size=env.world_size, timeout=timeout)

    def renewed(store: Store, group: dist.ProcessGroup) -> None:
        comm.renew(store, group)

    alarm = StoreAlarm(store, open_group, renewed)
    rank = xla.join(env.local_rank, env.local_world_size, env.world_size) if device.type == "xla" else env.rank
    try:
        alarm.open()
        beside = _open_beside(dist.group.WORLD) if device.type == "xla" else None
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"rank {env.rank} could not join the process group: {error}",
            expected=f"{env.world_size} ranks at {env.master_addr}:{env.master_port} over {both}",
            where="from_env",
            fix="See whether another rank failed before, and whether that address can be reached.",
        ) from error
    comm = Comm(
        dist.group.WORLD,
        rank,
        env.world_size,
        backend=chosen,
        control=torch.device("cpu"),
        owned=True,
        roll=RollCall(store, rank, env.world_size),
        beside=beside,
    )
    comm.bell = alarm if env.world_size > 1 and device.type != "xla" else None
    return comm


def adopt(group: dist.ProcessGroup, device: torch.device) -> Comm:
    """Return a handle on a group that its maker destroys.

    Args:
        group: a process group of torch, or of a subclass.
        device: this rank's device. On XLA this opens a group for the CPU beside it, a collective.
    """
    if device.type == "xla":
        return _adopt_xla(group)
    share: ThreadExchange | None = getattr(group, "share", None)
    comm = Comm(
        group,
        group.rank(),
        group.size(),
        backend=group.name(),
        control=_control_device(group, device),
        owned=False,
        roll=_roll_of(group) if share is None else None,
        share=share,
    )
    comm.bell = getattr(group, "alarm", None)
    return comm


def _adopt_xla(group: dist.ProcessGroup) -> Comm:
    if group is not dist.group.WORLD or group.name() != xla.BACKEND:
        raise ConfigError(
            "on XLA devices only the default group can be adopted",
            expected="the default group, over xla",
            got=f"{'the default' if group is dist.group.WORLD else 'another'} group, over {group.name()}",
            where="device=xla",
            fix='Open it with torch.distributed.init_process_group("xla", init_method="xla://").',
        )
    beside = _open_beside(group)
    handle = Comm(
        group,
        group.rank(),
        group.size(),
        backend=xla.BACKEND,
        control=torch.device("cpu"),
        owned=False,
        roll=_roll_of(group),
        beside=beside,
    )
    handle.opened.append(beside)
    return handle


def _open_beside(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Open a gloo group of all ranks for tensors on the CPU. A collective."""
    timeout = cast(Any, group).timeout
    return cast(dist.ProcessGroup, cast(Any, dist).new_group(backend="gloo", timeout=timeout))


def _adopt_default(env: LaunchEnv, device: torch.device, backend: str | None) -> Comm:
    group = dist.group.WORLD
    assert group is not None  # as it is initialized
    rank = group.rank() if device.type == "xla" else env.rank  # XLA assigns its own ranks
    if (group.rank(), group.size()) != (rank, env.world_size):
        raise ConfigError(
            "a process group is open already and disagrees with the environment",
            expected=f"rank {env.rank} of {env.world_size}",
            got=f"rank {group.rank()} of {group.size()}",
            where="from_env",
            fix="Adopt the open group with from_group(group), or open none before.",
        )
    if backend is not None and backend not in dist.get_backend_config(group):
        raise ConfigError(
            "a process group is open already over another backend",
            expected=backend,
            got=str(dist.get_backend_config(group)),
            where="from_env, backend",
            fix="Leave the backend out, or open no group before.",
        )
    return adopt(group, device)


def _control_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    if device.type == "cpu":
        return device
    try:
        serves_cpu = "cpu" in dist.get_backend_config(group)
    except (RuntimeError, ValueError, KeyError):  # c10d does not know the group
        serves_cpu = False
    return torch.device("cpu") if serves_cpu else device


def _roll_of(group: dist.ProcessGroup) -> RollCall | None:
    try:
        store = cast(Any, group).get_group_store()
    except (AttributeError, RuntimeError):  # an older torch
        return None
    return RollCall(PrefixStore("accel", store), group.rank(), group.size()) if store is not None else None
