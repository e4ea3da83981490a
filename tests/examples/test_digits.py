# SPDX-License-Identifier: Apache-2.0
"""The digits example: what it prints and leaves behind, its accuracy, and runs that are killed and go on."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from catching import assert_raises
from processes import job, patience, script_ranks, wait_for

import accel
from accel.testing import simulate

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"
STEPS = 23  # optimizer steps in an epoch: 1,437 training images in batches of 64


@pytest.fixture(scope="module")
def digits() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("digits_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where msgspec looks up the types of fields
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(autouse=True)
def streams() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def run(script: Path, world: int, *words: object, folder: Path) -> str:
    """Run a script to its end on so many ranks, and return what rank 0 printed."""
    with script_ranks(script, job(world), *words, folder=folder) as ranks:
        assert not any(rank.wait(120) for rank in ranks), [rank.said() for rank in ranks]
        return ranks[0].said()


def kill_once(script: Path, world: int, *words: object, folder: Path, ready: Callable[[], bool]) -> None:
    """Run a script on so many ranks, and kill them as soon as it is ready."""
    with script_ranks(script, job(world), *words, folder=folder):
        wait_for(ready, 60)


def newest(out: Path) -> int:
    """Return the step of the newest checkpoint, -1 if there is none."""
    return max((int(path.name[5:]) for path in out.glob("step-" + "[0-9]" * 8)), default=-1)


def lines(out: Path) -> list[dict[str, Any]]:
    """Return a run's metrics, without what a clock decides."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if name != "time"} for row in rows]


def stored(digits: ModuleType, out: Path) -> dict[str, torch.Tensor]:
    """Return the parameters of the last checkpoint."""
    path = accel.latest_checkpoint(out)
    assert path is not None
    model, names = digits.make_model(), json.loads((path / "manifest.json").read_text())["items"]
    _ = accel.load_state(accel.single(), path, dict.fromkeys(names) | {"model": model})
    return model.state_dict()


