# SPDX-License-Identifier: Apache-2.0
"""One host's part of a job over several: meet the other hosts, start this one's ranks, start them again if need be.

It runs as a process of its own, by path: only here, and in the rendezvous, does a launch import torch. Meeting,
restarts and hosts that come and go are those of torch's elastic agent,
https://docs.pytorch.org/docs/stable/elastic/agent.html; processes, their output and their failures are handled as on
one host.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, NoReturn, cast

import msgspec
from torch.distributed import DistError  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from accel.errors import AccelError, LaunchError
from accel.launching._children import Children
from accel.launching._hang import Watch
from accel.launching._hosts import Order
from accel.launching._launch import plan_here, record_dir
from accel.launching._meeting import describe_hosts
from accel.launching._plan import LaunchPlan, Place
from accel.launching._record import Failure, culprit, exit_code, repeats, stop_number
from accel.launching._relay import Relay, log_path
from accel.launching._rendezvous import Meeting, meet, until, within
from accel.launching._report import failure_report
from accel.launching._run import FAILED_GRACE_S, SETTLE_S, drain, end, stop, tell, wait
from accel.launching._signals import NOTICES, STOPPING, Signals, listening
from accel.launching._target import Target
from accel.launching._worker import die_with

_NEWS_S = 1.5  # from a failure on, for another host to say which rank failed first
_LEAST_NEWS_S = 0.3
_LOST_S = 1.0  # after which the store where hosts meet is taken not to answer
_CLOSE_S = 2.0


class _Asked(BaseException):
    """A signal that asks to stop arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Agent(SimpleElasticAgent):
    """torch's elastic agent around the processes of a `LaunchPlan`."""

    def __init__(self, spec: WorkerSpec, meeting: Meeting, signals: Signals, plan: Callable[[Place, int], LaunchPlan]):
        super().__init__(spec)
        self._meeting = meeting
        self._signals = signals
        self._plan_for = plan
        self._max_restarts = spec.max_restarts
        self._failed = 0
        self._starts = 0
        self._done = False
        self._report = ""
        self.noted_s: float | None = time.monotonic()  # when others were told something; None once nobody can be told
        self._told: int | None = None  # the rank whose failure the other hosts can read
        self._relay: Relay | None = None
        self.children = Children()
        self._hangs = Watch(self.children, None, None)
        self.plan: LaunchPlan | None = None
        self.status = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        place = Place(
            node_rank=self._meeting.place,
            num_nodes=len(self._meeting.hosts),
            master_addr=worker_group.master_addr or "",
            restarts=self._failed,
        )
        self.plan = plan = self._plan_for(place, worker_group.master_port or 0)
        if self._starts or place.node_rank == 0:
            why = f", restart {self._failed} of {self._max_restarts}" if self._failed else ""
            tell(f"accel: {describe_hosts(self._meeting.hosts, len(plan.processes))}{why}\n")
        self._starts += 1
        self._done = False
        self.noted_s, self._told = time.monotonic(), None
        self.children = Children()
        self._relay = self.children.start(plan)
        self._hangs = Watch(self.children, self._relay, plan.hang_timeout_s)
        return {local: process.rank for local, process in enumerate(plan.processes)}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        failures = self.children.failures()
        if failures and all(map(stop_number, failures)):  # the ranks agreed to stop
            raise _Asked(stop_number(failures[0]))
        if failures:
            self._note_failure()
            return RunResult(state=WorkerState.FAILED)
        if self.children.running():
            if echoes := list(filter(repeats, self.children.recorded())):
                _ = self._tell_others(culprit(echoes))  # while the rank ends, which may take seconds
            tell(self._hangs.look())
            return RunResult(state=WorkerState.HEALTHY)
        # torch would wait for the other hosts next, for minutes, and hear of nothing.
        if not self._others_done():
            return RunResult(state=WorkerState.FAILED if self._report else WorkerState.HEALTHY)
        self.finish()
        self.status = 0
        self.noted_s = time.monotonic()
        return RunResult(
            state=WorkerState.SUCCEEDED,
            return_values={worker.global_rank: None for worker in worker_group.workers},
        )

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        if not self._report and self.children.running():
            self._note_change()
        grace_s = FAILED_GRACE_S if self._report or self.plan is None else self.plan.stop_grace_s
        end(self.children, self._signals, grace_s)
        self.finish()

    def _shutdown(self, *_words: Any, **_options: Any) -> None:
        """Leave the ranks to whoever runs the agent."""

    def finish(self) -> None:
        """Show what ended ranks have printed, then what there is to say about a failure."""
        drain(self._relay, self._signals)
        tell(self._report)
        self._report = ""

    def _note_failure(self) -> None:
        """Find out who failed first, on whatever host."""
        assert self.plan is not None
        _ = wait(self.children, self._signals, SETTLE_S)
        failures = self.children.failures()
        mine, hosts = culprit(failures), self._hosts()
        first = culprit([mine, *self._news(mine)])
        self._failed += 1
        self.status = exit_code(first.status)
        log = f"{log_path(self.plan.log_dir, first.rank)} on {hosts[first.rank]}" if self.plan.log_dir else ""
        others = [failure for failure in failures if failure.rank != first.rank]
        where = describe_hosts(self._meeting.hosts, len(self.plan.processes)) if repeats(first) else ""
        self._report = failure_report(first, others, log, hosts=hosts, where=where)

    def _others_done(self) -> bool:
        """Say that our ranks have ended well; return whether all others have. Notes a failure if there was one."""
        store = self._meeting.store
        assert store is not None
        if not self._done:
            self._done = True
            _ = store.add("done", 1)
        return not self._note_others_failure() and store.add("done", 0) == len(self._meeting.hosts)

    def _note_others_failure(self) -> bool:
        """Take over what another host says of a failure, if one does."""
        if not (news := self._news(None)):
            return False
        first = culprit(news)
        self._failed += 1
        self.status = exit_code(first.status)
        self.noted_s = time.monotonic()
        self._report = failure_report(first, hosts=self._hosts())
        return True

    def _note_change(self) -> None:
        """Find out why another host wants to start again."""
        if not self._note_others_failure():
            tell("accel: a host has come or gone; all ranks start again\n")

    def _hosts(self) -> dict[int, str]:
        assert self.plan is not None
        count = len(self.plan.processes)
        return {at * count + local: host for at, host in enumerate(self._meeting.hosts) for local in range(count)}

    def _tell_others(self, mine: Failure) -> bool:
        """Write a failure where the other hosts find it, once for each rank; return whether that place answers."""
        store, place = self._meeting.store, self._meeting.place
        if store is not None and len(self._meeting.hosts) > 1 and self._told != mine.rank:
            self._told = mine.rank
            note = msgspec.json.encode(mine).decode()
            reached = within(_LOST_S, lambda: store.set(f"failure/{place}", note))
            self.noted_s = time.monotonic() if reached else None
        return self.noted_s is not None

    def _news(self, mine: Failure | None) -> list[Failure]:
        """Tell the other hosts of our failure, and return what they say of theirs."""
        store, place, hosts = self._meeting.store, self._meeting.place, len(self._meeting.hosts)
        heard: dict[int, Failure] = {}
        if store is None or hosts == 1:
            return []
        patience_s = _NEWS_S
        if mine is not None:
            if not self._tell_others(mine):
                return []
            patience_s = max(_LEAST_NEWS_S, mine.time_s + _NEWS_S - time.time())

        def listen() -> bool:
            for at in range(hosts):
                if at != place and at not in heard and store.check([f"failure/{at}"]):
                    heard[at] = msgspec.json.decode(store.get(f"failure/{at}"), type=Failure)
            return mine is None or not all(map(repeats, [mine, *heard.values()]))

        _ = within(patience_s, lambda: until(listen))
        return list(heard.values())


