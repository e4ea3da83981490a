# SPDX-License-Identifier: Apache-2.0
"""What the flags of `accel launch` do to real processes."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys

import pytest
from configs import FIELDS
from launches import parser, split_words
from launching import HERE, Workspace
from processes import patience, wait_for

SPEAK = """
import os, sys
print("out of", os.environ["RANK"], flush=True)
print("err of", os.environ["RANK"], file=sys.stderr, flush=True)
"""


def test_every_field_is_a_flag_and_every_flag_a_field() -> None:
    own = {"--help", "--config", "--module", "--no-python", "--dry-run", "--slurm"}
    own |= {"--hostfile", "--include", "--exclude", "--shell", "--export"}
    shorthands = {field.shorthand[0] for field in FIELDS if field.shorthand}
    flags = {flag for action in parser()._actions for flag in action.option_strings if flag.startswith("--")}
    assert flags - own - shorthands == {field.flag for field in FIELDS}


def test_the_script_is_found_behind_any_flag() -> None:
    for field in FIELDS:
        own = [field.flag, "1"] if field.metavar else [field.flag]
        assert split_words([*own, "--cpu", "-m", "train", "--quiet"]) == ([*own, "--cpu", "-m"], ["train", "--quiet"])


def test_the_cpu_alone_runs_as_many_processes_as_asked(workspace: Workspace) -> None:
    script = workspace.write("import os\nprint(os.environ['WORLD_SIZE'], os.environ['ACCEL_DEVICE'])")
    done = workspace.accel("launch", "--cpu", "--nproc-per-node", "2", script)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 2 cpu", "[rank 1] 2 cpu"], done.stderr


def test_a_file_in_the_folder_is_read_and_a_flag_beats_it(workspace: Workspace) -> None:
    workspace.write("nproc_per_node = 2\nprefix = false\nprecision = 'bf16'\n", "accel.toml")
    script = workspace.write("import os\nprint(os.environ['WORLD_SIZE'], os.environ.get('ACCEL_PRECISION'))")
    assert workspace.accel("launch", script).stdout == "2 bf16\n" * 2
    assert workspace.accel("launch", script, ACCEL_PRECISION="fp16", ACCEL_NPROC_PER_NODE="1").stdout == "1 fp16\n"
    done = workspace.accel("launch", "--precision=auto", "--nproc-per-node=1", script, ACCEL_PRECISION="fp16")
    assert done.stdout == "1 None\n"
    workspace.write('{"nproc_per_node": 3}', "other.json")
    done = workspace.accel("launch", "--config", "other.json", "--prefix=false", script)
    assert done.stdout == "3 None\n" * 3
    assert workspace.accel("launch", script, ACCEL_CONFIG="/dev/null").stdout == "1 None\n"


def test_a_rank_knows_the_flags_and_the_file_behind_its_settings(workspace: Workspace) -> None:
    workspace.write("accumulation = 4\nprecision = 'bf16'\n", "accel.toml")
    script = workspace.write("import os\nfrom accel import read_env\nprint(read_env(os.environ).sources)")
    done = workspace.accel("launch", "--cpu", "--accumulation", "2", script, ACCEL_STRATEGY="fsdp")
    assert ast.literal_eval(done.stdout) == {
        "device": "--device",
        "precision": "accel.toml, key precision",
        "accumulation": "--accumulation",
        "strategy": "ACCEL_STRATEGY",
    }, done.stderr


@pytest.mark.parametrize("count", [1, 2])
def test_logs_keep_what_every_rank_prints(workspace: Workspace, count: int) -> None:
    script = workspace.write(SPEAK)
    for _ in range(2):
        flags = ("--log-dir", "a/logs", "--quiet", "--nproc-per-node", str(count))
        done = workspace.accel("launch", *flags, script)
        prefix = "[rank 0] " if count > 1 else ""
        assert (done.stdout, done.stderr) == (f"{prefix}out of 0\n", f"{prefix}err of 0\n")
    for rank in range(count):
        lines = (workspace.folder / f"a/logs/rank-{rank}.log").read_text().splitlines()
        assert sorted(lines) == [f"err of {rank}"] * 2 + [f"out of {rank}"] * 2


def test_a_failure_names_the_log(workspace: Workspace) -> None:
    script = workspace.write("import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)")
    done = workspace.accel("launch", "--log-dir", "logs", "--nproc-per-node", "2", script)
    assert done.returncode == 3
    assert "accel: its output is in logs/rank-1.log" in done.stderr


def test_processes_get_cores_of_their_own(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    script = workspace.write("""
        import os
        cores = sorted(os.sched_getaffinity(0))
        assert os.environ["OMP_NUM_THREADS"] == str(len(cores)), os.environ["OMP_NUM_THREADS"]
        print(*cores)
    """)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core cannot be shared out")
    done = workspace.accel("launch", "--bind-cores", "--prefix=false", "--nproc-per-node", "2", script)
    shares = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    assert sorted(core for share in shares for core in share) == cores, done.stderr


def test_a_full_disk_ends_the_log_but_not_the_run(workspace: Workspace) -> None:
    (workspace.folder / "logs").mkdir()
    (workspace.folder / "logs/rank-0.log").symlink_to("/dev/full")
    done = workspace.accel("launch", "--log-dir", "logs", workspace.write("print('a', flush=True)\nprint('b')"))
    assert (done.returncode, done.stdout) == (0, "a\nb\n")
    assert done.stderr.startswith("accel: logs/rank-0.log ends here: No space left on device\n")


def test_a_module_runs_as_python_would_run_it(workspace: Workspace) -> None:
    code = """
        import sys
        from pkg import helper
        print(sys.argv, __name__, __package__, __spec__.name, sys.path[0])
        print(sys.modules["__main__"].__dict__ is globals())
    """
    workspace.write("", "pkg/__init__.py")
    workspace.write("", "pkg/helper.py")
    for name, module in {"pkg/train.py": "pkg.train", "pkg/__main__.py": "pkg"}.items():
        workspace.write(code, name)
        ours = workspace.accel("launch", "-m", module, "--epochs", "3")
        theirs = subprocess.run(
            [sys.executable, "-m", module, "--epochs", "3"], cwd=workspace.folder, capture_output=True, text=True
        )
        assert ours.stdout == theirs.stdout != "", ours.stderr


def test_a_module_that_fails_is_reported_at_its_own_line(workspace: Workspace) -> None:
    workspace.write("1 / 0", "broken.py")
    done = workspace.accel("launch", "-m", "broken")
    assert done.returncode == 1
    assert done.stderr.startswith("accel: rank 0 failed: ZeroDivisionError: division by zero - at ")
    assert "broken.py:1\n" in done.stderr
    assert "_worker" not in done.stderr


def test_a_program_needs_no_python(workspace: Workspace) -> None:
    done = workspace.accel("launch", "--no-python", "--nproc-per-node", "2", "sh", "-c", "echo $RANK")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0", "[rank 1] 1"]
    assert workspace.accel("launch", "--no-python", "sh", "-c", "exit 4").returncode == 4


def test_a_program_ends_with_a_launcher_that_is_killed(workspace: Workspace) -> None:
    launcher = workspace.start(
        "launch", "--no-python", "sh", "-c", "echo $$ > partial; mv partial pid-0; exec sleep 60"
    )
    [pid] = workspace.pids(1)
    launcher.kill()
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"))


def test_the_time_to_stop_is_a_setting(workspace: Workspace) -> None:
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nhere()\ntime.sleep(60)\n"
    launcher = workspace.start("launch", "--stop-grace-s", "0.2", workspace.write(HERE + stubborn))
    workspace.pids(1)
    launcher.terminate()
    _, err = launcher.communicate(timeout=patience(8))  # the default would take 10 s
    assert launcher.returncode == 143
    assert "killed because still running: rank 0" in err


def test_a_dry_run_prints_commands_that_a_shell_can_run(workspace: Workspace) -> None:
    script = workspace.write("import os, sys\nprint(os.environ['RANK'], os.environ['ACCEL_DEVICE'], sys.argv[1:])")
    done = workspace.accel("launch", "--dry-run", "--cpu", "--nproc-per-node", "2", script, "a b", "$x")
    assert done.returncode == 0, done.stderr
    shown = subprocess.run(["sh", "-c", done.stdout], capture_output=True, text=True, check=True, cwd=workspace.folder)
    assert shown.stdout == "0 cpu ['a b', '$x']\n1 cpu ['a b', '$x']\n"
    assert shlex.quote(str(script)) in done.stdout


def test_a_dry_run_of_one_host_of_several_shows_its_ranks(workspace: Workspace) -> None:
    flags = (
        "--nnodes",
        "3",
        "--node-rank",
        "2",
        "--nproc-per-node",
        "2",
        "--cpu",
        "--rdzv-endpoint",
        "localhost:29400",
    )
    done = workspace.accel("launch", "--dry-run", *flags, workspace.write(""))
    assert done.stdout.startswith("# host 2 of 3; "), done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("# rank")] == ["# rank 4", "# rank 5"]
    assert done.stdout.count("    WORLD_SIZE=6 \\\n") == done.stdout.count("    MASTER_ADDR=localhost \\\n") == 2


def test_a_dry_run_starts_nothing_and_shows_what_is_taken_away(workspace: Workspace) -> None:
    script = workspace.write("open('ran', 'w')")
    done = workspace.accel("launch", "--dry-run", "--log-dir", "logs", script, TORCHELASTIC_RUN_ID="7")
    assert "env -u TORCHELASTIC_RUN_ID" in done.stdout
    assert sorted(path.name for path in workspace.folder.iterdir()) == ["script.py"]
    done = workspace.accel("launch", "--dry-run", "nowhere.py")
    assert (done.returncode, done.stdout) == (2, "")
