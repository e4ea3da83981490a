# SPDX-License-Identifier: Apache-2.0
"""The folder that a launch test works in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Workspace
from processes import ending


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    space = Workspace(tmp_path)
    with ending(space.started):
        yield space
