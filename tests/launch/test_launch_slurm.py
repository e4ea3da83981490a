# SPDX-License-Identifier: Apache-2.0
"""The batch script of a launch, and what is refused before it is submitted."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from catching import assert_raises
from configs import FIELDS
from hypothesis import given, settings, strategies as st
from launches import LaunchTarget
from profiles import share

from accel.cli import main
from accel.config import LaunchConfig
from accel.errors import LaunchError
from accel.launching.hosts import _slurm
from accel.launching.hosts._slurm import batch_script

Submits = Callable[..., tuple[int, str, str]]

SRUN = """#!/bin/sh
while [ "${1#--kill}" != "$1" ] || [ "${1#--cpus}" != "$1" ]; do shift; done
for word; do printf '%s\\0' "$word"; done
"""


def script(config: LaunchConfig, *given_: str, args: tuple[str, ...] = (), **target: str) -> str:
    return batch_script(LaunchTarget(name="train.py", args=args, **target), config, given_, python="/bin/py")  # type: ignore[arg-type]


def run(text: str, folder: Path) -> list[str]:
    """Run a batch script where Slurm's commands only say what they are given."""
    for name, body in {"srun": SRUN, "scontrol": "#!/bin/sh\necho node7\necho node8\n"}.items():
        (folder / name).write_text(body)
        (folder / name).chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "123456", "SLURM_NNODES": "2"}
    done = subprocess.run(["bash"], input=text, env=environ, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_each_node_gets_a_launcher_that_meets_the_others_on_the_first(tmp_path: Path) -> None:
    text = script(LaunchConfig(nnodes=2, nproc_per_node=4), "nnodes", "nproc_per_node", args=("--epochs", "3"))
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in text
    told = ["--nnodes=2", "--rdzv-endpoint=node7:23456", "--nproc-per-node=4", "--", "train.py", "--epochs", "3"]
    assert run(text, tmp_path) == ["/bin/py", "-m", "accel.cli", "launch", *told]


def test_what_hosts_come_and_go_is_asked_for_as_a_range() -> None:
    text = script(LaunchConfig(nnodes="1:4"))
    assert "#SBATCH --nodes=1-4\n" in text
    assert "#SBATCH --no-kill\n" in text
    assert '--nnodes="1:$SLURM_NNODES"' in text


def test_options_of_slurm_are_handed_on_as_they_are() -> None:
    text = script(LaunchConfig(slurm_options="--partition=gpu --comment='a b'"), "slurm_options")
    assert "#SBATCH --partition=gpu --comment='a b'\n" in text
    assert "--slurm-options" not in text


@settings(max_examples=share(0.2), deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r")), max_size=3))
def test_the_scripts_words_come_through_a_shell_verbatim(args: list[str]) -> None:
    text = script(LaunchConfig(), args=tuple(args))
    words = shlex.split(text[text.index("exec srun") :].replace("\\\n", " ", 2))
    assert words[words.index("--") + 1 :] == ["train.py", *args]


def test_every_field_that_was_set_is_told_to_the_launchers_or_settled_by_the_job() -> None:
    text = script(LaunchConfig(), *(field.name for field in FIELDS))
    missing = {field.name for field in FIELDS if f" {field.flag}=" not in text}
    assert missing == {"node_rank", "slurm_options"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--slurm", "--node-rank", "0"], "Slurm numbers the nodes by itself - at flag --node-rank"),
        (["--slurm", "--slurm-options", "a\nb"], "invalid slurm_options"),
        (["--slurm", "--nproc-per-node", "2"], "there is no Slurm here: expected `sbatch` in PATH"),
    ],
)
def test_what_slurm_could_not_do_is_one_line_and_status_2(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *words, "train.py"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err


@pytest.mark.parametrize(("option", "limited"), [("--wait", False), ("-W", False), ("--requeue", True)])
def test_a_submission_waits_for_the_jobs_end_if_it_is_asked_to(
    option: str, limited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\nsleep 0.3\necho Submitted batch job 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setattr(_slurm, "_SUBMIT_S", 0.1)
    text = script(LaunchConfig(slurm_options=f"--time=5 {option}"))
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if limited:
        with assert_raises(LaunchError, fix="squeue --me"):
            _slurm.submit(text, environ)
    else:
        assert _slurm.submit(text, environ) == "Submitted batch job 1\n"


def test_a_job_that_slurm_refuses_is_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition: x' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "--slurm", "--cpu", "train.py"]) == 2
    assert "Slurm refuses the job: got invalid partition: x." in capsys.readouterr().err


EIGHT = ["--gpus-per-node=8", "--gpus-per-node 8", "--gpus-per-node=a100:8", "--gpus-per-node=a100:4,v100:4"]
EIGHT += ["--gres=gpu:8", "--gres gpu:8", "--gres=gpu:a100:8", "--gres=gpu:3090:8", "--gres=gpu:a100:8(S:0-1)"]
EIGHT += ["--gres=shard:2,gpu:4,gpu:v100:4", "--gres=gpu:2 --gres=gpu:8", "--gpus-per-task=8", "--gpus-per-task=h100:8"]
EIGHT += ["--tres-per-node=gres/gpu:8", "--tres-per-node=gres:gpu:h100:8", "--gpus=16", "-G 16", "-G16", "-G h100:16"]
EIGHT += ["--requeue --gres=gpu:8 --time 5", "--gpus-per-node=8 --gres=gpu:4"]


@pytest.fixture
def submits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Submits:
    """Return the status, output and errors of a dry run with these words and Slurm's options."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)

    def submit(*words: str, options: str = "", script: str = "train.py") -> tuple[int, str, str]:
        foreign = ["--slurm-options", options] if options else []
        status = main(["launch", "--slurm", "--dry-run", *words, *foreign, script])
        out, err = capsys.readouterr()
        return status, out, err

    return submit


@pytest.mark.parametrize("options", EIGHT)
def test_a_node_starts_a_rank_for_each_gpu_that_the_job_asks_for(submits: Submits, options: str) -> None:
    for words, count, idle in (([], 8, 0), (["--nproc-per-node", "3"], 3, 5), (["--nproc-per-node=auto"], 8, 0)):
        status, out, err = submits("--nnodes", "2", *words, options=options)
        assert status == 0
        assert f" --nproc-per-node={count} " in out
        assert f"#SBATCH {options}\n" in out
        assert err == (f"accel: {idle} of 8 GPUs of a host stay idle\n" if idle else "")


@pytest.mark.parametrize("options", ["", "--requeue", "--gres=shard:2", "--gres=none", "--gpus=3", "--gpus-per-node=0"])
def test_a_node_of_unknown_gpus_is_refused_with_the_flag_to_write(submits: Submits, options: str) -> None:
    status, out, err = submits("--nnodes", "2", options=options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    flag = err[err.index("`--nproc") :].split("`")[1]
    assert flag == "--nproc-per-node 8"
    if options != "--gpus-per-node=0":
        status, out, _ = submits("--nnodes", "2", *flag.split(), options=options)
        assert status == 0
        assert " --nproc-per-node=8 " in out


@pytest.mark.parametrize(
    ("words", "options", "count", "idle"),
    [
        (["--cpu"], "", 1, ""),
        (["--cpu", "--nproc-per-node", "4"], "", 4, ""),
        (["--cpu"], "--gres=gpu:4", 1, "4 of 4"),
        (["--gpu-ids", "0,1"], "--gres=gpu:4", 2, "2 of 4"),
        (["--device", "cuda:0"], "--gres=gpu:4", 1, "3 of 4"),
        (["--nnodes", "1:3", "--mesh", "dp=-1,tp=8"], "--gres=gpu:8", 8, ""),
        (["--nnodes", "2", "--mesh", "dp=4,tp=4"], "--gres=gpu:8", 8, ""),
        (["--mesh", "dp=4,tp=8"], "--gres=gpu:8 --nodes=4", 8, ""),
        ([], "--ntasks-per-node=1 --gpus-per-task=2", 2, ""),
    ],
)
def test_a_job_that_can_run_is_written(submits: Submits, words: list[str], options: str, count: int, idle: str) -> None:
    status, out, err = submits(*words, options=options)
    assert status == 0, err
    assert f" --nproc-per-node={count} " in out
    assert err == (f"accel: {idle} GPUs of a host stay idle\n" if idle else "")


@pytest.mark.parametrize(
    ("words", "options", "told"),
    [
        (["--nnodes", "2", "--mesh", "dp=3,tp=4"], "--gres=gpu:8", "the mesh does not fit the ranks"),
        (["--nnodes", "2", "--mesh", "tp=3,dp=-1"], "--gres=gpu:8", "the mesh does not fit the ranks"),
        (["--nnodes", "2:3", "--mesh", "tp=16,dp=-1"], "--gres=gpu:8", "the mesh does not fit the ranks"),
        (["--nproc-per-node", "9"], "--gres=gpu:8", "there are more processes than GPUs: expected at most 8"),
        (["--gpu-ids", "7,9"], "--gres=gpu:8", "there is no such GPU"),
        ([], "--ntasks-per-node=8 --gpus-per-task=1", "Leave it out, and write `--nproc-per-node 8`"),
        (["--nproc-per-node", "2"], "--comment='a", "the options of sbatch cannot be read"),
    ],
)
def test_a_job_that_cannot_run_is_refused_before_it_is_submitted(
    submits: Submits, words: list[str], options: str, told: str
) -> None:
    status, out, err = submits(*words, options=options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_the_launchers_of_a_job_need_no_file(submits: Submits) -> None:
    """A named file that another user can write would be found again, and refused, on each node."""
    Path("accel.toml").write_text('log_dir = "logs"\n')
    Path("accel.toml").chmod(0o666)
    assert submits("--cpu")[0] == 2
    status, out, err = submits("--cpu", "--config", "accel.toml")
    assert (status, err) == (0, f"accel: settings of {os.getcwd()}/accel.toml\n")
    assert " --config=/dev/null " in out
    assert " --log-dir=logs " in out


def test_a_missing_script_is_refused_before_it_is_submitted(submits: Submits) -> None:
    assert "there is no such script" in submits("--nproc-per-node", "2", script="trian.py")[2]


@pytest.mark.parametrize("option", ["--requeue", "-Jname", "--quiet", "--gres=gpu:2", "--help"])
def test_a_single_option_of_slurm_begins_with_a_dash(submits: Submits, option: str) -> None:
    for options in ([f"--slurm-options={option}"], ["--slurm-options", option]):
        status, out, err = submits("--nproc-per-node", "2", *options)
        assert status == 0, err
        assert f"#SBATCH {option}\n" in out


def test_an_option_of_slurm_as_a_flag_of_ours_is_named(submits: Submits) -> None:
    err = submits("--gpus-per-node", "8")[2]
    words = shlex.split(err[err.index("`--slurm") :].split("`")[1])
    assert " --nproc-per-node=8 " in submits(*words)[1]


STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
RIGHT = [
    (STEP, ["--nnodes", "1"], "written out"),
    (STEP | {"ACCEL_NNODES": "1"}, [], "written out, as a variable"),
    (STEP | {"RANK": "0", "WORLD_SIZE": "2"}, [], "a launch of a rank"),
    (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, [], "one task"),
    ({"SLURM_NNODES": "2", "SLURM_NTASKS": "2"}, [], "a batch script"),
    ({"OMPI_COMM_WORLD_SIZE": "1", "SM_HOSTS": '["algo-1"]'}, [], "alone"),
    (STEP, ["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:29400"], "one job"),
]


@pytest.mark.parametrize(
    ("environ", "first"),
    [
        (STEP, "n1"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "HOST"),
        ({"PMI_SIZE": "2"}, "HOST"),
        ({"SM_HOSTS": '["algo-2", "algo-1"]'}, "algo-1"),
    ],
)
@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_launchers_in_several_tasks_must_say_whether_they_are_one_job(
    words: list[str],
    environ: dict[str, str],
    first: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["launch", "--cpu", *words, "train.py"]) == 2
    _, err = capsys.readouterr()
    assert err.startswith("accel: error: 2 tasks start this launch, and it is unknown whether they are one job")
    assert f"Write `--nnodes 2 --rdzv-endpoint {first}:29400` for one job" in err
    assert "`--nnodes 1` for a job in each task" in err


@pytest.mark.parametrize(("environ", "words", "why"), RIGHT)
def test_a_launcher_that_was_told_or_is_alone_passes(
    environ: dict[str, str], words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["launch", "--cpu", "--dry-run", *words, "train.py"]) == 0, why


def test_the_page_on_slurm_shows_the_script_that_its_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "slurm.md").read_text()
    command = page.partition("```console\n$ ")[2].partition("```")[0].replace("\\\n", " ")
    shown = page.partition("```bash\n#!")[2].partition("\n```")[0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    words = shlex.split(command)[1:]
    assert main([*words[:2], "--dry-run", *words[2:]]) == 0
    printed = capsys.readouterr().out.rstrip().replace(sys.executable, "/usr/bin/python3")
    assert f"#!{shown}" == printed
