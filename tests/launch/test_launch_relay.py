# SPDX-License-Identifier: Apache-2.0
"""Lines: how bytes become them, and how those of several ranks share a stream."""

from __future__ import annotations

import os

from hypothesis import given, strategies as st

from accel.launching._relay import Pipe, Relay, Sink, split_lines

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
