# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints: which is the newest, which stay, and disks that fail."""

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU

from accel import latest_checkpoint, load_state, save_state
from accel.checkpoint import Keep
from accel.errors import CheckpointError, ConfigError
from accel.storage import LOCK, take_lock


def test_retention_keeps_the_newest_and_the_one_just_written(tmp_path: Path) -> None:
    for keep, left in ((None, [1, 2, 3, 4]), (1, [4]), (2, [3, 4]), (3, [2, 3, 4])):
        out = tmp_path / str(keep)
        for step in (1, 2, 3, 4):
            save_state(CPU, out, {"x": step}, step=step, keep=keep)
            assert latest_checkpoint(out) == out / f"step-{step:08d}"
        assert sorted(os.listdir(out)) == [f"step-{step:08d}" for step in left]
    save_state(CPU, tmp_path / "3", {"x": 0}, step=0, keep=2)  # started anew in an old folder
    assert sorted(os.listdir(tmp_path / "3")) == ["step-00000000", "step-00000004"]


def test_retention_never_deletes_what_accel_did_not_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3):
        save_state(CPU, tmp_path, {"x": step}, step=step)
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
    (tmp_path / "step-00000000").symlink_to("step-00000003")
    (tmp_path / "step-final").mkdir()
    (tmp_path / "step-00000005.bak").mkdir()
    with caplog.at_level(logging.WARNING, "accel.checkpoint"):
        save_state(CPU, tmp_path, {"x": 4}, step=4, keep=1)
    names = {"step-00000000", "step-00000001", "step-00000002", "step-00000004", "step-00000005.bak", "step-final"}
    assert set(os.listdir(tmp_path)) == names
    assert "step-00000001 stays" in caplog.text


def test_checkpoints_stay_by_step_and_by_metric(tmp_path: Path) -> None:
    losses = [5.0, 1.0, 4.0, 2.0, 3.0, 3.0, 4.0, 5.0]
    for step, loss in enumerate(losses):
        rule = Keep(newest=2, every=4, best=2, by="loss")
        save_state(CPU, tmp_path, {"x": step}, step=step, keep=rule, metrics={"loss": loss, "other": 0.0})
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:08d}" for step in (0, 1, 3, 4, 6, 7)]
    save_state(CPU, tmp_path, {"x": 8}, step=9, keep=Keep(best=1, by="loss"))  # one without a metric is never the best
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000009"]


@pytest.mark.parametrize("keep", [None, 1, 2, 3])
def test_a_run_that_is_started_again_goes_on_where_it_was_and_rotates(keep: int | None, tmp_path: Path) -> None:
    saved: list[int] = []
    for _ in range(3):
        found = latest_checkpoint(tmp_path)
        loaded = load_state(CPU, found, {"x": 0}) if found is not None else {"x": -1}
        assert loaded["x"] == (saved[-1] if saved else -1)
        for step in range(len(saved), len(saved) + 4):
            assert save_state(CPU, tmp_path, {"x": step}, step=step, keep=keep) == latest_checkpoint(tmp_path)
            saved.append(step)
            left = saved if keep is None else saved[-keep:]
            assert sorted(os.listdir(tmp_path)) == [f"step-{each:08d}" for each in left]


def test_what_writers_of_any_host_left_is_removed_by_the_next(tmp_path: Path) -> None:
    save_state(CPU, tmp_path, {"x": 1}, step=1)
    aside = tmp_path / "step-00000002.old-elsewhere-77-01234567"
    save_state(CPU, tmp_path, {"x": 2}, step=2).rename(aside)
    (tmp_path / "step-00000003.tmp-elsewhere-77-01234567").mkdir()
    (tmp_path / "step-00000003.tmp-elsewhere-77-01234567" / "manifest.json").write_text("{")
    assert latest_checkpoint(tmp_path) == aside
    save_state(CPU, tmp_path, {"x": 4}, step=4)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002", "step-00000004"]


