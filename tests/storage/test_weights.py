# SPDX-License-Identifier: Apache-2.0
"""Weights in the layout of Hugging Face: who goes where, and old ones replaced by new ones without a mixture."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from catching import assert_raises
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from tables import rows

from accel.errors import CheckpointError, ConfigError
from accel.storage import (
    INDEX,
    WEIGHTS,
    decode_index,
    encode_index,
    file_names,
    parse_size,
    plan_shards,
    publish_weights,
    staged,
    write_tensors,
)
from accel.storage._weight_files import stage_files


@given(sizes=st.lists(st.integers(0, 50), max_size=30), limit=st.integers(1, 60))
def test_shards_hold_every_tensor_once_in_order_and_at_most_the_limit(sizes: list[int], limit: int) -> None:
    named = {f"t{i}": size for i, size in enumerate(sizes)}
    shards = plan_shards(named, limit)
    assert [name for shard in shards for name in shard] == list(named)
    assert all(sum(named[name] for name in shard) <= limit or len(shard) == 1 for shard in shards)
    following = itertools.pairwise(shards)
    assert all(sum(named[n] for n in one) + named[other[0]] > limit for one, other in following)
    index = decode_index(encode_index(shards, named))
    assert index is not None
    assert index.weight_map.keys() == named.keys()
    assert set(index.files) <= set(file_names(len(shards)))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("1 GiB", 2**30),
        ("512mib", 2**29),
        ("7kb", 7000),
        ("3B", 3),
        (12, 12),
        ("1.5GB", 15 * 10**8),
        ("0.5 KiB", 512),
    ],
)
def test_sizes_are_decimal_or_binary_as_they_say(text: str | int, size: int) -> None:
    assert parse_size(text, "here") == size


@rows("wrong", ["5", "GB", "-1GB", "0GB", 0, -3, True, 2.5, None, "5PB", "1.GB", ".5GB", "0.5B"])
def test_what_is_no_size_is_refused(wrong: object) -> None:
    with assert_raises(ConfigError, problem="the size is not valid", expected="'5GB'"):
        parse_size(wrong, "here")  # type: ignore[arg-type]


class DiedError(Exception):
    pass


def die_at_change(patched: pytest.MonkeyPatch, last: int) -> None:
    """Let the change of a folder with that number, and all after it, fail as if the process had ended before it."""
    count = itertools.count(1)

    def dying(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            if next(count) >= last:
                raise DiedError
            return original(*args, **options)

        return call

    for name in ("rename", "unlink", "rmdir", "link"):
        patched.setattr(os, name, dying(getattr(os, name)))


def save(folder: Path, value: float, count: int) -> None:
    """Save `count` tensors of a value, each in a file of its own."""
    stage = stage_files(folder / "model")
    sizes = {f"t{i}": 4 for i in range(count)}
    shards = plan_shards(sizes, 4)
    for file, names in zip(file_names(count), shards, strict=True):
        write_tensors(stage, file, {name: torch.full((1,), value) for name in names})
    publish_weights(stage, file_names(count), encode_index(shards, sizes) if count > 1 else None)


def by_index(folder: Path) -> list[float] | None:
    """What a reader that prefers the index sees."""
    if not (folder / INDEX).exists():
        return [float(v) for v in load_file(folder / WEIGHTS).values()] if (folder / WEIGHTS).exists() else None
    index = decode_index((folder / INDEX).read_bytes())
    assert index is not None
    return [float(load_file(folder / file)[name]) for name, file in index.weight_map.items()]


def by_file(folder: Path) -> list[float] | None:
    """What a reader that prefers the single file sees, as transformers does."""
    return [float(v) for v in load_file(folder / WEIGHTS).values()] if (folder / WEIGHTS).exists() else by_index(folder)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (3, 1), (2, 3), (3, 3)])
def test_a_death_at_any_change_of_the_folder_leaves_old_or_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    at, died = 0, True
    while died:
        folder, at = tmp_path / str(at), at + 1
        folder.mkdir()
        save(folder, 1.0, before)
        (folder / "config.json").write_text("{}")
        with monkeypatch.context() as patched:
            die_at_change(patched, at)
            try:
                save(folder, 2.0, after)
                died = False
            except DiedError:
                pass
        for seen in (by_index(folder), by_file(folder)):
            assert seen in ([1.0] * before, [2.0] * after)
        save(folder, 3.0, after)
        assert by_index(folder) == by_file(folder) == [3.0] * after
        here = {name for name in os.listdir(folder) if ".tmp-" not in name}  # stages of this process, which lives
        expected = {"config.json", *file_names(after), *([INDEX] if after > 1 else [])}
        assert expected <= here <= expected | set(file_names(before)) - {WEIGHTS}  # what no index lists stays
    assert at > 3


def test_only_listed_files_of_the_known_names_are_deleted(tmp_path: Path) -> None:
    save(tmp_path, 1.0, 2)
    strange = ["model-00009-of-00009.safetensors", "other.safetensors", "optimizer.bin"]
    for name in strange:
        (tmp_path / name).write_bytes(b"mine")
    text = (tmp_path / INDEX).read_text().replace('"weight_map": {', '"weight_map": {"x": "other.safetensors",')
    (tmp_path / INDEX).write_text(text)
    save(tmp_path, 2.0, 1)
    assert sorted(os.listdir(tmp_path)) == sorted([WEIGHTS, *strange])


@pytest.mark.parametrize("index", ["", "[]", '{"metadata": {}, "weight_map": {"t0": "../x/model-00001-of-00002"}}'])
def test_a_broken_or_hostile_index_is_replaced_and_followed_nowhere(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    save(tmp_path, 2.0, 2)
    assert by_file(tmp_path) == [2.0, 2.0]


def test_where_files_cannot_be_linked_the_old_weights_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1.0, 2)

    def link(*args: object, **options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with assert_raises(CheckpointError, problem="without hard links", fix="Save into another folder"):
        save(tmp_path, 2.0, 2)
    assert by_file(tmp_path) == [1.0, 1.0]


@pytest.mark.parametrize("locks", [True, False])
def test_where_the_disk_fails_to_the_end_the_first_error_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    def fail(_: Path) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    def write() -> None:
        with staged(tmp_path / "model", locks=locks):
            monkeypatch.setattr(Path, "exists", fail)
            raise CheckpointError("first")

    with assert_raises(CheckpointError, problem="first"):
        write()
    monkeypatch.undo()
    with staged(tmp_path / "model") as stage:  # the lock is released
        assert stage.is_dir()
    assert not stage.exists()
