# SPDX-License-Identifier: Apache-2.0
"""Simulated ranks, under the name that this suite's tests know."""

from __future__ import annotations

import pytest

from accel.testing import Simulator


@pytest.fixture(scope="module")
def ranks(simulator: Simulator) -> Simulator:
    return simulator