def test_a_folder_that_is_being_saved_into_is_refused_and_can_be_read(tmp_path: Path) -> None:
    path = save_state(CPU, tmp_path, {"x": 1}, step=1)
    lock = take_lock(tmp_path)
    with assert_raises(CheckpointError, problem="another writer", got=f"process {os.getpid()} on host"):
        save_state(CPU, tmp_path, {"x": 2}, step=2)
    assert latest_checkpoint(tmp_path, verify=True) == path
    assert load_state(CPU, path, {"x": 0}) == {"x": 1}
    assert sorted(os.listdir(tmp_path)) == [LOCK, "step-00000001"]
    lock.release()
    save_state(CPU, tmp_path, {"x": 2}, step=2)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    for value in (1, 2):
        path = save_state(CPU, tmp_path, {"x": value}, step=7)
        assert load_state(CPU, path, {"x": 0}) == {"x": value}
    assert os.listdir(tmp_path) == ["step-00000007"]


def test_saving_over_something_else_moves_it_aside_and_keeps_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step-00000007").mkdir()
    (tmp_path / "step-00000007" / "thesis.txt").write_text("years of work")
    path = save_state(CPU, tmp_path, {"x": 1}, step=7, keep=1)
    assert load_state(CPU, path, {"x": 0}) == {"x": 1}
    assert [p.read_text() for p in tmp_path.glob("*/thesis.txt")] == ["years of work"]
    assert "stays" in caplog.text
    assert latest_checkpoint(tmp_path) == path


def test_latest_skips_what_is_no_checkpoint_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [save_state(CPU, tmp_path, {"x": step}, step=step) for step in range(7)]
    (paths[6] / "manifest.json").unlink()
    next(paths[5].glob("*.safetensors")).unlink()
    os.truncate(next(paths[4].glob("*.safetensors")), 9)
    (paths[3] / "manifest.json").write_bytes((paths[3] / "manifest.json").read_bytes().replace(b"3", b"4"))
    paths[2].rename(tmp_path / "elsewhere")
    (tmp_path / "step-00000002").symlink_to("elsewhere")
    paths[1].rename(tmp_path / "step-00000008")
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-00000010").write_text("a file")
    assert latest_checkpoint(tmp_path) == paths[0]
    reasons = {
        "step-00000006": "no complete",
        "step-00000005": "missing",
        "step-00000004": "wrong size",
        "step-00000003": "damaged",
        "step-00000002": "ELOOP|ENOTDIR",
        "step-00000008": "expected step 8, got step 1",
        "step-00000010": "ENOTDIR",
    }
    messages = {record.args[0].name: str(record.args[1]) for record in caplog.records if isinstance(record.args, tuple)}  # type: ignore[union-attr]
    assert messages.keys() == reasons.keys()
    assert all(any(word in messages[name] for word in words.split("|")) for name, words in reasons.items()), messages


