# SPDX-License-Identifier: Apache-2.0
"""A rank that goes away in a step: what torch raises out of DDP and fully_shard becomes a PeerError."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import job, script_ranks

import accel
from accel.comm import peer_error

SCRIPT = """
import os, sys
import torch, accel
from steps import begin_batch
from torch import nn

layout, moment = sys.argv[1:]
torch.set_num_threads(1)
with accel.session(device="cpu", timeout_s=20) as ctx:
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    if layout == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (ctx.world_size,)))
    model = accel.prepare_model(ctx, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = accel.train_state(ctx)
    try:
        for at in range(3):
            state = begin_batch(ctx, state)
            if ctx.rank == 1 and (at, moment) == (1, "forward"):
                os._exit(0)
            with accel.accumulate(ctx, state, model):
                loss = model(torch.randn(4, 300)).square().mean()
                if ctx.rank == 1 and (at, moment) == (1, "backward"):
                    os._exit(0)
                weight = 4 if at == 1 else torch.tensor(4)
                state = accel.backward(ctx, loss, state, weight=weight)
            state = accel.optimizer_step(ctx, optimizer, state)
    except accel.errors.PeerError as error:
        print("told:", at, str(error).replace(chr(10), " "), flush=True)
        os._exit(0)  # the group is broken, and closing it is another matter
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("layout", "moment"),
    [
        ("ddp", "backward"),
        pytest.param("ddp", "forward", marks=pytest.mark.slow),
        pytest.param("fsdp", "backward", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_left_is_told_of_in_forward_and_backward(tmp_path: Path, layout: str, moment: str) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(SCRIPT)
    with script_ranks(script, job(2), layout, moment, folder=tmp_path) as ranks:
        assert [rank.wait(120) for rank in ranks] == [0, 0], [rank.said() for rank in ranks]
        told = ranks[0].said()
    assert "told: 1" in told
    assert "did not complete" in told
    assert "Another rank has left or hangs" in told


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:4"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 2x2)"), False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (accel.errors.PeerError("all_reduce did not complete: Connection reset by peer"), False),
        (ValueError("not a shape"), False),
    ],
)
def test_only_what_speaks_of_peers_is_taken_for_a_lost_one(error: Exception, lost: bool) -> None:
    assert (peer_error(error, "backward") is not None) == lost