def run(order: Order) -> int:
    """Run this host's part of a job; return the exit status.

    Raises:
        LaunchError: the hosts do not come together, do not agree, or a process cannot be started.
    """
    environ = {name: value for name, value in os.environ.items() if name not in order.added}
    with listening() as signals, record_dir() as folder:

        def plan(place: Place, port: int) -> LaunchPlan:
            records = f"{folder}/{time.monotonic_ns()}"
            os.mkdir(records)
            return plan_here(order.target, order.config, environ, record_dir=records, place=place, port=port)

        processes = len(plan(Place(num_nodes=order.config.hosts[0]), 1).processes)
        meeting = meet(order.config, processes, _contents(order.target))
        spec = WorkerSpec(
            role="default",
            local_world_size=processes,
            rdzv_handler=meeting,
            entrypoint=order.target.name,
            max_restarts=order.config.max_restarts,
        )
        agent = Agent(spec, meeting, signals, plan)
        try:
            with _interrupting(agent):
                if (number := signals.wait(0)) in STOPPING:  # it came before there was anything to interrupt
                    raise _Asked(number)
                cast(Any, agent).run()
        except _Asked as asked:
            _ = signals.wait(0)  # the signal itself
            agent.children.signal(asked.number)
            ending = stop(agent.children, signals, asked.number, order.config.stop_grace_s)
            agent.finish()
            tell(ending.report)
            return ending.status
        except (RendezvousError, DistError) as error:
            end(agent.children, signals, FAILED_GRACE_S)
            agent.finish()
            if not agent.status:
                raise _not_met(error, order) from error
            tell(f"accel: no restart: {_reason(error)}\n")
        except AccelError:
            end(agent.children, signals, FAILED_GRACE_S)
            raise
        if (noted_s := agent.noted_s) is not None:
            _ = within(_CLOSE_S, lambda: meeting.leave(noted_s))
        return agent.status


@contextlib.contextmanager
def _interrupting(agent: Agent) -> Generator[None]:
    """Let signals to stop interrupt whatever torch waits for, and hand the others on."""

    def ask(number: int, _frame: FrameType | None) -> None:
        raise _Asked(number)

    def hand_on(number: int, _frame: FrameType | None) -> None:
        agent.children.signal(number)

    handlers = {**dict.fromkeys(STOPPING, ask), **dict.fromkeys(NOTICES, hand_on)}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            _ = signal.signal(number, handler)


def _not_met(error: Exception, order: Order) -> LaunchError:
    return LaunchError(
        "the hosts did not come together",
        expected=f"{order.config.nnodes} hosts at {order.config.rdzv_endpoint}",
        got=_reason(error),
        fix="See what the launchers on the other hosts printed.",
    )


def _contents(target: Target) -> str:
    """Tell a script from others, and another version of itself; modules and programs by name only."""
    if target.kind != "script":
        return os.path.basename(target.name)
    with open(target.name, "rb") as file:
        return f"version {hashlib.file_digest(file, 'sha256').hexdigest()[:8]}"


def _reason(error: Exception) -> str:
    if isinstance(error, RendezvousClosedError):
        return "another host has ended the job"
    if isinstance(error, RendezvousTimeoutError):
        return "too few hosts came in time"
    return "the first host does not answer"


def main(words: list[str]) -> NoReturn:
    """Run the agent that an order describes, and end the process: a thread may still wait for a host that is gone."""
    order = msgspec.json.decode(words[0], type=Order)
    die_with(order.parent)
    if "LOGLEVEL" not in os.environ:  # torch's own switch
        logging.disable(logging.CRITICAL)
    try:
        status = run(order)
    except AccelError as error:
        tell(f"accel: error: {error}\n")
        status = 2
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
