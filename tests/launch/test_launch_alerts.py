# SPDX-License-Identifier: Apache-2.0
"""Alerts of a launcher: a lost rank, an almost full disk, and what neither stderr nor a record may show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import Workspace

from accel.alerts import Alerts, read_alerts
from accel.launching.reports import _journal
from accel.launching.reports._journal import LaunchAlerts

SCRIPT = """
import os, sys
from pathlib import Path
Path("run").mkdir(exist_ok=True)
sys.audit("accel.run", "run")
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), 9)
"""
FILE = """
[alerts]
command = ["sh", "-c", "cat > got"]
webhook = "https://127.0.0.1:1/secret-part"
disk_full = 1.0
"""


def test_a_lost_rank_reaches_folder_command_and_one_line_of_a_webhook_that_fails(workspace: Workspace) -> None:
    _ = workspace.write(SCRIPT)
    _ = workspace.write(FILE, "accel.toml")
    ended = workspace.accel("launch", "--cpu", "--nproc-per-node", "2", "script.py")
    assert ended.returncode == 137
    [lost] = [each for each in read_alerts(workspace.folder / "run") if each.title == "rank 1 is lost"]
    assert (lost.level, lost.source, lost.text) == ("error", "launch", "was killed by SIGKILL")
    assert json.loads((workspace.folder / "got").read_text())["line"] == "rank 1 is lost: was killed by SIGKILL"
    lines = ended.stderr.splitlines()
    assert lines[-1].startswith("accel: rank 1 failed after")
    assert sum("the webhook did not get the alert 'rank 1 is lost': 3 tries" in line for line in lines) == 1
    written = [path.read_text() for path in (workspace.folder / "run").rglob("*.jsonl")]
    for text in (ended.stderr, ended.stdout, *written):
        assert "secret-part" not in text


def test_an_almost_full_disk_alerts_once_and_again_after_it_had_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        f_blocks, f_frsize = 100, 10**9
        f_bavail = 6

    monkeypatch.setattr(_journal.os, "statvfs", lambda folder: Disk)
    alerts = LaunchAlerts(Alerts(every_s=1e-9), look_s=600)
    alerts.begin([str(tmp_path), str(tmp_path / "gone")], looks=False)
    for free, seen in ((6, 0), (5, 1), (4, 1), (5.5, 1), (5, 1), (7, 1), (3, 2)):
        Disk.f_bavail = free
        alerts.look()
        found = sum(b"almost full" in line for line in bytes(alerts._log._content).splitlines())
        assert found == seen, free
    alerts.end()
    assert read_alerts(tmp_path)[-1].text == "97.0% in use, 3.0 GB left"


def test_without_the_section_a_launch_has_no_alerts(workspace: Workspace) -> None:
    _ = workspace.write(SCRIPT)
    assert workspace.accel("launch", "--cpu", "--nproc-per-node", "2", "script.py").returncode == 137
    assert read_alerts(workspace.folder / "run") == []
    assert [path.name for path in (workspace.folder / "run").iterdir()] == ["launches"]


def test_no_command_shows_the_url(workspace: Workspace) -> None:
    _ = workspace.write("")
    _ = workspace.write(FILE, "accel.toml")
    for words in (["launch", "--dry-run", "script.py"], ["config", "show"], ["env"]):
        ended = workspace.accel(*words)
        assert ended.returncode == 0
        assert "disk_full" in ended.stdout or "[alerts]" in ended.stdout
        assert "secret-part" not in ended.stdout + ended.stderr
