# SPDX-License-Identifier: Apache-2.0
"""Process groups and who owns them: what `connect` opened, `close` destroys; what was adopted is never destroyed."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage] - documented names

from accel import xla
from accel.comm._absent import RollCall
from accel.comm._alarm import Alarm, StoreAlarm
from accel.comm._idle import await_idle_threads
from accel.comm._order import Met
from accel.comm._rendezvous import open_store
from accel.env import LaunchEnv
from accel.errors import ConfigError, ContextClosedError, PeerError

T = TypeVar("T")
R = TypeVar("R")


class Share(Protocol):
    """Hands objects over between the ranks of a group that are threads of one process."""

    def __call__(self, mine: T, combine: Callable[[Sequence[T]], R], /) -> Callable[[], R]:
        """Begin to hand `mine` to all ranks, and return what waits for the common result. A collective.

        Args:
            mine: this rank's object; not to be changed until the wait.
            combine: makes the result of all ranks' objects, in rank order; called once. All ranks get the same object.
        """
        ...


class Unfinished(Protocol):
    """Work of all ranks that goes on beside training, and that the scope of its handle ends with."""

    def result(self) -> object:
        """Wait for it, and raise what went wrong. A collective."""
        ...

    def wait(self) -> None:
        """Wait for this rank's part, without communication and without raising."""
        ...