def assert_same_numbers(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-3)
        assert mine["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-3)
        assert mine["lr"] == theirs["lr"]
        assert (mine["tested"], theirs["tested"]) == (360, 360)
        assert (mine["samples"], theirs["samples"]) == (1437, 1437)
        assert abs(mine["right"] - theirs["right"]) <= 2


def test_a_short_run_leaves_metrics_and_checkpoints(
    digits: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digits.main(accel.single(), digits.Settings(epochs=2, out=str(tmp_path)))
    out, err = capsys.readouterr()
    table = lines(tmp_path)
    assert [row["step"] for row in table] == [STEPS, 2 * STEPS]
    last = table[-1]
    losses = f"train_loss {last['train_loss']:#.4g}  test_loss {last['test_loss']:#.4g}"
    assert out.splitlines()[1:] == [
        f"step    46  epoch      2  {losses}  accuracy {last['accuracy']:>6.1%}",
        f"curves: accel report {tmp_path}",
    ]
    assert "\r" not in err  # no progress bar where there is no terminal
    assert last["right"] / last["tested"] > 0.85
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000023", "step-00000046"]
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["project"], run["status"], run["config"]["epochs"]) == ("digits", "finished", 2)

    digits.main(accel.single(), digits.Settings(epochs=2, out=str(tmp_path)))
    assert "step-00000046: 46 of 46 steps are done" in capsys.readouterr().out
    assert lines(tmp_path) == table  # complete, and nothing was trained or measured anew


@pytest.mark.parametrize(
    ("world", "accumulate"),
    [pytest.param(1, 4, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow), (3, 2)],
)
def test_ranks_and_accumulation_do_not_change_the_run(
    digits: ModuleType, tmp_path: Path, world: int, accumulate: int
) -> None:
    digits.main(accel.single(), digits.Settings(epochs=1, out=str(tmp_path / "alone")))
    settings = digits.Settings(epochs=1, out=str(tmp_path / "many"))
    simulate(lambda ctx: digits.main(accel.replace(ctx, accumulation=accumulate), settings), world)
    assert_same_numbers(lines(tmp_path / "many"), lines(tmp_path / "alone"))


def test_other_settings_than_the_checkpoints_are_refused(digits: ModuleType, tmp_path: Path) -> None:
    digits.main(accel.single(), digits.Settings(epochs=1, out=str(tmp_path)))
    with assert_raises(
        accel.errors.ConfigError, expected=r"--lr 0\.004", got=r"--lr 0\.1", where="step-00000023", fix="Give the"
    ):
        digits.main(accel.single(), digits.Settings(epochs=1, out=str(tmp_path), lr=0.1))
    digits.main(accel.single(), digits.Settings(epochs=2, out=str(tmp_path)))
    assert len(lines(tmp_path)) == 2


def test_a_batch_that_does_not_divide_is_refused(digits: ModuleType, tmp_path: Path) -> None:
    with assert_raises(
        accel.errors.ConfigError, problem="a batch does not divide", got="64 images in 3 parts", where="--batch-size"
    ):
        digits.main(accel.single(accumulation=3), digits.Settings(out=str(tmp_path)))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--epochs -1", "argument --epochs: Expected `int` >= 1, got '-1'"),
        ("--epochs many", "argument --epochs: Expected `int`, got `str`, got 'many'"),
        ("--lr nan", "argument --lr: Expected `float` > 0.0, got 'nan'"),
        ("--save-every -2", "argument --save-every: Expected `int` >= 0, got '-2'"),
        ("--epoch 3", "unrecognized arguments: --epoch 3"),
    ],
)
def test_bad_flags_take_one_line(
    digits: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["digits.py", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        digits.read_flags()
    assert capsys.readouterr() == ("", f"digits.py: error: {told}\n")


def test_a_missing_package_is_named_before_training(
    digits: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with assert_raises(
        accel.errors.MissingExtraError, problem="scikit-learn", fix=r"pip install 'accel-torch\[examples\]'"
    ):
        digits.main(accel.single(), digits.Settings(out=str(tmp_path)))
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_two_processes_reach_97_percent(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accel.cli", "launch", "--nproc-per-node", "2"]
    command = [*launch, str(EXAMPLE), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120), check=False)
    assert done.returncode == 0, done.stderr
    rows = lines(tmp_path)
    assert len(rows) == 12
    assert rows[-1]["right"] >= 0.97 * 360
    assert f"accuracy {rows[-1]['accuracy']:>6.1%}\n" in done.stdout
    assert "[rank 0] step   276  epoch     12  " in done.stdout
    assert "[rank 1]" not in done.stdout


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_a_run_killed_in_an_epoch_ends_as_one_never_killed(digits: ModuleType, tmp_path: Path) -> None:
    flags = ("--epochs", 3, "--save-every", 5, "--out")
    run(EXAMPLE, 2, *flags, tmp_path / "whole", folder=tmp_path)

    killed = tmp_path / "killed"
    kill_once(EXAMPLE, 2, *flags, killed, folder=tmp_path, ready=lambda: newest(killed) > STEPS)
    assert STEPS < newest(killed) < 3 * STEPS  # the signal is fast enough to come in the second epoch, mostly
    assert f"going on from {killed}/step-000000" in run(EXAMPLE, 2, *flags, killed, folder=tmp_path)

    assert lines(tmp_path / "whole") == lines(killed)
    assert len(lines(killed)) == 3
    whole = stored(digits, tmp_path / "whole")
    resumed = stored(digits, killed)
    for name, parameter in whole.items():
        assert torch.equal(parameter.view(torch.int32), resumed[name].view(torch.int32)), name


SAMPLES, BATCH = 203, 8
ID_SCRIPT = f"""
import json, sys, time
from pathlib import Path
import accel, torch
from torch.utils.data import DataLoader, TensorDataset

out = Path(sys.argv[1])
with accel.session() as ctx:
    def note(**line):
        with open(out / "ids.jsonl", "a") as file:
            file.write(json.dumps(line) + "\\n")

    note = accel.on_main_process(ctx, note)
    data = DataLoader(TensorDataset(torch.arange({SAMPLES})), batch_size={BATCH}, shuffle=True)
    loader, cursor, step = accel.prepare_loader(ctx, data, global_batch={BATCH}), accel.Cursor(seed=3), 0
    if found := accel.latest_checkpoint(out / "saved"):
        loaded = accel.load_state(ctx, found, {{"cursor": cursor, "step": step}})
        cursor, step = loaded["cursor"], loaded["step"]
        note(resumed=step, world=ctx.world_size)
    while cursor.epoch < 1:
        for batch in accel.batches(ctx, loader, cursor):
            cursor, step = batch.next, step + 1
            note(step=step, ids=accel.gather_for_metrics(ctx, batch.data[0], batch).tolist())
            accel.save_state(ctx, out / "saved", {{"cursor": cursor, "step": step}}, step=step, keep=2)
            time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_killed_on_two_ranks_and_resumed_on_one_sees_every_sample_once(tmp_path: Path) -> None:
    script = tmp_path / "ids.py"
    script.write_text(ID_SCRIPT)
    kill_once(script, 2, tmp_path, folder=tmp_path, ready=lambda: newest(tmp_path / "saved") >= 7)
    run(script, 1, tmp_path, folder=tmp_path)

    lines = [json.loads(line) for line in (tmp_path / "ids.jsonl").read_text().splitlines()]
    (at,) = (i for i, line in enumerate(lines) if "resumed" in line)
    resumed = lines[at]["resumed"]
    assert 7 <= resumed < SAMPLES // BATCH
    assert lines[at]["world"] == 1
    # a step whose samples were noted, but which no checkpoint holds, has not been
    taken = [line for line in lines[:at] if line["step"] <= resumed] + lines[at + 1 :]
    assert [line["step"] for line in taken] == list(range(1, len(taken) + 1))
    assert sorted(sample for line in taken for sample in line["ids"]) == list(range(SAMPLES))
