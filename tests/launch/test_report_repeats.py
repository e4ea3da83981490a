# SPDX-License-Identifier: Apache-2.0
"""A long message stands once in the report of a failed run, however many ranks raised it."""

from __future__ import annotations

import pytest
from launches import Failure, failure_report, raised

MISMATCH = "ranks disagree about the call they make together: expected rank 0: gather" + 300 * "x"


def mismatch(rank: int, message: str, kind: str = "accel.errors.CollectiveMismatch") -> Failure:
    text = f"Traceback (most recent call last):\n  frames\n{kind}: {message}\n"
    return raised(rank, float(rank), kind, message, location=f"train.py:{7 + rank}", traceback=text)


def test_a_message_of_all_ranks_stands_in_the_first_line_only() -> None:
    lines = failure_report(mismatch(1, MISMATCH), [mismatch(0, MISMATCH), mismatch(2, MISMATCH)]).splitlines()
    assert lines == [
        f"accel: rank 1 failed: accel.errors.CollectiveMismatch: {MISMATCH} - at train.py:8",
        "accel: after it, rank 0 failed with the same error - at train.py:7",
        "accel: after it, rank 2 failed with the same error - at train.py:9",
        "Traceback (most recent call last):",
        "  frames",
        "accel.errors.CollectiveMismatch",
    ]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (mismatch(0, MISMATCH + "y"), f"failed: accel.errors.CollectiveMismatch: {MISMATCH}y"),
        (mismatch(0, MISMATCH, "ValueError"), f"failed: ValueError: {MISMATCH}"),
    ],
)
def test_another_error_is_told_whole(other: Failure, told: str) -> None:
    assert f"accel: after it, rank 0 {told}" in failure_report(mismatch(1, MISMATCH), [other])


@pytest.mark.parametrize("message", ["short", f"first line{'x' * 300}\nand a second"])
def test_a_traceback_keeps_a_message_that_the_first_line_does_not_hold_or_that_is_short(message: str) -> None:
    assert failure_report(mismatch(1, message)).endswith(f"accel.errors.CollectiveMismatch: {message}\n")
