# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a launch on one host: starts its ranks, watches them, ends them together, starts them again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from accel.errors import AccelError
from accel.launching._target import describe_hosts
from accel.launching.local._children import Children, log_path
from accel.launching.local._hang import Watch, Whereabouts, absent_report, locate
from accel.launching.local._launch_plan import LaunchPlan
from accel.launching.local._signals import LOOK_S, Orphans, Signals, listening
from accel.launching.reports._failure import Failure, culprit, exit_code, newest_checkpoint, repeats, stop_number
from accel.launching.reports._journal import Journal
from accel.launching.reports._report import (
    failure_report,
    has_stack,
    last_line,
    last_message,
    notify,
    reason,
    stop_report,
)
from accel.system import NOTICES, STOPPING

SETTLE_S = 0.3  # for the records of other ranks: one may have failed first
FAILED_GRACE_S = 2.5  # nothing of a failed run is left after 3 s, or 4 where a rank does not answer
_LEFTOVER_GRACE_S = 1.0  # for what ended ranks have left behind
_KILLED_GRACE_S = 1.5  # a process that waits for a device may outlive SIGKILL; the launcher does not wait with it
_POLL_S = 0.05
_DRAIN_S = 0.5  # after a request to stop, for output that is still to be shown

Exchange = tuple[list[Failure], list[Whereabouts]]  # failures of other hosts, and where ranks of all hosts are


class LaunchEnd(NamedTuple):
    """The end of a launch, or of one of its attempts."""

    status: int  # 0, the status of the rank that failed first, or 128 plus the number of the signal that stopped it
    report: str = ""  # text for stderr
    # The failure that caused the others; None if no rank failed, or a signal stopped the launch.
    first: Failure | None = None
    stopped: int = 0  # the signal that stopped it, or 0
    changed: bool = False  # whether the ranks were ended because a host came or went


class Peers:
    """The other hosts of a launch, as its supervisor on this host sees them; here there are none."""

    hosts: Sequence[str] = ()  # names of all hosts, in order of their ranks; empty where the launch knows one host only
    tick_s: float | None = None  # seconds between two looks at the other hosts; None for no looks

    def have_failed(self) -> bool:
        """Whether another host reports a failure."""
        return False

    def have_changed(self) -> bool:
        """Whether a host waits for all ranks to start again."""
        return False

    def all_done(self) -> bool:
        """Report that all ranks of this host have ended well; return whether the ranks of all hosts have."""
        return True

    def report(self, failure: Failure) -> None:
        """Report a failure of this host to the others."""

    def exchange(self, mine: Failure | None, find: Callable[[], Whereabouts]) -> Exchange:
        """Exchange failures, and the places of ranks if all failures only repeat another rank's.

        Returns the failure of each other host that has one, and the places of the ranks of all hosts, or nothing."""
        return [], [find()] if mine is not None and repeats(mine) else []


