# SPDX-License-Identifier: Apache-2.0
"""A failing rank: what the launcher says, with which status it ends, and that nobody is left."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from launches import Children, Failure, LaunchPlan
from launching import HERE, Workspace, alive
from processes import patience, wait_for

from accel.launching.local._launch_plan import ProcessPlan
from accel.launching.local._supervisor import run_to_end

pytestmark = pytest.mark.multiprocess

FAILING = """
    import os, time
    def step():
        raise ValueError("bad batch")
    if os.environ["RANK"] == os.environ["WORLD_SIZE"] == "1" or os.environ["RANK"] == "{rank}":
        print("to the end")
        step()
    time.sleep(60)
    """


@pytest.mark.parametrize(("n", "rank"), [("1", 0), ("2", 1)])
def test_the_last_output_is_the_culprits_report_once(workspace: Workspace, n: str, rank: int) -> None:
    script = workspace.write(FAILING.format(rank=rank))
    done = workspace.accel("launch", "--nproc-per-node", n, script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == f"accel: rank {rank} failed: ValueError: bad batch - at {script}:4"
    assert done.stderr.splitlines()[1] == "Traceback (most recent call last):"
    *_, raised, last = done.stderr.splitlines()
    assert raised == "ValueError: bad batch"
    told = re.escape(f"exit status 1: ValueError: bad batch - at {script}:4")
    assert re.fullmatch(rf"accel: rank {rank} failed after 0:\d\d:\d\d, {told}", last)
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("ValueError: bad batch") == 3  # first, in the traceback, and last
    assert "_worker" not in done.stderr
    assert "to the end" in done.stdout


def test_causes_are_told_and_an_error_in_a_library_points_at_the_users_line(workspace: Workspace) -> None:
    script = workspace.write("""
        import json
        try:
            {}["missing"]
        except KeyError as error:
            json.loads("{")
        """)
    done = workspace.accel("launch", script)
    assert done.stderr.startswith("accel: rank 0 failed: json.decoder.JSONDecodeError:")
    assert done.stderr.splitlines()[0].endswith(f"{script}:6")
    assert "During handling of the above exception" in done.stderr


def test_a_script_that_does_not_parse_points_at_its_line(workspace: Workspace) -> None:
    script = workspace.write("x = 1\ny = = 2\n")
    done = workspace.accel("launch", script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].endswith(f"{script}:2")
    assert "importlib" not in done.stderr


@pytest.mark.parametrize("n", [pytest.param("1", marks=pytest.mark.slow), "2"])
@pytest.mark.parametrize(
    ("statement", "code", "words"),
    [
        ("sys.exit(3)", 3, "exited with status 3 - at"),
        ("sys.exit('no data')", 1, "exited with status 1 - at"),
        ("os._exit(4)", 4, "exited with status 4 and left no traceback"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV - at"),
        ("raise KeyboardInterrupt", 130, "failed: KeyboardInterrupt - at"),
    ],
)
def test_the_exit_status_is_the_failing_ranks(
    workspace: Workspace, n: str, statement: str, code: int, words: str
) -> None:
    script = workspace.write(f"{HERE}\nif rank == 0: {statement}\ntime.sleep(60)\n")
    done = workspace.accel("launch", "--nproc-per-node", n, script)
    assert done.returncode == code
    report = done.stderr[done.stderr.index("accel: ") :]
    assert report.startswith(f"accel: rank 0 {words}")
    assert done.stderr.count("no data") == ("no data" in statement)


@pytest.mark.parametrize(
    ("cause", "code"),
    [("raise ValueError('cause')", 1), ("os.kill(os.getpid(), signal.SIGKILL)", 137), ("os._exit(7)", 7)],
)
def test_a_victim_is_not_blamed(workspace: Workspace, cause: str, code: int) -> None:
    script = workspace.write(f"""{HERE}
import socket
if rank == 1:
    with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))) as server:
        peer, _ = server.accept()
        {cause}
for _ in range(500):
    try:
        peer = socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
if not peer.recv(1):
    raise ConnectionError("connection closed")
""")
    done = workspace.accel("launch", "--nproc-per-node", "2", script)
    assert done.returncode == code
    assert done.stderr.startswith("accel: rank 1 ")
    assert "accel: after it, rank 0 failed: ConnectionError: connection closed" in done.stderr


def test_the_others_are_gone_in_time_even_if_they_do_not_want_to(workspace: Workspace) -> None:
    script = workspace.write(f"""{HERE}
