# SPDX-License-Identifier: Apache-2.0
"""The law by which replica groups share an epoch: each sample once, whatever number of groups each step has."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st
from profiles import share
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.engines import torchft


@settings(deadline=None, max_examples=share(0.6))
@given(
    samples=st.integers(1, 40),
    size=st.integers(1, 7),
    counts=st.lists(st.integers(1, 4), min_size=1),
    seed=st.integers(0, 9),
)
def test_groups_share_an_epoch_whatever_their_number(samples: int, size: int, counts: list[int], seed: int) -> None:
    ctx = accel.single("cpu")
    dataset = TensorDataset(torch.arange(samples))
    loader = accel.prepare_loader(ctx, DataLoader(dataset, batch_size=size, shuffle=True), global_batch=size)
    alone = [batch.data[0][: int(batch.valid)].tolist() for batch in accel.batches(ctx, loader, accel.Cursor(seed))]
    group = torchft.ReplicaGroup(ctx)
    state = accel.train_state(ctx, seed=seed)
    dealt: list[list[int]] = []
    step = 0
    while state.epoch == 0:
        groups = counts[step % len(counts)]
        turns = [
            torchft.Turn(step=step, groups=groups, index=index, healed=False, state=state, begun_s=0.0)
            for index in range(groups)
        ]
        batches = [torchft.next_batch(group, loader, turn, state) for turn in turns]
        assert len({batch.next for batch in batches}) == 1
        assert len({batch.is_last for batch in batches}) == 1
        dealt += [batch.data[0][: int(batch.valid)].tolist() for batch in batches if int(batch.valid)]
        nexts = [state.next(batch) for batch in batches]
        state = accel.TrainState(cursor=nexts[0].cursor, accum=state.accum, scaler=state.scaler)
        step += 1
    assert dealt == alone  # in the order of a run alone, each sample once
