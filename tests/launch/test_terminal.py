# SPDX-License-Identifier: Apache-2.0
"""Sizes, ages and progress as people read them."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, strategies as st

from accel import terminal


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12_345, "12.3 kB"), (999_499, "999 kB"), (999_500, "1.0 MB")],
)
def test_sizes_count_in_thousands(count: int, shown: str) -> None:
    assert terminal.show_size(count) == shown


@given(st.floats(0, 1e15))
def test_sizes_stay_short(count: float) -> None:
    assert len(terminal.show_size(count)) <= 8


@pytest.mark.parametrize(("age", "shown"), [(-3, "0 s"), (59, "59 s"), (60, "1 min"), (7300, "2 h"), (200_000, "2 d")])
def test_ages_are_in_their_largest_unit(age: float, shown: str) -> None:
    assert terminal.show_age(age) == shown


def test_columns_are_aligned_and_lines_end_without_blanks() -> None:
    assert terminal.show_table([("A", "LONG"), ("word", "b")]) == "A     LONG\nword  b"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_bar_is_for_terminals_and_for_what_takes_long(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(terminal.sys.stderr, "isatty", lambda: is_terminal, raising=False)
    line = "\rverify:  50% [############............] 500 B/1.0 kB  250 B/s  0:00:02 left\x1b[K"
    with terminal.byte_progress("verify", 1000) as advance:
        advance(100)
        assert capsys.readouterr().err == ""
        now[0] += 2
        advance(400)
        shown = capsys.readouterr().err
        assert (line in shown) == is_terminal
    assert capsys.readouterr().err == ("\r\x1b[K" if is_terminal else "")


def test_a_notebook_redraws_one_line_and_a_shorter_one_covers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    bar = terminal.ProgressBar(stream, None, show=terminal.show_size)
    assert not bar.is_due()
    now[0] += 1
    assert bar.is_due()
    bar.draw("long label", 100, 100)
    bar.draw("b", 1, 1)
    bar.close()
    _, long, short = stream.getvalue().split("\r")
    assert (long, short) == ("long label: 100 B  100 B/s", "b: 1 B  1 B/s".ljust(len(long)) + "\n")
