# SPDX-License-Identifier: Apache-2.0
"""Ranks that have been silent for long: where each of them is, told without ending any."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence

from accel.launch._children import Children
from accel.launch._frames import is_users
from accel.launch._record import STACK_SIGNAL, stack_path
from accel.launch._relay import Relay

_ANSWER_S = 0.5
_MOST_PLACES = 4
_MOST_FRAMES = 20
_HIDDEN = re.compile(r"/launch/_worker\.py|<frozen importlib")
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


class Watch:
    """Looks after the output of a launch's ranks, and asks them for their stacks once there has been none for long.

    Args:
        children: the ranks.
        relay: what shows their output.
        after_s: seconds without output; None to look after nothing.
    """

    def __init__(self, children: Children, relay: Relay | None, after_s: float | None) -> None:
        self._children = children
        self._relay = relay
        self._after_s = after_s
        self._told_s = 0.0

    def left_s(self) -> float | None:
        """Return in how many seconds to look; None for never."""
        if self._after_s is None or self._relay is None:
            return None
        return max(0.0, max(self._relay.last_s, self._told_s) + self._after_s - time.monotonic())

    def look(self) -> str:
        """Return where the ranks are if they have been silent for too long; nothing otherwise, or if it was told."""
        if self._relay is None or self.left_s() != 0:
            return ""
        already = self._told_s > self._relay.last_s
        self._told_s = time.monotonic()
        return "" if already else hang_report(self._stacks(), self._after_s or 0.0)

    def _stacks(self) -> dict[int, str]:
        """Ask each rank that has got so far for its Python stack; return those that come."""
        files = {rank: stack_path(record) for rank, record in self._children.records().items()}
        sizes = {rank: os.path.getsize(file) for rank, file in files.items() if os.path.exists(file)}
        for rank in sizes:
            self._children.signal_rank(rank, STACK_SIGNAL)
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and any(os.path.getsize(files[rank]) == size for rank, size in sizes.items()):
            time.sleep(0.02)
        stacks = dict.fromkeys(files, "")
        for rank, size in sizes.items():
            with open(files[rank], encoding="utf-8", errors="replace") as file:
                _ = file.seek(size)
                stacks[rank] = file.read()
        return stacks


def hang_report(stacks: Mapping[int, str], after_s: float) -> str:
    """Return where ranks are: one line for each place, and the stack of one rank there.

    Args:
        stacks: what the fault handler wrote for each rank, the innermost frame first; empty if it gave none.
        after_s: for how long there has been no output, in seconds.
    """
    places: dict[str, list[int]] = {}
    for rank, stack in stacks.items():
        places.setdefault(_place(stack), []).append(rank)
    lines = [f"accel: no output for {after_s:g} s"]
    lines += [f"accel: {_subject(ranks)} {place}" for place, ranks in places.items()]
    for ranks in list(places.values())[:_MOST_PLACES]:
        frames = [line for line in stacks[ranks[0]].splitlines() if _FRAME.match(line) and not _HIDDEN.search(line)]
        if len(frames) > _MOST_FRAMES:
            frames[_MOST_FRAMES - 5 : -5] = ["  ..."]
        lines += [f"Stack of rank {ranks[0]} (most recent call first):", *frames] if frames else []
    return "\n".join(lines) + "\n"


def _place(stack: str) -> str:
    """Say which line of the user's a stack is at, and what was called there."""
    frames: list[tuple[str, str, str]] = _FRAME.findall(stack)
    for at, (file, line, name) in enumerate(frames):
        if is_users(file):
            called = f", in {frames[at - 1][2]}" if at else ""
            return f"at {file}:{line} in {name}{called}"
    return f"at {frames[0][0]}:{frames[0][1]} in {frames[0][2]}" if frames else "without a Python stack"


def _subject(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}:"
