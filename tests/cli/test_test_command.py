# SPDX-License-Identifier: Apache-2.0
"""`accel test` as a process: the report, the exit status, and what it says when the launch itself breaks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import patience

from accel.cli import main


def accel_test(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accel.cli", "test", *words]
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_ranks_pass_every_check_with_the_users_configuration(tmp_path: Path) -> None:
    (tmp_path / "accel.toml").write_text('nproc_per_node = 2\ndevice = "cpu"\n')
    done = accel_test(tmp_path, ACCEL_PRECISION="bf16")
    assert (done.returncode, done.stderr) == (0, f"accel: settings of {tmp_path / 'accel.toml'}\n")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 ranks on 1 host, cpu, gloo, bf16, torch ")
    assert [line.split()[0] for line in lines[1:-1]] == ["ok"] * 6
    assert lines[-1] == "6 of 6 checks passed."


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_failed_check_is_told_with_its_likely_cause(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    done = accel_test(tmp_path, "--cpu", "--folder", str(file))
    assert done.returncode == 1
    assert "FAILED  checkpoint\n        rank 0: CheckpointError: " in done.stdout
    assert "        likely: " in done.stdout
    assert done.stdout.endswith("5 of 6 checks passed.\n")


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_launch_that_breaks_off_is_told(tmp_path: Path) -> None:
    done = accel_test(tmp_path, "--cpu", "--backend", "nosuch")
    assert done.returncode == 1
    assert done.stderr.startswith("accel: rank 0 failed: ")
    assert done.stdout.startswith("The ranks did not get as far as the first check")


def test_flags_are_those_of_a_launch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "--nproc-per-nod", "2"]) == 2
    assert "Did you mean `--nproc-per-node`?" in capsys.readouterr().err