class Supervisor:
    """Starts the ranks of this host once, and looks after them until all have ended."""

    def __init__(
        self,
        signals: Signals,
        plan: LaunchPlan,
        peers: Peers | None = None,
        journal: Journal | None = None,
        children: Children | None = None,
        orphans: Orphans | None = None,
    ) -> None:
        self._plan = plan
        self._peers = Peers() if peers is None else peers
        self._journal = Journal() if journal is None else journal
        self._signals = signals
        self._children = Children() if children is None else children
        self._orphans = orphans
        # Set before a process starts: a launcher that is ended by force takes its ranks along at any moment.
        signals.abandon = partial(self._children.signal_groups, signal.SIGKILL)
        self._relay = self._children.start(plan)
        self._watch = Watch(self._children, self._relay, plan.hang_timeout_s)

    def run(self) -> LaunchEnd:
        """Wait for the end of all ranks, and until their output is shown."""
        try:
            ending = self._supervise()
        except AccelError:
            self._end(FAILED_GRACE_S)
            _ = self._end_orphans()
            self._journal.end(self._children.statuses(), self._children.failures(), None)
            raise
        # The report comes last on the screen, and a traceback behind the rank's own lines in its log file.
        self._drain()
        self._log_failures()
        self._journal.end(self._children.statuses(), self._children.failures(), ending.first)
        return ending

    def _supervise(self) -> LaunchEnd:
        children, peers = self._children, self._peers
        while not (failures := children.failures()) and not peers.have_failed():
            self._journal.see(children.statuses())
            if self._orphans is not None:
                self._orphans.reap(children.pids())
            if not children.running():
                if children.failures():  # the last rank has failed since the look above
                    continue
                if peers.all_done():
                    return LaunchEnd(0)
            if peers.have_changed():
                notify(changed := "accel: a host has come or gone; all ranks start again\n")
                self._journal.note("hosts", changed)
                self._end(self._plan.stop_grace_s)
                return LaunchEnd(0, changed=True)
            number = self._signals.wait(self._patience_s())
            notify(silence := self._watch.look())
            if silence:
                self._journal.note("hang", silence)
            if number in NOTICES:
                children.signal(number)
                self._journal.note("notice", f"{signal.Signals(number).name} was forwarded to the ranks")
            # Who stops a whole job may have sent the signal to the ranks as well; that is no failure of theirs.
            elif number and all(number in (-failure.status, stop_number(failure)) for failure in children.failures()):
                children.signal(number)
                return self._stop(number)
            if peers.tick_s and (echoes := list(filter(repeats, children.recorded()))):
                peers.report(culprit(echoes))  # a rank may take seconds to end, in which the others can look around
        if failures and all(map(stop_number, failures)):  # the ranks agreed to stop, and the others are about to end
            return self._stop(stop_number(failures[0]))
        return self._fail()

    def _patience_s(self) -> float:
        times = [each for each in (self._watch.left_s(), self._peers.tick_s) if each is not None]
        return min(times, default=LOOK_S)

    def _fail(self) -> LaunchEnd:
        self._journal.see(self._children.statuses())  # before others end
        hurry = self._wait(SETTLE_S)
        failures = self._children.failures()
        if all(map(repeats, failures)):  # a rank that still ends may be the cause
            failures += [failure for failure in self._children.recorded() if not repeats(failure)]
        mine = culprit(failures) if failures else None
        others, whereabouts = self._peers.exchange(mine, self._find)
        self._end(0 if hurry else FAILED_GRACE_S)
        if not failures and not others:  # the other host could not be asked
            return LaunchEnd(0, changed=True)
        first = culprit([*failures, *others])
        hosts = self._hosts()
        log = log_path(self._plan.log_dir, first.rank) if self._plan.log_dir else ""
        report = failure_report(
            first,
            [failure for failure in failures if failure.rank != first.rank],
            f"{log} on {hosts[first.rank]}" if log and hosts else log,
            hosts=hosts,
            where=describe_hosts(self._peers.hosts, len(self._plan.processes)) if hosts and repeats(first) else "",
            absent=absent_report(whereabouts, hosts),
            left=self._end_orphans(hurry=hurry),
        )
        return LaunchEnd(exit_code(first.status), report, first)

    def _find(self) -> Whereabouts:
        """Ask the ranks that have not failed where they are."""
        heard = self._watch.ask()
        left = self._children.left()  # now, as a process may take long to end that has closed its connections
        failing = [failure.rank for failure in self._children.recorded()]
        return locate({rank: each for rank, each in heard.items() if rank not in (*left, *failing)}, left)

    def _hosts(self) -> dict[int, str]:
        """Return the host of each rank; empty where there is one host only."""
        count = len(self._plan.processes)
        return {at * count + local: host for at, host in enumerate(self._peers.hosts) for local in range(count)}

    def _stop(self, number: int) -> LaunchEnd:
        """Wait for ranks that a signal has asked to stop, then end them."""
        self._journal.note("stop", f"{signal.Signals(number).name} asks all ranks to stop")
        hurry = self._wait(self._plan.stop_grace_s)
        late = self._children.running()
        self._end(0 if late or hurry else _LEFTOVER_GRACE_S)
        recorded = [failure for failure in self._children.failures() if failure.record]
        report = stop_report(number, recorded, late)
        disobedient = [
            failure
            for failure in recorded
            if failure.record and failure.record.exception != "KeyboardInterrupt" and not stop_number(failure)
        ]
        if disobedient:
            first = culprit(disobedient)
            report += failure_report(first, [other for other in disobedient if other is not first])
        return LaunchEnd(exit_code(-number), report, stopped=number)

    def _end(self, grace_s: float) -> None:
        """End the ranks and what they have started: SIGTERM, and SIGKILL when their time is over."""
        if grace_s:
            _ = self._children.signal_groups(signal.SIGTERM)
            _ = self._wait(grace_s, groups=True)
        _ = self._children.signal_groups(signal.SIGKILL)
        _ = self._wait(_KILLED_GRACE_S)

    def _end_orphans(self, *, hurry: bool = False) -> str:
        """End processes that ranks have left behind in other sessions; return a line that names them."""
        if self._orphans is None:
            return ""
        return self._orphans.end(
            self._children.pids(), lambda left_s: self._signals.wait(left_s) in STOPPING or hurry, notify
        )

    def _wait(self, timeout_s: float, *, groups: bool = False) -> bool:
        """Wait until no rank runs, with `groups` nothing of theirs either; return whether a signal cut in."""
        deadline = time.monotonic() + timeout_s
        while (ranks := self._children.running()) or (groups and self._is_left()):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            # The end of a rank wakes this, the end of what a rank has started does not.
            if self._signals.wait(left_s if ranks else min(left_s, _POLL_S)) in STOPPING:
                return True
        return False

    def _is_left(self) -> bool:
        """Return whether anything of the ranks' groups is left."""
        if self._orphans is not None:
            self._orphans.reap(self._children.pids())
        return self._children.signal_groups(0)

    def _log_failures(self) -> None:
        """Write the whole traceback of each failed rank to its log file: the terminal shows one, and in short."""
        for failure in self._children.failures() if self._plan.log_dir else ():
            if failure.record is not None and failure.record.exception != "SystemExit":
                with suppress(OSError), open(log_path(self._plan.log_dir, failure.rank), "a", encoding="utf-8") as file:
                    _ = file.write(failure.record.traceback)

    def _drain(self) -> None:
        """Wait until all output is shown; not for long once a signal has asked to stop, as nobody may read it."""
        if self._relay is None:
            return
        self._relay.end()
        deadline = None
        while self._relay.is_alive() and (deadline is None or time.monotonic() < deadline):
            self._relay.join(_POLL_S)
            _ = self._signals.wait(0)
            if self._signals.asked and deadline is None:
                deadline = time.monotonic() + _DRAIN_S


