# SPDX-License-Identifier: Apache-2.0
"""Who is blamed, and in which words."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from launches import Failure, culprit, died, failure_report, file_beside, last_line, raised

import accel
from accel.launching.reports._failure import exit_code, read_failure
from accel.launching.reports._report import stop_report
from accel.run_folder import write_json


@given(st.permutations([raised(0, 3.0), raised(1, 1.0), raised(2, 2.0)]))
def test_the_earliest_record_is_the_culprits(failures: list[Failure]) -> None:
    assert culprit(failures).rank == 1


@given(
    st.permutations([raised(0, 1.0, "ConnectionError"), died(1, 1.2, -signal.SIGKILL), died(2, 1.1, -signal.SIGABRT)])
)
def test_a_killed_rank_is_blamed_before_peers_that_raise_or_abort_over_it(failures: list[Failure]) -> None:
    assert culprit(failures).rank == 1


@given(st.permutations([raised(0, 1.0, "accel.errors.PeerError"), raised(1, 1.5)]))
def test_an_error_that_repeats_another_ranks_is_not_the_first(failures: list[Failure]) -> None:
    assert culprit(failures).rank == 1


def test_an_abort_that_nothing_preceded_is_blamed() -> None:
    assert culprit([died(0, 1.0, -signal.SIGABRT), raised(1, 2.0, "ConnectionError")]).rank == 0


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3, 3), (-signal.SIGKILL, 137), (-signal.SIGSEGV, 139)])
def test_exit_codes_are_a_shells(status: int, code: int) -> None:
    assert exit_code(status) == code


def test_a_report_names_rank_error_and_place_first_and_ends_with_the_traceback() -> None:
    first = raised(1, 1.0, message="bad batch\nand more")
    text = failure_report(first, [raised(0, 2.0, "ConnectionError", "closed")])
    lines = text.splitlines()
    assert lines[0] == "accel: rank 1 failed: ValueError: bad batch - at train.py:7"
    assert lines[1] == "accel: after it, rank 0 failed: ConnectionError: closed - at train.py:7"
    assert first.record is not None
    assert text.endswith(first.record.traceback)


@given(st.integers(0, 300))
def test_the_launcher_says_little_however_many_ranks_fail(n: int) -> None:
    first, *others = [raised(rank, float(rank)) for rank in range(n + 1)]
    own = [line for line in failure_report(first, others).splitlines() if line.startswith("accel:")]
    assert len(own) <= 30
    assert len(stop_report(signal.SIGINT, [first, *others], range(n)).splitlines()) <= 30


def test_an_exit_status_is_told_without_a_traceback() -> None:
    assert (
        failure_report(raised(0, 1.0, "SystemExit", "3", 3)) == "accel: rank 0 exited with status 3 - at train.py:7\n"
    )
    assert "left no traceback" in failure_report(died(0, 1.0, 4))


def test_a_signal_is_named_even_without_a_name() -> None:
    assert "was killed by SIGTERM" in failure_report(died(0, 1.0, -signal.SIGTERM))
    assert "was killed by signal 40" in failure_report(died(0, 1.0, -40))


def test_a_crash_points_at_the_users_innermost_frame(tmp_path: Path) -> None:
    path = str(tmp_path / "rank-0.json")
    Path(file_beside(path, "crash")).write_text(
        "Fatal Python error: Segmentation fault\n\nStack (most recent call first):\n"
        '  File "/x/site-packages/lib.py", line 3 in call\n  File "/home/train.py", line 9 in step\n'
        '  File "/x/accel/launching/local/_worker.py", line 1 in main\n\nExtension modules: a, b (total: 2)\n'
    )
    text = failure_report(read_failure(0, -signal.SIGSEGV, path, 1.0))
    assert text.startswith("accel: rank 0 was killed by SIGSEGV - at /home/train.py:9\n")
    assert "_worker" not in text
    assert "Extension" not in text


def test_a_record_comes_back_whole_and_a_damaged_one_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    failure = raised(0, 1.5, message='quotes " and \\ and ü')
    assert failure.record is not None
    write_json(str(path), failure.record)
    assert read_failure(0, 1, str(path), 9.0) == failure
    path.write_bytes(path.read_bytes()[:-5])
    assert read_failure(0, 1, str(path), 9.0) == died(0, 9.0, 1)


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ({"ranks": 1}, "finished after 1:01:05"),
        ({"ranks": 8, "restarts": 1}, "8 ranks finished after 1:01:05 and 1 restart"),
        (
            {"status": 3, "culprit": 5, "log_dir": "logs"},
            "rank 5 failed after 1:01:05, exit status 3; output of each rank in logs",
        ),
        (
            {"ranks": 2, "checkpoint": "out/step-00000003", "log_dir": "logs"},
            "2 ranks finished after 1:01:05; newest checkpoint out/step-00000003; output of each rank in logs",
        ),
        ({"status": 143, "stopped": signal.SIGTERM}, "stopped by SIGTERM after 1:01:05, exit status 143"),
    ],
)
def test_the_last_line_has_the_end_the_time_and_the_files(end: dict[str, Any], text: str) -> None:
    assert last_line(**({"status": 0, "ranks": 8} | end), seconds=3665.2) == f"accel: {text}\n"


def test_every_line_that_a_launch_prints_begins_with_its_name() -> None:
    """Reports of several lines have it in front of each; tracebacks and stacks are Python's own."""
    plain = re.compile(r'\b(?:notify|tell)\(\s*(?:\w+ := )?f?"(?!accel: |")')
    rooms = [Path(accel.__file__).parent / name for name in ("launching", "cli", "comm", "items", "trackers")]
    found = [path.name for room in rooms for path in room.rglob("*.py") if plain.search(path.read_text())]
    assert found == []
