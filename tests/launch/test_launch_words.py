# SPDX-License-Identifier: Apache-2.0
"""What `accel` makes of words, the wrong ones above all."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import Workspace

from accel.cli import main
from accel.cli._launch import split_words


@given(st.lists(st.text(min_size=1)), st.sampled_from([[], ["--nproc-per-node", "2"], ["--nproc-per-node=2"]]))
def test_all_after_the_script_belongs_to_the_script(args: list[str], flags: list[str]) -> None:
    assert split_words([*flags, "train.py", *args]) == (flags, ["train.py", *args])
    assert split_words([*flags, "--", "-train.py", *args]) == (flags, ["-train.py", *args])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["launch"], "no script was given"),
        (["launch", "--nproc-per-node", "2"], "no script was given"),
        (["launch", "nowhere.py"], "there is no such script"),
        (["launch", "scrip.py"], "Did you mean `script.py`?"),
        (["launch", "."], "the script is a folder"),
        (["launch", "--nproc-per-node", "0", "script.py"], "an integer of at least 1, got 0"),
        (["launch", "--nproc-per-node", "-1", "script.py"], "an integer of at least 1, got -1"),
        (["launch", "--nproc-per-node", "two", "script.py"], "an integer of at least 1, got 'two'"),
        (["launch", "--nproc-per-node=1.5", "script.py"], "an integer of at least 1, got '1.5'"),
        (["launch", "--nproc-per-node"], "expected one argument"),
        (["launch", "--nproc-per-nod", "2", "script.py"], "Did you mean `--nproc-per-node`?"),
        (["launch", "--nproc=2", "script.py"], "unknown flag: got '--nproc'"),
        (["lunch"], "Did you mean `launch`?"),
        (["--versoin"], "Did you mean `--version`?"),
    ],
)
def test_a_wrong_word_is_one_line_and_status_2(
    words: list[str],
    told: str,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    workspace.write("")
    monkeypatch.chdir(workspace.folder)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("accel: error: ")
    assert told in err
    assert err.count("\n") == 1


def test_a_setting_that_cannot_be_is_refused_before_anything_starts(workspace: Workspace) -> None:
    done = workspace.accel("launch", workspace.write("print('ran')"), ACCEL_PRECISION="fp17")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("accel: error: unknown precision")


def test_too_many_processes_are_one_line_and_leave_none(workspace: Workspace) -> None:
    script = workspace.write("import time\ntime.sleep(60)\n")
    code = (
        "import resource, sys; from accel.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24)); sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "launch", "--nproc-per-node", "50", str(script)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("accel: error: rank ")
    assert done.stderr.count("\n") == 1


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "launch" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("accel ")
    with pytest.raises(SystemExit) as caught:
        main(["launch", "--help"])
    assert caught.value.code == 0
    assert "--nproc-per-node" in capsys.readouterr().out


def test_help_imports_neither_torch_nor_a_command() -> None:
    code = (
        "import sys; from accel.cli import main; main(['--help'])\n"
        "assert not {'torch', 'accel.launch', 'accel.cli._launch', 'argparse'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
