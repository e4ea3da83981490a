# SPDX-License-Identifier: Apache-2.0
"""Options, profiles and marks of the tests, and what keeps a machine's state out of them.

What a process that runs tests needs, simulated ranks among it, is in `helpers/running.py`.
"""

from __future__ import annotations

import importlib.machinery
import os
import signal
import sys
import threading
from collections.abc import Iterator

import moved_tests
import profiles
import pytest
from uncollected import no_collections

profiles.load()

# Compiled files are kept whatever the environment says: else each run compiles every test again in each of its workers,
# and each process that a test starts the package.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# in a shell's background these are ignored, and then children ignore them too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    _ = signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    _ = signal.signal(signal.SIGQUIT, signal.SIG_DFL)


class _Plain:
    """Finds the package's modules before pytest does, which rewrites the asserts of each package that has a plugin.

    They are then compiled once, for processes with pytest and for those without it.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.PathFinder.find_spec(name, path, target) if name.startswith("accel.") else None


sys.meta_path.insert(0, _Plain)


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
    """Hide GPUs from runs without the tests of GPUs: the others count on CPUs, also where contexts choose a device.

    Then load what running tests needs, torch included, unless xdist's workers run them. A worker collects in turns.
    """
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config.getoption("dist", "no") == "no" or not config.getoption("tx"):
        config.pluginmanager.import_plugin("running")
    if "PYTEST_XDIST_WORKER" in os.environ:
        config.pluginmanager.import_plugin("turns")


@pytest.hookimpl(trylast=True)  # behind Hypothesis, which only then may write
def pytest_sessionstart(session: pytest.Session) -> None:
    """In the process that hands out tests, write Hypothesis's tables while the workers start."""
    if session.config.getoption("dist", "no") != "no":
        threading.Thread(target=profiles.write_tables).start()
