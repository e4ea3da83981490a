# SPDX-License-Identifier: Apache-2.0
"""Every collective of torch.distributed gives on simulated ranks what its definition says, in any schedule."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

from accel.errors import CollectiveMismatch
from accel.testing import SimulationError, Simulator, simulate_groups

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
REDUCTIONS = {
    dist.ReduceOp.SUM: lambda xs: functools.reduce(operator.add, xs),
    dist.ReduceOp.PRODUCT: lambda xs: functools.reduce(operator.mul, xs),
    dist.ReduceOp.MIN: lambda xs: functools.reduce(torch.minimum, xs),
    dist.ReduceOp.MAX: lambda xs: functools.reduce(torch.maximum, xs),
}
BITWISE = {
    dist.ReduceOp.BAND: operator.and_,
    dist.ReduceOp.BOR: operator.or_,
    dist.ReduceOp.BXOR: operator.xor,
}
ALL_GATHER_SINGLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
worlds = st.integers(1, 8)
seeds = st.none() | st.integers(0, 2**16)
relaxed = settings(max_examples=share(0.8), deadline=None)


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    with Simulator() as simulator:
        yield simulator


def _draw(size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int | None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed or 0)
    return [torch.randint(1, 3, shape, generator=generator).to(dtype) for _ in range(size)]


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@relaxed
@given(size=worlds, shape=shapes, dtype=st.sampled_from(DTYPES), op=st.sampled_from(list(REDUCTIONS)), seed=seeds)
def test_all_reduce_and_reduce(simulator, size, shape, dtype, op, seed):
    xs, root = _draw(size, shape, dtype, seed), (seed or 0) % size

    def rank(group):
        everywhere, at_root = xs[group.rank()].clone(), xs[group.rank()].clone()
        dist.all_reduce(everywhere, op=op, group=group)
        dist.reduce(at_root, group_dst=root, op=op, group=group)
        return everywhere, at_root

    expected = REDUCTIONS[op](xs)
    for i, (everywhere, at_root) in enumerate(simulator.run_groups(rank, size, seed=seed)):
        assert_same(everywhere, expected)
        assert_same(at_root, expected if i == root else xs[i])


@relaxed
@given(size=worlds, counts=st.lists(st.integers(0, 6), min_size=8, max_size=8), seed=seeds)
def test_all_reduce_of_sparse_tensors(simulator, size, counts, seed):
    generator = torch.Generator().manual_seed(seed or 0)
    rows = [torch.randint(0, 5, (1, count), generator=generator) for count in counts]
    ones = [torch.ones(each.shape[1], 2).double() for each in rows]
    pairs = zip(rows, ones, strict=True)
    xs = [torch.sparse_coo_tensor(at, values, (5, 2), check_invariants=True) for at, values in pairs]

    def rank(group):
        mine = xs[group.rank()].clone()
        dist.all_reduce(mine, group=group)
        return mine

    for got in simulator.run_groups(rank, size, seed=seed):
        assert got.is_coalesced()
        assert_same(got.to_dense(), sum(each.to_dense() for each in xs[:size]))
        assert got.indices()[0].tolist() == torch.cat(rows[:size], 1).unique().tolist()


def test_a_sparse_tensor_meets_no_dense_one():
    def rank(group):
        dist.all_reduce(torch.eye(2).to_sparse() if group.rank() else torch.eye(2), group=group)

    with assert_raises(CollectiveMismatch, got=r"sparse float32\[2, 2\]"):
        simulate_groups(rank, 2)


@relaxed
@given(size=worlds, shape=shapes, op=st.sampled_from(list(BITWISE)), seed=seeds)
def test_bitwise_all_reduce(simulator, size, shape, op, seed):
    xs = _draw(size, shape, torch.int32, seed)

    def rank(group):
        x = xs[group.rank()].clone()
        dist.all_reduce(x, op=op, group=group)
        return x

    for got in simulator.run_groups(rank, size, seed=seed):
        assert_same(got, functools.reduce(BITWISE[op], xs))


@relaxed
@given(size=worlds, shape=shapes, dtype=st.sampled_from(DTYPES[:4]), seed=seeds)
def test_average(simulator, size, shape, dtype, seed):
    xs = _draw(size, shape, dtype, seed)

    def rank(group):
        x = xs[group.rank()].clone()
        dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group)
        return x

    for got in simulator.run_groups(rank, size, seed=seed):
        assert_same(got, (torch.stack(xs).double().sum(0) / size).to(dtype))


@relaxed
@given(size=worlds, shape=shapes, dtype=st.sampled_from((*DTYPES, torch.bool)), seed=seeds)
def test_moving_data(simulator, size, shape, dtype, seed):
    xs, root = _draw(size, shape, dtype, seed), (seed or 0) % size

    def rank(group):
        x, me = xs[group.rank()], group.rank()
        sent = x.clone()
        dist.broadcast(sent, group_src=root, group=group)
        listed = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(listed, x, group=group)
        single = x.new_empty(size * x.numel())
        ALL_GATHER_SINGLE(single, x.reshape(-1), group=group)
        gathered = [torch.empty_like(x) for _ in range(size)] if me == root else None
        dist.gather(x, gathered, group_dst=root, group=group)
        part = torch.empty_like(x)
        dist.scatter(part, list(xs) if me == root else None, group_src=root, group=group)
        dist.barrier(group=group)
        return sent, listed, single, gathered, part

    for i, (sent, listed, single, gathered, part) in enumerate(simulator.run_groups(rank, size, seed=seed)):
        assert_same(sent, xs[root])
        assert_same(single, torch.cat([x.reshape(-1) for x in xs]))
        assert_same(part, xs[i])
        for j in range(size):
            assert_same(listed[j], xs[j])
            if i == root:
                assert_same(gathered[j], xs[j])


@relaxed
@given(size=worlds, width=st.integers(0, 3), dtype=st.sampled_from(DTYPES), seed=seeds)
def test_reduce_scatter_and_all_to_all(simulator, size, width, dtype, seed):
    xs = _draw(size, (size, width), dtype, seed)

    def rank(group):
        x = xs[group.rank()]
        listed, single, swapped = x.new_empty(width), x.new_empty(width), torch.empty_like(x)
        dist.reduce_scatter(listed, [row.clone() for row in x], group=group)
        REDUCE_SCATTER_SINGLE(single, x.reshape(-1), group=group)
        dist.all_to_all_single(swapped, x, group=group)
        rows = [x.new_empty(width) for _ in range(size)]
        dist.all_to_all(rows, [row.clone() for row in x], group=group)
        return listed, single, swapped, torch.stack(rows)

    total = functools.reduce(operator.add, xs)
    for i, (listed, single, swapped, rows) in enumerate(simulator.run_groups(rank, size, seed=seed)):
        assert_same(listed, total[i])
        assert_same(single, total[i])
        assert_same(swapped, torch.stack([x[i] for x in xs]))
        assert_same(rows, swapped)


@relaxed
@given(data=st.data(), size=st.integers(1, 5), seed=seeds)
def test_ragged_all_to_all_single(simulator, data, size, seed):
    counts = data.draw(
        st.lists(st.lists(st.integers(0, 3), min_size=size, max_size=size), min_size=size, max_size=size)
    )

    def rank(group):
        me = group.rank()
        sends, receives = counts[me], [row[me] for row in counts]
        x = torch.cat([torch.full((count,), 10 * me + j) for j, count in enumerate(sends)])
        out = x.new_empty(sum(receives))
        dist.all_to_all_single(out, x, receives, sends, group=group)
        return out.tolist()

    for i, got in enumerate(simulator.run_groups(rank, size, seed=seed)):
        assert got == [10 * j + i for j in range(size) for _ in range(counts[j][i])]


@relaxed
@given(size=st.integers(2, 6), length=st.integers(0, 3), seed=seeds)
def test_messages_round_a_ring(simulator, size, length, seed):
    def rank(group):
        me = group.rank()
        mine, other = torch.full((length,), float(me)), torch.empty(length)
        sending = dist.isend(mine, group_dst=(me + 1) % size, group=group)
        dist.irecv(other, group_src=(me - 1) % size, group=group).wait()
        sending.wait()
        return other

    for i, got in enumerate(simulator.run_groups(rank, size, seed=seed)):
        assert_same(got, torch.full((length,), float((i - 1) % size)))


@relaxed
@given(size=st.integers(2, 6), tags=st.integers(1, 2), seed=seeds)
def test_messages_from_any_rank_arrive_once_each(simulator, size, tags, seed):
    def rank(group):
        me = group.rank()
        if me:
            dist.isend(torch.tensor(me), group_dst=0, group=group, tag=me % tags).wait()
            return []
        found = []
        for sender in range(1, size):
            tensor = torch.tensor(0)
            work = dist.irecv(tensor, group=group, tag=sender % tags)
            work.wait()
            assert work._source_rank() == tensor
            assert tensor % tags == sender % tags
            found.append(int(tensor))
        return found

    assert sorted(simulator.run_groups(rank, size, seed=seed)[0]) == list(range(1, size))


@relaxed
@given(size=worlds, seed=seeds, value=st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_objects(simulator, size, seed, value):
    root = (seed or 0) % size

    def rank(group):
        me, everything, mine = group.rank(), [None] * size, [(group.rank(), value)]
        dist.all_gather_object(everything, (me, value), group=group)
        at_root = [None] * size if me == root else None
        dist.gather_object(me, at_root, group_dst=root, group=group)
        dist.broadcast_object_list(mine, group_src=root, group=group)
        return everything, at_root, mine

    for i, (everything, at_root, sent) in enumerate(simulator.run_groups(rank, size, seed=seed)):
        assert everything == [(j, value) for j in range(size)]
        assert at_root == (list(range(size)) if i == root else None)
        assert sent == [(root, value)]


@relaxed
@given(size=worlds, order=st.permutations(range(5)), seed=seeds)
def test_handles_may_be_waited_for_in_any_order(simulator, size, order, seed):
    def rank(group):
        tensors = [torch.tensor(10.0 * i + group.rank()) for i in range(5)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        for i in order if group.rank() % 2 else range(5):
            works[i].wait()
            assert works[i].is_completed()
        futures = dist.all_reduce(tensors[0], group=group, async_op=True).get_future()
        return [tensor.item() for tensor in tensors], futures.wait()[0].item()

    ranks = sum(range(size))
    for got, last in simulator.run_groups(rank, size, seed=seed):
        assert got[1:] == [10.0 * i * size + ranks for i in range(1, 5)]
        assert got[0] == last == ranks * size


def test_both_generations_of_method_names():
    def rank(group):
        x, size, opts = torch.arange(4.0) + group.rank(), group.size(), dist.ReduceScatterOptions()
        found = []
        for name in ("_allgather_base", "all_gather_single"):
            found.append(x.new_empty(4 * size))
            getattr(group, name)(found[-1], x).wait()
        for name in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
            found.append(x.new_empty(4 * size))
            getattr(group, name)([found[-1]], [x]).wait()
        for name in ("_reduce_scatter_base", "reduce_scatter_single"):
            found.append(x.new_empty(2))
            getattr(group, name)(found[-1], x, opts).wait()
        for name in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
            found.append(x.new_empty(2))
            getattr(group, name)([found[-1]], [x], opts).wait()
        for name in ("alltoall_base", "all_to_all_single"):
            found.append(torch.empty_like(x))
            getattr(group, name)(found[-1], x, [], []).wait()
        return [tensor.tolist() for tensor in found]

    for i, got in enumerate(simulate_groups(rank, 2)):
        assert got[:4] == [[0, 1, 2, 3, 1, 2, 3, 4]] * 4
        assert got[4:8] == [[[1, 3], [5, 7]][i]] * 4
        assert got[8:] == [[[0, 1, 1, 2], [2, 3, 3, 4]][i]] * 2


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        (
            lambda group: dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG, group),
            {"problem": "AVG of torch.int64"},
        ),
        (lambda group: dist.all_reduce(torch.ones(2), dist.ReduceOp.BXOR, group), {"problem": "BXOR of torch.float32"}),
        (
            lambda group: dist.all_gather([torch.ones(2)], torch.ones(2), group),
            {"problem": "one for each rank", "expected": "2"},
        ),
    ],
)
def test_what_backends_refuse_is_refused(call, fields):
    with assert_raises(SimulationError, **fields):
        simulate_groups(call, 2)
