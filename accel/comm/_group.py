# SPDX-License-Identifier: Apache-2.0
"""The handle on a process group, and the ways to one: open, adopt, or do without. Only opened groups are destroyed."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import field
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage] - documented

from accel import xla
from accel.comm._call import Met, StepLog
from accel.comm._lost import Alarm, RollCall, StoreAlarm, await_idle_threads
from accel.comm._marks import Marks
from accel.comm._rendezvous import meeting_of, open_store
from accel.comm._units import UnitLog
from accel.devices import backend_of, select_device
from accel.env import LaunchEnv
from accel.errors import ConfigError, ContextClosedError, PeerError

T = TypeVar("T")
R = TypeVar("R")

# Above it, the first message of every rank for every rank costs more than log2(W) rounds of pairs.
MOST_GATHERED = 64


class ThreadExchange(Protocol):
    """Passes objects between ranks that are threads of one process."""

    def __call__(self, mine: T, combine: Callable[[Sequence[T]], R], /) -> Callable[[], R]:
        """Begin to pass an object to all ranks; return a function that waits for the common result. A collective.

        `combine` maps the objects, by rank, to the result, once for all ranks; `mine` stays unchanged until the wait.
        """
        ...


class Unfinished(Protocol):
    """Background work of all ranks, which ends with the scope of its handle."""

    def result(self) -> object:
        """Wait for the work and raise its error. A collective."""
        ...

    def wait(self) -> None:
        """Wait for this rank's part, without communication and without raising."""
        ...


