# SPDX-License-Identifier: Apache-2.0
"""Long tests leave the default run by their recorded seconds; each file keeps one, and no line is out of date."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import moved_tests
import pytest
import turns
from hypothesis import given, strategies as st

ROOT = Path(__file__).parent.parent
NAMES = st.builds(
    "tests/test_{}.py::test_{}[{}]".format, st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 9)
)


@pytest.mark.parametrize(("run", "end"), [("default", "["), ("slow", "::")])
@given(data=st.data())
def test_a_function_or_a_file_spends_its_seconds_and_a_file_keeps_its_shortest_test(
    run: str, end: str, data: st.DataObject
) -> None:
    seconds = data.draw(st.dictionaries(NAMES, st.floats(0, 3 if run == "default" else 12)))
    found = moved_tests.over_budget(run, seconds)
    left = {name: taken for name, taken in seconds.items() if name not in found}
    assert {name.split("::")[0] for name in left} == {name.split("::")[0] for name in seconds}
    assert all(taken > moved_tests.FREE for taken in found.values())
    for payer in {name.split(end)[0] for name in left}:
        paid = [taken for name, taken in left.items() if name.split(end)[0] == payer and taken > moved_tests.FREE]
        assert len(paid) == 1 or sum(paid) <= moved_tests.BUDGETS[run] + 1e-9


def test_moved_tests_are_written_in_order_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved_tests, "FILE", tmp_path / "durations.txt")
    first, second = tmp_path / "run-1", tmp_path / "run-2"
    _ = first.write_text("2 0.300 tests/test_a.py::test_x[b c]\n0 0.200 tests/test_a.py::test_x[a]\n")
    _ = second.write_text("1 0.010 tests/test_a.py::test_y\n")
    assert moved_tests.move("default", moved_tests.recorded([first, second])) == ["tests/test_a.py::test_x[b c]"]
    assert moved_tests.read() == {"tests/test_a.py::test_x[b c]": ("slow", 0.3)}


MOVED = {"a::f[1]": ("slow", 2.0), "a::g[0]": ("slow", 2.0), "a::l[0]": ("nightly", 9.0)}


class Item:
    """What `mark` needs of a test."""

    def __init__(self, nodeid: str, *markers: pytest.MarkDecorator) -> None:
        self.nodeid = nodeid
        self.stash = pytest.Stash()
        self.markers = {each.name: each.mark for each in markers}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.markers.get(name)

    def add_marker(self, name: str) -> None:
        self.markers[name] = getattr(pytest.mark, name).mark


def test_ci_runs_a_case_of_each_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved_tests, "read", lambda: MOVED)
    slow = pytest.mark.slow
    items: list[Any] = [
        Item("a::f[0]"),
        Item("a::f[1]"),  # moved, and the default run has a case
        Item("a::g[0]"),  # moved, without one
        Item("a::h[0]", slow),
        Item("a::h[1]", slow),
        Item("a::i[0]"),
        Item("a::i[1]", slow),
        Item("a::j[0]", slow, pytest.mark.kept("slow")),
        Item("a::j[1]", slow, pytest.mark.kept("slow")),
        Item("a::k[0]", slow, pytest.mark.nightly),
        Item("a::l[0]", slow),  # moved out of CI
        Item("a::l[1]", slow),
    ]
    moved_tests.mark(items)
    runs = [moved_tests.run_of(each) for each in items]
    assert runs == [
        *("default", "nightly", "slow", "slow", "nightly", "default", "slow", "slow", "slow", "nightly"),
        *("nightly", "nightly"),
    ]


@pytest.mark.parametrize(("share", "order"), [(0, "abcd"), (1 / 3, "cdab"), (2 / 3, "dabc"), (4 / 3, "cdab")])
def test_a_worker_begins_to_collect_behind_its_share_of_the_files(share: float, order: str) -> None:
    assert turns.turned("abcd", [1, 3, 4, 2], share) == list(order)


def test_each_line_names_a_test_that_is_there() -> None:
    functions = {name.split("[")[0] for name in moved_tests.read()}
    text = {path: (ROOT / path).read_text() for path in {name.split("::")[0] for name in functions}}
    gone = [each for each in functions if not re.search(rf"def {each.split('::')[-1]}\(", text[each.split("::")[0]])]
    assert gone == []


def test_examples_are_shares_of_a_profile() -> None:
    """`max_examples=10` would be 10 at night, too; a search for a case, such as `find`, may set its limit by a name."""
    number = re.compile(r"@settings\([^)]*max_examples=\d")
    assert [path.name for path in (ROOT / "tests").rglob("test_*.py") if number.search(path.read_text())] == []
