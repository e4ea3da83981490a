# SPDX-License-Identifier: Apache-2.0
"""`accel checkpoint`: what it prints, what it finds, what it deletes, and that looking needs no torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ckpt_helpers import CPU, Run
from processes import patience

from accel import save_state
from accel.checkpoint._retention import verify
from accel.cli import main
from accel.storage import as_place, take_lock
from accel.storage._place import LocalPlace


def runs(out: Path, steps: int = 4) -> list[Path]:
    run = Run()
    return [save_state(CPU, out, run.items(), step=step, metrics={"loss": 1 / step}) for step in range(1, steps + 1)]


def damage(path: Path) -> str:
    """Flip a bit of a checkpoint's tensors; return the file's name."""
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file.name


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = main(["checkpoint", *map(str, words)])
    out, err = capsys.readouterr()
    return status, out, err


def test_ls_tells_whole_broken_and_unfinished_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = runs(tmp_path, 3)
    (paths[1] / "manifest.json").write_text("{}")
    os.mkdir(tmp_path / "step-00000009.tmp-elsewhere-1-0123abcd")
    (tmp_path / "notes").mkdir()
    status, out, _ = told(capsys, "ls", tmp_path)
    title, first, second, third, stage = out.splitlines()
    assert status == 0
    assert title.split() == ["NAME", "SIZE", "AGE", "RANKS", "HOLDS"]
    assert first.startswith("step-00000001")
    assert "model optimizer scheduler cursor window loss=1" in first
    assert "[manifest.json: damaged: the digest does not fit the contents]" in second
    assert "loss=0.333333" in third
    assert "[being written or deleted]" in stage
    assert told(capsys, "ls", tmp_path / "notes")[1].startswith("no checkpoints")


def test_ls_marks_the_best_by_metrics_whose_names_tell_or_by_the_one_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = [(0.5, 0.2, 1.0), (0.25, 0.2, 3.0), (0.5, 0.1, 3.0), (0.25, 0.1, 2.0)]
    for step, (loss, accuracy, size) in enumerate(values):
        metrics = {"valid_loss": loss, "accuracy": accuracy, "size": size}
        save_state(CPU, tmp_path, {"a": 1}, step=step, metrics=metrics)

    def marks(*flags: str) -> list[list[str]]:
        lines = told(capsys, "ls", tmp_path, *flags)[1].splitlines()[1:]
        return [[word for word in line.split() if word.startswith("best-")] for line in lines]

    assert marks() == [[], ["best-accuracy"], [], ["best-valid_loss"]]
    assert marks("--by", "size", "--max") == [[], [], ["best-size"], []]
    assert marks("--by", "size") == [["best-size"], [], [], []]


def test_ls_leaves_out_what_a_run_deletes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = runs(tmp_path, 3)
    stage = tmp_path / "step-00000009.tmp-elsewhere-1-0123abcd"
    stage.mkdir()
    status, out, _ = told(capsys, "ls", tmp_path)
    for path in (paths[0], stage):
        assert path.name in out
    usage = LocalPlace.usage

    def delete_first(place: LocalPlace) -> tuple[int, float]:
        if place.path in (paths[0], stage):
            shutil.rmtree(place.path)
        return usage(place)

    monkeypatch.setattr(LocalPlace, "usage", delete_first)
    status, out, err = told(capsys, "ls", tmp_path)
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:]] == [path.name for path in paths[1:]]


def test_show_tells_items_and_tensors_of_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = runs(tmp_path, 2)[-1]
    status, out, _ = told(capsys, "show", tmp_path, "--tensors")
    assert status == 0
    assert out.startswith(f"{newest}\nstep 2, ")
    assert "optimizer  optimizer  AdamW" in out
    assert re.search(r"model\.0\.weight +float32 \[6, 4\] +tensors-00000-of-00001\.safetensors\n", out)
    assert "$rng" not in out


def test_verify_names_what_is_damaged_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = runs(tmp_path, 3)
    assert told(capsys, "verify", tmp_path)[0] == 0
    name = damage(paths[0])
    next(paths[1].glob("*.safetensors")).unlink()
    status, out, err = told(capsys, "verify", tmp_path)
    assert (status, err) == (1, "")
    assert f"{paths[0]}: {name}: damaged: the digest" in out
    assert f"{paths[1]}: {name}: missing" in out
    assert f"{paths[2]}: ok" in out
    assert told(capsys, "verify", paths[0])[0] == 1
    assert told(capsys, "verify", paths[2])[0] == 0


def test_verify_tells_how_far_it_is(tmp_path: Path) -> None:
    path = runs(tmp_path, 1)[0]
    counts: list[int] = []
    assert verify(as_place(path), counts.append) == []
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert sum(counts) == sum(each["size"] for each in files.values())


def test_diff_tells_items_shapes_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, wider = Run(), Run(width=7)
    one = save_state(CPU, tmp_path / "one", {"model": run.model, "best": 1}, step=1)
    same = save_state(CPU, tmp_path / "same", {"model": run.model, "best": 1}, step=1)
    other = save_state(CPU, tmp_path / "other", {"model": wider.model, "best": 2}, step=1)
    with torch.no_grad():
        run.model[0].weight[0, 0] += 0.5
    changed = save_state(CPU, tmp_path / "changed", {"model": run.model, "best": 1}, step=1)
    assert told(capsys, "diff", one, same, "--values")[:2] == (0, "no difference\n")
    status, out, _ = told(capsys, "diff", one, other)
    assert status == 1
    assert "item best: value int | value int, of another value" in out
    assert "tensor model.0.weight: float32 [6, 4] | float32 [7, 4]" in out
    assert told(capsys, "diff", one, changed)[1].startswith("tensors may have other values")
    status, out, _ = told(capsys, "diff", one, changed, "--values")
    assert (status, out) == (1, "tensor model.0.weight: 1 of 24 values differ, by at most 0.5\n")
    assert told(capsys, "diff", one, same)[:2] == (0, "no difference\n")


def test_prune_keeps_by_the_rule_and_never_what_is_not_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    paths = runs(tmp_path, 6)
    (paths[0] / "note.txt").write_text("mine")
    os.mkdir(tmp_path / "step-00000099")
    rule = ("--keep", 1, "--every", 3, "--best", 1, "--by", "loss", "--max")
    before = sorted(os.listdir(tmp_path))
    assert told(capsys, "prune", tmp_path, "--keep", 5, "--dry-run")[1] == f"would delete {paths[0]}\n"
    status, out, _ = told(capsys, "prune", tmp_path, *rule, "--dry-run")
    assert (status, out.count("would delete")) == (0, 3)
    assert sorted(os.listdir(tmp_path)) == before
    assert told(capsys, "prune", tmp_path, *rule)[1] == "".join(f"deleted {paths[at]}\n" for at in (1, 3, 4))
    assert told(capsys, "prune", tmp_path, "--keep", 1)[1].count("deleted") == 1
    assert sorted(os.listdir(tmp_path)) == [paths[0].name, paths[5].name, "step-00000099"]
    assert "holds what accel did not write" in caplog.text
    assert told(capsys, "prune", tmp_path / "step-00000099", "--keep", 1)[1] == "nothing to delete\n"


def test_prune_stays_out_while_a_run_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs(tmp_path, 2)
    lock = take_lock(tmp_path)
    status, _, err = told(capsys, "prune", tmp_path, "--keep", 1)
    lock.release()
    assert status == 2
    assert str(os.getpid()) in err
    assert len([name for name in os.listdir(tmp_path) if name.startswith("step")]) == 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["lss"], "unknown command: got 'lss' - at accel checkpoint. Did you mean `ls`?"),
        (["ls"], "the following arguments are required: RUN"),
        (["ls", "nowhere"], "there is no such folder: got 'nowhere' - at accel checkpoint"),
        (["prune", "nowhere", "--keep", "1"], "Pass the folder that the script passes to save_state."),
        (["diff", ".", "nowhere"], "there is no such folder: got 'nowhere'"),
        (["show", "."], "the folder is neither a checkpoint nor a run: expected a folder with manifest.json"),
        (["show", ".", "--tensor"], "Did you mean `--tensors`?"),
        (["diff", "."], "required: SECOND"),
        (["verify", "file"], "Not a directory"),
        (["prune", "."], "required: --keep"),
        (["prune", ".", "--keep", "0"], "no checkpoint would be kept: expected 1 or above, got 0"),
        (["prune", ".", "--keep", "1", "--best", "2"], "best= and by= need each other"),
        (["merge", "run", "out", "--item", "modle"], "expected model, got 'modle'"),
        (["merge", "run", "out", "--item", "cursor"], "got 'cursor', of kind record"),
        (["merge", "run", "out", "--max-shard-size", "big"], "the size is not valid"),
    ],
)
def test_a_wrong_word_is_one_line_and_status_2(
    words: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    runs(tmp_path / "run", 1)
    status, out, err = told(capsys, *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("accel: error: ")
    assert problem in err
    assert not (tmp_path / "out").exists()


@pytest.mark.multiprocess
def test_looking_at_checkpoints_loads_no_torch(tmp_path: Path) -> None:
    path = runs(tmp_path, 2)[0]
    words = [["ls", tmp_path], ["show", path], ["verify", tmp_path], ["diff", path, tmp_path], ["prune", tmp_path]]
    code = "import sys\nfrom accel.cli import main\n" + "".join(
        f"assert main({['checkpoint', *map(str, each)] + ['--keep', '1'] * (each[0] == 'prune')!r}) < 2\n"
        for each in words
    )
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True, timeout=patience(60))