_Along = dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None]
_Orders = dict[tuple[bytes, bytes, bytes], int]


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Comm:
    """A process group with its backend and devices: the one mutable object behind a context, which can be closed once.

    Attributes:
        rank, size: rank of this process and number of ranks.
        backend: c10d's backend for tensors on the rank's device; "none" without a group.
        control: device of control messages; the CPU wherever the group can.
        owned: whether `close` destroys the group.
        roll: notes of the ranks that reached a failed collective; None without a store.
        host_group: group for tensors on the CPU; None where the group itself carries them.
        opened: further groups to destroy in `close`.
        along: groups along several axes of a mesh, by the ranks of all groups that were opened together; None where
            this rank is in none of them.
        unfinished: background work; None without.
        spare: host memory of finished background work, by name, for the next to use.
        notes: facts that later calls on this group look up, by subject.
        marks: marks on records of the loop, by guards against dropped results.
        met: the last checked call, if ranks made it from different lines.
        right_orders: numbers of comparisons of orders by fingerprint and code places; see `accel.comm._call`.
        most_gathered: most ranks that receive the first messages of all.
        bell: ends the wait of all ranks; see `alarm`.
        closure: call with a running closure, "closure=" or "optimizer.step"; None outside of one.
        steps: decisions about optimizer steps that all ranks take together.
        deferred: reads the outcome of a step that only the device knows, and raises its error; None without.
        defers: whether parameters of a step are marked as "deferred".
        units: units of sharded models that this rank has run.
        stands_alone: whether this rank runs a model's forward while the others wait for it, as `prepare` does to find a
            plan. Groups along axes are None then.
        lost: why the ranks no longer communicate; empty while they do.
    """

    _group: dist.ProcessGroup | None
    rank: int
    size: int
    _: dataclasses.KW_ONLY
    backend: str
    control: torch.device
    owned: bool
    roll: RollCall | None = None
    host_group: dist.ProcessGroup | None = None
    opened: list[dist.ProcessGroup] = field(default_factory=list[dist.ProcessGroup])
    along: _Along = field(default_factory=_Along)
    unfinished: Unfinished | None = None
    spare: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    notes: dict[str, str] = field(default_factory=dict[str, str])
    marks: Marks = field(default_factory=Marks)
    met: Met | None = None
    right_orders: _Orders = field(default_factory=_Orders)
    most_gathered: int = MOST_GATHERED
    bell: Alarm | None = None
    closure: str | None = None
    steps: StepLog = field(default_factory=StepLog)
    deferred: Callable[[], None] | None = None
    defers: bool = False
    units: UnitLog = field(default_factory=UnitLog)
    stands_alone: bool = False
    lost: str = ""
    _share: ThreadExchange | None = None
    _closed: bool = False
    _number: int = 0

    def __repr__(self) -> str:
        return f"Comm(rank={self.rank}, size={self.size}, {'closed' if self._closed else 'open'})"

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, None for a single process; raises `ContextClosedError` once its scope has ended."""
        self.check_open()
        return self._group

    @property
    def share(self) -> ThreadExchange | None:
        """The exchange between ranks of one process, None where ranks are processes; raises as `group` does."""
        self.check_open()
        return self._share

    @property
    def is_large(self) -> bool:
        """Whether first messages are reduced on their way, as they are among many ranks."""
        return self.size > self.most_gathered

    @property
    def has_pairs(self) -> bool:
        """Whether control messages may go between pairs of ranks; NCCL would open a communicator for each pair."""
        return self.control.type == "cpu"

    @property
    def alarm(self) -> Alarm | None:
        """The alarm for ranks in torch's collectives; None with groups of a mesh, which cannot be opened again."""
        self.check_open()
        return None if self.opened else self.bell

    @contextlib.contextmanager
    def standing_alone(self) -> Generator[None]:
        """Let functions of this context compute as on one rank in a block."""
        self.stands_alone = True
        try:
            yield
        finally:
            self.stands_alone = False

    def renew(self, store: Store, group: dist.ProcessGroup) -> None:
        """Continue with a group that was opened again, over a store without notes."""
        self._group = group
        self._number = 0
        self.units = UnitLog()
        self.met = self.deferred = None
        self.right_orders.clear()
        self.steps.clear()
        self.roll = RollCall(store, self.rank, self.size)

    def carrier(self, tensor: torch.Tensor) -> dist.ProcessGroup | None:
        """Return the group for tensors on a tensor's device."""
        group = self.group
        # a group on XLA carries no CPU tensors, so that control messages take a gloo group
        return group if self.host_group is None or tensor.device.type != "cpu" else self.host_group

    def check_open(self) -> None:
        """Raise `ContextClosedError` if the scope that opened this has ended, `PeerError` if its group has."""
        # first, as it explains more than that the scope has ended
        if self.lost:
            raise PeerError(
                "the ranks of this context no longer communicate",
                expected="a call before a rank failed",
                got=self.lost,
                fix="Let the script end, and begin again from the newest checkpoint.",
            )
        if self._closed:
            raise ContextClosedError(
                "this context is closed",
                expected="a call inside the `with accel.session() as ctx:` block that opened it",
                got="a call after its end",
                fix="Move the call into the block.",
            )

    @property
    def number(self) -> int:
        """The number of the latest collective; 0 before any."""
        return self._number

    def next_number(self) -> int:
        """Return the number of the next collective, equal on all ranks that make the same calls."""
        self._number += 1
        return self._number

    def settle(self) -> None:
        """Read the outcome of a deferred step and raise its error, once. Waits for the device."""
        if self.deferred is not None:
            deferred, self.deferred = self.deferred, None
            deferred()

    def finish(self) -> None:
        """Wait for background work and raise its error. A collective if there is any."""
        if self.unfinished is not None:
            _ = self.unfinished.result()

    def close(self) -> None:
        """Drop the group, and destroy groups that were opened here. Waits for background work without raising, as other
        ranks may be gone. Later use raises; a second close does nothing."""
        if self._closed:
            return
        if self.unfinished is not None:
            self.unfinished.wait()
            self.unfinished = None
        # as large as a checkpoint: a closed handle must not keep it
        self.spare.clear()
        # the user may have destroyed the group and opened another, which is not ours to destroy
        owned = self.owned and self._group is not None and dist.group.WORLD is self._group
        if owned and self.roll is not None:
            self.roll.leave()  # before the group ends, so that ranks still in a call report why it fails
        opened = self.opened
        adopted = self._group is not None
        self.along.clear()
        self._closed = True
        self._group = self._share = self.deferred = None
        self.roll = self.host_group = self.bell = None
        self.opened = []
        if not owned and not opened:
            if adopted:
                await_idle_threads()  # the owner may destroy the group next
            return
        gc.collect()  # a group still referenced when it is destroyed can abort the interpreter at exit
        if owned:
            dist.destroy_process_group()
        else:
            for group in reversed(opened):
                with contextlib.suppress(ValueError):  # the user has destroyed it
                    dist.destroy_process_group(group)
        await_idle_threads()


