# SPDX-License-Identifier: Apache-2.0
"""Functions that take part in a save or a load: the files they write are in the same commit, verified like the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import nn

import accel
from accel.errors import CheckpointError, ConfigError
from accel.testing import simulate

PATHS = st.sampled_from(["a", "weights.bin", "unet/config.json", "unet/deep er/é.txt", "b/a"])
TREES = st.dictionaries(PATHS, st.binary(max_size=40), max_size=5)


def writer(files: dict[str, bytes]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)

    return write


def reader(into: dict[str, bytes]) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        into.clear()
        into.update(
            {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        )

    return read


@settings(max_examples=share(0.12))
@given(ranks=st.lists(TREES, min_size=1, max_size=3), other=st.integers(1, 3), mode=st.sampled_from(["sync", "async"]))
def test_files_of_all_ranks_come_back_at_any_world_size(
    tmp_path_factory: pytest.TempPathFactory, ranks: list[dict[str, bytes]], other: int, mode: Any
) -> None:
    out = tmp_path_factory.mktemp("run")
    common = {f"rank-{rank}/{path}": data for rank, files in enumerate(ranks) for path, data in files.items()}

    def save(ctx: accel.DistContext) -> Any:
        mine = {path: data for path, data in common.items() if path.startswith(f"rank-{ctx.rank}/")}
        folder = accel.items.Folder(save=writer(mine | {"all": b"of rank %d" % ctx.rank}))
        items = {"adapter": folder, "steps": 3}
        if mode == "sync":
            return accel.save_state(ctx, out, items, step=1)
        return accel.save_state(ctx, out, items, step=1, mode="async").result()

    path = simulate(save, len(ranks))[0]

    def load(ctx: accel.DistContext) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        loaded = accel.load_state(ctx, path, {"adapter": accel.items.Folder(load=reader(found)), "steps": 0})
        assert loaded["steps"] == 3
        return found

    for found in simulate(load, other):
        assert found == common | {"all": b"of rank 0"}


def test_a_rank_reads_the_files_it_selects(tmp_path: Path) -> None:
    def run(ctx: accel.DistContext) -> dict[str, bytes]:
        mine = f"rank-{ctx.rank}"
        found: dict[str, bytes] = {}
        folder = accel.items.Folder(
            writer({mine: b"x" * 100}), reader(found), lambda path: path == mine, scratch=tmp_path
        )
        path = accel.save_state(ctx, tmp_path / "run", {"engine": folder}, step=0)
        accel.load_state(ctx, path, {"engine": folder})
        return found

    assert [set(found) for found in simulate(run, 2)] == [{"rank-0"}, {"rank-1"}]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # no temporary folder stays


def test_damage_is_found_before_load_runs(tmp_path: Path) -> None:
    calls: list[Path] = []
    path = accel.save_state(CPU, tmp_path, {"adapter": accel.items.Folder(writer({"a": b"precious"}))}, step=1)
    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes().replace(b"precious", b"precioux"))
    with assert_raises(CheckpointError, problem="digest"):
        accel.load_state(CPU, path, {"adapter": accel.items.Folder(load=calls.append)})
    assert not calls


def test_a_load_that_raises_leaves_the_other_items(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    items: dict[str, Any] = {"model": model, "optimizer": optimizer, "adapter": accel.items.Folder(writer({"a": b"1"}))}
    path = accel.save_state(CPU, tmp_path, items, step=1)
    before = torch.nn.init.zeros_(model.weight).clone()
    optimizer.param_groups[0]["lr"] = 0.1

    def refuse(folder: Path) -> None:
        raise ValueError(json.dumps([each.name for each in folder.iterdir()]))

    with assert_raises(CheckpointError, problem=r'ValueError: \["a"\]', fix="what the load of item adapter did stays"):
        accel.load_state(CPU, path, items | {"adapter": accel.items.Folder(load=refuse)})
    assert torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["lr"] == 0.1
    accel.load_state(CPU, path, items | {"adapter": None})  # left in the file
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_nothing_is_written_when_save_raises_or_leaves_what_is_no_file(tmp_path: Path) -> None:
    def link(folder: Path) -> None:
        (folder / "link").symlink_to("/etc/hostname")

    def fail(_: Path) -> None:
        raise ValueError("no adapter yet")

    for save, refused in (
        (link, assert_raises(CheckpointError, problem="only regular files are stored")),
        (fail, pytest.raises(ValueError, match="no adapter yet")),
    ):
        with refused:
            accel.save_state(CPU, tmp_path / "run", {"adapter": accel.items.Folder(save)}, step=1)
    with assert_raises(ConfigError, problem="the Folder has no save function"):
        accel.save_state(CPU, tmp_path / "run", {"adapter": accel.items.Folder()}, step=1)
    assert accel.latest_checkpoint(tmp_path / "run") is None
    path = accel.save_state(CPU, tmp_path / "run", {"adapter": accel.items.Folder(writer({"a": b""}))}, step=1)
    with assert_raises(ConfigError, problem="the Folder has no load function"):
        accel.load_state(CPU, path, {"adapter": accel.items.Folder()})
    with assert_raises(CheckpointError, problem="value Folder"):
        accel.load_state(CPU, path, {"adapter": {"a": 1}})
