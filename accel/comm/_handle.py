# SPDX-License-Identifier: Apache-2.0
"""The handle on a process group: `close` destroys groups that `connect` opened, and never one that was adopted."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage] - documented

from accel.comm._absent import RollCall
from accel.comm._alarm import Alarm
from accel.comm._idle import await_idle_threads
from accel.comm._order import Met
from accel.errors import ContextClosedError

T = TypeVar("T")
R = TypeVar("R")

MOST_GATHERED = 64


class ThreadExchange(Protocol):
    """Passes objects between ranks that are threads of one process."""

    def __call__(self, mine: T, combine: Callable[[Sequence[T]], R], /) -> Callable[[], R]:
        """Begin to pass an object to all ranks; return a function that waits for the common result. A collective.

        Args:
            mine: this rank's object, unchanged until the wait.
            combine: maps the objects of all ranks, by rank, to the result. It is called once; all ranks get one object.
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


class Comm:
    """A process group with its backend and devices: the one mutable object behind a context, which can be closed once.

    Attributes:
        rank, size: rank of this process and number of ranks.
        backend: c10d's backend for tensors on the rank's device; "none" without a group.
        control: device of control messages; the CPU wherever the group can.
        owned: whether `close` destroys the group.
        roll: notes of the ranks that reached a failed collective; None without a store.
        beside: group for tensors on the CPU; None where the group itself carries them.
        opened: further groups to destroy in `close`.
        along: groups along several axes of a mesh, by the ranks of all groups that were opened together; None where
            this rank is in none of them.
        unfinished: background work; None without.
        spare: host memory of finished background work, by name, for the next to use.
        notes: facts that later calls on this group look up, by subject.
        met: the last checked call, if ranks made it from different lines.
        right_orders: numbers of comparisons of orders by fingerprint and code places; see `accel.comm._order`.
        most_gathered: most ranks that receive the first messages of all.
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
        "most_gathered",
        "notes",
        "opened",
        "owned",
        "rank",
        "right_orders",
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
        share: ThreadExchange | None = None,
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
        self.along: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}
        self.unfinished: Unfinished | None = None
        self.spare: dict[str, torch.Tensor] = {}
        self.notes: dict[str, str] = {}
        self.met: Met | None = None
        self.right_orders: dict[tuple[bytes, bytes, bytes], int] = {}
        self.most_gathered = MOST_GATHERED
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
    def share(self) -> ThreadExchange | None:
        """The exchange between ranks of one process; None where ranks are processes.

        Raises:
            ContextClosedError: the scope that opened this has ended.
        """
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
        """The alarm for ranks in collectives of torch; None where the group cannot be opened again.

        Further groups of a mesh cannot: modules refer to them by name.
        """
        self.check_open()
        return None if self.opened else self.bell

    def renew(self, store: Store, group: dist.ProcessGroup) -> None:
        """Continue with a group that was opened again, over a store without notes."""
        self._group = group
        self._number = 0
        self.met = None
        self.right_orders.clear()
        self.roll = RollCall(store, self.rank, self.size)

    def carrier(self, tensor: torch.Tensor) -> dist.ProcessGroup | None:
        """Return the group for tensors on a tensor's device."""
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
        """Return the number of the next collective, equal on all ranks that make the same calls."""
        self._number += 1
        return self._number

    def finish(self) -> None:
        """Wait for background work and raise its error. A collective if there is any."""
        if self.unfinished is not None:
            _ = self.unfinished.result()

    def close(self) -> None:
        """Drop the group and destroy groups that were opened here. Later use raises; a second close does nothing.

        Waits for background work without raising, as other ranks may be gone.
        """
        if self._closed:
            return
        if self.unfinished is not None:
            self.unfinished.wait()
            self.unfinished = None
        self.spare.clear()
        # the user may have destroyed the group and opened another, which is not ours to destroy
        owned = self.owned and self._group is not None and dist.group.WORLD is self._group
        if owned and self.roll is not None:
            self.roll.leave()
        opened = self.opened
        self.along.clear()
        self._closed = True
        self._group = self._share = None
        self.roll = self.beside = self.bell = None
        self.opened = []
        if not owned and not opened:
            return
        gc.collect()  # a group still referenced when it is destroyed can abort the interpreter at exit
        if owned:
            dist.destroy_process_group()
        else:
            for group in reversed(opened):
                with contextlib.suppress(ValueError):  # the user has destroyed it
                    dist.destroy_process_group(group)
        await_idle_threads()
