# SPDX-License-Identifier: Apache-2.0
"""A `torch.distributed.ProcessGroup`: each collective is a meeting of simulated ranks.

torch calls a Python subclass both from `torch.distributed` and from C++ (DDP's reducer). torch 2.13 renamed some
methods, and C++ calls the new or the old name depending on version, so both are here. This module has all the names
that torch fixes without documenting them; `tests/testing/test_sim_torch.py` fails when torch changes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from accel.fakes import is_fake
from accel.testing import _collectives as run
from accel.testing._collectives import Buffers, Reduction, Run, SimulatedCall, TensorLayout, layout, reduction_of
from accel.testing._device import SimulatedDevice
from accel.testing._meetings import Meeting, MeetingPoint, MessageSide
from accel.testing._networks import check_layouts, check_message, check_reduction, check_tensors
from accel.testing._sites import SimulationError

BACKEND = "simulated"

T = TypeVar("T")
R = TypeVar("R")

# Printed as what goes over a network in its place; the text is no dtype, so that no call of the user's is equal.
_SHARE = SimulatedCall("all_to_all_single", ("torch.uint8",))


class _ReduceOptions(Protocol):
    reduceOp: Any  # noqa: N815 - torch's name


class _RootOptions(Protocol):
    rootRank: int  # noqa: N815 - torch's name


class _ReduceToRootOptions(_ReduceOptions, _RootOptions, Protocol): ...


class _Unsent(NamedTuple):
    """The end of a call with fake tensors, which have no values to send."""

    done: bool = True


class SimulatedWork(dist.Work):
    """The handle of one rank on a call under way."""

    def __init__(
        self, rendezvous: MeetingPoint, rank: int, event: Meeting | MessageSide | _Unsent, outputs: list[Tensor]
    ) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._rank = rank  # the world's number
        self._event = event
        self._outputs = outputs
        self._given_up = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let other ranks run until the call is complete; the time-out has no meaning here."""
        if not self._given_up and not isinstance(self._event, _Unsent):
            self._rendezvous.wait(self._rank, self._event)
        return True

    def give_up(self) -> list[Tensor]:
        """Let every wait return at once from now on; return the tensors that the call was to fill."""
        self._given_up = True
        return self._outputs

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future that is complete already: waiting for one in C++ would keep other ranks from running."""
        self.wait()
        future: Future[list[Tensor]] = Future()
        future.set_result(self._outputs)
        return future

    def is_completed(self) -> bool:
        """Whether all ranks have come, after a turn of each rank that can continue, so that polling in a loop ends."""
        if not self._event.done and not self._given_up:
            self._rendezvous.poll(self._rank)
        return self._event.done

    def is_success(self) -> bool:
        """Whether all ranks have come; a call that fails stops the simulation."""
        return self._event.done

    def result(self) -> list[Tensor]:
        """The outputs of this rank."""
        return self._outputs

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def _source_rank(self) -> int:
        assert isinstance(self._event, MessageSide)  # torch asks the handles of receives only
        assert self._event.source is not None  # and after they are complete
        return self._rendezvous.members.ranks.index(self._event.source)


# The stub of ProcessGroup lists several generations of overloads that no single method can match.
_Untyped: Any = dist.ProcessGroup


class SimulatedGroup(_Untyped):
    """One rank's view of a group of simulated ranks.

    Args:
        rendezvous: of the group's ranks.
        rank: this rank's place in the group.
    """

    def __init__(self, rendezvous: MeetingPoint, rank: int) -> None:
        members = rendezvous.members
        self._rendezvous = rendezvous
        self._rank = rank
        self._size = len(members.ranks)
        self._me = members.ranks[rank]  # the world's number, as everywhere in a rendezvous
        self.alarm = rendezvous.alarm(self._me)  # read by `accel.comm`
        self.works: WeakSet[SimulatedWork] | None = None  # collects handles for a caller that asked for them
        self.device: SimulatedDevice | None = None  # its work ends before a collective begins
        super().__init__(rank, self._size)  # pyright: ignore[reportUnknownMemberType]

    def __repr__(self) -> str:
        return f"SimulatedGroup(rank={self._rank}, size={self._size}{self._rendezvous.members.label})"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._rendezvous.members.name

    def _get_backend(self, device: torch.device) -> SimulatedGroup:
        """Return what carries the messages of a device; torch 2.14 asks it whether it joins sends and receives."""
        return self

    @property
    def group_name(self) -> Any:  # torch's type is a NewType of str that it does not export
        return self._rendezvous.members.name

    def new_group(self, ranks: list[int], *, group_name: str, **options: object) -> SimulatedGroup | None:
        """Make a group for `torch.distributed.new_group`; None for a rank that is no member."""
        return self.subgroup(group_name, ranks) if self._me in ranks else None

    def subgroup(self, name: str, ranks: Sequence[int]) -> SimulatedGroup:
        """Return this rank's view of a group that it belongs to."""
        group = SimulatedGroup(self._rendezvous.among(name, ranks), list(ranks).index(self._me))
        group.works, group.device = self.works, self.device
        return group

    def allreduce(self, tensors: list[Tensor], opts: _ReduceOptions) -> dist.Work:
        op = reduction_of(opts.reduceOp)
        call = SimulatedCall("all_reduce", (op.value, *_layouts(tensors)))
        return self._join(call, Buffers(tensors, tensors), partial(run.all_reduce, op), op)

    def broadcast(self, tensors: list[Tensor], opts: _RootOptions) -> dist.Work:
        call = SimulatedCall("broadcast", (self._world_rank(opts.rootRank), *_layouts(tensors)))
        return self._join(call, Buffers(tensors, tensors), partial(run.broadcast, opts.rootRank))

    def reduce(self, tensors: list[Tensor], opts: _ReduceToRootOptions) -> dist.Work:
        op = reduction_of(opts.reduceOp)
        call = SimulatedCall("reduce", (op.value, self._world_rank(opts.rootRank), *_layouts(tensors)))
        return self._join(call, Buffers(tensors, tensors), partial(run.reduce, op, opts.rootRank), op)

    def barrier(self, opts: object = None) -> dist.Work:
        return self._join(SimulatedCall("barrier"), Buffers([], []), run.barrier)

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> dist.Work:
        call = SimulatedCall("all_gather", tuple(_layouts(input_tensors)))
        return self._join(call, Buffers(input_tensors, self._one_each(output_tensors[0])), run.all_gather)

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: _RootOptions) -> dist.Work:
        call = SimulatedCall("gather", (self._world_rank(opts.rootRank), *_layouts(input_tensors)))
        outputs = self._one_each(output_tensors[0]) if self._rank == opts.rootRank else []
        return self._join(call, Buffers(input_tensors, outputs), partial(run.gather, opts.rootRank))

    def gather_single(self, output: Tensor, input: Tensor, opts: _RootOptions) -> dist.Work:
        outputs = [*output.view(self._size, *input.shape)] if self._rank == opts.rootRank else []
        return self.gather([outputs], [input], opts)

    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: _RootOptions) -> dist.Work:
        call = SimulatedCall("scatter", (self._world_rank(opts.rootRank), *_layouts(output_tensors)))
        inputs = self._one_each(input_tensors[0]) if self._rank == opts.rootRank else []
        return self._join(call, Buffers(inputs, output_tensors), partial(run.scatter, opts.rootRank))

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: _ReduceOptions
    ) -> dist.Work:
        op = reduction_of(opts.reduceOp)
        call = SimulatedCall("reduce_scatter", (op.value, *_layouts(input_tensors[0])))
        buffers = Buffers(self._one_each(input_tensors[0]), output_tensors)
        return self._join(call, buffers, partial(run.reduce_scatter, op), op)

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> dist.Work:
        buffers = Buffers(self._one_each(input_tensors), self._one_each(output_tensors))
        return self._join(SimulatedCall("all_to_all"), buffers, run.all_to_all)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: _ReduceOptions) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        buffers = Buffers(_parts(input, input_sizes), _parts(output, output_sizes))
        return self._join(SimulatedCall("all_to_all_single", (input.dtype,)), buffers, run.all_to_all_single)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: _ReduceOptions) -> dist.Work:
        return self.allreduce(tensors, opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        call = SimulatedCall("all_gather_single", tuple(_layouts(inputs)))
        return self._join(call, Buffers(inputs, outputs), run.all_gather_single)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        flat = [tensor for tensors in outputs for tensor in tensors]
        call = SimulatedCall("all_gather_coalesced", tuple(_layouts(inputs)))
        return self._join(call, Buffers(inputs, flat), run.all_gather_coalesced)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: _ReduceOptions
    ) -> dist.Work:
        op = reduction_of(opts.reduceOp)
        call = SimulatedCall("reduce_scatter_single", (op.value, *_layouts(inputs)))
        return self._join(call, Buffers(inputs, outputs), partial(run.reduce_scatter_single, op), op)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        return self._post("send", self._me, self._world_rank(dst), tag, tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        return self._post("recv", self._world_rank(src), self._me, tag, tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        return self._post("recv", None, self._me, tag, tensors)

    gather_into_tensor = gather_single  # of torch 2.14, as the one above
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def share(self, mine: T, combine: Callable[[Sequence[T]], R], /) -> Callable[[], R]:
        """Begin to pass an object to all ranks; the way of small messages of `accel.comm`."""
        rendezvous, me = self._rendezvous, self._me
        self._settle()
        meeting = rendezvous.join(me, _SHARE, mine, combine)

        def wait() -> R:
            rendezvous.wait(me, meeting)
            return meeting.result

        return wait

    def _join(self, call: SimulatedCall, buffers: Buffers, work: Run, reduction: Reduction | None = None) -> dist.Work:
        network = self._rendezvous.network
        check_layouts(network, call.name, reduction, buffers.inputs, buffers.outputs)
        if reduction is not None:
            check_reduction(network, call.name, reduction, buffers.inputs[0].dtype)
        check_tensors(network, call.name, buffers.inputs, buffers.outputs)
        if any(type(each) is not Tensor and is_fake(each) for each in (*buffers.inputs, *buffers.outputs)):
            return self._work(_Unsent(), buffers.outputs)
        self._settle()
        event = self._rendezvous.join(self._me, call, buffers, work)
        return self._work(event, buffers.outputs)

    def _post(
        self, kind: Literal["send", "recv"], source: int | None, target: int, tag: int, tensors: list[Tensor]
    ) -> dist.Work:
        network = self._rendezvous.network
        check_message(network, any_source=source is None, tag=tag)
        check_tensors(network, kind, tensors, [])
        self._settle()
        return self._work(self._rendezvous.post(kind, source, target, tag, tensors[0]), tensors)

    def _settle(self) -> None:
        if self.device is not None:
            self.device.finish()

    def _work(self, event: Meeting | MessageSide | _Unsent, outputs: list[Tensor]) -> dist.Work:
        work = SimulatedWork(self._rendezvous, self._me, event, outputs)
        if self.works is not None:
            self.works.add(work)
        return work

    def _world_rank(self, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise SimulationError("no such rank in the group", expected=f"0 to {self._size - 1}", got=str(rank))
        return self._rendezvous.members.ranks[rank]

    def _one_each(self, tensors: list[Tensor]) -> list[Tensor]:
        if len(tensors) != self._size:
            raise SimulationError(
                "a list of tensors needs one for each rank", expected=f"{self._size} tensors", got=str(len(tensors))
            )
        return tensors


def _parts(tensor: Tensor, sizes: list[int]) -> list[Tensor]:
    return list(torch.split(tensor, sizes)) if sizes else [tensor]


def _layouts(tensors: Sequence[Tensor]) -> list[TensorLayout]:
    return [layout(tensor) for tensor in tensors]
