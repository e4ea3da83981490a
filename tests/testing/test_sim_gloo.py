# SPDX-License-Identifier: Apache-2.0
"""torch's calls on two gloo processes and on two simulated ranks give the same bytes, or are both refused.

A new call joins by a function decorated with `@call`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from twin_ranks import differences, refused, serve

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int8", "int32", "int64", "uint8", "bool")
REFUSED = ("int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "complex32")
DTYPES = (*FLOATS, *INTEGERS, *REFUSED, "complex64", "complex128")
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
SEED = 2026
ALL_GATHER_SINGLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Case(msgspec.Struct, frozen=True):
    """A call, and what its tensors hold."""

    name: str
    dtype: str = "float32"
    op: str = "SUM"
    shape: tuple[int, ...] = (3,)
    root: int = 0
    later: bool = False
    seed: int = 0


class Rank:
    """One rank's side of a case."""

    def __init__(self, group: dist.ProcessGroup, case: Case) -> None:
        self.group, self.case = group, case
        self.rank, self.size = group.rank(), group.size()
        self.root, self.later, self.op = case.root, case.later, getattr(dist.ReduceOp, case.op)
        self.is_root = self.rank == case.root
        self.other = 1 - self.rank
        self._generator = torch.Generator().manual_seed(2 * case.seed + self.rank)

    def draw(self, *lead: int) -> torch.Tensor:
        shape, dtype = (*lead, *self.case.shape), getattr(torch, self.case.dtype)
        if dtype.is_complex or dtype.is_floating_point:
            return (torch.randn(shape, generator=self._generator, dtype=torch.float64) * 4).to(dtype)
        return torch.randint(0, 9, shape, generator=self._generator).to(dtype)

    def empty(self, *lead: int) -> torch.Tensor:
        shape, dtype = (*lead, *self.case.shape), getattr(torch, self.case.dtype)
        return torch.zeros(shape, dtype=torch.uint8).to(dtype)

    def indices(self, count: int) -> torch.Tensor:
        return torch.randint(0, 5, (1, count), generator=self._generator)

    def rows(self) -> list[torch.Tensor]:
        return [self.draw() for _ in range(self.size)]

    def empties(self) -> list[torch.Tensor]:
        return [self.empty() for _ in range(self.size)]


Call = Callable[[Rank], Any]
CALLS: dict[str, Call] = {}
REDUCTIONS: list[str] = []  # calls that look at `op`


def call(fn: Call) -> Call:
    CALLS[fn.__name__] = fn
    return fn


def reduction(fn: Call) -> Call:
    REDUCTIONS.append(fn.__name__)
    return call(fn)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


@reduction
def all_reduce(me: Rank) -> Any:
    x = me.draw()
    _wait(dist.all_reduce(x, me.op, me.group, me.later))
    return x


@reduction
def all_reduce_sparse(me: Rank) -> Any:
    values = me.draw()
    x = torch.sparse_coo_tensor(me.indices(values.shape[0]), values, (5, *values.shape[1:]), check_invariants=False)
    _wait(dist.all_reduce(x, me.op, me.group, me.later))
    return x.is_coalesced(), x.coalesce().indices(), x.coalesce().values()


@reduction
def all_reduce_coalesced(me: Rank) -> Any:
    xs, options = me.rows(), dist.AllreduceCoalescedOptions()
    options.reduceOp = me.op
    me.group.allreduce_coalesced(xs, options).wait()
    return xs


@reduction
def reduce(me: Rank) -> Any:
    x = me.draw()
    _wait(dist.reduce(x, op=me.op, group=me.group, async_op=me.later, group_dst=me.root))
    return x if me.is_root else None  # gloo leaves parts of sums on the other ranks


@reduction
def reduce_scatter(me: Rank) -> Any:
    out = me.empty()
    _wait(dist.reduce_scatter(out, me.rows(), me.op, me.group, me.later))
    return out


@reduction
def reduce_scatter_single(me: Rank) -> Any:
    x = me.draw(me.size)
    out = me.empty().reshape(-1)
    _wait(REDUCE_SCATTER_SINGLE(out, x.reshape(-1), op=me.op, group=me.group, async_op=me.later))
    return out


@reduction
def reduce_scatter_coalesced(me: Rank) -> Any:
    outs, options = [me.empty().reshape(-1) for _ in range(2)], dist.ReduceScatterOptions()
    options.reduceOp = me.op
    run = getattr(me.group, "reduce_scatter_single_coalesced", None) or me.group.reduce_scatter_tensor_coalesced
    run(outs, [me.draw(me.size).reshape(-1) for _ in range(2)], options).wait()
    return outs


@call
def broadcast(me: Rank) -> Any:
    x = me.draw()
    _wait(dist.broadcast(x, group=me.group, async_op=me.later, group_src=me.root))
    return x


@call
def all_gather(me: Rank) -> Any:
    outs = me.empties()
    _wait(dist.all_gather(outs, me.draw(), me.group, me.later))
    return outs


@call
def all_gather_single(me: Rank) -> Any:
    x = me.draw(1)
    out = me.empty(me.size)
    _wait(ALL_GATHER_SINGLE(out, x, group=me.group, async_op=me.later))
    return out


