# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin, and the page on testing as a user meets it: its tests run, its outputs are what is printed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import patience

from accel.testing import Simulator

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
BLOCKS = list(re.finditer(r"^```(python|text)\n(.*?)^```", PAGE, flags=re.M | re.S))
CODE = [block[2] for block in BLOCKS if block[1] == "python"]
TEN_LINES = next(code for code in CODE if "def test_" in code)

SHARING = """
import threading
seen = []

def test_first(simulator):
    assert simulator.run(lambda ctx: ctx.rank, 3) == [0, 1, 2]
    seen.append((simulator, threading.active_count()))

def test_second(simulator):
    assert simulator.run(lambda ctx: ctx.rank, 3) == [0, 1, 2]
    assert seen == [(simulator, threading.active_count())]
"""
FEWER = """
from hypothesis import Phase, settings

settings.register_profile("fewer", max_examples=30, phases=[Phase.generate, Phase.shrink])
settings.load_profile("fewer")
"""
AFTERWARDS = """
import threading

def test_no_thread_is_left():
    assert not [thread for thread in threading.enumerate() if "accel" in thread.name]
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest prints of a user's suite: the page's tests, its ten lines alone, and others."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "conftest.py").write_text(FEWER)
    files = {"page": "\n\n".join(CODE), "ten_lines": TEN_LINES, "sharing": SHARING, "then": AFTERWARDS}
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-W", "error"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=patience(120), check=False
    ).stdout


def without_sizes(text: str) -> str:
    """A report without the bytes of accel's own messages, which change with versions."""
    return re.sub(r"uint8\[\d+\]", "uint8[]", text)


def test_shown_outputs_are_what_is_printed():
    namespace: dict[str, Any] = {"__name__": "train"}
    printed, compared, end = "", 0, 0
    for block in BLOCKS:
        if block[1] == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block[2], "train.py", "exec"), namespace)
            printed = out.getvalue()
        elif PAGE[end : block.start()] == "\n\nprints\n\n":
            assert without_sizes(printed) == without_sizes(block[2])
            compared += 1
        end = block.end()
    assert compared == PAGE.count("\nprints\n") > 2


@pytest.mark.slow  # a suite of its own
def test_the_page_s_tests_are_a_user_s_suite(suite):
    assert re.findall(r"^FAILED (\S+)", suite, flags=re.M) == ["test_page.py::test_forgetful"], suite
    passed = len(re.findall(r"^test_page.py::\w+ PASSED", suite, flags=re.M))
    assert passed == PAGE.count("def test_") - 1 > 4
    assert "rank 0: returned" in suite
    assert "_world.py" not in suite.partition("rank 0: returned")[0]  # the simulator's frames would bury the user's
    [shown] = re.findall(r"^    trees=.*", PAGE, flags=re.M)
    assert shown in suite


@pytest.mark.slow  # a suite of its own
def test_the_ten_lines_stand_alone(suite):
    assert len([line for line in TEN_LINES.splitlines() if line.strip()]) <= 10
    assert "test_ten_lines.py::test_gather_keeps_every_row PASSED" in suite


@pytest.mark.slow  # a suite of its own
def test_the_fixture_serves_a_module_and_ends_with_it(suite):
    for test in ("sharing.py::test_first", "sharing.py::test_second", "then.py::test_no_thread_is_left"):
        assert f"test_{test} PASSED" in suite


def test_the_plugin_is_installed_and_light():
    [plugin] = importlib.metadata.entry_points(group="pytest11", name="accel")
    code = f"import sys, {plugin.module}\nassert not sys.modules.keys() & {{'torch', 'numpy', 'hypothesis'}}\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience(60))


def test_the_fixture_is_a_simulator(simulator):
    assert isinstance(simulator, Simulator)