def test_latest_verified_skips_damaged_bytes_and_names_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [save_state(CPU, tmp_path, {"x": torch.ones(9)}, step=step) for step in range(3)]
    for path in paths[1:]:
        file = next(path.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert latest_checkpoint(tmp_path) == paths[2]
    assert latest_checkpoint(tmp_path, verify=True) == paths[0]
    assert [record.getMessage().count("safetensors: damaged") for record in caplog.records] == [1, 1]
    assert load_state(CPU, paths[0], {"x": torch.zeros(9)})["x"].equal(torch.ones(9))


def test_a_folder_that_is_no_checkpoint_is_refused_with_the_way_out(tmp_path: Path) -> None:
    save_state(CPU, tmp_path, {"x": 1}, step=0)
    (tmp_path / "step-00000000" / "manifest.json").unlink()
    with assert_raises(CheckpointError, problem="the folder holds no complete checkpoint", fix="given to save_state"):
        load_state(CPU, tmp_path / "step-00000000", {"x": 0})


@pytest.mark.parametrize("name", ["open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir"])
def test_a_disk_that_fails_at_any_operation_leaves_the_older_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state(CPU, tmp_path, {"x": 1}, step=1)
    real, failures = getattr(os, name), 0
    codes = [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES]
    for moment in range(80):
        calls, code, turn = iter(range(100)), codes[moment % 4], moment // 4

        def fail(*args: Any, _calls: Any = calls, _turn: int = turn, _code: int = code, **kwargs: Any) -> Any:
            if next(_calls) == _turn:
                raise OSError(_code, os.strerror(_code), args[0] if isinstance(args[0], str) else None)
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            try:
                save_state(CPU, tmp_path, {"x": 2}, step=2)
                failed = False
            except CheckpointError as error:
                assert errno.errorcode[code] in str(error)  # noqa: PT017
                assert str(tmp_path) in str(error)  # noqa: PT017
                failed, failures = True, failures + 1
        path = latest_checkpoint(tmp_path)
        assert path is not None
        assert load_state(CPU, path, {"x": 0})["x"] == int(path.name[-1])
        if not failed:
            assert path.name == "step-00000002"
        if next(calls) <= turn:
            break
        if name in ("open", "write", "mkdir"):
            assert not list(tmp_path.glob("*.tmp-*"))
        assert save_state(CPU, tmp_path, {"x": 3}, step=3, keep=1) == latest_checkpoint(tmp_path)  # training goes on
        save_state(CPU, tmp_path, {"x": 1}, step=1, keep=1)
        assert os.listdir(tmp_path) == ["step-00000001"]
    assert failures or name in ("unlink", "rmdir")  # those only happen after the commit


def test_a_reader_beside_a_writer_always_finds_one(tmp_path: Path) -> None:
    save_state(CPU, tmp_path, {"x": 0}, step=0, keep=1)
    stop, failures = threading.Event(), list[Exception]()

    def write() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            try:
                save_state(CPU, tmp_path, {"x": step}, step=step // 3, keep=1)
            except Exception as error:
                failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            assert latest_checkpoint(tmp_path) is not None
    finally:
        stop.set()
        writer.join()
    assert not failures


def save_or_be_refused(out: Path, writer: int) -> None:
    for count in range(60):
        mine = {"writer": writer, "x": torch.full((5000,), writer)}
        try:
            save_state(CPU, out, mine, step=count // 4, keep=2)
        except CheckpointError as error:
            assert "another writer is saving" in str(error)  # noqa: PT017


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_two_writers_at_once_never_mix_and_readers_never_notice(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    save_state(CPU, tmp_path, {"writer": 0, "x": torch.full((5000,), 0)}, step=0)
    writers, loads = list[int](), 0
    for writer in (1, 2):
        if (pid := os.fork()) == 0:
            try:
                save_or_be_refused(tmp_path, writer)
                os._exit(0)
            except BaseException as error:
                print(f"writer {writer}: {error!r}", flush=True)
                os._exit(1)
        writers.append(pid)
    ended: dict[int, int] = {}
    while len(ended) < len(writers):
        ended |= dict(os.waitpid(pid, os.WNOHANG) for pid in writers if pid not in ended)
        ended.pop(0, None)  # one that still runs
        path = latest_checkpoint(tmp_path)
        assert path is not None
        try:
            loaded = load_state(CPU, path, {"writer": 0, "x": torch.zeros(0)})
        except CheckpointError as error:
            assert not path.exists() or "deleted" in str(error) or "missing" in str(error)  # noqa: PT017 - replaced since
            continue
        assert loaded["x"].eq(loaded["writer"]).all()  # type: ignore[attr-defined]
        loads += 1
    assert set(ended.values()) == {0}
    assert loads
    assert LOCK not in os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["step-00000001", "step-00000001.old-abc"])
def test_a_runs_folder_with_the_name_of_a_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    with assert_raises(ConfigError, fix="Pass the folder above it, or rename it") as caught:
        save_state(CPU, tmp_path / name, {"value": 1}, step=1)
    assert caught.value.where == "save_state, out="
    assert not (tmp_path / name).exists()
