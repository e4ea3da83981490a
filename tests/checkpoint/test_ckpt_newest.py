# SPDX-License-Identifier: Apache-2.0
"""Loading from a run's folder: the newest checkpoint that is whole, on all ranks the same, whatever a writer does."""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU, Manifest, open_checkpoint
from torch import nn

from accel import load_state, save_state
from accel.checkpoint import _read
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.items import Loaded
from accel.items._loading import load_newest
from accel.items._source import LoadOptions
from accel.process import wait_for_everyone
from accel.storage import as_place
from accel.testing import simulate

STRICT = LoadOptions(strict=True, cast=False, transform=None)


def damage(path: Path, number: int = 0) -> None:
    file = sorted(path.glob("*.safetensors"))[number]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def newest(ctx: DistContext, out: Path, x: object = 0) -> Loaded | None:
    return load_newest(ctx, out, {"x": x}, options=STRICT, site="")


def without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unsupported)


@pytest.mark.parametrize("where", ["files", "store"])
def test_a_runs_folder_loads_its_newest_checkpoint(where: str, tmp_path: Path) -> None:
    out = tmp_path if where == "files" else f"memory://newest/{tmp_path.name}"
    for step in (9, 10, 2):
        saved = save_state(CPU, out, {"x": step}, step=step)
    loaded = load_state(CPU, out, {"x": 0})
    assert loaded == {"x": 10}
    assert loaded.path == saved.parent / "step-00000010"
    assert load_state(CPU, saved, {"x": 0}).path == saved


def test_a_folder_without_checkpoints_is_an_error_and_none_to_who_asks_for_the_newest(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "killed" / "step-00000001").mkdir(parents=True)
    for out in ("missing", "empty", "killed"):
        assert newest(CPU, tmp_path / out) is None
        with assert_raises(CheckpointError, problem="the folder holds no checkpoint") as caught:
            load_state(CPU, tmp_path / out, {"x": 0})
        assert caught.value.where == str(tmp_path / out)
    (tmp_path / "file").write_text("")
    with assert_raises(CheckpointError, problem="ENOTDIR"):
        load_state(CPU, tmp_path / "file", {"x": 0})


def test_a_step_that_retention_has_deleted_is_an_error_that_says_so(tmp_path: Path) -> None:
    first = save_state(CPU, tmp_path, {"x": 1}, step=1)
    save_state(CPU, tmp_path, {"x": 2}, step=2, keep=1)
    with assert_raises(CheckpointError, problem="deleted") as caught:
        load_state(CPU, first, {"x": 0})
    assert caught.value.where == str(first)
    assert "step-00000002" in caught.value.got
    assert "run's folder" in caught.value.fix


