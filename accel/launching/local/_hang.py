# SPDX-License-Identifier: Apache-2.0
"""Reports of ranks that are silent or missing: where each of them is, asked without ending any."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from accel.errors._checks import is_users
from accel.launching.local._children import Children, Relay
from accel.launching.reports._failure import DECORATOR, STACK_SIGNAL, WORKER, EnteredCollective, file_beside
from accel.run_folder import read_json
from accel.terminal import show_limit, show_names

_ANSWER_S = 1.0
_PAUSE_S = 0.02
_MOST_PLACES = 4  # with their stacks
_MOST_LINES = 16
_MOST_FRAMES = 20
_HIDDEN = re.compile(rf"{re.escape(WORKER)}|<frozen importlib")
_COLLECTIVE = (
    "torch/distributed/",
    "torch/autograd/graph.py",
    "accel/comm/",
)  # the second runs backward, and DDP in it
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


class RankAnswer(NamedTuple):
    """The answer of a rank to the question where it is."""

    stack: str = ""  # stack from the fault handler, the innermost frame first; empty if there is none
    asked: bool = False  # whether the rank could be asked for its collectives
    # Current or last collective of each group; None if the rank gave none.
    calls: Sequence[EnteredCollective] | None = None
    stopped: str = ""  # why it can answer nothing; empty if it runs


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    """Places of the ranks of one host, while other ranks failed for want of one."""

    left: list[int] = []  # ranks that have ended with status 0
    silent: list[int] = []  # ranks of launchers that do not answer
    elsewhere: dict[int, str] = {}  # for each rank that is in no collective, its line of code
    waiting: dict[int, str] = {}  # for each rank that is in a collective, its line of code


class Watch:
    """A watch over the ranks' output, which asks them where they are after `after_s` seconds of silence."""

    def __init__(self, children: Children, relay: Relay | None, after_s: float | None) -> None:
        self._children = children
        self._relay = relay
        self._after_s = after_s
        self._logged_s = 0.0
        self._looks = 0  # in this silence
        self._places: dict[int, str] = {}

    def left_s(self) -> float | None:
        """Return the seconds until the next look; None for never."""
        if self._after_s is None or self._relay is None:
            return None
        return max(0.0, max(self._relay.last_s, self._logged_s) + self._after_s - time.monotonic())

    def look(self) -> str:
        """Return a report of where the ranks are after a silence; empty if none has moved since the last."""
        if self._relay is None or self._after_s is None or self.left_s() != 0:
            return ""
        # There was output since the last report: this silence is another.
        if self._logged_s <= self._relay.last_s:
            self._looks, self._places = 0, {}
        self._logged_s = time.monotonic()
        self._looks += 1
        heard = self.ask()
        places = {rank: _place(each) for rank, each in heard.items()}
        before, self._places = self._places, places
        return "" if places == before else hang_report(heard, self._after_s * self._looks)

    def ask(self) -> dict[int, RankAnswer]:
        """Ask each running rank where it is; return the answers that come in time."""
        stopped = self._children.stopped()
        # A stopped process answers nothing, and waiting for it would cost the answers of the others their time.
        records = {rank: record for rank, record in self._children.records().items() if rank not in stopped}
        stacks = {rank: file_beside(record, "stack") for rank, record in records.items()}
        # Stacks are appended: an answer begins at the end that the file has now.
        sizes = {rank: os.path.getsize(file) for rank, file in stacks.items() if os.path.exists(file)}
        calls = {rank: file_beside(record, "calls") for rank, record in records.items() if _request(record)}
        for rank in sizes:
            self._children.signal_rank(rank, STACK_SIGNAL)

        def open_questions() -> bool:
            return any(os.path.getsize(stacks[rank]) == size for rank, size in sizes.items()) or not all(
                map(os.path.exists, calls.values())
            )

        # The launcher waits here, a second at most: a rank in C code may never answer, and that is news as well.
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and open_questions():
            time.sleep(_PAUSE_S)
        time.sleep(_PAUSE_S)  # a stack that has begun may still be written
        heard = {
            rank: RankAnswer(
                stack=_from(stacks[rank], sizes[rank]) if rank in sizes else "",
                asked=rank in calls,
                calls=read_json(calls[rank], list[EnteredCollective]) if rank in calls else None,
            )
            for rank in records
        } | {rank: RankAnswer(stopped=text) for rank, text in stopped.items()}
        return dict(sorted(heard.items()))


def hang_report(heard: Mapping[int, RankAnswer], after_s: float) -> str:
    """Return a report of where ranks are: groups with waiting ranks, one line and one stack for each place."""
    places: dict[str, list[int]] = {}
    for rank, each in heard.items():
        places.setdefault(_place(each), []).append(rank)
    lines = [f"accel: no output for {show_limit(after_s)}", *map("accel: {}".format, _waits(heard)[:_MOST_PLACES])]
    shown = [f"accel: {_subject(ranks)}: {place}" for place, ranks in places.items()]
    lines += shown[:_MOST_LINES] + [f"accel: and {len(shown) - _MOST_LINES} more places"] * (len(shown) > _MOST_LINES)
    for ranks in list(places.values())[:_MOST_PLACES]:
        stack = heard[ranks[0]].stack
        frames = [line for line in stack.splitlines() if _FRAME.match(line) and not _HIDDEN.search(line)]
        if len(frames) > _MOST_FRAMES:
            frames[_MOST_FRAMES - 5 : -5] = ["  ..."]
        lines += [f"Stack of rank {ranks[0]} (most recent call first):", *frames] if frames else []
    return "\n".join(lines) + "\n"


