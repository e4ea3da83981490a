# SPDX-License-Identifier: Apache-2.0
"""What the package declares is what CI runs: the oldest torch is the one that the suite is installed with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def pinned() -> str:
    """The version of torch that CI installs."""
    found = re.search(r"^torch==(\d+\.\d+)\.\d+$", (ROOT / "constraints.txt").read_text(), flags=re.M)
    assert found is not None
    return found[1]


def test_the_oldest_torch_is_the_one_that_ci_runs(pinned: str) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torches = [need for need in declared["dependencies"] if re.match(r"torch\b", need)]
    assert torches == [f"torch>={pinned}"]
    assert f"torch {pinned} or newer" in (ROOT / "README.md").read_text()


def test_no_extra_asks_for_a_torch_that_the_package_refuses() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [need for needs in extras.values() for need in needs if re.match(r"torch(_xla)?\b", need)]
    assert not named, named