@pytest.mark.parametrize("number", [0, 1])
def test_damage_that_one_rank_finds_makes_all_take_the_next_older(
    number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save(ctx: DistContext) -> None:
        for step in (1, 2, 3):
            save_state(ctx, tmp_path, {"x": torch.full((99,), float(step)), "model": nn.Linear(9, 9)}, step=step)

    def load(ctx: DistContext) -> tuple[Path, float]:
        loaded = load_state(ctx, tmp_path, {"x": torch.zeros(99), "model": nn.Linear(9, 9)})
        assert isinstance(loaded.path, Path)
        assert isinstance(loaded["x"], torch.Tensor)
        return loaded.path, float(loaded["x"].mean())

    simulate(save, 2)
    damage(tmp_path / "step-00000003", number)
    os.truncate(next((tmp_path / "step-00000002").glob("*.safetensors")), 9)
    with caplog.at_level(logging.WARNING, "accel.checkpoint"):
        assert simulate(load, 2) == [(tmp_path / "step-00000001", 1.0)] * 2
    messages = [record.getMessage() for record in caplog.records]
    assert [next(word for word in ("digest", "wrong size") if word in text) for text in messages] == [
        "digest",
        "wrong size",
    ]
    with assert_raises(CheckpointError, problem="damaged"):  # the one that was asked for, or none
        load_state(CPU, tmp_path / "step-00000003", {"x": torch.zeros(99), "model": nn.Linear(9, 9)})


def test_a_run_of_damaged_checkpoints_is_an_error_that_lists_them_and_changes_nothing(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for step in (1, 2):
        save_state(CPU, tmp_path, {"model": model}, step=step)
    damage(tmp_path / "step-00000001")
    (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
    torch.nn.init.zeros_(model.weight)
    with assert_raises(CheckpointError, problem="no checkpoint of this run can be loaded") as caught:
        load_state(CPU, tmp_path, {"model": model})
    assert "step-00000001: " in caught.value.got
    assert "step-00000002: " in caught.value.got
    assert not model.weight.any()


def test_a_newest_checkpoint_that_does_not_fit_is_an_error_and_not_skipped(tmp_path: Path) -> None:
    save_state(CPU, tmp_path, {"x": torch.zeros(2)}, step=1)
    save_state(CPU, tmp_path, {"y": torch.zeros(2)}, step=2)
    with assert_raises(CheckpointError, problem="item x"):
        load_state(CPU, tmp_path, {"x": torch.zeros(2)})


def test_retention_leaves_a_checkpoint_that_is_being_read_to_the_next_save(tmp_path: Path) -> None:
    first = save_state(CPU, tmp_path, {"x": 1}, step=1)
    with open_checkpoint(as_place(first)):
        save_state(CPU, tmp_path, {"x": 2}, step=2, keep=1)
        assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]
        save_state(CPU, tmp_path, {"x": 3}, step=1)  # replaces what is being read
        assert load_state(CPU, first, {"x": 0}) == {"x": 3}
    save_state(CPU, tmp_path, {"x": 4}, step=4, keep=1)
    assert os.listdir(tmp_path) == ["step-00000004"]


def deleting(out: Path, gone: Path, world: set[int], ctx: DistContext) -> Loaded | None:
    """Load the newest checkpoint of a run, of which a writer elsewhere deletes one while it is compared."""

    def items(manifest: Manifest) -> dict[str, object]:
        world.add(manifest.step)
        if ctx.rank == 0 and manifest.step == 2 and gone.exists():
            shutil.rmtree(gone)
        return {"x": torch.zeros(3)}

    return load_newest(ctx, out, {}, items, options=STRICT, site="")


@pytest.mark.parametrize("world", [1, 2])
def test_where_nothing_can_be_locked_the_next_is_taken_for_one_that_vanishes(
    world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save_state(CPU, tmp_path, {"x": torch.full((3,), step)}, step=step)
    without_flock(monkeypatch)
    steps = set[int]()
    for loaded in simulate(lambda ctx: deleting(tmp_path, tmp_path / "step-00000002", steps, ctx), world):
        assert loaded is not None
        assert loaded.path == tmp_path / "step-00000001"
        assert loaded["x"].eq(1).all()  # type: ignore[attr-defined]
    assert steps == {1, 2}
    assert not caplog.records  # deleted by its writer, which is nobody's loss


def test_a_step_that_is_saved_again_while_ranks_open_it_is_one_checkpoint_to_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def both(ctx: DistContext) -> object:
        if ctx.is_main_process:
            save_state(CPU, tmp_path, {"x": 1}, step=1)
        wait_for_everyone(ctx)

        def items(manifest: Manifest) -> dict[str, object]:
            if ctx.is_main_process:
                save_state(CPU, tmp_path, {"x": 2}, step=1)
            return {"x": 0}

        loaded = load_newest(ctx, tmp_path, {}, items, options=STRICT, site="")
        return loaded and loaded["x"]

    assert len(set(simulate(both, 2))) == 1
    assert not caplog.records


def test_a_folder_aside_is_taken_only_where_a_second_look_finds_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing that a writer overtakes may show the step that it has replaced, and neither of the two newer ones."""
    save_state(CPU, tmp_path / "former", {"x": 1}, step=1)
    save_state(CPU, tmp_path, {"x": 2}, step=1)
    shutil.move(tmp_path / "former" / "step-00000001", tmp_path / "step-00000001.old-elsewhere-77-01234567")
    listed = _read.candidates
    torn = [[each for each in listed(as_place(tmp_path)) if not each[1]]]
    assert len(torn[0]) == 1
    monkeypatch.setattr(_read, "candidates", lambda place: torn.pop() if torn else listed(place))
    loaded = newest(CPU, tmp_path)
    assert loaded is not None
    assert loaded["x"] == 2
    shutil.rmtree(tmp_path / "step-00000001")  # its writer died between two renames
    loaded = newest(CPU, tmp_path)
    assert loaded is not None
    assert loaded["x"] == 1


@contextlib.contextmanager
def writing(out: Path, keep: int) -> Iterator[list[Exception]]:
    """Save in a loop on a thread, several steps and some of them again; gives its failures."""
    save_state(CPU, out, {"x": torch.zeros(50)}, step=0)
    stop, failures = threading.Event(), list[Exception]()

    def write() -> None:
        for count in range(1, 10**6):
            if stop.is_set():
                return
            try:
                save_state(CPU, out, {"x": torch.full((50,), count)}, step=count // 2, keep=keep)
            except Exception as error:
                failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield failures
    finally:
        stop.set()
        writer.join()


def read(ctx: DistContext, out: Path, count: int) -> list[float]:
    found = list[float]()
    for _ in range(count):
        value = load_state(ctx, out, {"x": torch.zeros(50)})["x"]
        assert isinstance(value, torch.Tensor)
        assert value.eq(value[0]).all()
        found.append(float(value[0]))
    return found


@pytest.mark.parametrize("lock", [True, False])
@pytest.mark.parametrize("keep", [1, 2])
def test_a_reader_beside_a_writer_always_loads(
    keep: int, lock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not lock:
        without_flock(monkeypatch)
    with writing(tmp_path, keep) as failures:
        found = read(CPU, tmp_path, 40)
    assert found == sorted(found)  # never an older one than before
    assert not failures


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("keep", [1, 2])
def test_a_thousand_loads_beside_a_writer_all_succeed(keep: int, world: int, tmp_path: Path) -> None:
    with writing(tmp_path, keep) as failures:
        ranks = simulate(lambda ctx: read(ctx, tmp_path, 250), world, timeout_s=290)
    assert all(found == ranks[0] for found in ranks)
    assert not failures