def alone() -> Comm:
    """Return the handle of a single process without a group."""
    return Comm(None, 0, 1, backend="none", control=torch.device("cpu"), owned=False)


def connect(env: LaunchEnv, device: torch.device, backend: str | None, timeout_s: float) -> Comm:
    """Open the default process group, of one process too, or adopt it if it is open. A collective.

    `backend` is c10d's for tensors on the device; None for the usual one of its kind, such as nccl on CUDA.
    """
    if dist.is_initialized():
        return _adopt_default(env, device, backend)
    select_device(device)
    if device.type == "xla" and backend not in (None, xla.BACKEND):
        where = "backend=, ACCEL_BACKEND"
        raise ConfigError("XLA tensors are sent by XLA only", expected="xla, or none", got=backend, where=where)
    chosen = backend or backend_of(device)
    # a backend for each kind of device: control messages and objects stay on the CPU, without a wait for the GPU
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
        host_group = _open_host_group(dist.group.WORLD) if device.type == "xla" else None
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"rank {env.rank} could not join the process group: {error}",
            expected=f"{env.world_size} ranks at {meeting_of(env)} over {both}",
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
        host_group=host_group,
    )
    # a lone rank waits for nobody; XLA's collectives cannot be cut
    comm.bell = alarm if env.world_size > 1 and device.type != "xla" else None
    return comm


def adopt(group: dist.ProcessGroup, device: torch.device) -> Comm:
    """Return a handle on a group that its maker destroys; on XLA also open a group for the CPU, a collective."""
    if device.type == "xla":
        return _adopt_xla(group)
    share: ThreadExchange | None = getattr(group, "share", None)  # of a simulated group
    comm = Comm(
        group,
        group.rank(),
        group.size(),
        backend=group.name(),
        control=_control_device(group, device),
        owned=False,
        roll=_roll_of(group) if share is None else None,
        _share=share,
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
    host_group = _open_host_group(group)
    handle = Comm(
        group,
        group.rank(),
        group.size(),
        backend=xla.BACKEND,
        control=torch.device("cpu"),
        owned=False,
        roll=_roll_of(group),
        host_group=host_group,
    )
    handle.opened.append(host_group)
    return handle


def _open_host_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Open a gloo group of all ranks for tensors on the CPU. A collective."""
    timeout = cast(Any, group).timeout
    return cast(dist.ProcessGroup, cast(Any, dist).new_group(backend="gloo", timeout=timeout))


def _adopt_default(env: LaunchEnv, device: torch.device, backend: str | None) -> Comm:
    group = dist.group.WORLD
    assert group is not None  # as it is initialized
    rank = group.rank() if device.type == "xla" else env.rank  # XLA assigns its own ranks
    # a launcher's variables and an open group must not mean different jobs
    if (group.rank(), group.size()) != (rank, env.world_size):
        raise ConfigError(
            "a process group is open already and disagrees with the environment",
            expected=f"rank {env.rank} of {env.world_size}",
            got=f"rank {group.rank()} of {group.size()}",
            where="from_env",
            fix="Adopt the open group with from_group(group), or open none before.",
        )
    if env.init_method:
        raise ConfigError(
            "a process group is open already, so init_method has no effect",
            expected="no open group",
            got=repr(env.init_method),
            where="init_method=",
            fix="Leave it out, or open no group before.",
        )
    opened = dist.get_backend_config(group)
    if backend is not None and backend not in opened:
        raise ConfigError(
            "a process group is open already over another backend",
            expected=backend,
            got=str(opened),
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
