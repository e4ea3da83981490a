# SPDX-License-Identifier: Apache-2.0
"""Attempts of a launch: all ranks start, and start again after a failure, until the last line reports the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from accel.launching._children import Children
from accel.launching._failure_record import newest_checkpoint
from accel.launching._journal import Journal
from accel.launching._plan import LaunchPlan
from accel.launching._report import last_line, tell
from accel.launching._signals import Signals, listening
from accel.launching._supervisor import Ending, Peers, Supervisor


def run_plan(plan: LaunchPlan) -> int:
    """Start the processes of a plan and wait for them; the first failure, or a signal, ends all.

    Their output goes to this process's own streams. When a rank fails, the others get SIGTERM, and SIGKILL if they
    are still there 2.5 s later; then the report of the rank that failed first is written to stderr. SIGINT and
    SIGTERM are handed on, with the plan's time to end; a second one kills. SIGUSR1 and SIGUSR2 are handed on.

    Args:
        plan: processes to start.

    Returns:
        0, or the exit status of the rank that failed first (128 plus the number of the signal that killed it), or
        128 plus the number of the signal that stopped the launch.

    Raises:
        LaunchError: a process cannot be started, or this is not the main thread.
    """
    ending = run_to_end(plan)
    tell(ending.report)
    return ending.status


def run_to_end(plan: LaunchPlan, children: Children | None = None) -> Ending:
    """Run a plan as `run_plan` does, but leave the report to the caller.

    Args:
        plan: processes to start.
        children: starts and watches them; None for processes of this host.
    """
    with listening() as signals:
        return Supervisor(signals, plan, children=children).run()


def run_attempts(
    start: Callable[[int, Ending], tuple[LaunchPlan, Peers] | Ending],
    signals: Signals,
    *,
    max_restarts: int,
    summary: bool = False,
    shows_last: bool = True,
    journal: Journal | None = None,
) -> Ending:
    """Start all ranks, and again after each failure, `max_restarts` times at most; return the last end.

    Args:
        start: returns the ranks of the next attempt and the other hosts, given the number of failures and the end of
            the last attempt; an `Ending` if there can be no attempt.
        signals: signals of this process.
        max_restarts: number of failures after which all ranks start again. A host that comes or goes is none.
        summary: whether the last line on stderr reports the end of the run. Without log files, one rank gets none, as
            its streams are this process's own, nor does a stop without a checkpoint, whose report is the last line;
            nor a good end with `quiet`.
        shows_last: whether the report of the last end is written to stderr, as those before it.
        journal: journal of the launch; None for none.

    Raises:
        LaunchError: a process cannot be started.
    """
    journal = Journal() if journal is None else journal
    began_s = time.monotonic()
    attempt = None
    checkpoint = ""
    ending = Ending(0)
    failed = 0
    while not isinstance(made := start(failed, ending), Ending):
        kind = "start" if attempt is None else "hosts" if ending.changed else "restart"
        attempt = made
        records = {process.rank: process.record for process in attempt[0].processes}
        supervisor = Supervisor(signals, *attempt, journal)
        journal.begin(records, attempt[1].hosts, kind)
        ending = supervisor.run()
        checkpoint = newest_checkpoint(process.record for process in attempt[0].processes) or checkpoint
        failed += ending.first is not None
        is_last = not ending.changed and (ending.first is None or failed > max_restarts)
        tell(ending.report if shows_last or not is_last else "")
        if is_last:
            break
    else:
        ending = made
        tell(ending.report)
    stopped = signal.Signals(ending.stopped).name if ending.stopped else ""
    journal.finish(ending.status, ending.report, stopped=stopped, checkpoint=checkpoint)
    if summary and attempt is not None:
        tell(_summary(*attempt, ending, checkpoint, time.monotonic() - began_s))
    return ending


def _summary(plan: LaunchPlan, peers: Peers, ending: Ending, checkpoint: str, seconds: float) -> str:
    ranks = len(plan.processes) * max(1, len(peers.hosts))
    # One rank has this process's own streams; the report of a stop is one line.
    is_told = ranks == 1 or (ending.stopped and not checkpoint)
    if (is_told and not plan.log_dir) or (plan.quiet and not ending.status):
        return ""
    return last_line(
        ending.status,
        ranks=ranks,
        seconds=seconds,
        restarts=plan.restarts,
        stopped=ending.stopped,
        culprit=None if ending.first is None else ending.first.rank,
        checkpoint=checkpoint,
        log_dir=plan.log_dir,
    )
