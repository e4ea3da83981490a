# SPDX-License-Identifier: Apache-2.0
"""Lines: how bytes become them, and how those of several ranks share a stream."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from launches import Relay
from profiles import share

from accel import terminal
from accel.launching.local import _children
from accel.launching.local._children import Log, Pipe, Sink, split_lines

TEXT = st.lists(st.sampled_from([b"a", b"\xff", b"\n", b"\r", b"\r\n"]), max_size=12).map(b"".join)


def split_all(chunks: list[bytes]) -> tuple[list[bytes], bytes]:
    lines: list[bytes] = []
    rest = b""
    for chunk in chunks:
        more, rest = split_lines(rest + chunk)
        lines += more
    return lines, rest


@given(st.lists(TEXT, max_size=6))
def test_lines_do_not_depend_on_how_the_bytes_arrive(chunks: list[bytes]) -> None:
    lines, rest = split_all(chunks)
    assert b"".join(lines) + rest == b"".join(chunks)
    assert (lines, rest) == split_all([b"".join(chunks)])
    assert all(line.endswith((b"\n", b"\r")) for line in lines)
    assert b"\n" not in rest


def shown(*writes: tuple[bytes, list[bytes]]) -> bytes:
    source, target = os.pipe()
    sink = Sink(target)
    for prefix, lines in writes:
        sink.write(prefix, lines)
    sink.finish(writes[-1][0])
    os.close(target)
    with os.fdopen(source, "rb") as file:
        return file.read()


def test_a_rank_overwrites_its_own_progress_bar_in_place() -> None:
    assert shown((b"0 ", [b"\r", b"10%\r", b"20%\r", b"100%\n"])) == b"0 10%\r0 20%\r0 100%\n"


def test_a_rank_never_overwrites_the_progress_bar_of_another() -> None:
    assert shown((b"0 ", [b"10%\r"]), (b"1 ", [b"hi\n"]), (b"0 ", [b"20%\r"])) == b"0 10%\r\n1 hi\n0 20%\r\n"


def test_while_one_bar_stands_others_show_their_end_only() -> None:
    writes = [
        (b"0 ", [b"1%\r"]),
        (b"1 ", [b"1%\r", b"2%\r"]),
        (b"0 ", [b"2%\r"]),
        (b"1 ", [b"all\n"]),
        (b"0 ", [b"3%\r"]),
    ]
    assert shown(*writes) == b"0 1%\r0 2%\r\n1 all\n0 3%\r\n"


def test_a_bar_that_stands_still_gives_its_line_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(_children.time, "monotonic", lambda: now[0])
    source, target = os.pipe()
    sink = Sink(target)
    sink.write(b"0 ", [b"1%\r"])
    now[0] += 6
    sink.write(b"1 ", [b"5%\r"])
    os.close(target)
    with os.fdopen(source, "rb") as file:
        assert file.read() == b"0 1%\r\n1 5%\r"


@settings(max_examples=share(0.6))
@given(st.lists(st.tuples(st.integers(0, 1), st.floats(0, 2), st.booleans()), min_size=1, max_size=30))
def test_a_slow_sink_draws_few_states_and_loses_neither_lines_nor_the_newest_state(
    events: list[tuple[int, float, bool]],
) -> None:
    now = [10.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_children.time, "monotonic", lambda: now[0])
        source, target = os.pipe()
        sink = Sink(target, redraw_s=0.5)
        lines: list[bytes] = []
        for number, (rank, wait_s, is_bar) in enumerate(events):
            now[0] += wait_s
            line = b"%d%s" % (number, b"\r" if is_bar else b"\n")
            lines += [] if is_bar else [b"%d %s" % (rank, line)]
            sink.write(b"%d " % rank, [line])
        now[0] += 1
        sink.refresh()
        sink.refresh()
        os.close(target)
    with os.fdopen(source, "rb") as file:
        text = file.read()
    assert [
        line for line in text.splitlines(keepends=True) if line.endswith(b"\n") and line.strip() and line in lines
    ] == lines
    assert text.count(b"\r") <= (now[0] - 10) / 0.5 + 1
    rank, _, is_bar = events[-1]
    if is_bar and all(each == rank for each, _, _ in events):
        assert text.endswith(b"%d %d\r" % (rank, len(events) - 1))


@settings(max_examples=share(1))
@given(st.lists(st.tuples(st.integers(0, 1), st.floats(0, 9), st.booleans()), max_size=30))
def test_without_a_cursor_a_bar_is_a_line_now_and_then_and_its_last_state(
    events: list[tuple[int, float, bool]],
) -> None:
    now = [10.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal.time, "monotonic", lambda: now[0])
        source, target = os.pipe()
        sink = Sink(target, redraws=False)
        lines: list[bytes] = []
        last = {0: b"", 1: b""}
        for number, (rank, wait_s, is_bar) in enumerate(events):
            now[0] += wait_s
            text = b"%d" % number
            lines += [] if is_bar else [b"%d %s\n" % (rank, text)]
            last[rank] = b"%d %s\n" % (rank, text) if is_bar else b""
            sink.write(b"%d " % rank, [b"\r", text + (b"\r" if is_bar else b"\n")])
            sink.refresh()
        for rank in last:
            sink.finish(b"%d " % rank)
        os.close(target)
    with os.fdopen(source, "rb") as file:
        text = file.read()
    assert b"\r" not in text
    shown = text.splitlines(keepends=True)
    assert [line for line in shown if line in lines] == lines
    assert len(shown) - len(lines) <= (now[0] - 10) / 10 * 2 + 2
    assert all(not state or state in shown for state in last.values())


def test_a_log_file_keeps_the_last_state_of_a_bar_that_a_kill_ended(tmp_path: Path) -> None:
    log = Log(str(tmp_path), 0)
    log.write([b"begins\n", b"1%\r", b"2%\r"])
    log.write([b"3%\r"])
    log.close()
    log.close()
    assert (tmp_path / "rank-0.log").read_bytes() == b"begins\n3%\n"


def test_a_rank_that_stands_in_front_of_a_line_is_not_put_there_again() -> None:
    assert shown((b"[rank 1] ", [b"[rank 1] a\n", b"[rank 10] b\n"])) == b"[rank 1] a\n[rank 1] [rank 10] b\n"


def test_a_last_line_without_its_end_is_shown() -> None:
    child, end = os.pipe()
    source, target = os.pipe()
    with os.fdopen(child, "rb", buffering=0) as pipe, os.fdopen(source, "rb") as file:
        relay = Relay([Pipe(pipe, Sink(target), prefix=b"[rank 3] ")])
        relay.start()
        os.write(end, b"one\ntwo")
        os.close(end)
        relay.join(10)
        os.close(target)
        assert file.read() == b"[rank 3] one\n[rank 3] two\n"


def test_a_pipe_that_somebody_still_holds_does_not_keep_the_relay() -> None:
    child, end = os.pipe()
    source, target = os.pipe()
    with os.fdopen(child, "rb", buffering=0) as pipe, os.fdopen(source, "rb") as file:
        relay = Relay([Pipe(pipe, Sink(target), prefix=b"[rank 0] ")])
        relay.start()
        os.write(end, b"left")
        relay.end()
        relay.join(10)
        assert not relay.is_alive()
        os.close(end)
        os.close(target)
        assert file.read() == b"[rank 0] left\n"