def run_to_end(plan: LaunchPlan, children: Children | None = None) -> LaunchEnd:
    """Start the processes of a plan, on `children` if there are any, and wait for them; return the end.

    The first failure, or a signal, ends all. The caller prints the report."""
    with listening() as signals:
        return Supervisor(signals, plan, children=children).run()


def run_attempts(
    start: Callable[[int, LaunchEnd], tuple[LaunchPlan, Peers] | LaunchEnd],
    signals: Signals,
    *,
    max_restarts: int,
    summary: bool = False,
    shows_last: bool = True,
    journal: Journal | None = None,
    orphans: Orphans | None = None,
) -> LaunchEnd:
    """Start all ranks, and again after each failure, `max_restarts` times at most; return the last end.

    `start` returns the next attempt's ranks and hosts, or the end. A host that comes or goes is no failure."""
    journal = Journal() if journal is None else journal
    began_s = time.monotonic()
    attempt = None
    checkpoint = ""
    ending = LaunchEnd(0)
    failed = 0
    while not isinstance(made := start(failed, ending), LaunchEnd):
        kind = "start" if attempt is None else "hosts" if ending.changed else "restart"
        attempt = made
        records = {process.rank: process.record for process in attempt[0].processes}
        supervisor = Supervisor(signals, *attempt, journal, orphans=orphans)
        journal.begin(records, attempt[1].hosts, kind)
        ending = supervisor.run()
        checkpoint = newest_checkpoint(process.record for process in attempt[0].processes) or checkpoint
        failed += ending.first is not None
        if signals.asked and (ending.changed or (ending.first is not None and failed <= max_restarts)):
            ending = _stopped(ending, signals.asked)  # asked while ranks were ended: they do not start again
        is_last = not ending.changed and (ending.first is None or failed > max_restarts)
        notify(ending.report if shows_last or not is_last else "")
        if is_last:
            break
    else:
        ending = made
        notify(ending.report)
    stopped = signal.Signals(ending.stopped).name if ending.stopped else ""
    journal.finish(ending.status, ending.report, stopped=stopped, checkpoint=checkpoint)
    if summary and attempt is not None:
        notify(_summary(*attempt, ending, checkpoint, time.monotonic() - began_s))
    elif shows_last and ending.first is not None:
        notify(last_message(ending.first))
    return ending


def _stopped(ending: LaunchEnd, number: int) -> LaunchEnd:
    """Return the end of an attempt after which a signal stops the launch."""
    report = ending.report + stop_report(number, (), ())
    return LaunchEnd(exit_code(-number), report, stopped=number)


def _summary(plan: LaunchPlan, peers: Peers, ending: LaunchEnd, checkpoint: str, seconds: float) -> str:
    ranks = len(plan.processes) * max(1, len(peers.hosts))
    # One rank has this process's own streams, and without a stack its report is as short as the report of a stop.
    is_short = ending.first is None or not has_stack(ending.first)
    is_explained = (ranks == 1 and is_short) or (ending.stopped and not checkpoint)
    if (is_explained and not plan.log_dir) or (plan.quiet and not ending.status):
        return ""
    return last_line(
        ending.status,
        ranks=ranks,
        seconds=seconds,
        restarts=plan.restarts,
        stopped=ending.stopped,
        culprit=None if ending.first is None else ending.first.rank,
        reason=reason(ending.first),
        checkpoint=checkpoint,
        log_dir=plan.log_dir,
    )
