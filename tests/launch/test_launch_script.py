# SPDX-License-Identifier: Apache-2.0
"""A launched script sees what `python script.py` would show it, and its output comes through."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from launching import ACCEL, HERE, Workspace
from processes import patience

pytestmark = pytest.mark.multiprocess


def test_a_script_sees_what_python_would_show_it(workspace: Workspace) -> None:
    script = workspace.write(
        """
        import atexit, sys
        import beside
        def show(when):
            main = sys.modules["__main__"]
            print(when, main.__name__, main.__spec__, main.show is show, sys.argv, sys.path[0])
        show("now")
        print(__file__)
        atexit.register(show, "at exit")
        """,
        "inner/script.py",
    )
    workspace.write("", "inner/beside.py")
    words = ("--help", "--nproc-per-node", "9", "--", "-x", "", "two words")
    plain = subprocess.run(
        [sys.executable, "inner/script.py", *words], cwd=workspace.folder, capture_output=True, text=True, check=True
    )
    done = workspace.accel("launch", "inner/script.py", *words)
    hint = "accel: --nproc-per-node goes to the script: flags of accel launch come before it\n"
    assert (done.returncode, done.stderr) == (0, hint)
    assert done.stdout == plain.stdout
    assert str(script) in done.stdout


def test_files_of_the_current_folder_do_not_take_the_place_of_modules(workspace: Workspace) -> None:
    for name in ("signal", "ctypes", "msgspec", "traceback", "types"):
        workspace.write("raise SystemExit('shadowed')", f"{name}.py")
    script = workspace.write("print('fine')", "inner/script.py")
    done = subprocess.run(
        [sys.executable, "-P", *ACCEL[1:], "launch", str(script)],
        cwd=workspace.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_multiprocessing_finds_functions_and_classes_of_the_script(workspace: Workspace, method: str) -> None:
    script = workspace.write(f"""
        import multiprocessing
        class Pair:
            def __init__(self, x): self.x = x
        def double(pair): return Pair(pair.x * 2)
        if __name__ == "__main__":
            with multiprocessing.get_context("{method}").Pool(1) as pool:
                print([pair.x for pair in pool.map(double, [Pair(1), Pair(2)])])
        """)
    done = workspace.accel("launch", "--nproc-per-node", "2", script)
    assert (done.returncode, done.stderr[:30]) == (0, "accel: 2 ranks finished after ")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] [2, 4]", "[rank 1] [2, 4]"]


def test_neither_the_launcher_nor_its_worker_imports_torch(workspace: Workspace) -> None:
    workspace.write("raise ImportError('torch was imported')", "fake/torch.py")
    script = workspace.write("import sys\nprint('torch' in sys.modules)")
    done = workspace.accel("launch", "--nproc-per-node", "2", script, PYTHONPATH=str(workspace.folder / "fake"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] False", "[rank 1] False"]
    code = (
        "import os, sys; from accel.launching import run_launch\n"
        f"status = run_launch({str(script)!r}, environ=os.environ); print(status, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n0 False\n"


def test_a_launch_does_not_change_the_environment_of_its_caller(workspace: Workspace) -> None:
    script = workspace.write("import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])")
    code = (
        "import os; from accel.config import LaunchConfig\n"
        "from accel.launching import run_launch; before = dict(os.environ)\n"
        "outer = {**os.environ, 'RANK': '7', 'WORLD_SIZE': '9'}\n"
        f"run_launch({str(script)!r}, config=LaunchConfig(nproc_per_node=2), environ=outer)\n"
        "assert before == dict(os.environ)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 2", "[rank 1] 1 2"]


def test_megabytes_from_all_ranks_come_whole_line_by_line(workspace: Workspace) -> None:
    script = workspace.write(f"""{HERE}
for line in range(20_000):
    os.write(1 + line % 2, b"%d %05d %s\\n" % (rank, line, b"x" * 100))
""")
    done = workspace.accel("launch", "--nproc-per-node", "2", script)
    assert done.returncode == 0
    for stream, odd in ((done.stdout, 0), (done.stderr, 1)):
        lines = stream.splitlines()
        for rank in range(2):
            mine = [line for line in lines if line.startswith(f"[rank {rank}] {rank} ")]
            assert mine == [f"[rank {rank}] {rank} {line:05d} {'x' * 100}" for line in range(odd, 20_000, 2)]
        assert len(lines) == 20_000 + odd  # the launcher's last line


def test_a_line_written_in_pieces_is_shown_in_one(workspace: Workspace) -> None:
    script = workspace.write(
        "import time\nfor word in 'abc':\n    print(word, end='')\n    time.sleep(0.05)\nprint()\n"
    )
    done = workspace.accel("launch", "--nproc-per-node", "2", script)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] abc", "[rank 1] abc"]


def test_bytes_that_are_no_text_come_through(workspace: Workspace) -> None:
    script = workspace.write("import os\nos.write(1, b'\\xff\\xfe\\n')\n")
    for n, prefix in (("1", b""), ("2", b"[rank 0] ")):
        done = subprocess.run(
            [*ACCEL, "launch", "--nproc-per-node", n, str(script)],
            capture_output=True,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        assert prefix + b"\xff\xfe\n" in done.stdout


def test_one_process_has_the_launchers_own_streams(workspace: Workspace) -> None:
    script = workspace.write("import sys\nsys.stdout.write('\\r10%\\r20% ' + sys.stdin.read())")
    done = subprocess.run([*ACCEL, "launch", str(script)], input=b"read", capture_output=True, check=True)
    assert done.stdout == b"\r10%\r20% read"


def test_a_reader_that_goes_away_ends_the_run(workspace: Workspace) -> None:
    script = workspace.write("while True:\n    print('x' * 1000)\n")
    launcher = workspace.start("launch", "--nproc-per-node", "2", script)
    assert launcher.stdout is not None
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.stderr is not None
    err = launcher.stderr.read()
    assert launcher.wait(patience(5)) == 1
    assert "failed: BrokenPipeError" in err


def test_an_error_of_a_hook_users_installed_is_theirs_to_show(workspace: Workspace) -> None:
    script = workspace.write("""
        import sys
        def hook(kind, error, trace, before=sys.excepthook):
            print("hook saw", error)
            before(kind, error, trace)
        sys.excepthook = hook
        raise ValueError("bad")
        """)
    done = workspace.accel("launch", script)
    assert done.stdout == "hook saw bad\n"
    assert done.stderr.count("Traceback") == 1


def test_a_launch_of_no_op_workers_is_quick(workspace: Workspace) -> None:
    script = workspace.write("")
    began = time.monotonic()
    assert workspace.accel("launch", "--nproc-per-node", "2", script).returncode == 0
    assert time.monotonic() - began < patience(5)
