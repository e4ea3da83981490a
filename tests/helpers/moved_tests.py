# SPDX-License-Identifier: Apache-2.0
"""Which tests are too long for the default run, or for CI: by the CPU seconds that each took when it was recorded.

`tests/durations.txt` has a line for each test that has moved: its run, its CPU seconds, and its name. A function may
spend a number of seconds by default, and its cases take them in order; a file in CI's slow run, and its tests take
them by length. Those that find too little left move to the next run: a law keeps its first cases by default, a subject
its shorter tests in CI, and all of them run at night. CI's slow run has the first slow case of each function, and the
first of those that moved where the default run has none. A file keeps at least its shortest test, and tests marked
`kept` stay where the mark says. Cases move in this direction alone; delete lines and record again to take some back.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

FILE = Path(__file__).parent.parent / "durations.txt"
RUNS = ("default", "slow", "nightly")
BUDGETS = {"default": 0.4, "slow": 8.0}  # CPU seconds: of a function by default, of a file in the slow run
_PLACE = pytest.StashKey[int]()
FREE = 0.05  # CPU seconds of a case that nobody pays for: rows of tables


def read() -> dict[str, tuple[str, float]]:
    """Return run and CPU seconds of the tests that have moved, by name."""
    rows = (line.split(" ", 2) for line in FILE.read_text().splitlines())
    return {name: (run, float(seconds)) for run, seconds, name in rows}


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark the tests that have moved by their runs, and all but the first case of a slow function as nightly."""
    moved = read()
    slow: list[pytest.Item] = []
    seen = set[str]()  # functions of which the default run has a case, or CI's slow one
    for at, item in enumerate(items):
        item.stash[_PLACE] = at
        run, _ = moved.get(item.nodeid, ("default", 0.0))
        for each in RUNS[1 : RUNS.index(run) + 1]:
            item.add_marker(each)
        function, belongs = item.nodeid.split("[")[0], run_of(item)
        if belongs == "default":
            seen.add(function)
        elif belongs == "slow":
            slow.append(item)
        elif run == "nightly":  # CI's case of this function was too long: no other takes its place
            seen |= {function, f"{function} slow"}
    for item in slow:
        function = item.nodeid.split("[")[0]
        kept = item.get_closest_marker("kept")
        if kept is not None and kept.args == ("slow",):
            continue
        if function in seen and (item.nodeid in moved or f"{function} slow" in seen):
            item.add_marker("nightly")
        seen |= {function, f"{function} slow"}


def run_of(item: pytest.Item) -> str:
    """Return the run that a test belongs to."""
    return next((run for run in reversed(RUNS[1:]) if item.get_closest_marker(run) is not None), "default")


def over_budget(run: str, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the tests of a run that find too little left of their function's or their file's seconds."""
    end, order = ("[", list(seconds)) if run == "default" else ("::", sorted(seconds, key=seconds.__getitem__))
    spent: defaultdict[str, float] = defaultdict(float)
    found: dict[str, float] = {}
    for name in order:
        payer, taken = name.split(end)[0], seconds[name]
        if taken > FREE and spent[payer] + taken > BUDGETS[run]:
            found[name] = taken
        elif taken > FREE:
            spent[payer] += taken
    files: defaultdict[str, list[str]] = defaultdict(list)
    for name in seconds:
        files[name.split("::")[0]].append(name)
    for names in files.values():
        if all(name in found for name in names):
            del found[min(names, key=seconds.__getitem__)]
    return found


def move(run: str, seconds: Mapping[str, float]) -> list[str]:
    """Move tests of a run to the next one, by what they took; write the file, and return their names."""
    moved = read() if FILE.exists() else {}
    following = RUNS[RUNS.index(run) + 1]
    found = over_budget(run, seconds)
    moved |= {name: (following, taken) for name, taken in found.items()}
    lines = [f"{where} {taken:.2f} {name}\n" for name, (where, taken) in sorted(moved.items())]
    _ = FILE.write_text("".join(lines))
    return list(found)


@contextmanager
def recording(item: pytest.Item) -> Generator[None]:
    """Append a test's place and CPU seconds to a file of this process, if the run has `--record-durations`."""
    file: str | None = item.config.getoption("record_durations")
    began = sum(os.times()[:4])  # of this process, and of its children that have ended
    yield
    kept = item.get_closest_marker("kept")
    if file is not None and (kept is None or kept.args != (run_of(item),)):
        with open(f"{file}-{os.getpid()}", "a") as opened:
            _ = opened.write(f"{item.stash[_PLACE]} {sum(os.times()[:4]) - began:.3f} {item.nodeid}\n")


def recorded(files: Iterable[Path]) -> dict[str, float]:
    """Return the CPU seconds of tests that runs have recorded, by name, in the order of the collection."""
    rows = [line.split(" ", 2) for file in files for line in file.read_text().splitlines()]
    return {name: float(seconds) for _, seconds, name in sorted(rows, key=lambda row: int(row[0]))}
