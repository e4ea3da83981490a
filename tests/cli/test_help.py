# SPDX-License-Identifier: Apache-2.0
"""The help of every command: within 80 columns, and each setting of a launch in one group."""

from __future__ import annotations

import contextlib

import pytest
from launches import parser

from accel.cli import main
from accel.cli._checkpoint import _VERBS
from accel.cli._config import SUBCOMMANDS
from accel.cli._main import COMMANDS
from accel.config import LaunchConfig

HELPS = [
    [],
    *([command.name] for command in COMMANDS),
    *(["config", name] for name in SUBCOMMANDS),
    *(["checkpoint", name] for name in _VERBS),
]


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_the_help_of_a_command_fits_a_terminal(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):  # argparse's own end
        assert main([*words, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: {' '.join(['accel', *words[:1]])}")
    assert [line for line in shown.splitlines() if len(line) > 80] == []


def test_each_setting_has_a_group_of_flags() -> None:
    groups = [group for group in parser()._action_groups if group.title not in ("options", "positional arguments")]
    grouped = [action.dest for group in groups for action in group._group_actions]
    assert set(LaunchConfig.__struct_fields__) <= set(grouped)
