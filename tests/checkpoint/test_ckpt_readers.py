# SPDX-License-Identifier: Apache-2.0
"""Ranks of a large group find the readers of a checkpoint's files from bits, as a small one from all numbers."""

from __future__ import annotations

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

import accel
from accel.checkpoint._boxes import main_readers
from accel.checkpoint._read import agree_on_readers
from accel.comm import Call
from accel.errors import CheckpointError


@settings(max_examples=share(0.5))
@given(size=st.integers(2, 5), files=st.integers(0, 19), data=st.data())
def test_readers_are_the_same_on_both_sides_of_the_switch(ranks, size, files, data):
    sizes = st.lists(st.sampled_from([0, 0, 1, 9, 10, 19, 20, 2**40]), min_size=files, max_size=files)
    wanted = [data.draw(sizes) for _ in range(size)]

    def rank(ctx):
        ctx.comm.most_gathered = 1
        return agree_on_readers(ctx.comm, Call("dividing"), wanted[ctx.rank])

    assert ranks.run(rank, size) == [main_readers(wanted, range(len(wanted)))] * size
    for at, readers in enumerate(main_readers(wanted, range(len(wanted)))):
        assert bool(readers) == any(mine[at] for mine in wanted)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_large_group_checks_every_byte_and_loads(ranks, tmp_path, damaged):
    def rank(ctx):
        ctx.comm.most_gathered = 1
        model = torch.nn.Linear(8, 8)
        items = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        saved = accel.save_state(ctx, tmp_path, items, step=1)
        weight = accel.broadcast(ctx, model.weight)
        if damaged and ctx.is_main_process:
            file = max(saved.glob("*.safetensors"), key=lambda path: path.stat().st_size)
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        accel.wait_for_everyone(ctx)
        torch.nn.init.zeros_(model.weight)
        if damaged:
            with assert_raises(CheckpointError, problem="digest"):
                accel.load_state(ctx, saved, items)
            return not model.weight.any()
        accel.load_state(ctx, saved, items)
        return torch.equal(model.weight, weight)

    assert all(ranks.run(rank, 3))
