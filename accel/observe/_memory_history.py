# SPDX-License-Identifier: Apache-2.0
"""Snapshots of CUDA's memory with the history of allocations, which torch's page at docs.pytorch.org/memory_viz shows.

Torch documents both calls, though their names are private: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

_MOST_EVENTS = 100_000  # allocations and frees, the newest


@contextlib.contextmanager
def recording() -> Generator[None]:
    """Record allocations of CUDA with their stacks in the block."""
    cuda: Any = torch.cuda.memory
    cuda._record_memory_history(max_entries=_MOST_EVENTS)
    try:
        yield
    finally:
        cuda._record_memory_history(enabled=None)


def write_snapshot(path: Path) -> None:
    """Write a snapshot of the memory, and of what was recorded.

    Raises:
        OSError: the file cannot be written.
    """
    cuda: Any = torch.cuda.memory
    cuda._dump_snapshot(str(path))
