# SPDX-License-Identifier: Apache-2.0
"""Ranks that print nothing for long: where they are is shown, and they go on."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from launches import EnteredCollective, RankAnswer, hang_report
from launching import HERE, Workspace
from processes import patience

from accel.launching.reports._failure import last_calls, read_plain

WAITING = """Current thread 0x00007f (most recent call first):
  File "/lib/site-packages/torch/distributed/c10d.py", line 9 in wait
  File "/lib/site-packages/accel/process.py", line 37 in wait_for_everyone
  File "/home/ada/train.py", line 12 in step
  File "/home/ada/train.py", line 20 in <module>
  File "/lib/site-packages/accel/launching/local/_worker.py", line 85 in run_script
"""
LOADING = WAITING.replace("line 12 in step", "line 7 in load")


def stacks(by_rank: Mapping[int, str]) -> dict[int, RankAnswer]:
    return {rank: RankAnswer(stack=stack) for rank, stack in by_rank.items()}


def entered(number: int, *, waiting: bool, group: str = "gloo", place: str = "") -> EnteredCollective:
    of_all = " " not in group
    return EnteredCollective(
        group=group, of_all=of_all, number=number, operation="all_gather", call="gather", place=place, waiting=waiting
    )


def test_ranks_at_one_place_share_a_line_and_a_stack() -> None:
    lines = hang_report(stacks({0: WAITING, 1: LOADING, 2: WAITING, 3: ""}), 60).splitlines()
    assert lines[:4] == [
        "accel: no output for 60 s",
        "accel: ranks 0, 2: at /home/ada/train.py:12 in step, in wait_for_everyone",
        "accel: rank 1: at /home/ada/train.py:7 in load, in wait_for_everyone",
        "accel: rank 3: without a Python stack",
    ]
    assert [line for line in lines if line.startswith("Stack")] == [
        "Stack of rank 0 (most recent call first):",
        "Stack of rank 1 (most recent call first):",
    ]
    assert not any("_worker" in line for line in lines)


def test_deep_stacks_keep_both_ends() -> None:
    deep = "".join(f'  File "/lib/site-packages/a.py", line {at} in f\n' for at in range(100))
    frames = hang_report(stacks({0: deep}), 60).splitlines()[3:]
    assert len(frames) == 21
    assert (frames[0].split()[3], frames[15], frames[-1].split()[3]) == ("0", "  ...", "99")


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        (
            [[entered(17, waiting=True)], [entered(16, waiting=False)], [entered(17, waiting=True)]],
            "rank 1 is not in collective 17 of gloo; ranks 0, 2 wait in it",
        ),
        ([[entered(1, waiting=True)], [], []], "ranks 1, 2 are not in collective 1 of gloo; rank 0 waits in it"),
        ([[entered(2, waiting=True)]] * 2, "ranks 0, 1 wait in collective 2 of gloo"),
        ([[entered(2, waiting=True)], [entered(5, waiting=False)]], "rank 0 waits in collective 2 of gloo"),
        ([[entered(2, waiting=True)], None], "rank 0 waits in collective 2 of gloo"),
        (
            [[entered(2, waiting=True, group="nccl in group 3 (dp)")], [entered(9, waiting=False)]],
            "rank 0 waits in collective 2 of nccl in group 3 (dp)",
        ),
    ],
)
def test_ranks_that_wait_and_those_they_wait_for_are_told_apart(
    calls: list[list[EnteredCollective] | None], told: str
) -> None:
    heard = {rank: RankAnswer(WAITING, asked=True, calls=each) for rank, each in enumerate(calls)}
    assert hang_report(heard, 60).splitlines()[1] == f"accel: {told}"


def test_ranks_that_all_compute_wait_for_nobody() -> None:
    lines = hang_report({0: RankAnswer(WAITING, asked=True, calls=[entered(3, waiting=False)])}, 60).splitlines()
    assert lines[1].startswith("accel: rank 0: at ")
    assert lines[1].endswith("; last in collective 3 of gloo, all_gather of gather")


def test_the_line_of_a_call_is_told_where_the_stack_has_another() -> None:
    place = "/home/ada/train.py:12 in step"
    heard = [
        RankAnswer(WAITING, asked=True, calls=[entered(3, waiting=True, place=place)]),
        RankAnswer(LOADING, asked=True, calls=[entered(2, waiting=False, place=place)]),
        RankAnswer(LOADING, asked=True),
    ]
    lines = hang_report(dict(enumerate(heard)), 60).splitlines()
    assert lines[2].endswith("in wait_for_everyone; in collective 3 of gloo, all_gather")
    assert lines[3].endswith(f"last in collective 2 of gloo, all_gather of gather at {place}")
    assert lines[4].endswith("; it does not answer")


def recorded(number: int, *, retired: bool, name: str = "gloo:all_reduce", group: str = "default_pg") -> dict[str, Any]:
    """A call as torch's flight recorder has it."""
    frames = [("wrapper", "/lib/site-packages/c10d_logger.py"), ("step", "/home/ada/train.py"), ("main", "/a.py")]
    return {
        "process_group": ("0" if group == "default_pg" else "7", group),
        "profiling_name": name,
        "collective_seq_id": number,
        "retired": retired,
        "is_p2p": name.startswith("gloo:recv"),
        "time_created_ns": number,
        "frames": [{"name": frame, "filename": file, "line": 9} for frame, file in frames],
        "timeout_ms": 1,
    }


