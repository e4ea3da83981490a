# SPDX-License-Identifier: Apache-2.0
"""Ranks that print nothing for long: where they are is shown, and they go on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import HERE, Workspace

from accel.launch._hang import hang_report

WAITING = """Current thread 0x00007f (most recent call first):
  File "/lib/site-packages/torch/distributed/c10d.py", line 9 in wait
  File "/lib/site-packages/accel/process.py", line 37 in wait_for_everyone
  File "/home/ada/train.py", line 12 in step
  File "/home/ada/train.py", line 20 in <module>
  File "/lib/site-packages/accel/launch/_worker.py", line 85 in run_script
"""
LOADING = WAITING.replace("line 12 in step", "line 7 in load")


def test_ranks_at_one_place_share_a_line_and_a_stack() -> None:
    lines = hang_report({0: WAITING, 1: LOADING, 2: WAITING, 3: ""}, 60).splitlines()
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
    frames = hang_report({0: deep}, 60).splitlines()[3:]
    assert len(frames) == 21
    assert (frames[0].split()[3], frames[15], frames[-1].split()[3]) == ("0", "  ...", "99")


@given(st.lists(st.sampled_from([WAITING, LOADING, ""]), min_size=1, max_size=500))
def test_many_ranks_take_few_lines(stacks: list[str]) -> None:
    report = hang_report(dict(enumerate(stacks)), 1)
    assert len(report.splitlines()) <= 20
    assert max(map(len, report.splitlines())) < 200


@pytest.mark.multiprocess
@pytest.mark.parametrize("n", ["1", "2"])
def test_silent_ranks_are_shown_once_and_live_on(workspace: Workspace, n: str) -> None:
    script = workspace.write(f"""{HERE}
def load():
    while time.monotonic() < end:
        time.sleep(0.1)
print("begins", flush=True)
end = time.monotonic() + 2.5
load()
print("ends", flush=True)
""")
    done = workspace.accel("launch", "--nproc-per-node", n, "--hang-timeout-s", "1", script)
    assert (done.returncode, done.stdout.count("ends")) == (0, int(n))
    lines = done.stderr.splitlines()
    assert lines[0] == "accel: no output for 1 s"
    assert lines[1].startswith(f"accel: {'rank 0' if n == '1' else 'ranks 0, 1'}: at {script}:")
    assert lines[1].endswith(" in load")
    assert lines[2] == "Stack of rank 0 (most recent call first):"
    assert sum(line.startswith("accel:") for line in lines) == 2


@pytest.mark.multiprocess
def test_a_program_that_has_no_python_stack_is_left_alone(workspace: Workspace) -> None:
    words = ("--no-python", "--hang-timeout-s", "0.5", "sh", "-c", "sleep 1.2; echo done")
    done = workspace.accel("launch", *words)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr == "accel: no output for 0.5 s\naccel: rank 0: without a Python stack\n"
