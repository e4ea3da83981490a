# SPDX-License-Identifier: Apache-2.0
"""A group of threads of one process as ranks: `copied`, `summed` and their like, without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_Untyped: Any = dist.ProcessGroup  # its stub lists several generations of overloads that no method can match
_PATIENCE_S = 60.0


class _Done(dist.Work):
    """The handle on a collective that is complete."""

    def wait(self, timeout: object = None) -> bool:
        return True


class _Meeting:
    """The place where ranks put tensors for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_PATIENCE_S)
        self.slots: list[list[Tensor]] = [[] for _ in range(size)]


class ThreadGroup(_Untyped):
    """One rank's view of a group of threads. It only knows the collectives of `accel.comm._gradients`.

    Tensors of different shapes break the meeting, for all ranks, with a `threading.BrokenBarrierError`.
    """

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self._meeting = meeting
        self._rank = rank
        self._size = size
        super().__init__(rank, size)  # pyright: ignore[reportUnknownMemberType]

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, tensors: list[Tensor], opts: object = None) -> dist.Work:
        def total(all_of: Sequence[list[Tensor]]) -> Tensor:
            return torch.stack([each[0] for each in all_of]).sum(0)

        return self._met(tensors, total, tensors[0])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: object = None) -> dist.Work:
        return self._met([input], lambda all_of: torch.cat([each[0] for each in all_of]), output)

    def alltoall_base(
        self, output: Tensor, input: Tensor, back: list[int], to: list[int], opts: object = None
    ) -> dist.Work:
        def received(all_of: Sequence[list[Tensor]]) -> Tensor:
            return torch.cat([each[self._rank] for each in all_of])

        return self._met(list(torch.split(input, to)), received, output)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: object = None) -> dist.Work:
        def part(all_of: Sequence[list[Tensor]]) -> Tensor:
            return torch.stack([each[0] for each in all_of]).sum(0).chunk(self._size)[self._rank]

        return self._met([input], part, output)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    all_to_all_single = alltoall_base

    def _met(self, given: list[Tensor], of: Callable[[Sequence[list[Tensor]]], Tensor], output: Tensor) -> dist.Work:
        meeting = self._meeting
        meeting.slots[self._rank] = given
        _ = meeting.barrier.wait()
        try:
            result = of(meeting.slots)
            if result.shape != output.shape:
                raise RuntimeError(f"ranks meet with other shapes: {list(result.shape)}, not {list(output.shape)}")
        except BaseException:
            meeting.barrier.abort()
            raise
        _ = meeting.barrier.wait()
        _ = output.copy_(result)
        return _Done()


class SilentGroup(ThreadGroup):
    """The first rank of a group without other running ranks. It receives zeros from them, and sums are its tensors."""

    def __init__(self, size: int) -> None:
        super().__init__(_Meeting(size), 0, size)

    def _met(self, given: list[Tensor], of: Callable[[Sequence[list[Tensor]]], Tensor], output: Tensor) -> dist.Work:
        if output is not given[0]:  # no sum: a sum stays the value of this rank
            _ = output.zero_()
        return _Done()


def run_in_threads(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Run work on every rank of a group of threads, and return the results; raises the first rank's error."""
    meeting = _Meeting(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(meeting, rank, size))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if errors:
        raise next((each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0])
    return [results[rank] for rank in range(size)]