import subprocess
if rank == 0:
    while len([name for name in os.listdir() if name.startswith("pid-")]) < 3:
        time.sleep(0.01)
    raise ValueError("first")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    here("grandchild")
else:
    here()
    with open("pid-sleep", "w") as file:
        file.write(str(subprocess.Popen(["sleep", "60"]).pid))
time.sleep(60)
""")
    began = time.monotonic()
    done = workspace.accel("launch", "--nproc-per-node", "2", script)
    assert time.monotonic() - began < patience(10)  # 3 where nothing else computes
    assert done.returncode == 1
    assert done.stderr.startswith("accel: rank 0 failed: ValueError: first")
    wait_for(lambda: not any(map(alive, workspace.pids(3))), seconds=2)


def test_names_and_messages_of_any_bytes_are_reported(workspace: Workspace) -> None:
    script = workspace.write("raise ValueError('\\udcff')", "\udcff.py")
    done = workspace.accel("launch", script)
    assert done.returncode == 1
    assert done.stderr.startswith("accel: rank 0 failed: ValueError: \\udcff - at ")


def test_an_error_in_a_process_that_a_rank_forks_is_not_the_ranks(workspace: Workspace) -> None:
    script = workspace.write(f"""{HERE}
if os.fork() == 0:
    raise ValueError("in the fork")
os.wait()
os.kill(os.getpid(), signal.SIGKILL)
""")
    done = workspace.accel("launch", script)
    assert done.returncode == 137
    assert done.stderr.count("ValueError: in the fork") == 1
    assert done.stderr.splitlines()[-2].startswith("accel: rank 0 was killed by SIGKILL")


@pytest.mark.parametrize(
    ("flags", "last"),
    [
        ([], ""),
        (["--nproc-per-node", "2"], "accel: 2 ranks finished after TIME\n"),
        (["--nproc-per-node", "2", "--quiet"], ""),
        (["--log-dir", "logs"], "accel: finished after TIME; output of each rank in logs\n"),
    ],
)
def test_a_clean_end_is_one_line_where_there_is_something_to_say(
    workspace: Workspace, flags: list[str], last: str
) -> None:
    script = workspace.write("import sys\nsys.exit(0)\n")
    done = workspace.accel("launch", *flags, script)
    assert (done.returncode, done.stdout) == (0, "")
    assert re.sub(r"\d:\d\d:\d\d", "TIME", done.stderr) == last


@pytest.mark.nightly
def test_the_last_line_names_the_newest_checkpoint_that_was_written_or_resumed(workspace: Workspace) -> None:
    script = workspace.write("""
        import sys, accel
        with accel.session(device="cpu") as ctx:
            state = accel.resume(ctx, "out", {}, accel.train_state(ctx, seed=0))
            for step in range(int(sys.argv[1])):
                accel.save_state(ctx, "out", {"state": state}, step=step)
        sys.exit(int(sys.argv[2]))
    """)
    for saves, status, end in (
        (3, 0, "2 ranks finished after TIME"),
        (0, 4, "rank 0 failed after TIME, exit status 4"),
    ):
        done = workspace.accel("launch", "--cpu", "--nproc-per-node", "2", script, str(saves), str(status))
        assert done.returncode == status, done.stderr
        last = re.sub(r"\d:\d\d:\d\d", "TIME", done.stderr.splitlines()[-1])
        assert re.sub("rank 1", "rank 0", last) == f"accel: {end}; newest checkpoint out/step-00000002"


def test_what_a_successful_rank_leaves_running_is_its_own_business(workspace: Workspace) -> None:
    script = workspace.write(f"""{HERE}
import subprocess
if rank == 0:
    with open("pid-sleep", "w") as file:
        file.write(str(subprocess.Popen(["sleep", "600"]).pid))
""")
    assert workspace.accel("launch", "--nproc-per-node", "2", script).returncode == 0
    (left,) = workspace.pids(1)
    assert alive(left)
    os.kill(left, signal.SIGKILL)


def test_a_failure_between_two_looks_is_no_success(tmp_path: Path) -> None:
    class SlowLook(Children):
        """Sees the ranks as they were before they ended."""

        def failures(self) -> list[Failure]:
            seen = super().failures()
            while self.running():
                time.sleep(0.01)
            return seen

    command = (sys.executable, "-c", "raise SystemExit(3)")
    process = ProcessPlan(rank=0, program=command, command=command, environ={}, record=str(tmp_path / "record"))
    assert run_to_end(LaunchPlan(processes=(process,)), SlowLook()).status == 3
