# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of parallelism."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def own_graphs() -> Iterator[None]:
    """Let a test compile anew, count its graphs alone, and leave none."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()
