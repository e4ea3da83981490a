# SPDX-License-Identifier: Apache-2.0
"""Functions launched on real processes: values in rank order, exceptions whole, nobody left, nothing sent by half."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from launching import Workspace, alive
from processes import patience, wait_for

import accel
from accel.config import LaunchConfig
from accel.launching._function import launch_placed
from accel.launching.local import _function_rank

E2E = pytest.mark.multiprocess


class RefusedError(Exception):
    """An error of the user's, with a field."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text, code)
        self.code = code


def total(ctx: accel.DistContext, values: torch.Tensor, factor: int) -> tuple[int, int, str, torch.Tensor]:
    return ctx.rank, int(accel.reduce(ctx, values[ctx.rank])) * factor, ctx.precision.compute, values


def fail(ctx: accel.DistContext) -> None:
    if ctx.rank == 1:
        raise RefusedError("no more", 7)
    accel.wait_for_everyone(ctx)


def leave(ctx: accel.DistContext, how: str) -> Any:
    accel.wait_for_everyone(ctx)  # or one that is still joining fails first
    if ctx.rank == 0:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "exit":
            os._exit(0)
    return threading.Lock() if how == "lock" else None


@E2E
@pytest.mark.kept("slow")
def test_values_come_back_in_rank_order_and_the_environment_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCEL_PRECISION", "bf16")
    before = dict(os.environ)
    config = LaunchConfig(device="cpu", precision="bf16", log_dir=str(tmp_path / "logs"))
    values = accel.launch(total, (torch.tensor([3, 4]), 10), nproc=2, config=config)
    assert [value[:3] for value in values] == [(0, 70, "bf16"), (1, 70, "bf16")]
    assert all(value[3].tolist() == [3, 4] for value in values)
    assert dict(os.environ) == before
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["launches", "rank-0.log", "rank-1.log"]


@E2E
def test_the_first_failing_ranks_exception_comes_back_whole() -> None:
    with pytest.raises(RefusedError, match="no more") as raised:
        accel.debug_launcher(fail)
    assert raised.value.code == 7
    (note,) = raised.value.__notes__
    assert note.startswith("rank 1 of 2 raised this\n")
    assert 'raise RefusedError("no more", 7)' in note
    assert "_called" not in note
    assert "_worker" not in note


@E2E
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("kill", accel.errors.LaunchError, "rank 0 was killed by SIGKILL"),
        ("interrupt", accel.errors.LaunchError, "rank 0 failed: KeyboardInterrupt"),
        ("exit", accel.errors.LaunchError, "rank 0 ended before it returned a value"),
        ("lock", accel.errors.ConfigError, "cannot be pickled"),
    ],
)
def test_a_rank_without_a_value_is_told(how: str, error: type[Exception], words: str) -> None:
    with assert_raises(error, problem=words):
        accel.debug_launcher(leave, (how,))


@E2E
@pytest.mark.slow
def test_what_a_script_defines_goes_by_value_and_needs_no_guard(workspace: Workspace) -> None:
    script = workspace.write("""
        import dataclasses, accel, torch
        a = torch.randn(600, 600)
        (a @ a).sum()  # OpenMP's threads are awake, and a fork would hang
        @dataclasses.dataclass
        class Out:
            rank: int
        scale = 2
        values = accel.debug_launcher(lambda ctx: Out(ctx.rank * scale))
        assert values == [Out(0), Out(2)], values
        print("done")
        """)
    environ = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, script]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=patience(60), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@E2E
@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 1), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_no_rank_outlives_its_parent(workspace: Workspace, number: int, status: int) -> None:
    script = workspace.write("""
        import accel, os, time
        def wait(ctx):
            with open(f"partial-{ctx.rank}", "w") as file:
                file.write(str(os.getpid()))
            os.replace(f"partial-{ctx.rank}", f"pid-{ctx.rank}")
            time.sleep(60)
        try:
            accel.debug_launcher(wait)
        except KeyboardInterrupt:
            raise SystemExit(1)
        """)
    popen = subprocess.Popen([sys.executable, script], cwd=workspace.folder, stderr=subprocess.PIPE, text=True)
    workspace.started.append(popen)
    wait_for(lambda: len(list(workspace.folder.glob("pid-*"))) == 2, seconds=60)
    pids = workspace.pids(2)
    popen.send_signal(number)
    assert popen.wait(timeout=patience(15)) == status
    wait_for(lambda: not any(map(alive, pids)), seconds=5)


def test_the_function_keeps_its_name_whatever_was_imported_before() -> None:
    code = """
import sys
import {first}
import accel
from accel.launching._function import launch
assert accel.launch is launch
assert "torch" not in sys.modules
"""
    for first in ("accel", "accel.launching"):
        subprocess.run([sys.executable, "-c", code.format(first=first)], check=True, timeout=patience(60))


def test_settings_without_effect_are_refused() -> None:
    with assert_raises(accel.errors.ConfigError, problem="launched on this machine", expected="nnodes=1"):
        accel.launch(total, config=LaunchConfig(nnodes=2, rdzv_endpoint="a:1"))
    with assert_raises(accel.errors.ConfigError, problem="start once", expected="max_restarts=0"):
        launch_placed(
            total, (), nproc=1, config=LaunchConfig(max_restarts=1), place=lambda _config, _call: nullcontext()
        )


def test_ranks_that_start_again_leave_nothing_of_the_last_time(tmp_path: Path) -> None:
    _function_rank.send_call(str(tmp_path), b"call")
    _function_rank.send_value(str(tmp_path), 0, b"value")
    _function_rank.send_error(str(tmp_path), 1, RefusedError("", 1), "")
    _function_rank.drop_results(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["call"]


def test_what_cannot_be_sent_is_refused_before_anything_starts() -> None:
    with assert_raises(
        accel.errors.ConfigError, problem="there is no function to launch", expected="a function", got="'train.py'"
    ):
        _ = accel.launch("train.py", nproc=2)  # type: ignore[arg-type]
    with assert_raises(accel.errors.ConfigError, fix=r"Write \(3,\) for one argument"):
        _ = accel.launch(print, 3, nproc=2)  # type: ignore[arg-type]
    with assert_raises(
        accel.errors.ConfigError, problem="cannot be pickled", got="tuple", where="the function to launch"
    ):
        accel.debug_launcher(total, (threading.Lock(),))


def test_without_the_extra_what_has_a_module_is_sent_and_the_rest_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_function_rank, "find_spec", lambda _: None)
    assert _function_rank.unpack(_function_rank.pack((total, [1, RefusedError]), "here"), "here") == (
        total,
        [1, RefusedError],
    )
    monkeypatch.setattr(RefusedError, "__module__", "__main__")
    for sent in (lambda ctx: ctx, RefusedError("", 1)):
        with assert_raises(accel.errors.MissingExtraError, fix=r"accel-torch\[notebook\]"):
            _function_rank.pack(sent, "here")


def test_only_the_main_thread_launches() -> None:
    caught: list[BaseException] = []

    def call() -> None:
        try:
            accel.debug_launcher(total)
        except accel.errors.LaunchError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


def test_an_exception_that_cannot_travel_leaves_its_traceback(tmp_path: Path) -> None:
    class LocalError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(one)

    for error in (LocalError(1, 2), OSError(threading.Lock())):
        _function_rank.send_error(str(tmp_path), 0, error, "the traceback")
        assert _function_rank.receive_error(str(tmp_path), 0) == (None, "the traceback")
    assert _function_rank.receive_error(str(tmp_path), 1) is None
