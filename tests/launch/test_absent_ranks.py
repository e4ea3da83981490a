# SPDX-License-Identifier: Apache-2.0
"""A rank that others miss is named first, by its place or its early end; a silence is reported again as it changes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from launches import (
    Children,
    EnteredCollective,
    RankAnswer,
    Relay,
    absent_report,
    culprit,
    locate,
    raised,
)
from launching import Workspace, missed_backward

from accel.launching.local._hang import Watch
from accel.launching.reports._failure import repeats

LOADING = """Current thread 0x00007f (most recent call first):
  File "/lib/site-packages/torch/utils/data/dataloader.py", line 9 in wait
  File "/home/ada/train.py", line 7 in load
"""
IN_BACKWARD = """Current thread 0x00007f (most recent call first):
  File "/lib/site-packages/torch/autograd/graph.py", line 979 in _engine_run_backward
  File "/lib/site-packages/torch/_tensor.py", line 623 in backward
  File "/home/ada/train.py", line 12 in step
"""
IN_GATHER = IN_BACKWARD.replace("torch/autograd/graph.py", "accel/comm/_torch.py")


def entered(*, waiting: bool) -> list[EnteredCollective]:
    return [EnteredCollective(group="gloo", of_all=True, number=3, operation="all_reduce", waiting=waiting)]


def test_ranks_that_are_in_no_collective_come_first() -> None:
    heard = {0: RankAnswer(IN_BACKWARD), 1: RankAnswer(LOADING), 3: RankAnswer(IN_GATHER), 4: RankAnswer(IN_BACKWARD)}
    lines = absent_report([locate(heard, [2])]).splitlines()
    assert lines[0].startswith("accel: rank 2 exited")
    assert lines[1].startswith("accel: rank 1 never reached the collective: at /home/ada/train.py:7 in load")
    assert [line.split(":")[1] for line in lines[2:]] == [" ranks 0, 3, 4 waited"]


@pytest.mark.parametrize(("waiting", "came"), [(True, "waited"), (False, "never reached the collective")])
def test_what_torch_recorded_counts_before_the_stack(waiting: bool, came: str) -> None:
    heard = {0: RankAnswer(IN_BACKWARD, asked=True, calls=entered(waiting=waiting))}
    assert absent_report([locate(heard, [])]).startswith(f"accel: rank 0 {came}: ")


@pytest.mark.parametrize(
    "message",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv",
        "Connection closed by peer [127.0.0.1]:2434",
    ],
)
def test_torchs_own_words_for_a_lost_peer_blame_nobody_before_a_rank_that_failed_by_itself(message: str) -> None:
    victim, cause = raised(0, 0.0, "RuntimeError", message), raised(1, 1.0, "ValueError", "bad batch")
    assert repeats(victim)
    assert culprit([victim, cause]) is cause


class _Places(Watch):
    """A watch whose ranks answer what a test says."""

    def __init__(self, relay: Relay, stacks: list[str]) -> None:
        super().__init__(Children(), relay, 0.01)
        self._stacks = stacks

    def ask(self) -> dict[int, RankAnswer]:
        return {0: RankAnswer(self._stacks.pop(0))}


def test_a_silence_is_reported_again_once_the_places_have_changed() -> None:
    relay = Relay([])
    watch = _Places(relay, [LOADING, LOADING, IN_BACKWARD, IN_BACKWARD, IN_BACKWARD])
    reports: list[str] = []
    for at in range(5):
        if at == 4:
            relay.last_s = time.monotonic()  # something was printed
        time.sleep(0.02)
        reports.append(watch.look())
    assert [bool(report) for report in reports] == [True, False, True, False, True]
    assert reports[0].splitlines()[0] == "accel: no output for 0.01 s"
    assert reports[2].splitlines()[0] == "accel: no output for 0.03 s"
    assert reports[4].splitlines()[0] == "accel: no output for 0.01 s"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("leaves", "named"),
    [
        pytest.param(
            "time.sleep(60)", "rank 1 never reached the collective: at {script}:8 in <module>", marks=pytest.mark.slow
        ),
        ("os._exit(0)", "rank 1 exited with status 0, while other ranks continued"),
        pytest.param("sys.exit(0)", "rank 1 exited with status 0, while other ranks continued", marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_a_backward_misses_stands_in_the_first_line(
    workspace: Workspace, leaves: str, named: str
) -> None:
    script = workspace.write(missed_backward(leaves))
    done = workspace.accel("launch", "--cpu", "--nproc-per-node", "2", script)
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("accel: ")]
    assert lines[0] == "accel: " + named.format(script=script)
    assert lines[1].startswith("accel: rank 0 failed: RuntimeError: ")


@pytest.mark.multiprocess
def test_a_rank_that_ends_while_it_is_asked_lives_on(tmp_path: Path) -> None:
    """An ending interpreter takes the fault handler away before the process is gone."""
    script = f"""
import faulthandler, os
from accel.launching.reports._failure import STACK_SIGNAL
from accel.launching.local._worker import show_stacks
show_stacks({str(tmp_path / "record")!r})
faulthandler.unregister(STACK_SIGNAL)  # as at the end
os.kill(os.getpid(), STACK_SIGNAL)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
