# SPDX-License-Identifier: Apache-2.0
"""Autocast follows the context's precision, and ends with its block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("precision", DTYPES)
def test_matrix_products_run_in_the_precision_and_parameters_stay(precision):
    ctx, model = accel.single(precision=precision), nn.Linear(4, 4)
    with accel.autocast(ctx):
        assert model(torch.zeros(2, 4)).dtype == DTYPES[precision]
        assert torch.is_autocast_enabled("cpu") == (precision != "fp32")
    assert model(torch.zeros(2, 4)).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert model.weight.dtype == torch.float32


def test_it_ends_with_a_block_that_fails():
    def fail():
        with accel.autocast(accel.single(precision="bf16")):
            raise KeyError("inside")

    with pytest.raises(KeyError):
        fail()
    assert not torch.is_autocast_enabled("cpu")


def test_fp32_within_a_users_own_autocast_changes_nothing():
    with torch.autocast("cpu", dtype=torch.bfloat16), accel.autocast(accel.single()):
        assert nn.Linear(2, 2)(torch.zeros(1, 2)).dtype == torch.bfloat16


def test_ranks_have_autocast_of_their_own(ranks):
    def rank(ctx):
        mine = accel.replace(ctx, precision=("fp32", "bf16", "fp16")[ctx.rank])
        with accel.autocast(mine):
            accel.wait_for_everyone(ctx)
            return nn.Linear(2, 2)(torch.zeros(1, 2)).dtype

    assert ranks.run(rank, 3) == list(DTYPES.values())
