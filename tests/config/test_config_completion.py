# SPDX-License-Identifier: Apache-2.0
"""Completion: which words, and that the shells ask for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from configs import FIELDS
from processes import patience

from accel.cli import main
from accel.cli._main import COMMANDS
from accel.cli._setup import complete


def test_every_field_and_its_names_are_completed() -> None:
    flags = complete(["launch", "--"])
    for field in FIELDS:
        assert field.flag in flags
        assert not field.metavar or complete(["launch", field.flag, ""]) == list(field.names)
    assert complete(["config", "show", "--"]) == flags


def test_every_command_is_completed() -> None:
    assert complete([""]) == complete([]) == [*(command.name for command in COMMANDS), "--help", "--version"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["la"], ["launch"]),
        (["launch", "--prec"], ["--precision"]),
        (["launch", "--precision", "b"], ["bf16"]),
        (["launch", "--cpu", "--device", "cu"], ["cuda"]),
        (["launch", "--config", ""], []),
        (["launch", ""], []),
        (["launch", "train.py", "--"], []),
        (["launch", "--quiet", "train.py", "--precision", ""], []),
        (["config", "sh"], ["show"]),
        (["config", "default", "--"], []),
        (["completion", "z"], ["zsh"]),
        (["test", "--fo"], ["--folder"]),
        (["test", "--precision", "b"], ["bf16"]),
        (["env", "--"], ["--help", "--config", "--json"]),
        (["estimate", "--me"], ["--memory", "--mesh"]),
        (["estimate", "--context", "r"], ["ring"]),
        (["plan", "--mem"], ["--memory"]),
        (["plan", "--precision", "b"], ["bf16"]),
        (["estimate", "m:f", "--strategy", "ddp"], ["ddp", "ddp-zero"]),
        (["estimate", ""], []),
        (["nothing", ""], []),
    ],
)
def test_words_become_what_they_can(words: list[str], found: list[str]) -> None:
    assert complete(words) == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_takes_the_script_and_gets_the_words(shell: str, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell} here")
    accel = tmp_path / "accel"
    accel.write_text(f'#!/bin/sh\nexec {sys.executable} -m accel.cli "$@"\n')
    accel.chmod(0o755)
    asks = {
        "bash": 'eval "$(accel completion bash)"; COMP_WORDS=(accel launch --preci); COMP_CWORD=2;'
        " _accel; echo $COMPREPLY",
        "zsh": 'compdef() {}; compadd() { shift; echo "$@"; }; eval "$(accel completion zsh)";'
        " words=(accel launch --preci); CURRENT=3; _accel",
        "fish": "accel completion fish | source; complete --do-complete 'accel launch --preci'",
    }
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(
        [program, "-c", asks[shell]],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience(30),
        check=False,
    )
    assert (done.stdout, done.stderr) == ("--precision\n", "")


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fsh"]) == 2
    assert "one of bash, zsh, fish, got 'fsh' - at accel completion. Did you mean `fish`?" in capsys.readouterr().err
    assert main(["completion"]) == 2
