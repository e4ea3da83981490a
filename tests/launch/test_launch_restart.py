# SPDX-License-Identifier: Apache-2.0
"""Ranks that start again after one has failed, on one host."""

from __future__ import annotations

import signal

import pytest
from launching import HERE, REST, Workspace
from processes import patience, wait_for

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("n", ["1", "2"])
def test_a_job_that_fails_starts_again_and_may_succeed(workspace: Workspace, n: str) -> None:
    script = workspace.write("""
        import os, sys
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("attempt", restarts)
        if os.environ["RANK"] == "0" and restarts < 2:
            raise ValueError(f"attempt {restarts} is bad")
    """)
    done = workspace.accel("launch", "--nproc-per-node", n, "--max-restarts", "5", script)
    assert done.returncode == 0
    assert done.stderr.count("accel: rank 0 failed: ValueError: attempt") == 2
    assert "accel: all ranks start again, restart 1 of 5\n" in done.stderr
    *_, restarted, last = ["", *done.stderr.splitlines()] if n == "2" else ["", *done.stderr.splitlines(), ""]
    assert restarted == "accel: all ranks start again, restart 2 of 5"
    assert n == "1" or (last.startswith("accel: 2 ranks finished after ") and last.endswith(" and 2 restarts"))
    assert done.stdout.count("attempt 2") == int(n)


def test_when_no_restart_is_left_the_last_failure_is_told_last_and_is_the_status(workspace: Workspace) -> None:
    script = workspace.write("import os, sys; sys.exit(3 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))")
    done = workspace.accel("launch", "--max-restarts", "1", script)
    assert done.returncode == 4
    assert [line.partition(" - ")[0] for line in done.stderr.splitlines()] == [
        "accel: rank 0 exited with status 3",
        "accel: all ranks start again, restart 1 of 1",
        "accel: rank 0 exited with status 4",
    ]


def test_nothing_starts_again_after_a_wish_to_stop(workspace: Workspace) -> None:
    script = workspace.write(f"""{HERE}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
here(os.environ["TORCHELASTIC_RESTART_COUNT"])
{REST}
""")
    launcher = workspace.start("launch", "--max-restarts", "9", script)
    wait_for(lambda: (workspace.folder / "pid-0").exists())
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=patience(8))
    assert launcher.returncode == 143
    assert not (workspace.folder / "pid-1").exists()
