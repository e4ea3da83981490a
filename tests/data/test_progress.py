# SPDX-License-Identifier: Apache-2.0
"""The progress line: the main rank only, where the epoch stands, as wide as there is room."""

from __future__ import annotations

import dataclasses
import io
import os
import re

import pytest
import torch
from catching import assert_raises
from torch.utils.data import DataLoader

import accel
from accel import Cursor


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def columns(monkeypatch):
    """Sets how wide the terminal says it is."""

    def say(width):
        monkeypatch.setattr(Terminal, "fileno", lambda _: 1)
        monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((width, 24)))

    return say


def _run(ctx, out, cursor=None, stop=-1, **options) -> tuple[int, str]:
    loader = accel.prepare_loader(ctx, DataLoader(range(50), batch_size=5))
    seen = 0
    found = accel.batches(ctx, loader, cursor or Cursor())
    for step, batch in enumerate(accel.data.progress(ctx, found, total=loader.samples, file=out, **options)):
        seen += batch.valid
        if step == stop:
            break
    return seen, out.getvalue()


def test_a_terminal_shows_the_samples_of_all_ranks_once(ranks, columns):
    columns(120)
    results = ranks.run(lambda ctx: _run(ctx, Terminal(), every_s=0), 2)
    assert [seen for seen, _ in results] == [25, 25]
    shown = results[0][1].split("\r")[1:]
    assert len(shown) == 5
    assert re.fullmatch(r"epoch 0:  20% \[####\.{20}\] 10/50 samples  [\d,.]+ samples/s  0:00:00 left\x1b\[K", shown[0])
    assert re.fullmatch(r"epoch 0: 100% \[#{24}\] 50/50 samples  [\d,.]+ samples/s  0:00:00\x1b\[K\n", shown[-1])
    assert results[1][1] == ""


def test_a_pipe_to_a_launcher_with_a_terminal_is_redrawn_in_its_width():
    source, target = os.pipe()
    ctx = dataclasses.replace(accel.single(), columns=60)
    with os.fdopen(source, newline="") as read, os.fdopen(target, "w", newline="") as out:
        loader = accel.prepare_loader(ctx, DataLoader(range(50), batch_size=5))
        for _ in accel.data.progress(ctx, accel.batches(ctx, loader), total=loader.samples, file=out, every_s=0):
            pass
        out.close()
        shown = read.read().replace("\x1b[K", "")
    *states, end = shown.split("\r")[1:]
    assert len(states) == 9
    assert end.endswith("\n")
    assert all(len(state) < 60 for state in (*states, end.strip()))


def test_a_file_of_a_rank_below_such_a_launcher_gets_lines():
    _, text = _run(dataclasses.replace(accel.single(), columns=60), io.StringIO(), every_s=0)
    assert text.count("\n") == 10
    assert "\r" not in text


def test_a_resumed_epoch_goes_on_where_it_was():
    _, text = _run(accel.single(), Terminal(), Cursor(epoch=3, consumed=40), every_s=0, label="train")
    assert "train:  90%" in text
    assert "45/50" in text


def test_a_line_that_is_left_ends():
    seen, text = _run(accel.single(), Terminal(), stop=2, every_s=0)
    assert seen == 15
    assert text.endswith("\n")
    assert "10/50" in text
    assert "15/50" not in text  # the batch in which the loop was left is not done


@pytest.mark.parametrize(("width", "shown"), [(0, 80), (20, 20), (40, 40), (70, 70), (80, 80), (200, 200)])
def test_a_line_is_never_wider_than_its_terminal(columns, width, shown):
    """What breaks into two lines cannot be drawn again."""
    columns(width)
    _, text = _run(accel.single(), Terminal(), every_s=0)
    lines = text.replace("\x1b[K", "").strip().split("\r")
    assert len(lines) == 10
    assert all(len(line) < shown for line in lines)
    assert all(("[" in line) == (shown >= 70) for line in lines)


@pytest.mark.parametrize(("options", "lines"), [({}, 1), ({"show": False}, 0), ({"every_s": 0}, 10)])
def test_what_is_no_terminal_gets_lines(options, lines):
    """So what a launcher reads through a pipe, or a log, holds them too."""
    seen, text = _run(accel.single(), io.StringIO(), **options)
    assert seen == 50
    assert text.count("\n") == text.count("epoch 0") == lines
    assert "\r" not in text
    assert "\x1b" not in text


def test_without_a_total_it_counts():
    ctx, out = accel.single(), io.StringIO()
    loader = accel.prepare_loader(ctx, DataLoader(range(7), batch_size=5))
    for _ in accel.data.progress(ctx, accel.batches(ctx, loader, Cursor()), file=out, every_s=0):
        pass
    first, last = out.getvalue().splitlines()
    assert re.fullmatch(r"epoch 0: 5 samples  [\d,.]+ samples/s", first)
    assert re.fullmatch(r"epoch 0: 7 samples  [\d,.]+ samples/s", last)


def test_values_of_the_loop_stand_in_the_line_and_are_read_only_then():
    loss, read = torch.tensor(0.25), []

    def values():
        read.append(loss)
        return {"loss": loss, "lr": 3e-4}

    _, text = _run(accel.single(), io.StringIO(), values=values)
    assert re.search(r"50/50 samples  [\d,.]+ samples/s  loss 0\.25  lr 0\.0003  0:00:00\n$", text)
    assert len(read) == 1


@pytest.mark.parametrize(("value", "got"), [("low", "str"), (torch.ones(2), r"Tensor of shape \[2\]")])
def test_a_value_that_is_no_number_is_named(value, got):
    with assert_raises(accel.errors.ConfigError, got=f"^{got}$", where=r"^progress\(values=\), loss$"):
        _run(accel.single(), io.StringIO(), values=lambda: {"loss": value})


def test_other_things_than_batches_are_refused():
    ctx = accel.single()
    with assert_raises(
        accel.errors.ConfigError, expected=r"accel\.batches", got="int", where="progress", fix=r"tqdm\(things"
    ):
        list(accel.data.progress(ctx, range(3), file=io.StringIO()))
