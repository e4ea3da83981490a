# SPDX-License-Identifier: Apache-2.0
"""Folders in memory for tests of checkpoints: they wait for the disk thousands of times, and most of their time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
_LEAST_BYTES = 1 << 30


def _has_room() -> bool:
    if not os.access(MEMORY, os.W_OK):
        return False
    free = os.statvfs(MEMORY)
    return free.f_bavail * free.f_frsize >= _LEAST_BYTES


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory where the system has one with room. Power cuts are simulated, so that no law needs a disk."""
    if not _has_room():
        yield tmp_path_factory.mktemp("checkpoint")
        return
    with tempfile.TemporaryDirectory(prefix="accel-tests-", dir=MEMORY) as folder:
        yield Path(folder)