def locate(heard: Mapping[int, RankAnswer], left: Sequence[int]) -> Whereabouts:
    """Sort the ranks of one host by whether they wait in a collective; those in `left` have ended with status 0."""
    elsewhere: dict[int, str] = {}
    waiting: dict[int, str] = {}
    for rank, each in heard.items():
        (waiting if _is_waiting(each) else elsewhere)[rank] = _place(each)
    return Whereabouts(left=list(left), elsewhere=elsewhere, waiting=waiting)


def absent_report(whereabouts: Iterable[Whereabouts], hosts: Mapping[int, str] = MappingProxyType({})) -> str:
    """Return a report of the ranks that others missed: one line for each place, missing ranks first."""
    found = list(whereabouts)
    facts = [("exited with status 0, while other ranks continued", rank) for each in found for rank in each.left]
    facts += [
        ("never reached the collective: no answer from the launcher", rank) for each in found for rank in each.silent
    ]
    facts += [
        (f"never reached the collective: {place}", rank) for each in found for rank, place in each.elsewhere.items()
    ]
    facts += [(f"waited: {place}", rank) for each in found for rank, place in each.waiting.items()]
    by_text: dict[str, list[int]] = {}
    for text, rank in facts:
        by_text.setdefault(text, []).append(rank)
    lines = [f"accel: {_subject(ranks, hosts)} {text}\n" for text, ranks in by_text.items()]
    return "".join(lines[: 1 + _MOST_PLACES])


def _is_waiting(heard: RankAnswer) -> bool:
    """Whether a rank is in a collective, by its flight record, or else by its stack."""
    if heard.calls:
        return heard.calls[0].waiting
    files = [file for file, _, _ in _FRAME.findall(heard.stack)]
    called = itertools.takewhile(lambda file: not is_users(file), files)
    return any(sign in file for file in called for sign in _COLLECTIVE)


def _waits(heard: Mapping[int, RankAnswer]) -> list[str]:
    """Return a line for each group: ranks that wait in a collective, and known ranks that are missing in it."""
    answers = {rank: each.calls for rank, each in heard.items() if each.calls is not None}
    groups: list[str] = []
    for group, of_all in dict.fromkeys((each.group, each.of_all) for calls in answers.values() for each in calls):
        found = {rank: next((each for each in calls if each.group == group), None) for rank, calls in answers.items()}
        entered = [each for each in found.values() if each is not None and each.waiting]
        if not entered:
            continue
        number = min(each.number for each in entered)
        present = [rank for rank, each in found.items() if each is not None and each.waiting and each.number == number]
        absent = [
            rank
            for rank, each in found.items()
            if (of_all if each is None else not each.waiting and each.number < number)
        ]
        wait = "waits" if len(present) == 1 else "wait"
        groups.append(
            f"{_subject(absent)} {'is' if len(absent) == 1 else 'are'} not in collective {number} of {group}; "
            f"{_subject(present)} {wait} in it"
            if absent
            else f"{_subject(present)} {wait} in collective {number} of {group}"
        )
    return groups


def _place(heard: RankAnswer) -> str:
    """Return a rank's current user line, call and collective."""
    if heard.stopped:
        return heard.stopped
    line = _line(heard.stack)
    if not heard.calls:
        return f"{line}; it does not answer" if heard.asked and heard.calls is None else line
    entered = heard.calls[0]
    here = entered.waiting and line.startswith(f"at {entered.place}")
    return f"{line}; {'in' if entered.waiting else 'last in'} {entered.short if here else entered}"


def _line(stack: str) -> str:
    frames: list[tuple[str, str, str]] = _FRAME.findall(stack)
    called = ""
    for file, line, name in frames:
        if is_users(file):
            return f"at {file}:{line} in {name}{called and f', in {called}'}"
        called = name if name != DECORATOR else called
    return f"at {frames[0][0]}:{frames[0][1]} in {frames[0][2]}" if frames else "without a Python stack"


def _subject(ranks: Sequence[int], hosts: Mapping[int, str] = MappingProxyType({})) -> str:
    where = {hosts.get(rank, "") for rank in ranks}
    host = f" on {where.pop()}" if hosts and len(where) == 1 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {show_names([*map(str, ranks)], 8)}{host}"


def _request(record: str) -> bool:
    """Ask a rank for its collectives; return whether it listens at its pipe."""
    with contextlib.suppress(OSError):  # it does not
        Path(file_beside(record, "calls")).unlink(missing_ok=True)
        pipe = os.open(file_beside(record, "ask"), os.O_WRONLY | os.O_NONBLOCK)
        with open(pipe, "wb", buffering=0) as opened:
            return opened.write(b"?") == 1
    return False


def _from(path: str, start: int) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        _ = file.seek(start)
        return file.read()
