# SPDX-License-Identifier: Apache-2.0
"""Traces: arithmetic of intervals against a bitmap, traces of CPUs and GPUs by hand, the words of the command."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

from accel.cli import main
from accel.errors import ConfigError
from accel.report.traces import (
    Communication,
    RankBreakdown,
    Trace,
    describe_profile,
    find_waits,
    intersect,
    length,
    parse_trace,
    rank_times,
    read_traces,
    slowest,
    subtract,
    union,
)

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda ends: (min(ends), max(ends))), max_size=6)


def cells(spans: list[tuple[float, float]]) -> set[int]:
    """The unit cells that spans cover."""
    return {cell for start, end in spans for cell in range(int(start), int(end))}


@settings(max_examples=share(1.6))
@given(one=SPANS, other=SPANS)
def test_sets_of_intervals_are_sets_of_cells(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    left, right = union(one), union(other)
    assert cells(left) == cells(one)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(left))
    assert cells(subtract(left, right)) == cells(left) - cells(right)
    assert cells(intersect(left, right)) == cells(left) & cells(right)
    assert length(subtract(left, right)) == len(cells(left) - cells(right))


@settings(max_examples=share(1.2))
@given(steps=SPANS, work=SPANS, messages=SPANS, data=SPANS, late=SPANS, on_gpu=st.booleans())
def test_the_parts_of_a_step_add_up_to_it(
    steps: list[tuple[int, int]],
    work: list[tuple[int, int]],
    messages: list[tuple[int, int]],
    data: list[tuple[int, int]],
    late: list[tuple[int, int]],
    on_gpu: bool,
) -> None:
    trace = Trace(
        name="t",
        rank=0,
        world_size=1,
        on_gpu=on_gpu,
        steps=dict(enumerate(steps)),
        work=union(work),
        communications=[Communication("c", "", *span) for span in sorted(messages)],
        data=union(data),
        operators={},
    )
    waits = find_waits([])
    waits.spans[0] = late  # type: ignore[assignment]
    found = rank_times(trace, waits)
    window, sent, starved = cells(steps), cells(messages), cells(data)
    busy = (cells(work) if on_gpu else cells(work) - starved) & window
    sent &= window
    assert found.total == len(window)
    assert found.computing == len(busy)
    assert found.hidden == len(sent & busy)
    assert found.waiting == len((sent - busy) & cells(late))
    assert found.exposed == len(sent - busy - cells(late))
    assert found.data == len((starved & window) - busy - sent)
    parts = found.computing + found.waiting + found.exposed + found.data + found.idle
    assert parts == found.total


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def content(events: list[dict[str, Any]], **extra: Any) -> bytes:
    return json.dumps({"schemaVersion": 1, **extra, "traceEvents": events}).encode()


def cpu_trace(rank: int, late: float) -> bytes:
    """A step of 100 us: data, a forward, a backward whose all-reduce on gloo's thread ends when the last rank comes."""
    at = 10 + late  # end of the wait for data
    events = [
        {"ph": "M", "name": "process_name", "pid": 1},
        event("user_annotation", "ProfilerStep#7", 0, 100),
        event("user_annotation", "accel.data", 0, at),
        event("cpu_op", "aten::stack", 2, 4),  # makes the batch
        event("cpu_op", "aten::linear", at, 10),
        event("cpu_op", "aten::addmm", at + 2, 6),
        event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", at + 10, 80 - at),
        event("cpu_op", "AddmmBackward0", at + 10, 80 - at),
        event("cpu_op", "aten::mm", at + 10, 8),
        event("cpu_op", "c10d::allreduce_", at + 18, 1),
        event("user_annotation", "gloo:all_reduce", at + 15, 70 - at, 2),
    ]
    return content(events, distributedInfo={"rank": rank, "world_size": 2})


def test_a_trace_of_a_cpu_is_taken_apart() -> None:
    trace = parse_trace("x.json", cpu_trace(1, 30))
    assert (trace.rank, trace.world_size, trace.on_gpu, trace.steps) == (1, 2, False, {7: (0, 100)})
    assert trace.work == [(2, 6), (40, 58)]
    assert trace.operators["aten::linear"].time_us == 4
    assert trace.operators["aten::addmm"].time_us == 6
    assert not any("Backward" in name or "c10d" in name for name in trace.operators)
    traces = [parse_trace("x.json", cpu_trace(rank, 30 * rank)) for rank in range(2)]
    waits = find_waits(traces)
    assert waits.spans == {0: [(25, 55), (28, 28)], 1: [(55, 55), (58, 58)]}
    first, second = (rank_times(each, waits) for each in traces)
    assert first == RankBreakdown(
        rank=0, steps=1, total=100, computing=18, waiting=27, exposed=30, hidden=3, data=10, idle=15
    )
    assert second == RankBreakdown(
        rank=1, steps=1, total=100, computing=18, waiting=0, exposed=27, hidden=3, data=40, idle=15
    )
    slow = slowest([first, second])
    assert slow is not None
    assert (slow.rank, slow.own, slow.usual, slow.part, slow.more) == (1, 100, 73, "data", 30)
    assert slowest([first]) is None


NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def gpu_trace(rank: int, wait: float, *, group: str = "[0, 1]", kernels: tuple[str, ...] = (NCCL,)) -> bytes:
    """A step whose kernels run after the host has left it, with an exchange that is half hidden by a kernel."""
    events = [
        event("user_annotation", "ProfilerStep#3", 0, 20),
        event("gpu_user_annotation", "ProfilerStep#3", 10, 100, 7),
        event("user_annotation", "accel.data", 0, 14),
        event("cpu_op", "aten::mm", 14, 3),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 15, 5, 7),
        event("kernel", "ampere_sgemm_128x64_tn", 20, 30, 7),
        *(
            event("kernel", name, 40 - wait, 20 + wait, 20, **{"Process Group Ranks": group, "Process Group Name": "0"})
            for name in kernels
        ),
        event("kernel", "void at::native::vectorized_elementwise_kernel<4>", 70, 10, 7),
        event("gpu_memset", "Memset (Device)", 80, 2, 7),
    ]
    return content(events, distributedInfo={"rank": rank, "world_size": 2, "backend": "nccl"})


def test_a_trace_of_a_gpu_is_that_of_its_device() -> None:
    traces = [parse_trace("x.json", gpu_trace(rank, 35 * (1 - rank))) for rank in range(2)]
    assert traces[0].steps == {3: (10, 110)}
    assert traces[0].work == [(15, 50), (70, 82)]
    assert traces[0].communications == [Communication(NCCL, "[0, 1]", 5, 60)]
    waits = find_waits(traces)
    assert waits.spans == {0: [], 1: []}  # it began before the step of the device
    waits = find_waits([parse_trace("x.json", gpu_trace(rank, 25 * (1 - rank))) for rank in range(2)])
    assert waits.spans == {0: [(15, 40)], 1: [(40, 40)]}
    found = rank_times(parse_trace("x.json", gpu_trace(1, 0)), waits)
    assert found == RankBreakdown(
        rank=1, steps=1, total=100, computing=47, waiting=0, exposed=10, hidden=10, data=4, idle=39
    )
    assert set(traces[0].operators) == {
        "Memcpy HtoD (Pinned -> Device)",
        "ampere_sgemm_128x64_tn",
        "void at::native::vectorized_elementwise_kernel<4>",
        "Memset (Device)",
    }


def test_ranks_of_other_groups_are_not_compared_and_other_lists_are_told() -> None:
    apart = [parse_trace("x.json", gpu_trace(rank, 20 * rank, group=f"[{rank}]")) for rank in range(2)]
    assert find_waits(apart).compared == 0
    other = [
        parse_trace("x.json", gpu_trace(0, 0)),
        parse_trace("x.json", gpu_trace(1, 20, kernels=(NCCL, "ncclDevKernel_AllGather_RING_LL()"))),
    ]
    waits = find_waits(other)
    assert (waits.compared, waits.skipped, waits.spans) == (2, 2, {0: [], 1: []})
    assert "2 of 2 collectives differ between ranks" in describe_profile(other)


def write(folder: Path, name: str, data: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)


def test_the_command_prints_a_row_for_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "profile", "b.json.gz", cpu_trace(0, 0))
    write(tmp_path / "profile", "a.json", cpu_trace(1, 30))
    write(tmp_path / "profile", ".rank-00002.partial.json.gz", b"torn")
    assert main(["profile", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "2 ranks, 1 steps, on the CPU\n"
        "RANK  MS/STEP  COMPUTING  WAITING  EXPOSED  HIDDEN  DATA   IDLE\n"
        "0     0.10     18.0%      27.0%    30.0%    3.0%    10.0%  15.0%\n"
        "1     0.10     18.0%      0.0%     27.0%    3.0%    40.0%  15.0%\n"
        "slowest: rank 1, 100 us a step without waiting, median 73 us; data, 30 us a step above the median\n"
        "\n"
        "longest operators\n"
        "NAME          MS/STEP  CALLS/STEP\n"
        "aten::mm      0.008    1.0\n"
        "aten::addmm   0.006    1.0\n"
        "aten::linear  0.004    1.0\n"
        "aten::stack   0.004    1.0\n"
    )
    assert main(["profile", str(tmp_path / "profile"), "--operators", "0"]) == 0
    assert "longest" not in capsys.readouterr().out
    assert main(["profile", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "profile").rename(tmp_path / "elsewhere")
    (tmp_path / "run.json").write_text("{}")
    assert main(["profile", str(tmp_path)]) == 2
    assert "the run has no profile" in capsys.readouterr().err


def test_names_of_operators_are_one_line_and_ranks_come_from_file_names(tmp_path: Path) -> None:
    bad = "<script>\n\x1b[2J" + "x" * 100
    write(tmp_path, "trace_rank3.json", content([event("cpu_op", bad, 0, 5)]))
    traces = read_traces(tmp_path)
    assert traces[0].rank == 3
    text = describe_profile(traces)
    assert "\x1b" not in text
    assert "<script>\\n\\x1b[2J" in text
    assert "no step boundaries in the traces of ranks 3: call profile.step()" in text


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "no traces"),
        ({"a.json": b"{"}, "the file is not a trace of torch.profiler"),
        ({"a.json": b"[]"}, "the file is not a trace of torch.profiler"),
        ({"a.json": b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"}, "the file is not a trace of torch.profiler"),
        ({"a.json.gz": b"torn"}, "the file is not a trace of torch.profiler"),
        ({"a.json": cpu_trace(0, 0), "b.json": cpu_trace(0, 0)}, "several traces of rank 0"),
        ({"a.json": cpu_trace(0, 0), "b.json": content([], accel={"rank": 1, "world_size": 4})}, "of different runs"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, files: dict[str, bytes], told: str) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with assert_raises(ConfigError, problem=told):
        _ = read_traces(tmp_path)


def test_a_torn_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(cpu_trace(0, 0))[:-20])
    with assert_raises(ConfigError, problem="a trace cannot be read"):
        _ = read_traces(tmp_path)
