# SPDX-License-Identifier: Apache-2.0
"""The ranks of a launch, as the actors that hold them report them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from accel.config import LaunchConfig
from accel.errors import AccelError, LaunchError
from accel.launching import (
    Children,
    Failure,
    FailureRecord,
    LaunchPlan,
    RankNews,
    RankPosition,
    Relay,
    open_logs,
    read_failure,
    start_relay,
)

_LOOK_S = 0.2
_SIGNAL_S = 5.0
_LOST = 1  # status of a rank whose actor is gone


class RayChildren(Children):
    """Ranks in actors; a thread asks these for news.

    Args:
        ray: the package.
        actors: holder of each rank.
        hosts: address of each.
    """

    def __init__(self, ray: Any, actors: Sequence[Any], hosts: Sequence[str]) -> None:
        super().__init__()
        self._ray = ray
        self._actors = actors
        self._hosts = hosts
        self._status: dict[int, int | None] = dict.fromkeys(range(len(actors)))
        self._seen_s: dict[int, float] = {}
        self._plan: LaunchPlan | None = None
        self._pipes: dict[int, tuple[IO[bytes], IO[bytes]]] = {}

    def open(self, positions: Sequence[RankPosition], config: LaunchConfig, call: bytes) -> None:
        """Start the process of each rank.

        Raises:
            LaunchError: a host cannot start it.
        """
        ray = self._ray
        starts = [
            actor.start.remote(position, config, call) for actor, position in zip(self._actors, positions, strict=True)
        ]
        for rank, start in enumerate(starts):
            try:
                ray.get(start)
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None)
                if isinstance(cause, AccelError):
                    raise cause from error
                raise LaunchError(
                    f"rank {rank} of {len(starts)} does not start",
                    got=_first_line(error),
                    where=self._hosts[rank],
                    fix="Let every host of the cluster have this Python, accel and the modules of the function.",
                ) from error

    def start(self, plan: LaunchPlan) -> Relay | None:
        self._plan = plan
        ends: dict[int, tuple[IO[bytes], IO[bytes]]] = {}
        for process in plan.processes:
            out, to_out = os.pipe()
            err, to_err = os.pipe()
            ends[process.rank] = os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0)
            self._pipes[process.rank] = os.fdopen(to_out, "wb", 0), os.fdopen(to_err, "wb", 0)
        relay = start_relay(plan, open_logs(plan), ends)
        threading.Thread(target=self._watch, name="accel-ray-watch", daemon=True).start()
        return relay

    def running(self) -> list[int]:
        return [rank for rank, status in self._status.items() if status is None]

    def left(self) -> list[int]:
        return [rank for rank, status in self._status.items() if status == 0]

    def statuses(self) -> dict[int, int | None]:
        return dict(self._status)

    def failures(self) -> list[Failure]:
        return [
            read_failure(rank, status, self._record(rank), self._seen_s[rank])
            for rank, status in self._status.items()
            if status
        ]

    def recorded(self) -> list[Failure]:
        return []  # records come with the end of a rank

    def signal(self, number: int) -> None:
        self._send(number, self.running(), group=False)

    def signal_rank(self, rank: int, number: int) -> None:
        self._send(number, [rank], group=False)

    def records(self) -> dict[int, str]:
        return {}  # no rank writes where this process could read

    def signal_groups(self, number: int) -> bool:
        """Send a signal to each rank and the processes it has started; return whether a rank runs."""
        if number:
            self._send(number, list(self._status), group=True)
        return bool(self.running())

    def _send(self, number: int, ranks: Sequence[int], *, group: bool) -> None:
        ray = self._ray
        sent = [self._actors[rank].signal.remote(int(number), group=group) for rank in ranks]
        _ = ray.wait(sent, num_returns=len(sent), timeout=_SIGNAL_S) if sent else None

    def _record(self, rank: int) -> str:
        assert self._plan is not None
        return self._plan.processes[rank].record

    def _watch(self) -> None:
        """Ask the actors for news until all ranks have ended."""
        ray = self._ray
        asked = {self._actors[rank].look.remote(): rank for rank in self._status}
        while asked:
            ready, _ = ray.wait(list(asked), num_returns=1, timeout=_LOOK_S)
            for each in ready:
                rank = asked.pop(each)
                try:
                    news: RankNews = ray.get(each)
                except ray.exceptions.RayError as error:
                    self._lose(rank, error)
                    continue
                self._pass_on(rank, news)
                if news.status is None:
                    asked[self._actors[rank].look.remote()] = rank

    def _pass_on(self, rank: int, news: RankNews) -> None:
        for pipe, data in zip(self._pipes[rank], (news.out, news.err), strict=True):
            if data:
                _write(pipe, data)
        if news.status is None:
            return
        folder = Path(self._record(rank)).parent
        for name, data in news.files.items():
            _ = folder.joinpath(Path(name).name).write_bytes(data)
        self._end(rank, news.status)

    def _lose(self, rank: int, error: Exception) -> None:
        """Record that the actor of a rank is gone, and the rank with it."""
        kind = type(error)
        lost = FailureRecord(
            rank=rank,
            host=self._hosts[rank],
            exception=f"ray.exceptions.{kind.__qualname__}",
            message=f"the actor of rank {rank} on {self._hosts[rank]} is gone, and the rank with it",
            location="",
            traceback=f"{error}\n",
            time_s=time.time(),
        )
        _ = Path(self._record(rank)).write_bytes(msgspec.json.encode(lost))
        self._end(rank, _LOST)

    def _end(self, rank: int, status: int) -> None:
        for pipe in self._pipes[rank]:
            pipe.close()
        self._seen_s[rank] = time.time()
        self._status[rank] = status
        os.kill(os.getpid(), signal.SIGCHLD)  # wakes the supervisor, which waits for the ends of its children


def _write(pipe: IO[bytes], data: bytes) -> None:
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(pipe.fileno(), left) :]
    except OSError:  # nobody reads the output any more
        return


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
