# SPDX-License-Identifier: Apache-2.0
"""Run the checks one by one, agree on each, and show the lines on rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from accel.collectives import gather_object
from accel.context import DistContext
from accel.testing.selfcheck._checks import CHECKS, Check
from accel.testing.selfcheck._outcome import Outcome, likely_cause

_MOST_PROBLEMS = 4
_NO_FOLDER = "takes a folder that all hosts share; name it with --folder"


def run_checks(
    ctx: DistContext,
    folder: Path | None,
    note: Callable[[list[Outcome]], None],
    checks: Sequence[Check] = CHECKS,
) -> list[Outcome]:
    """Run checks, each to its end on all ranks. A collective.

    Args:
        ctx: the context.
        folder: for checkpoints, on a file system that all hosts share; None to leave out the checks that need one.
        note: called with the outcomes so far, before and after each check.
        checks: the ones to run.

    Returns:
        An outcome for each check, the same on every rank.

    Raises:
        Exception: an error of this rank alone, after which the ranks cannot agree any more.
    """
    outcomes: list[Outcome] = []
    for check in checks:
        if check.in_folder and folder is None:
            outcomes.append(Outcome(name=check.name, state="skipped", detail=_NO_FOLDER))
            note(outcomes)
            continue
        note([*outcomes, Outcome(name=check.name, state="running", cause=check.cause)])
        outcomes.append(_outcome(ctx, check, folder or Path()))
        note(outcomes)
    return outcomes


def _outcome(ctx: DistContext, check: Check, folder: Path) -> Outcome:
    began = time.perf_counter()
    try:
        seen, problems = check.run(ctx, folder)
        raised = None
    except Exception as error:
        seen, problems, raised = "", [f"{type(error).__name__}: {error}"], error
    try:
        told = gather_object(ctx, (seen, problems))
    except Exception as error:
        raise raised or error from error
    wrong = _by_rank([problems for _, problems in told])
    seconds = time.perf_counter() - began
    if not wrong:
        return Outcome(name=check.name, state="ok", detail=told[0][0], seconds=seconds)
    detail = "\n".join(wrong)
    return Outcome(
        name=check.name, state="failed", detail=detail, cause=likely_cause(detail, check.cause), seconds=seconds
    )


def _by_rank(told: Sequence[Sequence[str]]) -> list[str]:
    """Return each problem once, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, problems in enumerate(told):
        for problem in problems:
            ranks.setdefault(problem, []).append(rank)
    lines = [
        f"rank{'s' if len(having) > 1 else ''} {', '.join(map(str, having))}: {problem}"
        for problem, having in ranks.items()
    ]
    more = [f"and {len(lines) - _MOST_PROBLEMS} more"] if len(lines) > _MOST_PROBLEMS else []
    return lines[:_MOST_PROBLEMS] + more
