# SPDX-License-Identifier: Apache-2.0
"""The first message: the same size on all ranks, whatever they call, and not too many bytes among many."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

import accel
from accel.comm import Call, Comm, agreed_values, as_tensor, exchange, inline_bytes, reduced_bytes
from accel.errors import CheckpointError


def _comm(size: int) -> Comm:
    return Comm(None, 0, size, backend="none", control=torch.device("cpu"), owned=False)


@given(size=st.integers(2, 20_000))
def test_many_ranks_get_shorter_messages_in_which_any_dtype_can_follow_any(size):
    room = inline_bytes(_comm(size)) or reduced_bytes(_comm(size))
    assert room % 16 == 0
    assert 896 <= room <= (inline_bytes(_comm(size - 1)) or reduced_bytes(_comm(size - 1))) <= 8128
    assert size * inline_bytes(_comm(size)) <= 64 * 1024


@pytest.mark.parametrize("size", [2, 17, 129])
@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("odd", [False, True])
def test_payloads_of_any_length_arrive_from_every_rank(ranks, size, extra, odd):
    """Of the length that just fits, and one more and less; of all ranks, or of one beside empty ones."""

    def rank(ctx):
        room = inline_bytes(ctx.comm) or 1024
        mine = bytes([ctx.rank]) * (room + extra) if ctx.rank == 1 or not odd else b""
        parts = exchange(ctx.comm, Call("test"), as_tensor(mine))
        return [(part.numel() - room, set(part.tolist())) for part in parts]

    for parts in ranks.run(rank, size):
        for number, (beyond, values) in enumerate(parts):
            if number == 1 or not odd:
                assert (beyond, values) == (extra, {number})
            else:
                assert values == set()


@pytest.mark.parametrize("length", [3, 300, 30_000])
def test_errors_of_any_length_reach_many_ranks_whole(ranks, length):
    def rank(ctx):
        def write():
            if ctx.rank == 100:
                raise CheckpointError("no room", got="x" * length)
            return ctx.rank

        with pytest.raises(CheckpointError) as caught:
            agreed_values(ctx.comm, Call("saving"), write, int)
        accel.wait_for_everyone(ctx)
        return str(caught.value) == f"rank 100: no room: got {'x' * length}"

    assert all(ranks.run(rank, 129))
