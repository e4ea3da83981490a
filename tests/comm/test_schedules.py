# SPDX-License-Identifier: Apache-2.0
"""Schedules of messages: every send has its receive, all ranks end with all values in rank order, in few rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from profiles import share

from accel.comm import _rounds
from accel.comm._rounds import Round, gather_rounds, gather_to_rounds, reduction_rounds

sizes = st.integers(1, 300)


def _run(plans: list[list[Any]], send: Callable[[int, Any], object], receive: Callable[[int, Any, Any], None]) -> None:
    """Carry out the ranks' plans, each as far as its messages have come."""
    wires: dict[tuple[int, int], deque[object]] = {}
    waiting = [deque(plan) for plan in plans]
    sent = [False] * len(plans)
    while any(waiting):
        moved = False
        for rank, plan in enumerate(waiting):
            if plan and not sent[rank]:
                if plan[0].target is not None:
                    wires.setdefault((rank, plan[0].target), deque()).append(send(rank, plan[0]))
                sent[rank] = moved = True
            if plan and (plan[0].source is None or wires.get((plan[0].source, rank))):
                each = plan.popleft()
                if each.source is not None:
                    receive(rank, each, wires[each.source, rank].popleft())
                sent[rank], moved = False, True
        assert moved, "ranks wait for each other"
    assert not any(wires.values()), "a message that nobody received"


@given(size=sizes)
def test_a_reduction_combines_neighbours_in_rank_order_on_all_ranks(size: int) -> None:
    held = [[rank] for rank in range(size)]

    def receive(rank: int, each: Round, theirs: list[int]) -> None:
        assert each.source is not None
        if each.final:
            held[rank] = theirs
        else:
            held[rank] = held[rank] + theirs if each.source > rank else theirs + held[rank]

    plans = [reduction_rounds(rank, size) for rank in range(size)]
    _run(plans, lambda rank, each: held[rank], receive)
    assert held == [list(range(size))] * size
    assert max(map(len, plans)) <= size.bit_length() + 1


@given(size=sizes)
def test_a_gather_ends_with_every_row_on_every_rank(size: int) -> None:
    rows = [[rank] for rank in range(size)]

    def receive(rank: int, each: Round, theirs: list[int]) -> None:
        assert len(theirs) == each.received
        rows[rank] = rows[rank] + theirs

    plans = [gather_rounds(rank, size) for rank in range(size)]
    _run(plans, lambda rank, each: rows[rank][: each.sent], receive)
    assert rows == [[(rank + i) % size for i in range(size)] for rank in range(size)]
    assert max(map(len, plans)) <= size.bit_length()
    assert all(sum(each.sent for each in plan) == size - 1 for plan in plans)


@given(size=sizes, data=st.data())
def test_a_gather_to_one_rank_sends_every_other_ranks_rows_once(size: int, data: st.DataObject) -> None:
    dst = data.draw(st.integers(0, size - 1))
    rows = [[rank] for rank in range(size)]

    def receive(rank: int, each: Round, theirs: list[int]) -> None:
        assert len(theirs) == each.received
        rows[rank] = rows[rank] + theirs

    plans = [gather_to_rounds(rank, size, dst) for rank in range(size)]
    _run(plans, lambda rank, each: rows[rank][: each.sent], receive)
    assert rows[dst] == [(dst + i) % size for i in range(size)]
    assert all(sum(each.target is not None for each in plan) == (rank != dst) for rank, plan in enumerate(plans))
    assert max(map(len, plans)) <= size.bit_length()


def _add(lower: torch.Tensor, upper: torch.Tensor) -> None:
    lower += upper


@settings(max_examples=share(0.5))
@given(size=st.integers(2, 13), length=st.integers(0, 5), seed=st.none() | st.integers(0, 9))
def test_messages_between_pairs_give_the_bits_of_one_process(ranks: Any, size: int, length: int, seed: int | None):
    values = torch.randn(size, length, generator=torch.Generator().manual_seed(size))
    expected = _rounds.reduce_rows(values.clone(), _add)

    def rank(ctx: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.comm._share = None  # as between processes
        total = _rounds.start_reduction(ctx.comm, values[ctx.rank].clone(), _add)()
        rows = torch.empty(size * length)
        _rounds.start_gather(ctx.comm, rows, values[ctx.rank].clone())()
        return total, rows

    for total, rows in ranks.run(rank, size, seed=seed):
        assert torch.equal(total, expected)
        assert torch.equal(rows.view(size, length), values)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_a_gather_to_one_rank_fills_its_rows(ranks: Any, size: int) -> None:
    def rank(ctx: Any) -> torch.Tensor:
        ctx.comm._share = None
        rows = torch.empty(size * 2, dtype=torch.int64)
        _rounds.start_gather(ctx.comm, rows, torch.tensor([ctx.rank, 7]), dst=size - 1)()
        return rows.view(size, 2)[:, 0]

    assert ranks.run(rank, size)[-1].tolist() == list(range(size))
