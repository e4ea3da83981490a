# SPDX-License-Identifier: Apache-2.0
"""Small messages of simulated ranks are handed over and not sent; ranks and their errors see no difference."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises

import accel
from accel.comm import Call, exchange
from accel.errors import CollectiveMismatch, ContextClosedError
from accel.testing import simulate


def test_a_rank_may_change_what_it_received():
    def rank(ctx: accel.DistContext) -> list[list[int]]:
        payload = torch.arange(3, dtype=torch.uint8) + ctx.rank
        received = exchange(ctx.comm, Call("test"), payload)
        before = [part.tolist() for part in received]
        for part in received:
            _ = part.fill_(100 + ctx.rank)
        gathered = accel.gather(ctx, torch.ones(2))
        _ = gathered.fill_(100 + ctx.rank)
        accel.wait_for_everyone(ctx)
        assert all(part.eq(100 + ctx.rank).all() for part in [*received, gathered])
        return before

    assert simulate(rank, 3) == [[[0, 1, 2], [1, 2, 3], [2, 3, 4]]] * 3


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_user_s_own_call_is_never_taken_for_a_message(seed):
    """Even one of the name, dtype and size that messages have on a network."""

    def rank(ctx: accel.DistContext) -> None:
        if ctx.rank:
            own = torch.zeros(2 * 8192, dtype=torch.uint8)
            dist.all_to_all_single(torch.empty_like(own), own, group=ctx.comm.group)
        else:
            _ = accel.gather(ctx, torch.ones(2))

    with assert_raises(CollectiveMismatch, problem="ranks disagree about collective #0") as caught:
        simulate(rank, 2, seed=seed)
    assert "test_sim_messages.py" in str(caught.value)
    assert "accel.gather" in str(caught.value)


def test_a_closed_context_hands_nothing_over():
    def rank(ctx: accel.DistContext) -> None:
        ctx.comm.close()
        _ = accel.gather(ctx, torch.ones(2))

    with pytest.raises(ContextClosedError):
        simulate(rank, 2)
