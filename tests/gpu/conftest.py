# SPDX-License-Identifier: Apache-2.0
"""A group over nccl, for tests that need a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import accel


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[accel.DistContext]:
    """A context on a group of one rank that another framework opened, over nccl alone."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield accel.from_group(group)
    dist.destroy_process_group()
