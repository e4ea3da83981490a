# SPDX-License-Identifier: Apache-2.0
"""What the caller has switched on for its own computation changes nothing that is sent."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from leaves import form_of, tensors_of

import accel

SURROUNDINGS = {
    "bf16": partial(torch.autocast, "cpu", torch.bfloat16),
    "fp16": partial(torch.autocast, "cpu", torch.float16),
    "another device": partial(torch.device, "meta"),  # as init_empty_weights and set_default_device do
    "inference": torch.inference_mode,
    "no graph": torch.no_grad,
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CALLS = {
    "gather": accel.gather,
    "gather to one": partial(accel.gather, dst=0, to="cpu"),
    "sum": accel.reduce,
    "mean": partial(accel.reduce, op="mean"),
    "product": partial(accel.reduce, op="product"),
    "max": partial(accel.reduce, op="max"),
    "broadcast": accel.broadcast,
    "pad": accel.pad_across_processes,
    "a tree without tensors": lambda ctx, tree: accel.gather(ctx, {"nothing": None}),
    "any_rank": lambda ctx, tree: torch.tensor(accel.any_rank(ctx, ctx.rank == 1), device="cpu"),
    "objects": lambda ctx, tree: torch.tensor(accel.gather_object(ctx, ctx.rank), device="cpu"),
    "object list": lambda ctx, tree: torch.tensor(accel.broadcast_object_list(ctx, [ctx.rank], src=1), device="cpu"),
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rows", [2, 40_000])
def test_results_are_those_of_a_call_outside(ranks, surroundings, call, rows):
    ragged = call in ("gather", "gather to one", "pad")

    def rank(ctx):
        each = [torch.full((rows + ragged * ctx.rank, 2), ctx.rank + 1.0, dtype=dtype) for dtype in FLOATS]
        outside = CALLS[call](ctx, each)
        with SURROUNDINGS[surroundings]():
            inside = CALLS[call](ctx, each)
        assert form_of(inside) == form_of(outside)
        for one, other in zip(tensors_of(inside), tensors_of(outside), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one.cpu(), other)

    ranks.run(rank, 3)
