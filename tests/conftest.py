# SPDX-License-Identifier: Apache-2.0
"""Simulated ranks, under the name that this suite's tests know; and what keeps a machine's state out of the tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import moved_tests
import profiles
import pytest
import torch
from processes import children, patience
from uncollected import no_collections

from accel.testing import Simulator

profiles.load()

# Compiled files are kept whatever the environment says: else each run compiles every test again in each of its workers,
# and each process that a test starts the package.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# One thread for each process: a worker of pytest has a core, and threads of OpenMP spin while they wait for one.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

# in a shell's background these are ignored, and then children ignore them too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    _ = signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    _ = signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """No collection walks what modules and parameters of tests make: it stays."""
    with no_collections():
        return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `tests/durations.py`."""
    parser.addoption("--record-durations", metavar="FILE", help="write each test's CPU seconds to FILE-PID")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave long cases to later runs."""
    moved_tests.mark(items)


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from runs without the tests of GPUs: the others count on CPUs, also where contexts choose a device."""
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


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
