# SPDX-License-Identifier: Apache-2.0
"""Reading a part of a stored tensor: straight into its memory where the bytes lie in one run, else through a view."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from catching import assert_raises
from ckpt_golden import HERE
from ckpt_helpers import CPU, Box, open_checkpoint
from hypothesis import given, settings, strategies as st

import accel
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.storage import OpenDirectory, as_place
from accel.testing import simulate

GOLDEN = max(HERE.glob("format-?"))
DIRECT, PIECE = "accel.checkpoint._read._DIRECT_BYTES", "accel.checkpoint._read._PIECE_BYTES"


@settings(deadline=None)
@given(data=st.data(), pieces=st.integers(1, 9))
def test_a_part_is_the_same_whichever_way_it_is_read(data: st.DataObject, pieces: int) -> None:
    with open_checkpoint(as_place(GOLDEN)) as saved, pytest.MonkeyPatch.context() as patch:
        name = data.draw(st.sampled_from(sorted(saved.entries)))
        shape, whole = saved.entries[name].shape, saved.read(name)
        starts = [data.draw(st.integers(0, max(size - 1, 0))) for size in shape]
        ends = [data.draw(st.integers(min(at + 1, size), size)) for at, size in zip(starts, shape, strict=True)]
        box = Box(tuple(starts), tuple(end - start for start, end in zip(starts, ends, strict=True)))
        patch.setattr(DIRECT, 1)
        patch.setattr(PIECE, max(1, whole.nbytes // pieces))
        part = saved.read(name, box)
    assert torch.equal(part, whole[tuple(map(slice, starts, ends))])


def test_what_is_filled_counts_as_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DIRECT, 1)
    model = torch.nn.Linear(2, 2)
    path = accel.save_state(CPU, tmp_path, {"model": model}, step=1)
    loss = model(torch.ones(2, requires_grad=True)).square().sum()
    accel.load_state(CPU, path, {"model": model})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DIRECT, 1)
    path = accel.save_state(CPU, tmp_path, {"x": torch.ones(1 << 16)}, step=1)
    file = next(path.glob("*.safetensors"))
    with open_checkpoint(as_place(path)) as saved:
        saved.open_files([("x", None)])
        os.truncate(file, 1 << 17)
        with assert_raises(CheckpointError, problem=f"{file.name}: wrong size", got="its end"):
            saved.read("x")


def test_a_disk_that_fails_after_everything_was_checked_is_told_by_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DIRECT, 1)
    path = accel.save_state(CPU, tmp_path, {"model": torch.nn.Linear(2, 2)}, step=1)
    real = OpenDirectory.read_into

    def fail(self: OpenDirectory, name: str, start: int, memory: memoryview) -> None:
        if len(failing):
            raise self.refusal(name, failing.pop())
        real(self, name, start, memory)

    def body(ctx: DistContext) -> str:
        with pytest.raises(CheckpointError) as caught:
            accel.load_state(ctx, path, {"model": torch.nn.Linear(2, 2)})
        return str(caught.value)

    failing = ["a bad sector"]
    monkeypatch.setattr(OpenDirectory, "read_into", fail)
    one, other = simulate(body, 2)
    assert one == other
    assert "a bad sector; it was complete when it was checked, and parts of it have been loaded" in one
