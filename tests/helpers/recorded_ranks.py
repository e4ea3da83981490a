# SPDX-License-Identifier: Apache-2.0
"""What each rank calls on each communicator, of simulated ranks or of lone ones, of whose meshes no other rank runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import accel
from accel.testing._collectives import Buffers, SimulatedCall, _parts
from accel.testing._default_group import default_groups
from accel.testing._group import SimulatedGroup
from accel.testing._meetings import Members


class Communicator(NamedTuple):
    """A group: its name and the world's numbers of its ranks."""

    name: str
    ranks: tuple[int, ...]


class Collective(NamedTuple):
    """A call of all ranks of a communicator, with the facts that they must agree on."""

    on: Communicator
    what: str


class Message(NamedTuple):
    """A rank's side of a message, between the world's numbers of two ranks."""

    on: Communicator
    source: int
    target: int
    what: str


Step = tuple[Collective | Message, ...]  # what begins at once: a collective, a message, or a batch of messages
Steps = dict[int, list[Step]]  # of each rank, in its order


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    """Record what ranks call. Messages of `batch_isend_irecv` are one step, as on NCCL.

    Enter it around the ranks: ranks that entered it each for itself would restore each other's replacements.
    """
    assert threading.current_thread() is threading.main_thread(), "recorded is entered by a rank"
    steps: Steps = {}
    batches: dict[int, list[Message]] = {}
    join, post, share = SimulatedGroup._join, SimulatedGroup._post, SimulatedGroup.share
    together = dist.batch_isend_irecv

    def note(group: Any, what: str) -> None:
        steps.setdefault(group._me, []).append((Collective(_communicator(group), what),))

    def joined(self: Any, call: SimulatedCall, *rest: Any) -> Any:
        note(self, str(call))
        return join(self, call, *rest)

    def shared(self: Any, *args: Any) -> Any:
        note(self, "agreement")
        return share(self, *args)

    def posted(self: Any, kind: Any, source: int, target: int, tag: int, tensors: Sequence[torch.Tensor]) -> Any:
        what = f"{tensors[0].dtype}, {tensors[0].numel()}"  # NCCL has no tags
        message = Message(_communicator(self), source, target, what)
        if self._me in batches:
            batches[self._me].append(message)
        else:
            steps.setdefault(self._me, []).append((message,))
        return post(self, kind, source, target, tag, tensors)

    def batched(operations: Any) -> Any:
        me = operations[0].group._me
        batches[me] = []
        works = together(operations)
        steps.setdefault(me, []).append(tuple(batches.pop(me)))
        return works

    with monkeypatch.context() as patched:
        patched.setattr(SimulatedGroup, "_join", joined)
        patched.setattr(SimulatedGroup, "_post", posted)
        patched.setattr(SimulatedGroup, "share", shared)
        patched.setattr(dist, "batch_isend_irecv", batched)
        yield steps


def _communicator(group: Any) -> Communicator:
    members = group._rendezvous.members
    return Communicator(members.name, members.ranks)


class _Done:
    """A call that has ended."""

    done = True

    def __init__(self, result: object = None) -> None:
        self.result = result


class _Alone:
    """Meetings of a rank's group, to which the others bring what this one brings; messages that come are ones."""

    network = None

    def __init__(self, members: Members) -> None:
        self.members = members

    def join(self, rank: int, call: SimulatedCall, brought: Any, run: Callable[[Sequence[Any]], object]) -> _Done:
        with torch.no_grad():
            if call.name == "all_to_all_single" and isinstance(brought, Buffers):
                return self._exchange(rank, brought)
            others = brought
            if isinstance(brought, Buffers):
                others = Buffers(brought.inputs, [torch.empty_like(each) for each in brought.outputs])
            return _Done(run([brought if each == rank else others for each in self.members.ranks]))

    def _exchange(self, rank: int, brought: Buffers) -> _Done:
        """Give a rank from each other one what it sends itself; ones where it expects another size."""
        inputs, outputs = (_parts(each, len(self.members.ranks)) for each in brought)
        own = inputs[self.members.ranks.index(rank)].clone()
        for each in outputs:
            _ = each.copy_(own.view_as(each)) if each.numel() == own.numel() else each.fill_(1)
        return _Done()

    def post(self, kind: str, source: int, target: int, tag: int, tensor: torch.Tensor) -> _Done:
        if kind == "recv":
            with torch.no_grad():
                _ = tensor.fill_(1)
        return _Done()

    def wait(self, rank: int, event: object) -> None:
        """Do nothing: each call has ended."""

    def poll(self, rank: int) -> None:
        """Do nothing."""

    def alarm(self, rank: int) -> None:
        """Return no alarm: nobody waits."""

    def among(self, name: str, ranks: Sequence[int]) -> _Alone:
        return _Alone(Members(name, ranks, whole=False))


def run_alone(fn: Callable[[accel.DistContext], object], world_size: int) -> None:
    """Run a function on each rank of a world, one after another.

    Other ranks bring what the running one does, so the shapes on which ranks agree must be alike.
    """
    everybody = Members("0", range(world_size), whole=True)
    failed: list[BaseException] = []

    def rank_alone(rank: int, enter: Any) -> None:
        group: Any = SimulatedGroup(_Alone(everybody), rank)  # type: ignore[arg-type]
        try:
            with enter(group), torch.enable_grad():
                _ = fn(accel.from_group(group, device="cpu"))
        except BaseException as error:
            error.add_note(f"raised on rank {rank} alone")
            failed.append(error)

    with default_groups() as enter:
        for rank in range(world_size):
            # torch keeps caches of meshes by thread
            thread = threading.Thread(target=rank_alone, args=(rank, enter))
            thread.start()
            thread.join()
            if failed:
                raise failed[0]
