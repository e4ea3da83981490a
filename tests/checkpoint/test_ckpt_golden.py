# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every format that ever was, kept for ever: each loads into what it was made of."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from ckpt_golden import HERE, filled, start
from ckpt_helpers import CPU, FORMAT, equal

import accel
from accel.context import DistContext
from accel.testing import simulate


def state(items: dict[str, Any]) -> list[Any]:
    slots = [dict(items["optimizer"].state[each]) for each in items["model"].parameters()]
    progress = items["progress"]
    return [dict(items["model"].state_dict()), slots, progress.epoch, progress.best, progress.window, items["extra"]]


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_checkpoint_of_every_format_loads(number: int, world: int) -> None:
    def body(ctx: DistContext) -> list[Any]:
        items = start()
        return state(items | accel.load_state(ctx, HERE / f"format-{number}", items))

    assert all(equal(found, state(filled(number))) for found in simulate(body, world))


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
def test_random_streams_of_every_format_go_on(number: int) -> None:
    def draw(ctx: DistContext) -> tuple[float, float]:
        accel.load_state(ctx, HERE / f"format-{number}", start())
        return torch.rand(1).item(), torch.rand(1, generator=torch.Generator().manual_seed(40 + ctx.rank)).item()

    assert all(drawn == expected for drawn, expected in simulate(draw, 2))


def pieces_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return manifest["tensors"]["model.0.weight"]["pieces"]


def swap_files(manifest: dict[str, Any]) -> None:
    one, other = pieces_of(manifest)
    one["file"], other["file"] = other["file"], one["file"]


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a hole": lambda m: pieces_of(m).pop(),
    "twice": lambda m: pieces_of(m).append(pieces_of(m)[0]),
    "moved": lambda m: pieces_of(m)[1].update(offset=[2, 0]),
    "outside": lambda m: pieces_of(m)[1].update(offset=[4, 0]),
    "negative": lambda m: pieces_of(m)[1].update(offset=[-3, 0]),
    "absurd": lambda m: pieces_of(m)[1].update(shape=[2**62, 2**62]),
    "overflow": lambda m: m["tensors"]["model.0.weight"].update(shape=[2**32, 2**32]),
    "swapped": swap_files,
    "stretched": lambda m: (pieces_of(m)[0].update(shape=[4, 3]), pieces_of(m)[1].update(offset=[4, 0], shape=[1, 3])),
    "elsewhere": lambda m: pieces_of(m)[0].update(file="manifest.json"),
    "old": lambda m: m.update(format=1),
}


@pytest.mark.parametrize("change", HOSTILE)
@pytest.mark.parametrize("verify", [True, False])
def test_pieces_that_lie_are_refused_even_where_digests_are_not_compared(
    change: str, verify: bool, tmp_path: Path
) -> None:
    shutil.copytree(HERE / "format-2", tmp_path / "bad")
    file = tmp_path / "bad" / "manifest.json"
    manifest = msgspec.json.decode(file.read_bytes())
    del manifest["digest"]
    HOSTILE[change](manifest)
    body = msgspec.json.encode(manifest)[1:]
    file.write_bytes(b'{"digest":"' + hashlib.sha256(body).hexdigest().encode() + b'",' + body)
    items = start()
    with pytest.raises(accel.errors.CheckpointError):
        accel.load_state(CPU, tmp_path / "bad", items, verify=verify)
    assert equal(state(items), state(start()))
