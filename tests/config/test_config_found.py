# SPDX-License-Identifier: Apache-2.0
"""A file of settings that was found, and not named: whoever else can write it cannot act as this user by it."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from catching import assert_raises
from processes import patience

from accel.cli import main
from accel.config import LaunchConfig, _files
from accel.errors import ConfigError

ME, ROOT, OTHER = 1000, 0, 1001
MINE, PEERS = 500, 700
NAMES = {MINE: "ada", PEERS: "team"}
HELD = {
    "alerts": '[alerts]\ncommand = ["touch", "ran"]\n',
    "rdzv_endpoint": 'rdzv_endpoint = "elsewhere:29400"\n',
    "slurm_options": 'slurm_options = "--wrap=touch"\n',
    "log_dir": 'log_dir = "logs"\n',
}
Owns = Callable[..., None]


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> Owns:
    """Make files appear to have an owner, a group and a mode."""

    def own(*, owner: int, mode: int, group: int = MINE, members: tuple[str, ...] = (), link: int = ME) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: ME)
        found = SimpleNamespace(st_uid=owner, st_gid=group, st_mode=stat.S_IFREG | mode)
        monkeypatch.setattr(_files.os, "lstat", lambda path: SimpleNamespace(st_uid=link))
        monkeypatch.setattr(_files.os, "stat", lambda path, **_: found)
        account = pwd.struct_passwd(("ada", "", ME, group, "", "", ""))
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: account)
        named = grp.struct_group((NAMES.get(group, "ada"), "", group, list(members)))
        monkeypatch.setattr(grp, "getgrgid", lambda gid: named)

    return own


@pytest.mark.parametrize(
    ("facts", "trusted"),
    [
        ({"owner": ME, "mode": 0o644}, True),
        ({"owner": ME, "mode": 0o600}, True),
        ({"owner": ROOT, "mode": 0o644}, True),
        ({"owner": ME, "mode": 0o664}, True),  # a group of this user's own
        ({"owner": ME, "mode": 0o664, "members": ("ada",)}, True),
        ({"owner": ME, "mode": 0o664, "group": 0}, True),
        ({"owner": ME, "mode": 0o664, "members": ("bob",)}, False),
        ({"owner": ME, "mode": 0o664, "group": PEERS}, False),
        ({"owner": ME, "mode": 0o644, "group": PEERS}, True),
        ({"owner": ME, "mode": 0o646}, False),
        ({"owner": ME, "mode": 0o666}, False),
        ({"owner": ROOT, "mode": 0o666}, False),
        ({"owner": OTHER, "mode": 0o644}, False),
        ({"owner": OTHER, "mode": 0o444}, False),
        ({"owner": ME, "mode": 0o644, "link": OTHER}, False),
        ({"owner": ME, "mode": 0o644, "link": ROOT}, True),
    ],
)
def test_four_keys_count_only_in_a_file_that_nobody_else_can_write(
    owned: Owns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, int], trusted: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in HELD.items():
        Path("accel.toml").write_text("format = 1\n" + text)
        owned(**facts)
        if trusted:
            assert name in _files.read_found().values
        else:
            with assert_raises(ConfigError, got=f"{name} in a file ", fix=r"--config accel\.toml"):
                _files.read_found()
        assert name in _files.read_config("accel.toml").values  # named


def test_other_keys_count_in_any_file(owned: Owns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = {name: value for name, value in msgspec.structs.asdict(LaunchConfig()).items() if name not in HELD}
    lines = [f"{name} = {_files.toml_value(value)}" for name, value in values.items() if not isinstance(value, dict)]
    Path("accel.toml").write_text("\n".join(["format = 1", *lines]) + "\n")
    owned(owner=OTHER, mode=0o666)
    assert set(_files.read_found().values) == set(values)


@pytest.mark.multiprocess
def test_the_line_of_the_error_launches_and_prints_its_file(tmp_path: Path) -> None:
    (tmp_path / "accel.toml").write_text('format = 1\ndevice = "cpu"\nlog_dir = "logs"\n')
    (tmp_path / "accel.toml").chmod(0o666)
    (tmp_path / "train.py").write_text("print('ran')")

    def launch(*flags: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "accel.cli", "launch", *flags, "train.py"]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=patience(60))

    refused = launch()
    assert refused.returncode == 2
    assert not (tmp_path / "logs").exists()
    flag = refused.stderr[refused.stderr.index("`--config") :].split("`")[1]
    followed = launch(*flag.split())
    assert (followed.returncode, followed.stdout) == (0, "ran\n"), followed.stderr
    assert followed.stderr.startswith(f"accel: settings of {tmp_path}/accel.toml\n")
    (tmp_path / "accel.toml").chmod(0o644)
    assert launch().returncode == 0
    assert not launch("--config", "/dev/null", "--cpu").stderr.startswith("accel: settings of accel.toml")


def test_the_report_for_bugs_names_the_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("accel.toml").write_text('log_dir = "logs"\n')
    Path("accel.toml").chmod(0o666)
    assert main(["config", "show"]) == 2
    assert "log_dir in a file that every user can write" in capsys.readouterr().err
