# SPDX-License-Identifier: Apache-2.0
"""The suite's own layout: test files of any folder may share a name, and helpers are found by theirs."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def helpers() -> list[Path]:
    """The modules that tests import by bare name."""
    imports = re.compile(r"^(?:from|import) (\w+)", flags=re.M)
    named = {name for path in TESTS.rglob("*.py") for name in imports.findall(path.read_text())}
    found = [path for path in TESTS.rglob("*.py") if path.stem in named and path.parent.name != "benchmarks"]
    return [path for path in found if not path.stem.startswith("test_")]


def test_every_helper_is_found_by_its_own_name(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getoption("importmode") == "importlib"
    assert len(helpers()) > 5
    assert {path.parent for path in helpers()} <= set(pytestconfig.getini("pythonpath"))
    counts = Counter(path.name for path in helpers())
    assert max(counts.values()) == 1, counts


def test_no_example_hides_a_package_of_an_extra() -> None:
    """A script's folder comes first on `sys.path`, so `examples/ray.py` would be found in place of ray."""
    extras = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = {re.split(r"\W", line)[0] for lines in extras.values() for line in lines} | set(extras)
    assert {"deepspeed", "megatron", "ray"} <= packages
    examples = {path.stem for path in (TESTS.parent / "examples").glob("*.py")}
    assert not examples & packages
