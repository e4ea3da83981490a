# SPDX-License-Identifier: Apache-2.0
"""`total_steps` is the number of optimizer steps that the loop takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader, TensorDataset

import accel


@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 9),
    accumulation=st.integers(1, 5),
    epochs=st.integers(1, 3),
    drop_last=st.booleans(),
    shared=st.booleans(),
    world_size=st.integers(1, 4),
)
def test_it_counts_the_windows_of_a_loop(
    samples: int, batch: int, accumulation: int, epochs: int, drop_last: bool, shared: bool, world_size: int
) -> None:
    size = batch * (1 if shared else world_size)
    if drop_last and samples < size:
        return
    plain = DataLoader(TensorDataset(torch.arange(samples)), batch, drop_last=drop_last)
    loader = accel.prepare_loader(accel.single(), plain, global_batch=size, data_parallel=(world_size - 1, world_size))
    accum, steps = accel.Accumulation(accumulation), 0
    for _ in range(epochs):
        count = samples // size if drop_last else -(-samples // size)
        for number in range(count):
            accum = accum.next(last=number == count - 1)
            if accum.sync:
                accum, steps = accum.close(stepped=True), steps + 1
    assert accel.total_steps(loader, accumulation=accumulation, epochs=epochs) == steps


def test_wrong_arguments_are_refused_by_name() -> None:
    plain = DataLoader(TensorDataset(torch.arange(4)))
    loader = accel.prepare_loader(accel.single(), plain)
    with pytest.raises(accel.ConfigError, match=r"at total_steps\(accumulation=\)"):
        accel.total_steps(loader, accumulation=0)
    with pytest.raises(accel.ConfigError, match=r"at total_steps\(epochs=\)"):
        accel.total_steps(loader, epochs=1.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(accel.DataError, match=r"total_steps\(accel.prepare_loader\(ctx, loader\)"):
        accel.total_steps(plain)  # pyright: ignore[reportArgumentType]
