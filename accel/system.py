# SPDX-License-Identifier: Apache-2.0
"""Properties that a process inherits from the system: signals that ask it to stop, streams, the working directory."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Collection

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # their meaning is the script's own
# A closed terminal sends the first more than once, by the shell and by the kernel; the kernel sends the second every
# second. So another one of them is no second request.
REPEATED = (signal.SIGHUP, signal.SIGXCPU)
SAME_REQUEST_S = 0.3  # a scheduler may signal the ranks and the launcher, which forwards the signal


def not_ignored(signals: Collection[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that this process does not ignore, as `nohup` lets it ignore SIGHUP."""
    return [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]


def open_streams() -> None:
    """Open /dev/null as each standard stream that is closed; else another file gets its number, here or in a child."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)


def tell(text: str) -> None:
    """Write to stderr at once; without a stderr, or if its terminal is gone, nothing."""
    if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison] - it was closed as Python started
        with contextlib.suppress(OSError):
            _ = sys.stderr.write(text)
            sys.stderr.flush()


def current_folder() -> str:
    """Return the working directory; a deleted one by the name that it had."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            return os.readlink("/proc/self/cwd")  # with " (deleted)" at its end
        return "(deleted)"


def absolute(path: str) -> str:
    """Return an absolute path, in a deleted working directory too."""
    return os.path.normpath(os.path.join(current_folder(), path))
