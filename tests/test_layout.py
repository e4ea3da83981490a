# SPDX-License-Identifier: Apache-2.0
"""The suite's own layout: test files of any folder may share a name, and helpers are found by theirs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def helpers() -> list[Path]:
    """The modules that tests import by bare name; benchmarks are programs, and pytest finds its own files."""
    found = [path for path in TESTS.rglob("*.py") if not path.name.startswith("test_") and path.name != "conftest.py"]
    return [path for path in found if path.parent.name != "benchmarks"]


def test_every_helper_is_found_by_its_own_name(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getoption("importmode") == "importlib"
    assert {path.parent for path in helpers()} <= set(pytestconfig.getini("pythonpath"))
    counts = Counter(path.name for path in helpers())
    assert max(counts.values()) == 1, counts