class Comm:
    """A process group and how to use it. This is the one mutable thing behind a context: it can be closed, once.

    Attributes:
        rank, size: this process's place in the group.
        backend: c10d's name for what carries tensors on the rank's device; "none" without a group.
        control: the device that small control messages travel on; the CPU wherever the group can.
        owned: whether `close` destroys the group.
        roll: where ranks note who came to a collective that failed; None where no store is known.
        beside: carries tensors on the CPU where the group itself carries none; None where it does.
        opened: further groups that were opened for this handle's user, and that `close` destroys.
        along: those of several axes of a mesh, by the ranks of all groups that were opened together.
        unfinished: what goes on in the background; None if nothing does.
        spare: host memory that such work leaves to the next, by name.
        met: the last checked call, if ranks made it from different places.
        bell: ends the wait of all ranks; see `alarm`.
    """

    __slots__ = (
        "_closed",
        "_group",
        "_number",
        "_share",
        "along",
        "backend",
        "bell",
        "beside",
        "control",
        "met",
        "opened",
        "owned",
        "rank",
        "roll",
        "size",
        "spare",
        "unfinished",
    )

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        size: int,
        *,
        backend: str,
        control: torch.device,
        owned: bool,
        roll: RollCall | None = None,
        beside: dist.ProcessGroup | None = None,
        share: Share | None = None,
    ) -> None:
        self._group = group
        self._closed = False
        self._number = 0
        self.rank = rank
        self.size = size
        self.backend = backend
        self.control = control
        self.owned = owned
        self.roll = roll
        self.beside = beside
        self._share = share
        self.opened: list[dist.ProcessGroup] = []
        self.along: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}
        self.unfinished: Unfinished | None = None
        self.spare: dict[str, torch.Tensor] = {}
        self.met: Met | None = None
        self.bell: Alarm | None = None

    def __repr__(self) -> str:
        return f"Comm(rank={self.rank}, size={self.size}, {'closed' if self._closed else 'open'})"

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, None for a single process.

        Raises:
            ContextClosedError: the scope that opened it has ended.
        """
        self.check_open()
        return self._group

    @property
    def share(self) -> Share | None:
        """What hands objects over between ranks of one process; None where ranks are processes.

        Raises:
            ContextClosedError: the scope that opened this has ended.
        """
        self.check_open()
        return self._share

    @property
    def alarm(self) -> Alarm | None:
        """What reaches ranks in collectives that torch runs; None where the group cannot be opened again here.

        Further groups of a mesh cannot: modules hold them by their names.
        """
        self.check_open()
        return None if self.opened else self.bell

    def renew(self, store: Store, group: dist.ProcessGroup) -> None:
        """Go on with a group that was opened again, over a store that nothing was noted in."""
        self._group = group
        self._number = 0
        self.met = None
        self.roll = RollCall(store, self.rank, self.size)

    def carrier(self, tensor: torch.Tensor) -> dist.ProcessGroup | None:
        """The group that carries a tensor from where it lies."""
        group = self.group
        return group if self.beside is None or tensor.device.type != "cpu" else self.beside

    def check_open(self) -> None:
        """Raise `ContextClosedError` if the scope that opened this has ended."""
        if self._closed:
            raise ContextClosedError(
                "this context is closed",
                expected="a call inside the `with accel.session() as ctx:` block that opened it",
                got="a call after its end",
                fix="Move the call into the block.",
            )

    def next_number(self) -> int:
        """Count a collective: equal numbers on all ranks as long as they make the same calls."""
        self._number += 1
        return self._number

    def finish(self) -> None:
        """Wait for what goes on in the background, and raise what went wrong. A collective if something does."""
        if self.unfinished is not None:
            _ = self.unfinished.result()

    def close(self) -> None:
        """Drop the group, and destroy what was opened here. Later use raises; a second close does nothing.

        Waits for what goes on in the background, without raising: the other ranks may be gone.
        """
        if self._closed:
            return
        if self.unfinished is not None:
            self.unfinished.wait()
            self.unfinished = None
        self.spare.clear()
        # somebody may have destroyed it already, and even opened another that is not ours to destroy
        owned = self.owned and self._group is not None and dist.group.WORLD is self._group
        if owned and self.roll is not None:
            self.roll.leave()
        opened = self.opened
        self.along.clear()
        self._closed, self._group, self.roll, self.beside, self._share, self.opened = True, None, None, None, None, []
        self.bell = None
        if not owned and not opened:
            return
        gc.collect()  # a group still referenced when it is destroyed can abort the interpreter at exit
        if owned:
            dist.destroy_process_group()
        else:
            for group in reversed(opened):
                with contextlib.suppress(ValueError):  # somebody has destroyed it already
                    dist.destroy_process_group(group)
        await_idle_threads()


def alone() -> Comm:
    """A handle for one process without a group."""
    return Comm(None, 0, 1, backend="none", control=torch.device("cpu"), owned=False)


def connect(env: LaunchEnv, device: torch.device, backend: str | None, timeout_s: float) -> Comm:
    """Open the default process group, or adopt the one that somebody has opened before. A collective.

    One process gets a group, too. On XLA devices ranks are XLA's own, which come after those that the launcher gave.

    Args:
        env: this process's place, from `read_env`.
        device: this rank's device.
        backend: c10d backend for tensors on that device; None for nccl on CUDA, xla on XLA and gloo elsewhere.
        timeout_s: seconds after which a collective that misses a rank fails.

    Raises:
        ConfigError: an open default group disagrees with the environment, or with the backend asked for; or XLA does
            not connect the processes.
        PeerError: the other ranks could not be reached.
    """
    if dist.is_initialized():
        return _adopt_default(env, device, backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "xla" and backend not in (None, xla.BACKEND):
        where = "backend=, ACCEL_BACKEND"
        raise ConfigError("XLA tensors travel by XLA alone", expected="xla, or none", got=backend, where=where)
    chosen = backend or {"cuda": "nccl", "xla": xla.BACKEND}.get(device.type, "gloo")
    both = chosen if device.type in ("cpu", "xla") else f"cpu:gloo,{device.type}:{chosen}"
    # whose functions hold, for ever, the group that is open when DDP imports them: it is the default of an argument
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
    """A handle on a group that somebody else made and will destroy.

    Args:
        group: any process group of torch, or a subclass.
        device: this rank's device. On XLA a group for the CPU is opened beside it, which is a collective.
    """
    if device.type == "xla":
        return _adopt_xla(group)
    share: Share | None = getattr(group, "share", None)
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
    """Open a group of all ranks for tensors on the CPU, beside one that carries none. A collective."""
    timeout = cast(Any, group).timeout
    return cast(dist.ProcessGroup, cast(Any, dist).new_group(backend="gloo", timeout=timeout))


def _adopt_default(env: LaunchEnv, device: torch.device, backend: str | None) -> Comm:
    group = dist.group.WORLD
    assert group is not None  # is_initialized() said so
    rank = group.rank() if device.type == "xla" else env.rank  # XLA has an order of its own
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
    except (RuntimeError, ValueError, KeyError):  # a group that c10d does not know
        serves_cpu = False
    return torch.device("cpu") if serves_cpu else device


def _roll_of(group: dist.ProcessGroup) -> RollCall | None:
    try:
        store = cast(Any, group).get_group_store()
    except (AttributeError, RuntimeError):  # an older torch
        return None
    return RollCall(PrefixStore("accel", store), group.rank(), group.size()) if store is not None else None