def test_of_what_torch_recorded_the_first_open_call_of_each_group_counts_or_the_last() -> None:
    entries = [
        recorded(1, retired=True),
        recorded(2, retired=False),
        recorded(3, retired=False),
        recorded(50, retired=True, group="mesh_dp"),
        recorded(60, retired=False, name="gloo:recv 1<-0"),
        recorded(70, retired=True, name="nccl:_all_gather_base"),
    ]
    told = last_calls({"entries": entries, "version": "2.10"})
    assert [str(each) for each in told] == [
        "collective 2 of gloo, all_reduce at /home/ada/train.py:9 in step",
        "collective 70 of nccl, _all_gather_base at /home/ada/train.py:9 in step",
        "collective 50 of gloo in group 7 (mesh_dp), all_reduce at /home/ada/train.py:9 in step",
    ]
    assert [(each.waiting, each.of_all) for each in told] == [(True, True), (False, True), (False, False)]
    assert last_calls({}) == []
    with pytest.raises(msgspec.ValidationError):
        last_calls({"entries": [{"version": "another"}]})


class Planted:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_a_flight_record_is_read_as_plain_values_and_calls_nothing(tmp_path: Path) -> None:
    record = {"entries": [recorded(2, retired=False)], "version": "2.10", "rank": 0, "share": 0.5, "none": None}
    for written in [json.dumps(record).encode(), *(pickle.dumps(record, each) for each in range(6))]:
        assert [each.number for each in last_calls(read_plain(written))] == [2]
    for each in range(2, 6):
        with pytest.raises(pickle.UnpicklingError, match=r"names posix\.mkdir"):
            read_plain(pickle.dumps([Planted(tmp_path / "made")], each))
    assert not list(tmp_path.iterdir())
    for called in (b"cos\nsystem\n(S'true'\ntR.", b"(S'true'\nios\nsystem\n.", b"\x82\x01.", b"Pname\n.", b"K\x01Q."):
        with pytest.raises(pickle.UnpicklingError):
            read_plain(called)
    for torn in (b"", b"\x80", pickle.dumps(record)[:-9], b"nonsense", b"{broken", b"}]K\x01s."):
        with pytest.raises(pickle.UnpicklingError):
            read_plain(torn)


