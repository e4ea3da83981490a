# SPDX-License-Identifier: Apache-2.0
"""Real processes that share a sequence: equal to one process, and told of a rank that dies inside the ring."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from processes import job, patience, script_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

EQUAL = """
from functools import partial
import torch, accel
from torch import nn

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
q, k, v, grad = (torch.randn(2, heads, 24, 8, generator=generator).double() for heads in (4, 2, 2, 4))
mask = torch.ones(24, 24, dtype=torch.bool).tril()


def attend(function, q, k, v, grad):
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    out = function(*leaves)
    out.backward(grad)
    return {"out": out.detach(), **{name: each.grad for name, each in zip("qkv", leaves)}}


near = mask.triu(-4)
whole, windowed = (
    attend(lambda *each: nn.functional.scaled_dot_product_attention(*each, seen, enable_gqa=True), q, k, v, grad)
    for seen in (mask, near)
)
with accel.session(device="cpu") as ctx:
    part = accel.parallel.split_sequence(ctx, {"q": q, "k": k, "v": v, "grad": grad}, dim=2)
    for method, window in (("gather", None), ("ring", None), ("heads", None), ("ring", 5)):
        expected = accel.parallel.split_sequence(ctx, windowed if window else whole, dim=2, shift=())
        layer = partial(accel.parallel.context_attention, ctx, method=method, window=window)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for function in (*[layer] * 20, compiled, compiled):  # messages of many rings in a row keep their order
            got = attend(function, *(part[name] for name in ("q", "k", "v", "grad")))
            worst = max((got[name] - expected[name]).abs().max().item() for name in got)
            assert worst < 1e-12, (method, window, worst)
print("equal", flush=True)
"""

DIES = """
import os, sys, time
import torch, accel
from steps import begin_batch
import accel.parallel.axes.context._ring as ring

torch.set_num_threads(1)
message = int(sys.argv[1])
sent = 0
start_shift = ring.start_shift


def dies_at_a_message(*arguments, **options):
    global sent
    sent += 1
    if ctx.rank == 1 and sent == message:
        os._exit(0)
    return start_shift(*arguments, **options)


with accel.session(device="cpu", timeout_s=60) as ctx:
    ring.start_shift = dies_at_a_message
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    began = time.monotonic()
    try:
        out = accel.parallel.context_attention(ctx, x, x, x, method="ring")
        accel.backward(ctx, out.sum(), begin_batch(ctx))
    except accel.errors.PeerError as error:
        print(f"told after {time.monotonic() - began:.1f} s:", error, flush=True)
        os._exit(0)
"""

LEAVES = """
import os, sys
import torch, accel
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        heads = self.linear(x).unflatten(2, (2, 2)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return x + mixed.transpose(1, 2).flatten(2)


with accel.session(device="cpu", timeout_s=60) as ctx:
    plan = accel.parallel.Plan(context=sys.argv[1])
    model = accel.prepare_model(ctx, nn.Sequential(Block(), Block()), plan=plan)
    model = accel.compile_model(model, "repeated", backend="aot_eager", fullgraph=True)
    x = accel.parallel.split_sequence(ctx, {"x": torch.randn(1, 8, 4)})["x"]
    for _ in range(2):
        model(x).sum().backward()
    if ctx.rank == 1:
        os._exit(0)
    try:
        model(x)
    except accel.errors.PeerError as error:
        print("told:", error, flush=True)
        os._exit(0)
"""


@pytest.mark.parametrize("count", [2, 4])
def test_processes_are_one(tmp_path: Path, count: int) -> None:
    script = tmp_path / "equal.py"
    script.write_text(EQUAL)
    with script_ranks(script, job(count, ACCEL_MESH=f"cp={count}"), folder=tmp_path) as ranks:
        assert [rank.wait(120) for rank in ranks] == [0] * count, [rank.said() for rank in ranks]
        assert [rank.said() for rank in ranks] == ["equal\n"] * count  # not a warning either


@pytest.mark.parametrize("message", [2, 4])
def test_others_are_told_of_a_rank_that_dies_inside_the_ring(tmp_path: Path, message: int) -> None:
    """Of 3 ranks: at the second message of the forward, and at the second of the backward."""
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    began = time.monotonic()
    with script_ranks(script, job(3, ACCEL_MESH="cp=3"), message, folder=tmp_path) as ranks:
        assert [rank.wait(60) for rank in ranks] == [0, 0, 0], [rank.said() for rank in ranks]
        for rank in (ranks[0], ranks[2]):
            assert "told after" in rank.said()
            assert "Another rank has left or hangs" in rank.said()
    assert time.monotonic() - began < patience(45)  # and not the 60 s of the time-out


@pytest.mark.parametrize("method", ["ring", "heads"])
def test_others_are_told_in_a_compiled_block_of_a_rank_that_left(tmp_path: Path, method: str) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    with script_ranks(script, job(2, ACCEL_MESH="cp=2"), method, folder=tmp_path) as ranks:
        assert [rank.wait(120) for rank in ranks] == [0, 0], [rank.said() for rank in ranks]
        assert "told: the forward of Sequential did not complete" in ranks[0].said()
