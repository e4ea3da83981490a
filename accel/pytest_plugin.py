# SPDX-License-Identifier: Apache-2.0
"""Pytest plugin: the fixture `simulator`. Loading it loads neither torch nor Hypothesis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from accel.testing import Simulator


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    """An `accel.testing.Simulator` with threads that serve all tests of a module, and end with it.

    Its scope suits Hypothesis, which refuses fixtures that would be shared by the examples of one test only.
    """
    from accel.testing import Simulator

    with Simulator() as opened:
        yield opened