RECORDS = """
import sys, tempfile
import torch, torch.distributed as dist
from accel.launching.reports._failure import last_calls, read_plain
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
other = dist.new_group([0], group_desc="mesh_dp")
for group in (None, other, None):
    dist.all_reduce(torch.ones(2), group=group)
recorder = sys.modules["torch._C._distributed_c10d"]
pickled = recorder._dump_fr_trace(includeStackTraces=False)
text = recorder._dump_fr_trace_json()
for record in (pickled, text.encode() if isinstance(text, str) else text):
    print(record[:1] == b"{", *sorted(map(str, last_calls(read_plain(record)))), sep="; ")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_gloo_records_is_read_from_its_pickle_and_its_json() -> None:
    command = [sys.executable, "-W", "ignore", "-c", RECORDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=True)
    calls = "collective 1 of gloo in group 1 (mesh_dp), all_reduce; collective 2 of gloo, all_reduce"
    assert done.stdout.splitlines() == [f"False; {calls}", f"True; {calls}"]


answers = st.none() | st.lists(
    st.builds(
        entered,
        st.integers(1, 3),
        waiting=st.booleans(),
        group=st.sampled_from(["gloo", *(f"nccl in group {at}" for at in range(9))]),
        place=st.sampled_from(["", "/home/ada/train.py:12 in step"]),
    ),
    max_size=4,
)


heard_of = st.builds(
    RankAnswer, st.sampled_from([WAITING, LOADING, ""]), st.booleans(), answers, st.sampled_from(["", "SIGSTOP"])
)


@given(st.lists(heard_of, max_size=500))
def test_many_ranks_take_few_lines(heard: list[RankAnswer]) -> None:
    report = hang_report(dict(enumerate(heard)), 1)
    assert len(report.splitlines()) <= 1 + 4 + 17 + 4 * 6
    assert max(map(len, report.splitlines())) < 300


@pytest.mark.multiprocess
@pytest.mark.parametrize("n", ["1", "2"])
def test_silent_ranks_are_shown_once_and_live_on(workspace: Workspace, n: str) -> None:
    script = workspace.write(f"""{HERE}
def load():
    while time.monotonic() < end:
        time.sleep(0.1)
print("begins", flush=True)
end = time.monotonic() + {patience(2.5)}
load()
print("ends", flush=True)
""")
    done = workspace.accel("launch", "--nproc-per-node", n, "--hang-timeout-s", "1", script)
    assert (done.returncode, done.stdout.count("ends")) == (0, int(n))
    reports = done.stderr.split("accel: no output for ")[1:]  # starting and ending may have taken as long
    lines = next(report for report in reports if " in load" in report).splitlines()
    assert lines[1].startswith(f"accel: {'rank 0' if n == '1' else 'ranks 0, 1'}: at {script}:")
    assert lines[1].endswith(" in load")
    assert lines[2] == "Stack of rank 0 (most recent call first):"
    assert sum(" in load" in line and line.startswith("accel:") for line in done.stderr.splitlines()) <= 2


@pytest.mark.multiprocess
def test_a_program_that_has_no_python_stack_is_left_alone(workspace: Workspace) -> None:
    words = ("--no-python", "--hang-timeout-s", "0.5", "sh", "-c", "sleep 1.2; echo done")
    done = workspace.accel("launch", *words)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr == "accel: no output for 0.5 s\naccel: rank 0: without a Python stack\n"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("call", "operation"),
    [
        pytest.param("backward()", "all_reduce", marks=pytest.mark.slow),
        pytest.param("accel.gather(ctx, torch.ones(2))", r"all_\w+", marks=pytest.mark.slow),
    ],
)
def test_who_waits_in_which_collective_is_told_with_the_last_one_of_who_does_not(
    workspace: Workspace, call: str, operation: str
) -> None:
    script = workspace.write(f"""
        import time, torch, accel
        with accel.session(device="cpu") as ctx:
            model = accel.prepare_model(ctx, torch.nn.Linear(2, 2))
            def backward():
                model(torch.ones(1, 2)).sum().backward()
            backward()
            accel.wait_for_everyone(ctx)
            print("begins", flush=True)
            if ctx.rank == 1:
                time.sleep({patience(4)})
            {call}
    """)
    done = workspace.accel("launch", "--cpu", "--nproc-per-node", "2", "--hang-timeout-s", "1.5", script)
    assert done.returncode == 0, done.stderr
    reports = done.stderr.split("accel: no output")  # imports and the end may have taken as long
    report = next(report for report in reports if "rank 1 is not in" in report and "of wait_for_everyone" in report)
    who, waiting, elsewhere = report.splitlines()[1:4]
    number = int(who.split(" of gloo")[0].split()[-1])
    assert who == f"accel: rank 1 is not in collective {number} of gloo; rank 0 waits in it"
    assert re.search(rf"; in collective {number} of gloo, {operation}$", waiting)
    last = rf"; last in collective {number - 1} of gloo, all_\w+ of wait_for_everyone at {script}:8 in <module>$"
    assert re.search(last, elsewhere)
