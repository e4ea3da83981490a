# SPDX-License-Identifier: Apache-2.0
"""What the package declares: the oldest torch is one that a trial of the tests has passed."""

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


def test_the_oldest_torch_passed_the_tests(pinned: str) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torches = [need for need in declared["dependencies"] if re.match(r"torch\b", need)]
    oldest = torches[0].removeprefix("torch>=")
    assert torches == [f"torch>={oldest}"]
    assert f"torch {oldest} or newer; CI runs torch {pinned}" in (ROOT / "README.md").read_text()
    trials = (ROOT / "docs" / "torch-versions.md").read_text()
    assert re.search(rf"^\| {re.escape(oldest)}\.\d+ \|.*\b0 failed\b", trials, flags=re.M)


def test_no_extra_asks_for_a_torch_that_the_package_refuses() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [need for needs in extras.values() for need in needs if re.match(r"torch(_xla)?\b", need)]
    assert not named, named
