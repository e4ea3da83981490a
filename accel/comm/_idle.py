# SPDX-License-Identifier: Apache-2.0
"""Waiting for gloo's threads that outlive their group, so that none needs python while the interpreter ends.

Such a thread drops the tensors of a collective after reporting its end. That takes the GIL, and a thread that asks for
it while the interpreter ends aborts the process: https://github.com/pytorch/pytorch/issues/190489. The threads end with
the last reference to their group, which a live model or mesh may hold.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
_LONGEST_S = 2.0
_PAUSE_S = 0.001


def await_idle_threads() -> None:
    """Wait until gloo's threads in this process are idle, for 2 s at most; returns at once on systems other than Linux.

    A thread that waits for the GIL looks idle. It gets the GIL in the pause, so a thread that looks idle twice is.
    """
    idle = 0
    until = time.monotonic() + _LONGEST_S
    while idle < 2 and time.monotonic() < until and (states := thread_states()):
        idle = idle + 1 if set(states) == {"S"} else 0
        time.sleep(_PAUSE_S)


def thread_states() -> list[str]:
    """Return the kernel's state of each of gloo's threads: "S" for sleeping, "R" for running or runnable."""
    states: list[str] = []
    for path in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            head, _, tail = (path / "stat").read_text(errors="replace").rpartition(")")
            if head.endswith(f"({_NAME}"):
                states.append(tail.split()[0])
    return states
