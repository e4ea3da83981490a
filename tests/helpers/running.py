# SPDX-License-Identifier: Apache-2.0
"""A process that runs tests: their limits and records, what they leave behind, and simulated ranks for them.

`conftest.py` loads it where tests run. The process that hands tests to xdist's workers starts them 3 s earlier without.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from typing import Any

import moved_tests
import pytest
import torch
from processes import children, patience

from accel.testing import Simulator

# One thread for each process: a worker of pytest has a core, and threads of OpenMP spin while they wait for one.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

if not torch.cuda.is_available():  # else each seed of torch formats a stack, and keeps it for a device that never comes
    torch.cuda.manual_seed_all = lambda seed: None


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Let loggers of libraries propagate, so that pytest adds its handlers to the root logger alone.

    Torch has 60 that do not, one of which writes each step of a compilation as soon as it has a handler.
    """
    for each in logging.getLogger().manager.loggerDict.values():
        if isinstance(each, logging.Logger):
            each.propagate = True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Give each test the time that it has on a quiet machine, longer where others compute too."""
    marker = item.get_closest_marker("timeout")
    if item.config.getoption("timeout") is None:
        seconds = marker.args[0] if marker else float(item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(patience(seconds)), append=False)
    with moved_tests.recording(item):
        return (yield)


def serves(line: str) -> bool:
    """Whether a process is one of multiprocessing's or torch's own, which end with this one."""
    kept = "multiprocessing.resource_tracker", "multiprocessing.forkserver", "addr2line", "compile_worker"
    return any(each in line for each in kept)


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Collections of a module's tests skip the objects that imports and earlier modules have made."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """A test that leaves a process behind fails itself, instead of one that comes later."""
    before = children()
    yield
    after = children()
    if after.keys() - before:
        gc.collect()  # workers of loaders end with what holds them, such as an error's traceback
        after = children()
    left = {pid: line for pid, line in after.items() if pid not in before and not serves(line)}
    assert not left, f"processes that the test has started and not waited for: {left}"


class _Patient(Simulator):
    """A simulator whose limit of 60 s grows with the machine's load: ranks with workers take their time."""

    def run(self, *args: Any, **options: Any) -> list[Any]:
        __tracebackhide__ = True
        return super().run(*args, **{"timeout_s": patience(60), **options})


@pytest.fixture(scope="module")
def ranks() -> Iterator[Simulator]:
    """`simulator`, with more patience."""
    with _Patient() as opened:
        yield opened
