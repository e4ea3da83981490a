# SPDX-License-Identifier: Apache-2.0
"""Each of xdist's workers begins to collect at a different folder; all of them end with the same order of tests.

In a fresh clone each worker then compiles one part of the tests, with rewritten asserts, and reads the other parts from
the disk. If all workers began at the same file, each of them would compile every file.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")

_TESTS = Path(__file__).parent.parent
_PLACES: dict[str, int] = {}  # of the folders and files in tests/, by node id


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the list of what is in tests/."""
    report = yield
    if isinstance(collector, pytest.Directory) and collector.path == _TESTS and report.passed:
        _PLACES.update((child.nodeid, at) for at, child in enumerate(report.result))
        files = [max(1, sum(1 for _ in child.path.rglob("test_*.py"))) for child in report.result]
        worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        report.result = turned(report.result, files, worker / int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring tests back into the order of the folders and files."""

    def place(item: pytest.Item) -> int:
        return next((_PLACES[node.nodeid] for node in item.iter_parents() if node.nodeid in _PLACES), 0)

    items.sort(key=place)


def turned(children: Sequence[T], weights: Sequence[int], share: float) -> list[T]:
    """Return children from the first one on that has at least a share of all weights before it; the others follow.

    A share from 1 on, as of a worker that replaces one that has crashed, is without the ones.
    """
    before = list(accumulate(weights, initial=0))
    first = next(at for at, weight in enumerate(before) if weight >= share % 1 * before[-1])
    return [*children[first:], *children[:first]]
