# SPDX-License-Identifier: Apache-2.0
"""What `accel` makes of words, the wrong ones above all."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, strategies as st
from launches import split_words
from launching import Workspace
from processes import patience
from tables import rows

from accel.cli import main

FILES = {
    "script.py": "",
    "bad.toml": "quiet = true\ndevice = cpu\n",
    "bad.json": '{"quiet": true "prefix": false}',
    "wrong.toml": "nproc_per_node = '2'\n",
    "unknown.toml": "nproc_per_nod = 2\n",
    "clash.toml": "gpu_ids = [0]\n",
}


@given(st.lists(st.text(min_size=1)), st.sampled_from([[], ["--nproc-per-node", "2"], ["--nproc-per-node=2"]]))
def test_all_after_the_script_belongs_to_the_script(args: list[str], flags: list[str]) -> None:
    assert split_words([*flags, "train.py", *args]) == (flags, ["train.py", *args])
    assert split_words([*flags, "--", "-train.py", *args]) == (flags, ["-train.py", *args])


@rows(
    "words, told",
    [
        (["launch"], "no script was given"),
        (["launch", "--nproc-per-node", "2"], "no script was given"),
        (["launch", "nowhere.py"], "there is no such script"),
        (["launch", "scrip.py"], "Did you mean `script.py`?"),
        (["launch", "."], "the script is a folder"),
        (["launch", "--nproc-per-node", "0", "script.py"], "an integer from 1 to 4096 or auto, got '0'"),
        (["launch", "--nproc-per-node", "-1", "script.py"], "an integer from 1 to 4096 or auto, got '-1'"),
        (["launch", "--nproc-per-node", "two", "script.py"], "an integer from 1 to 4096 or auto, got 'two'"),
        (["launch", "--nproc-per-node=1.5", "script.py"], "an integer from 1 to 4096 or auto, got '1.5'"),
        (["launch", "--nproc-per-node"], "expected one argument"),
        (["launch", "--nproc-per-node", "script.py"], "value before the script: `--nproc-per-node N script.py`"),
        (
            ["launch", "--epochs", "3", "script.py"],
            "Flags of the script come after it: `accel launch script.py --epochs`",
        ),
        (["launch", "--nproc-per-nod", "2", "script.py"], "Did you mean `--nproc-per-node`?"),
        (["launch", "--nproc=2", "script.py"], "unknown flag: got '--nproc'"),
        (
            ["launch", "--nproc-per-node", "2", "--nproc-per-node", "4", "script.py"],
            "given twice: got 2 and 4",
        ),
        (
            ["launch", "--cpu", "--device", "cuda", "script.py"],
            "the flag is given twice: got cpu and cuda - at --device",
        ),
        (["launch", "--cpu", "--gpu-ids", "0", "script.py"], "GPUs have no effect on cpu"),
        (["launch", "--cpu", "--backend", "nccl", "script.py"], "nccl carries messages between GPUs only"),
        (["launch", "--gpu-ids", "0,1", "--nproc-per-node", "3", "script.py"], "Start at most 2"),
        (["launch", "--gpu-ids", "0,x", "script.py"], "a list of integers such as 0,1 or all, got '0,x'"),
        (["launch", "--gpu-ids", "99", "script.py"], "there is no such GPU"),
        (["launch", "--device", "cuda", "script.py"], "no GPU is visible"),
        (["launch", "--nnodes", "2", "script.py"], "the hosts have no endpoint to meet at"),
        (["launch", "--nnodes", "4:1", "script.py"], "more hosts at least than at most"),
        (["launch", "--node-rank", "1", "script.py"], "there is no such host: got node_rank=1, nnodes=1"),
        (
            ["launch", "--nnodes", "2", "--rdzv-endpoint", "h.invalid:1", "script.py"],
            "the rendezvous host does not resolve here",
        ),
        (["launch", "--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:99999", "script.py"], "there is no such port"),
        (["launch", "--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:1", "--gpu-ids", "9", "script.py"], "no such GPU"),
        (["launch", "--max-restarts", "-1", "script.py"], "an integer from 0 to 100000, got '-1'"),
        (["launch", "--precision", "bf61", "script.py"], "Did you mean `bf16`?"),
        (["launch", "--timeout-s", "-5", "script.py"], "a number above 0 and at most 1000000000 or auto, got '-5'"),
        (["launch", "--quiet=maybe", "script.py"], "true or false, got 'maybe' - at --quiet"),
        (["launch", "-m", "--no-python", "script"], "a module is run by python"),
        (["launch", "-m", "script.py"], "there is no such module"),
        (["launch", "-m", "json"], "the module is a package that cannot be run"),
        (["launch", "--no-python", "./script.py"], "Allow it with `chmod +x ./script.py`"),
        (["launch", "--no-python", "no-such-program"], "there is no such program"),
        (["launch", "--log-dir", "script.py/logs", "script.py"], "the folder for log files cannot be used"),
        (
            ["launch", "--config", "bad.toml", "script.py"],
            "invalid value - at bad.toml, line 2, column 10",
        ),
        (
            ["launch", "--config", "bad.json", "script.py"],
            "malformed JSON: got expecting ',' delimiter - at bad.json",
        ),
        (["launch", "--config", "wrong.toml", "script.py"], "got '2' - at wrong.toml, key nproc_per_node"),
        (
            ["launch", "--config", "unknown.toml", "script.py"],
            "unknown key: got 'nproc_per_nod' - at unknown.toml.",
        ),
        (["launch", "--config", "clash.toml", "--cpu", "script.py"], "at clash.toml, key gpu_ids and --device"),
        (["launch", "--config", "bad.tolm", "script.py"], "Did you mean `bad.toml`?"),
        (["launch", "--config", "old.yaml", "script.py"], "`accel config import old.yaml`"),
        (["launch", "--dry-run", "nowhere.py"], "there is no such script"),
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
    for name, text in FILES.items():
        workspace.write(text, name)
    monkeypatch.chdir(workspace.folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("accel: error: ")
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"ACCEL_PRECISION": "fp17"}, "invalid precision"),
        ({"ACCEL_PRECISON": "bf16"}, "Did you mean `ACCEL_PRECISION`?"),
        ({"ACCEL_NPROC_PER_NODE": "many"}, "an integer from 1 to 4096 or auto, got 'many' - at ACCEL_NPROC_PER_NODE"),
        ({"ACCEL_CONFIG": "nowhere.toml"}, "there is no such file: got 'nowhere.toml'"),
    ],
)
def test_a_wrong_variable_is_one_line_and_status_2(
    variables: dict[str, str],
    told: str,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = workspace.write("")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["launch", str(script)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err


def test_a_setting_that_cannot_be_is_refused_before_anything_starts(workspace: Workspace) -> None:
    done = workspace.accel("launch", workspace.write("print('ran')"), ACCEL_PRECISION="fp17")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("accel: error: invalid precision")


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
        timeout=patience(20),
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


def test_a_reader_that_leaves_early_is_no_error(workspace: Workspace) -> None:
    command = f"{sys.executable} -m accel.cli config show"
    done = subprocess.run(
        ["sh", "-c", f"{{ {command}; echo $? >&2; }} | true"], capture_output=True, text=True, cwd=workspace.folder
    )
    assert done.stderr in ("141\n", "0\n")  # 0 if the words were faster than the reader's end


def test_help_imports_neither_torch_nor_a_command() -> None:
    code = (
        "import sys; from accel.cli import main; main(['--help'])\n"
        "assert not {'torch', 'accel.launching', 'accel.cli._launch', 'argparse'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_flag_of_the_launcher_behind_the_script_is_told(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _ = workspace.write("")
    monkeypatch.chdir(workspace.folder)
    assert main(["launch", "--dry-run", "script.py", "--nproc-per-node", "2"]) == 0
    assert capsys.readouterr().err == (
        "accel: --nproc-per-node goes to the script: flags of accel launch come before it\n"
    )
