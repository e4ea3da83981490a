# SPDX-License-Identifier: Apache-2.0
"""Gloo's threads that outlive their group are waited for, so that none needs python while the interpreter ends.

Such a thread drops the tensors of a collective after it has told that the collective is over. That takes the GIL, and
who asks for it while the interpreter ends aborts the process: https://github.com/pytorch/pytorch/issues/190489. The
threads end with the last reference to their group, which a model or mesh that the user still holds may have.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
_LONGEST_S = 2.0
_PAUSE_S = 0.001


def await_idle_threads() -> None:
    """Return once gloo's threads in this process have nothing to do, after 2 s at most; on Linux only, else at once.

    A thread that waits for the GIL looks idle. It gets it in the pause, so one that looks idle twice is.
    """
    idle, until = 0, time.monotonic() + _LONGEST_S
    while idle < 2 and time.monotonic() < until and (states := thread_states()):
        idle = idle + 1 if set(states) == {"S"} else 0
        time.sleep(_PAUSE_S)


def thread_states() -> list[str]:
    """Return the kernel's letter for the state of each of gloo's threads: S sleeps, R runs or would like to."""
    states: list[str] = []
    for path in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            head, _, tail = (path / "stat").read_text(errors="replace").rpartition(")")
            if head.endswith(f"({_NAME}"):
                states.append(tail.split()[0])
    return states
