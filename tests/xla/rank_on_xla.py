# SPDX-License-Identifier: Apache-2.0
"""One rank of a job on what stands for XLA, run by a test: what travels from the host, and how errors do."""

from __future__ import annotations

import sys
from typing import Any

import fake_xla
import torch
import torch.distributed as dist

import accel
from accel.comm import all_gather_flat, broadcast_flat

torch_xla: Any = fake_xla.install()
with accel.session(device="xla", timeout_s=60) as ctx:
    assert (ctx.backend, ctx.device) == ("xla", torch.device("xla", 0))
    assert torch_xla.joined == [(ctx.local_rank, ctx.local_world_size)]
    assert accel.gather_object(ctx, ctx.rank) == [0, 1]
    assert all_gather_flat(ctx.comm, torch.tensor([ctx.rank])).tolist() == [[0], [1]]
    mine = torch.tensor([ctx.rank])
    broadcast_flat(ctx.comm, mine, source=1)
    assert mine.item() == 1
    try:
        accel.gather(ctx, {"a": mine}) if ctx.rank else accel.reduce(ctx, {"a": mine})
    except accel.errors.CollectiveMismatch as error:
        assert "reduce" in str(error)  # noqa: PT017 - both ranks see it here
    adopted = accel.from_group(dist.group.WORLD, device="xla")
    assert accel.gather_object(adopted, adopted.rank) == [0, 1]
    accel.close(adopted)
    assert dist.is_initialized()
assert not dist.is_initialized()
sys.stdout.write(f"launcher's local rank {ctx.local_rank} is rank {ctx.rank}\n")
