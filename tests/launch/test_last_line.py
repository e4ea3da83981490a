# SPDX-License-Identifier: Apache-2.0
"""The last line of a failed launch is its message, and the frames above are the user's."""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from launches import (
    Failure,
    RankAnswer,
    absent_report,
    failure_report,
    hang_report,
    last_line,
    locate,
    raised,
)
from launching import HERE, REST, Workspace
from processes import patience

import accel
from accel.launching.reports._failure import without_own
from accel.launching.reports._report import describe_end, last_message, notify
from accel.run_folder import read_launches

PACKAGE = os.path.dirname(accel.__file__)
USER, ACCEL, TORCH = "/home/ada/train.py", f"{PACKAGE}/comm/_x.py", "/usr/lib/site-packages/torch/nn/x.py"
ERROR, PLAIN = "accel.errors.StepError", "TypeError: bad"


def frame(file: str, line: int = 1) -> str:
    return f'  File "{file}", line {line}, in f\n    f()\n    ^^^\n'


def told(*files: str, end: str = PLAIN) -> str:
    return "Traceback (most recent call last):\n" + "".join(map(frame, files)) + f"{end}\n"


def failed(message: str, text: str = "", kind: str = "ValueError") -> Failure:
    return raised(1, 1.0, kind, message, location=f"{USER}:7", traceback=text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (told(USER, ACCEL, ACCEL, USER), (USER, 2, USER)),
        (told(USER, ACCEL, TORCH, ACCEL, USER), (USER, 1, TORCH, 1, USER)),
        (told(ACCEL, USER), (1, USER)),
        (told(USER, ACCEL, ACCEL, end=ERROR), (USER, 2)),
        (told(USER, ACCEL), (USER, ACCEL)),  # a fault of accel's own, perhaps
        (told(USER, ACCEL, USER, ACCEL, TORCH), (USER, 1, USER, ACCEL, TORCH)),
        (told(ACCEL, TORCH, end=ERROR), (ACCEL, TORCH)),
        (told(USER, TORCH), (USER, TORCH)),
    ],
)
def test_accels_frames_are_counted_beside_those_of_the_user(text: str, shown: tuple[str | int, ...]) -> None:
    found = re.findall(r'File "(.+)", line|\.\.\. (\d+) frames? of accel', without_own(text))
    assert [file or int(count) for file, count in found] == list(shown)
    assert without_own(text).splitlines()[-1] == text.splitlines()[-1]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_text_without_accels_frames_stays_as_it_is(text: str) -> None:
    assert without_own(text) == text
    printed = "".join(traceback.format_exception(ValueError(text)))
    assert without_own(printed) == printed


def test_each_error_of_a_chain_is_shortened_by_itself() -> None:
    chain = told(USER, ACCEL, USER) + "\nThe above exception was the direct cause:\n\n" + told(USER, ACCEL, end=ERROR)
    assert without_own(chain).count("1 frame of accel") == 2


def test_the_last_line_repeats_class_text_and_the_users_line() -> None:
    failure = failed("a" * 300, told(USER, end=f"ValueError: {'a' * 300}"))
    line = last_line(1, ranks=2, seconds=1.0, culprit=1, reason=describe_end(failure), log_dir="logs")
    text = f"ValueError: {'a' * 300} - at {USER}:7"
    assert line == f"accel: rank 1 failed after 0:00:01, exit status 1: {text}; output of each rank in logs\n"
    assert failure_report(failure).endswith("ValueError\n")
    assert last_message(failure) == f"accel: rank 1 failed: {text}\n"
    assert last_message(failed("short", told(USER, end="ValueError: short"))) == ""  # it is the traceback's last line
    assert last_message(Failure(rank=0, status=-signal.SIGKILL, time_s=1.0)) == ""


def test_an_error_of_a_dataset_worker_is_told_by_its_own_text_and_line() -> None:
    inner = told("/usr/lib/site-packages/torch/w.py", "/home/ada/data.py", end="ValueError: sample 7 is damaged")
    failure = failed(f"Caught ValueError in DataLoader worker process 0.\nOriginal {inner}")
    assert describe_end(failure).endswith("worker process 0. ValueError: sample 7 is damaged - at /home/ada/data.py:1")


def test_a_line_of_a_report_is_bounded_and_the_traceback_then_keeps_the_message() -> None:
    failure = failed("a" * 20_000, told(USER, end=f"ValueError: {'a' * 20_000}"))
    assert len(describe_end(failure)) < 1_200
    assert failure_report(failure).endswith("a" * 20_000 + "\n")


def test_a_text_of_broken_frames_is_told_in_time_linear_in_it() -> None:
    message = 'Traceback (most recent call last):\n  File "a.py", line 1\n' + '  File "' * 12_000
    began_s = time.process_time()
    assert describe_end(failed(message, message)).endswith("a.py:1")
    assert "File" in failure_report(failed(message, message))
    assert time.process_time() - began_s < 1.0


def test_what_terminals_act_on_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    notify(failure_report(failed("\x1b[2J\x9b ü\tx\rhi\x07", told(USER, end="ValueError: \x1b[2J\x9b\rhi\x07"))))
    err = capsys.readouterr().err
    assert all(char.isprintable() or char == "\n" for char in err)
    assert "\\x1b[2J\\x9b" in err
    assert "ü" in err


def test_a_stopped_rank_is_said_to_be_stopped() -> None:
    heard = {0: RankAnswer(stack=f'  File "{USER}", line 3 in step\n'), 1: RankAnswer(stopped="stopped by a debugger")}
    assert "accel: rank 1: stopped by a debugger\n" in hang_report(heard, 5.0)
    assert "accel: rank 1 never reached the collective: stopped by a debugger\n" in absent_report([locate(heard, [])])


FAILING = """
    import accel, torch
    def step(ctx):
        state = accel.train_state(ctx)
        accel.backward(ctx, torch.ones(1, requires_grad=True).sum(), state)
    with accel.session(device="cpu") as ctx:
        step(ctx)
"""


@pytest.mark.multiprocess
def test_the_terminal_shows_the_users_frames_and_log_and_record_all(workspace: Workspace) -> None:
    script = workspace.write(FAILING)
    done = workspace.accel("launch", "--log-dir", "logs", script)
    *report, last = done.stderr.splitlines()
    assert last.startswith("accel: rank 0 failed after ")
    assert "exit status 1: accel.errors.StepError: no batch has begun" in last
    assert f" - at {script}:5; output" in last
    own = '/accel/training/_backward.py"'  # of the package that the launch imports: the tree's, or an installed one
    log = (workspace.folder / "logs" / "rank-0.log").read_text()
    error = read_launches(workspace.folder / "logs")[0].attempts[0].error
    assert error is not None
    assert own not in "\n".join(report)
    assert any(re.fullmatch(r"  \.\.\. \d frames of accel", line) for line in report)
    assert own in log
    assert own in error.traceback


@pytest.mark.multiprocess
def test_a_rank_that_was_stopped_is_found_by_the_watch(workspace: Workspace) -> None:
    script = workspace.write(f"{HERE}\nhere()\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n{REST}\n")
    launcher = workspace.start("launch", "--nproc-per-node", "2", "--hang-timeout-s", "0.5", script)
    workspace.pids(2)
    stopped = int(Path(workspace.folder / "pid-1").read_text())
    assert launcher.stderr is not None
    lines = iter(launcher.stderr.readline, "")
    found = next(line for line in lines if line.startswith("accel: rank 1: "))
    assert found == f"accel: rank 1: stopped by a signal (state T); `kill -CONT {stopped}` continues it\n"
    os.kill(stopped, signal.SIGCONT)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=patience(20))
