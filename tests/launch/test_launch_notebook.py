# SPDX-License-Identifier: Apache-2.0
"""Launches from notebooks: hosts that are recognized by their variables, TPUs there, and one real notebook."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from catching import assert_raises
from processes import patience

import accel
from accel.config import LaunchConfig
from accel.launching import _function
from accel.launching._function import HostedNotebook, choose_device, rank_environ, read_hosted
from accel.run_folder import read_launches

COLAB = {"COLAB_RELEASE_TAG": "release-colab_20261101-060104_RC00", "COLAB_GPU": "1", "COLAB_TPU_1VM": ""}
COLAB_TPU = {"COLAB_RELEASE_TAG": "r", "COLAB_TPU_1VM": "1", "TPU_ACCELERATOR_TYPE": "v5e-1"}
KAGGLE = {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "COLAB_RELEASE_TAG": "r"}  # its image grows out of Colab's
KAGGLE_TPU = KAGGLE | {"PJRT_DEVICE": "TPU", "TPU_PROCESS_ADDRESSES": "local", "CLOUD_TPU_TASK_ID": "0"}
AUTO = LaunchConfig(nproc_per_node="auto")


@pytest.fixture
def chips(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with torch_xla, whose number of chips a test sets."""
    machine = SimpleNamespace(tpu_chips=8)
    monkeypatch.setattr(_function, "find_spec", lambda _: object())
    monkeypatch.setattr(_function, "read_machine", lambda: machine)
    return machine


@pytest.mark.parametrize(
    ("environ", "hosted"),
    [
        ({}, None),
        ({"JPY_PARENT_PID": "7", "PJRT_DEVICE": "TPU"}, None),
        (COLAB, HostedNotebook("Colab")),
        (COLAB_TPU, HostedNotebook("Colab", "v5e-1")),
        (COLAB | {"COLAB_TPU_ADDR": "10.0.0.2:8470"}, HostedNotebook("Colab", "a TPU", is_remote=True)),
        (KAGGLE, HostedNotebook("Kaggle")),
        (KAGGLE_TPU, HostedNotebook("Kaggle", "a TPU")),
    ],
)
def test_hosts_are_recognized_by_their_variables(environ: dict[str, str], hosted: HostedNotebook | None) -> None:
    assert read_hosted(environ) == hosted


def test_a_tpu_is_taken_where_nobody_chose_a_device(chips: SimpleNamespace) -> None:
    tpu = read_hosted(KAGGLE_TPU)
    assert choose_device(AUTO, tpu, {}).device == "xla"
    assert choose_device(LaunchConfig(device="cpu"), tpu, {}).device == "cpu"
    for elsewhere in (None, read_hosted(COLAB)):
        assert choose_device(AUTO, elsewhere, {}) is AUTO
    assert choose_device(LaunchConfig(nproc_per_node=8), tpu, {}).device == "xla"
    chips.tpu_chips = 0
    assert choose_device(AUTO, tpu, {}).device == "xla"
    with assert_raises(accel.errors.LaunchError, expected="nproc=1", got="nproc=8", where="Kaggle, a TPU"):
        choose_device(LaunchConfig(nproc_per_node=8), tpu, {})


def test_variables_that_mislead_xla_do_not_reach_the_ranks() -> None:
    left = KAGGLE | {"PJRT_DEVICE": "TPU"}
    assert rank_environ(KAGGLE_TPU, read_hosted(KAGGLE_TPU)) == left
    elsewhere = {"TPU_PROCESS_ADDRESSES": "a,b"}
    assert rank_environ(elsewhere, read_hosted(elsewhere)) == elsewhere


def test_a_tpu_that_cannot_be_used_is_refused_before_anything_starts(
    chips: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: Any = ModuleType("torch_xla")
    used._XLAC = SimpleNamespace(_xla_runtime_is_initialized=lambda: True)
    with assert_raises(
        accel.errors.LaunchError, problem="this process holds the TPU", where="Colab, v5e-1", fix="Restart the kernel"
    ):
        choose_device(AUTO, read_hosted(COLAB_TPU), {"torch_xla": used})
    with assert_raises(accel.errors.LaunchError, problem="behind the network"):
        choose_device(AUTO, read_hosted(COLAB | {"COLAB_TPU_ADDR": "10.0.0.2:8470"}), {})
    monkeypatch.setattr(_function, "find_spec", lambda _: None)
    with assert_raises(
        accel.errors.MissingExtraError, problem="only torch_xla drives", fix=r"torch_xla\[tpu\].*device=\"cpu\""
    ):
        accel.launch(print, environ=COLAB_TPU, config=AUTO)


CELLS = (
    "import accel, os, sys, time; from accel.config import LaunchConfig",
    """
def train(ctx, steps):
    if ctx.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("a bad start")
    accel.wait_for_everyone(ctx)
    for step in range(steps):
        print(f"\\rstep {step}", end="", file=sys.stderr, flush=True)
        time.sleep(0.01)
    print(file=sys.stderr)
    print("trained on", ctx.device)
    return ctx.rank

config = LaunchConfig(device="cpu", max_restarts=1, log_dir="logs")
accel.launch(train, (100,), nproc=2, config=config)
""",
    """
def fails(ctx):
    if ctx.rank == 1:
        raise KeyError("label")
    accel.wait_for_everyone(ctx)

accel.debug_launcher(fails)
""",
)


@pytest.mark.multiprocess
@pytest.mark.engine
@pytest.mark.slow
def test_a_real_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it, a kernel does not show what its children print
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(
        notebook,
        timeout=int(patience(120)),
        allow_errors=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    _, trained, failed = notebook.cells

    shown = {"stdout": "", "stderr": ""}
    for output in trained.outputs:
        if output.output_type == "stream":
            shown[output.name] += output.text
    (result,) = (output for output in trained.outputs if output.output_type == "execute_result")
    assert result.data["text/plain"] == "[0, 1]"
    assert sorted(shown["stdout"].splitlines()) == ["[rank 0] trained on cpu", "[rank 1] trained on cpu"]
    assert "accel: rank 1 failed: ValueError: a bad start" in shown["stderr"]
    assert "accel: all ranks start again, restart 1 of 1\n" in shown["stderr"]
    states = re.findall(r"\[rank [01]\] step \d+[\r\n]", shown["stderr"])
    assert {"[rank 0] step 99\n", "[rank 1] step 99\n"} <= set(states)
    assert len(states) < 20, "200 states were printed"

    (record,) = read_launches(tmp_path / "logs")
    assert record.command == ("__main__.train",)
    assert (record.restarts, record.status, len(record.attempts)) == (1, 0, 2)
    assert record.attempts[0].error is not None
    assert record.attempts[0].error.message == "a bad start"

    (error,) = (output for output in failed.outputs if output.output_type == "error")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
    assert (error.ename, error.evalue) == ("KeyError", "'label'")
    assert "rank 1 of 2 raised this" in plain
    assert 'raise KeyError("label")' in plain
    assert "debug_launcher(fn" not in plain, "frames of the launcher are hidden"
