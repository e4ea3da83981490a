# SPDX-License-Identifier: Apache-2.0
"""An error about rows of unequal width, or about a value that is no tensor, names the call that takes it."""

from __future__ import annotations

from collections import UserList
from typing import Any

import numpy as np
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch.utils.data import DataLoader

import accel
from accel.errors import CollectiveMismatch, TreeError


def _batch(ctx: accel.DistContext) -> accel.Batch:
    loader = accel.prepare_loader(ctx, DataLoader(range(2 * ctx.world_size), batch_size=2))
    return next(iter(accel.batches(ctx, loader, accel.Cursor())))


@settings(max_examples=share(0.4))
@given(
    widths=st.lists(st.integers(0, 4), min_size=2, max_size=3).filter(lambda widths: len(set(widths)) > 1),
    dim=st.sampled_from([1, 2]),
)
def test_rows_of_any_width_go_the_way_that_the_error_names(ranks, widths, dim):
    def rank(ctx: accel.DistContext) -> tuple[int, ...]:
        batch = _batch(ctx)
        shape = [2, 3, 3]
        shape[dim] = widths[ctx.rank]
        tree: Any = {"logits": torch.ones(shape)}
        with pytest.raises(CollectiveMismatch) as caught:
            accel.gather_for_metrics(ctx, tree, batch)
        line = caught.value.fix.removeprefix("Make the sizes equal first: tree = ").removesuffix(".")
        assert line == f"accel.pad_across_processes(ctx, tree, dim={dim})"
        padded = accel.pad_across_processes(ctx, tree, dim=dim)
        return tuple(accel.gather_for_metrics(ctx, padded, batch)["logits"].shape)

    expected = [2 * len(widths), 3, 3]
    expected[dim] = max(widths)
    assert ranks.run(rank, len(widths)) == [tuple(expected)] * len(widths)


@pytest.mark.parametrize(
    ("other", "way"),
    [
        (torch.ones(2, 4, 4), "Fill the tensors up to one shape"),
        (torch.ones(2, 3, 3, dtype=torch.float64), "the same calls"),
        (torch.ones(2, 3), "the same calls"),
    ],
)
def test_what_padding_cannot_mend_is_not_sent_to_it(ranks, other, way):
    def rank(ctx: accel.DistContext) -> None:
        with assert_raises(CollectiveMismatch, fix=way):
            accel.gather(ctx, other if ctx.rank else torch.ones(2, 3, 3))

    ranks.run(rank, 2)


@pytest.mark.parametrize("call", [accel.gather, accel.reduce, accel.broadcast, accel.pad_across_processes])
@pytest.mark.parametrize(
    ("value", "way"),
    [
        (np.arange(2), r"torch.as_tensor\(\.\.\.\)"),
        (1.5, r"torch.as_tensor\(\.\.\.\)"),
        ("text", r"accel.gather_object\(ctx"),
        (UserList([torch.zeros(1)]), r"list\(\.\.\.\) of it"),
    ],
)
def test_a_value_that_is_no_tensor_has_a_way(ranks, call, value, way):
    def rank(ctx: accel.DistContext) -> None:
        with assert_raises(TreeError, fix=way):
            call(ctx, [value])

    ranks.run(rank, 2)


def test_texts_of_a_batch_go_the_way_that_the_error_names(ranks):
    def rank(ctx: accel.DistContext) -> list[str]:
        batch = _batch(ctx)
        texts = [f"{sample}" for sample in batch.data.tolist()]
        with pytest.raises(TreeError) as caught:
            accel.gather_for_metrics(ctx, texts, batch)
        line = caught.value.fix.removeprefix("Send texts with ").removesuffix(".")
        assert line == "accel.gather_for_metrics(ctx, texts, batch, use_gather_object=True)"
        return eval(line)

    assert [sorted(each) for each in ranks.run(rank, 2)] == [["0", "1", "2", "3"]] * 2