@call
def all_gather_single_coalesced(me: Rank) -> Any:
    outs = [me.empty(me.size).reshape(-1) for _ in range(2)]
    run = getattr(me.group, "all_gather_single_coalesced", None) or me.group.allgather_into_tensor_coalesced
    run(outs, [me.draw().reshape(-1) for _ in range(2)]).wait()
    return outs


@call
def all_gather_coalesced(me: Rank) -> Any:
    outs = [me.empties() for _ in range(me.size)]
    dist.all_gather_coalesced(outs, me.rows(), me.group)
    return outs


@call
def gather(me: Rank) -> Any:
    outs = me.empties() if me.is_root else None
    _wait(dist.gather(me.draw(), outs, group=me.group, async_op=me.later, group_dst=me.root))
    return outs


@call
def scatter(me: Rank) -> Any:
    out = me.empty()
    rows = me.rows() if me.is_root else None
    _wait(dist.scatter(out, rows, group=me.group, async_op=me.later, group_src=me.root))
    return out


@call
def all_to_all(me: Rank) -> Any:
    outs = me.empties()
    _wait(dist.all_to_all(outs, me.rows(), me.group, me.later))
    return outs


@call
def all_to_all_single(me: Rank) -> Any:
    x = me.draw(me.size)
    out = me.empty(me.size)
    _wait(dist.all_to_all_single(out, x, group=me.group, async_op=me.later))
    return out


@call
def all_to_all_ragged(me: Rank) -> Any:
    counts = [[1, 2], [0, 3]]
    sends, receives = counts[me.rank], [row[me.rank] for row in counts]
    out = me.empty(sum(receives))
    _wait(dist.all_to_all_single(out, me.draw(sum(sends)), receives, sends, group=me.group, async_op=me.later))
    return out


@call
def messages(me: Rank) -> Any:
    out = me.empty()
    sending = dist.isend(me.draw(), group=me.group, group_dst=me.other, tag=me.root)
    dist.irecv(out, group=me.group, group_src=me.other, tag=me.root).wait()
    sending.wait()
    return out


@call
def blocking_messages(me: Rank) -> Any:
    out = me.empty(1).reshape(-1)
    if not out.numel():
        return None  # gloo waits for ever for an empty message, unless both sides are asynchronous
    if me.is_root:
        dist.send(me.draw(1).reshape(-1), me.other)
        return None
    return dist.recv(out, me.other if me.later else None), out


@call
def batched_messages(me: Rank) -> Any:
    outs, sent = me.empties(), me.rows()
    ops = [dist.P2POp(dist.isend, x, me.other) for x in sent] + [dist.P2POp(dist.irecv, x, me.other) for x in outs]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return outs


@call
def objects(me: Rank) -> Any:
    mine: Any = {"rank": me.rank, "shape": me.case.shape, "values": me.draw().double().tolist()}
    everything: list[Any] = [None] * me.size
    dist.all_gather_object(everything, mine, group=me.group)
    at_root: list[Any] | None = [None] * me.size if me.is_root else None
    dist.gather_object(mine, at_root, group=me.group, group_dst=me.root)
    sent = [mine]
    dist.broadcast_object_list(sent, group=me.group, group_src=me.root)
    part: list[Any] = [None]
    dist.scatter_object_list(part, [mine, "other"] if me.is_root else None, group=me.group, group_src=me.root)
    return everything, at_root, sent, part


@call
def functional_collectives(me: Rank) -> Any:
    x = me.draw(me.size)
    gathered = functional.all_gather_tensor(x, 0, me.group)
    scattered = functional.reduce_scatter_tensor(x, "sum", 0, me.group)
    return [functional.all_reduce(x, "sum", me.group) + 0, gathered + 0, scattered + 0]


def _cases(drawn: int) -> list[Case]:
    """Every call with every dtype and reduce op once; then some of each call that are drawn."""
    one_op = [Case(name, dtype) for name in CALLS if name not in REDUCTIONS for dtype in DTYPES]
    any_op = [Case(name, dtype, op) for name in REDUCTIONS for dtype in DTYPES for op in OPS]
    draw = random.Random(SEED + drawn)
    return one_op + any_op + [_drawn(draw, name, number) for number in range(drawn) for name in CALLS]


def _drawn(draw: random.Random, name: str, number: int) -> Case:
    dtype = draw.choice((*FLOATS, *INTEGERS))
    allowed = OPS[:5] if dtype in FLOATS else (OPS[0], *OPS[2:])
    shape = tuple(draw.randint(0, 4) for _ in range(draw.randint(1, 3)))
    return Case(name, dtype, draw.choice(allowed), shape, draw.randint(0, 1), draw.random() < 0.5, number)


def _run(group: dist.ProcessGroup, case: Case) -> Any:
    return CALLS[case.name](Rank(group, case))


def _same(expected: object, got: object) -> bool:
    """Whether both are refused, each in its own words, or both are the same."""
    return refused(expected) and refused(got) if refused(expected) or refused(got) else expected == got


@pytest.mark.multiprocess
@pytest.mark.parametrize("drawn", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_simulated_ranks_equal_gloo_processes(drawn):
    cases = _cases(drawn)
    wrong, real = differences(__file__, [str(drawn)], _run, cases, _same)
    assert not wrong, f"{len(wrong)} of {2 * len(cases)} differ\n" + "\n".join(wrong[:20])
    assert sum(map(refused, real[0])) < len(cases) / 2


if __name__ == "__main__":
    serve(_run, _cases(int(sys.argv[2])))
