# SPDX-License-Identifier: Apache-2.0
"""Bad disks: no write that was lost or changed makes a checkpoint that loads, and the former one still does."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import nn

import accel
from accel import DistContext
from accel.errors import CheckpointError
from accel.storage import write_file
from accel.testing import FaultNotReached, Simulator, WriteFault

SIZE = 2
WRITES = [(0, 0, "tensors-00000-of-00002.safetensors"), (0, 1, "manifest.json"),
          (1, 0, "tensors-00001-of-00002.safetensors")]  # fmt: skip


def items(step: int) -> dict[str, object]:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(step)
        model.bias.fill_(step)
    return {"model": model, "cursor": accel.Cursor(seed=step)}


def save(simulator: Simulator, out: Path, step: int, *faults: WriteFault) -> None:
    simulator.run(lambda ctx: accel.save_state(ctx, out, items(step), step=step), SIZE, faults=faults)


def load(simulator: Simulator, path: Path) -> list[float]:
    """What every rank finds in a checkpoint."""

    def rank(ctx: DistContext) -> float:
        held = items(0)
        accel.load_state(ctx, path, held)
        assert isinstance(held["model"], nn.Linear)
        return held["model"].weight.detach()[0, 0].item()

    return simulator.run(rank, SIZE)


def test_each_write_is_listed_above(ranks, tmp_path):
    for rank in range(SIZE):
        last = sum(1 for who, _, _ in WRITES if who == rank)
        with assert_raises(FaultNotReached, got=f"^{last} in all"):
            save(ranks, tmp_path, 1, WriteFault(rank, last))


@pytest.fixture(scope="module")
def first(ranks, tmp_path_factory) -> Path:
    """A folder with the checkpoint of step 1."""
    out = tmp_path_factory.mktemp("first")
    save(ranks, out, 1)
    return out


@settings(deadline=None, max_examples=share(0.6))
@given(
    write=st.sampled_from(WRITES),
    action=st.sampled_from(["drop", "cut", "corrupt"]),
    byte=st.integers(-2000, 2000),
)
def test_a_checkpoint_on_a_disk_that_lied_is_refused_by_file(ranks, first, write, action, byte):
    rank, number, name = write
    with TemporaryDirectory() as folder:
        out = Path(shutil.copytree(first, folder, dirs_exist_ok=True))
        save(ranks, out, 2, WriteFault(rank, number, action, byte=byte))
        live = items(7)
        lost = action == "drop" and name == "manifest.json"  # a folder without it is none
        with assert_raises(CheckpointError, **{"expected" if lost else "where": name}):
            ranks.run(lambda ctx: accel.load_state(ctx, out / "step-00000002", live), SIZE)
        assert isinstance(live["model"], nn.Linear)
        assert live["model"].weight.eq(7).all()
        assert load(ranks, out / "step-00000001") == [1.0] * SIZE
        if action != "corrupt":
            assert accel.latest_checkpoint(out) == out / "step-00000001"


@pytest.mark.parametrize(("rank", "number", "name"), WRITES)
def test_a_full_disk_is_one_error_on_all_ranks_and_costs_nothing_older(ranks, tmp_path, rank, number, name):
    save(ranks, tmp_path, 1)

    def attempt(ctx: DistContext) -> str:
        with pytest.raises(CheckpointError) as caught:
            accel.save_state(ctx, tmp_path, items(2), step=2)
        accel.wait_for_everyone(ctx)  # training can go on
        return str(caught.value)

    texts = ranks.run(attempt, SIZE, faults=[WriteFault(rank, number, "full")])
    assert len(set(texts)) == 1
    assert f"rank {rank}: No space left on device (ENOSPC)" in texts[0]
    assert name in texts[0]
    assert "Free space" in texts[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert accel.latest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    assert load(ranks, tmp_path / "step-00000001") == [1.0] * SIZE


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        (WriteFault(0, 1, "drop"), None),
        (WriteFault(0, 1, "cut"), b"ab"),
        (WriteFault(0, 1, "corrupt"), b"abce"),
        (WriteFault(0, 1, "corrupt", byte=0), b"`bcd"),
        (WriteFault(0, 1, "corrupt", byte=-4), b"`bcd"),
        (WriteFault(0, 1, "corrupt", byte=6), b"abbd"),
    ],
)
def test_what_each_action_leaves(ranks, tmp_path, fault, left):
    def rank(ctx: DistContext) -> None:
        for name in ("one", "two", "three"):
            write_file(tmp_path, f"{name}-{ctx.rank}", [b"ab", b"cd"])

    ranks.run(rank, SIZE, faults=[fault])
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    expected = {f"{name}-{rank}": b"abcd" for name in ("one", "two", "three") for rank in range(SIZE)}
    del expected["two-0"]
    assert files == expected | ({} if left is None else {"two-0": left})


def test_an_empty_file_cannot_be_corrupted(ranks, tmp_path):
    with assert_raises(FaultNotReached, problem="an empty file has no byte to change"):
        ranks.run(lambda ctx: write_file(tmp_path, "empty", []), 1, faults=[WriteFault(0, 0, "corrupt")])


def test_nothing_is_left_of_a_fault_after_its_run(ranks, tmp_path):
    ranks.run(lambda ctx: write_file(tmp_path, "one", [b"ab"]), 1, faults=[WriteFault(0, 0)])
    ranks.run(lambda ctx: write_file(tmp_path, "two", [b"ab"]), 1)
    write_file(tmp_path, "three", [b"ab"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["three", "two"]
