# SPDX-License-Identifier: Apache-2.0
"""Carry a plan out: start its processes, wait, end them together, and say what happened."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

from accel.launching._children import Children
from accel.launching._hang import Watch, absent_report
from accel.launching._plan import LaunchPlan
from accel.launching._record import Failure, culprit, exit_code, repeats, stop_number
from accel.launching._relay import Relay, log_path
from accel.launching._report import failure_report, last_line, stop_report
from accel.launching._signals import NOTICES, STOPPING, Signals, listening

SETTLE_S = 0.3  # for the records of other ranks, one of which may have failed first
FAILED_GRACE_S = 2.5  # nothing of a failed run is left after 3 s, or 4 where a rank does not answer
_LEFTOVER_GRACE_S = 1.0  # for what ended ranks have left behind
_KILLED_GRACE_S = 1.5  # a process that waits for a device may outlive SIGKILL; the launcher does not wait with it
_POLL_S = 0.05


class Ending(NamedTuple):
    """How a launch ended.

    Attributes:
        status: 0, the status of the rank that failed first, or 128 plus the number of the signal that stopped it.
        report: what there is to say, for stderr.
        first: the failure that caused the others; None if no rank failed, or a signal stopped the launch.
        stopped: the signal that stopped it, or 0.
    """

    status: int
    report: str = ""
    first: Failure | None = None
    stopped: int = 0


def run_plan(plan: LaunchPlan) -> int:
    """Start the processes of a plan and wait for them; the first failure, or a signal, ends all.

    Their output goes to this process's own streams. When a rank fails, the others get SIGTERM, and SIGKILL if they
    are still there 2.5 s later; then the report of the rank that failed first is written to stderr. SIGINT and
    SIGTERM are handed on, with the plan's time to end; a second one kills. SIGUSR1 and SIGUSR2 are handed on.

    Args:
        plan: what to start.

    Returns:
        0, or the exit status of the rank that failed first (128 plus the number of the signal that killed it), or
        128 plus the number of the signal that stopped the launch.

    Raises:
        LaunchError: a process cannot be started, or this is not the main thread.
    """
    return run_plans([plan])


def run_plans(plans: Iterable[LaunchPlan], *, summary: bool = False) -> int:
    """Run plans one after another as `run_plan` does, each because the one before has failed; return the last status.

    Args:
        plans: taken one by one, so that each can be made when its time comes.
        summary: whether the last line on stderr reports the end of the run. Without log files, one rank gets none, as
            its streams are this process's own, nor does a stop, whose report says it; nor a good end with `quiet`.

    Raises:
        LaunchError: as `run_plan`.
    """
    ending, latest = Ending(0), None
    started = time.monotonic()
    with listening() as signals:
        for plan in plans:
            latest = plan
            if plan.restarts:
                tell(f"accel: all ranks start again, restart {plan.restarts} of {plan.max_restarts}\n")
            ending = _carry_out(plan, signals)
            tell(ending.report)
            if ending.first is None:
                break
    if summary and latest is not None:
        tell(_summary(latest, ending, time.monotonic() - started))
    return ending.status


def _summary(plan: LaunchPlan, ending: Ending, seconds: float) -> str:
    ranks = len(plan.processes)
    said = ranks == 1 or ending.stopped  # one rank has this process's own streams; a stop's report is one line
    if (said and not plan.log_dir) or (plan.quiet and not ending.status):
        return ""
    culprit = None if ending.first is None else ending.first.rank
    return last_line(
        ending.status,
        ranks=ranks,
        seconds=seconds,
        restarts=plan.restarts,
        stopped=ending.stopped,
        culprit=culprit,
        log_dir=plan.log_dir,
    )


def run_to_end(plan: LaunchPlan) -> Ending:
    """Run a plan as `run_plan` does, but leave the report to the caller."""
    with listening() as signals:
        return _carry_out(plan, signals)


def _carry_out(plan: LaunchPlan, signals: Signals) -> Ending:
    children = Children()
    relay = children.start(plan)
    ending = _supervise(children, signals, plan, Watch(children, relay, plan.hang_timeout_s))
    drain(relay, signals)
    return ending


def tell(text: str) -> None:
    """Write to stderr, at once."""
    _ = sys.stderr.write(text)
    sys.stderr.flush()


def _supervise(children: Children, signals: Signals, plan: LaunchPlan, watch: Watch) -> Ending:
    while children.running() and not children.failures():
        number = signals.wait(watch.left_s())
        tell(watch.look())
        if number in NOTICES:
            children.signal(number)
        # Who stops a whole job may have sent the signal to the ranks as well; that is no failure of theirs.
        elif number and all(number in (-failure.status, stop_number(failure)) for failure in children.failures()):
            children.signal(number)
            return stop(children, signals, number, plan.stop_grace_s)
    failures = children.failures()
    if failures and all(map(stop_number, failures)):  # the ranks agreed to stop, and the others are about to end
        return stop(children, signals, stop_number(failures[0]), plan.stop_grace_s)
    return _fail(children, signals, plan.log_dir, watch) if failures else Ending(0)


def _fail(children: Children, signals: Signals, log_dir: str, watch: Watch) -> Ending:
    left = children.left()
    hurry = wait(children, signals, SETTLE_S)
    failures = children.failures()
    absent = _absent(children, watch, left, failures)
    end(children, signals, 0 if hurry else FAILED_GRACE_S)
    first = culprit(failures)
    log = log_path(log_dir, first.rank) if log_dir else ""
    report = failure_report(first, [other for other in failures if other is not first], log, absent=absent)
    return Ending(exit_code(first.status), report, first)


def _absent(children: Children, watch: Watch, left: list[int], failures: list[Failure]) -> str:
    """Return where the ranks are that others missed, if that is how the run failed."""
    if not all(map(repeats, failures)):
        return ""
    heard = watch.ask()
    ending = {failure.rank for failure in children.recorded()}
    return absent_report({rank: each for rank, each in heard.items() if rank not in ending}, left)


def end(children: Children, signals: Signals, grace_s: float) -> None:
    """End the ranks and what they have started: SIGTERM, and SIGKILL when their time is over."""
    if grace_s:
        _ = children.signal_groups(signal.SIGTERM)
        _ = wait(children, signals, grace_s, groups=True)
    _ = children.signal_groups(signal.SIGKILL)
    _ = wait(children, signals, _KILLED_GRACE_S)


def stop(children: Children, signals: Signals, number: int, grace_s: float) -> Ending:
    """Wait for ranks that a signal has asked to stop, then end them."""
    hurry = wait(children, signals, grace_s)
    late = children.running()
    end(children, signals, 0 if late or hurry else _LEFTOVER_GRACE_S)
    recorded = [failure for failure in children.failures() if failure.record]
    report = stop_report(number, recorded, late)
    if failed := [failure for failure in recorded if not _in_order(failure)]:
        first = culprit(failed)
        report += failure_report(first, [other for other in failed if other is not first])
    return Ending(exit_code(-number), report, stopped=number)


def wait(children: Children, signals: Signals, timeout_s: float, *, groups: bool = False) -> bool:
    """Wait until no rank runs and, with `groups`, nothing that a rank has started; return whether a signal cut in."""
    deadline = time.monotonic() + timeout_s
    while (ranks := children.running()) or (groups and children.signal_groups(0)):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        # The end of a rank wakes this, the end of what a rank has started does not.
        if signals.wait(left_s if ranks else min(left_s, _POLL_S)) in STOPPING:
            return True
    return False


def drain(relay: Relay | None, signals: Signals) -> None:
    """Wait until all output is shown, unless a signal says that nobody waits for it any more."""
    if relay is None:
        return
    relay.end()
    while relay.is_alive():
        relay.join(_POLL_S)
        if signals.wait(0) in STOPPING:
            return


def _in_order(failure: Failure) -> bool:
    interrupted = failure.record is not None and failure.record.exception == "KeyboardInterrupt"
    return interrupted or stop_number(failure) != 0
