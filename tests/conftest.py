# SPDX-License-Identifier: Apache-2.0
"""Simulated ranks whose threads serve a whole module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel.testing import Simulator


@pytest.fixture(scope="module")
def ranks() -> Iterator[Simulator]:
    with Simulator() as simulator:
        yield simulator
