# SPDX-License-Identifier: Apache-2.0
"""Trackers as an item of checkpoints: the same run goes on, and no step stands twice in its local files."""

from __future__ import annotations

import csv
import errno
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises, caught
from hypothesis import example, given, settings, strategies as st
from processes import patience, same_path
from profiles import share

import accel
from accel.report import FollowedRun, report_page
from accel.run_folder import read_run
from accel.testing import Simulator
from accel.trackers import _writer


def untimed(folder: Path) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """The files of a run without the readings of clocks."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(list(row)[-1] == "time" for row in rows)
    with open(folder / "metrics.csv", newline="") as file:
        table = [row[:-1] for row in csv.reader(file)]
    return [{name: row[name] for name in row if name != "time"} for row in rows], table


def local() -> list[accel.trackers.Tracker]:
    return [accel.trackers.jsonl(), accel.trackers.csv()]


# A step and the names of its values, for each call of `log`; steps may repeat.
CALLS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["a", "ab", "c"])), min_size=1, max_size=8)


def log_calls(
    trackers: accel.trackers.Trackers, calls: list[tuple[int, str]], span: range, *, then: Callable[[int], None]
) -> None:
    ctx, step = accel.single(), 0
    for at, (more, names) in enumerate(calls):
        step += more
        if at in span:
            accel.log(ctx, trackers, dict.fromkeys(names, at / 7), step=step)
            then(at)


@settings(max_examples=share(0.12))
@given(CALLS, st.integers(0, 7), st.integers(0, 7), st.sampled_from([b"", b'{"step":3,"a"', b"3,1", b'{"step":99}\n{']))
@example([(1, "a"), (0, "ab"), (1, "c")], 0, 3, b"")
def test_a_run_that_goes_on_leaves_the_files_of_one_never_stopped(
    calls: list[tuple[int, str]], saved_at: int, stopped_at: int, torn: bytes
) -> None:
    saved_at = min(saved_at, len(calls) - 1)
    ctx, whole = accel.single(), range(len(calls))
    with tempfile.TemporaryDirectory() as name:
        straight, stopped = Path(name, "straight"), Path(name, "stopped")
        with accel.tracking(ctx, "p", to=local(), dir=straight) as trackers:
            log_calls(trackers, calls, whole, then=lambda at: None)

        kept: dict[str, Any] = {}
        first = accel.init_trackers(ctx, "p", to=local(), dir=stopped)

        def keep(at: int) -> None:
            if at == saved_at:
                kept.update(first.state_dict())

        log_calls(first, calls, range(max(stopped_at, saved_at + 1)), then=keep)
        accel.end_trackers(ctx, first)
        for file in ("metrics.jsonl", "metrics.csv"):
            with open(stopped / file, "ab") as opened:
                _ = opened.write(torn if torn[:1] in ((b"{", b"") if file.endswith("jsonl") else (b"3", b"")) else b"")
        with accel.tracking(ctx, "p", to=local(), dir=stopped) as trackers:
            trackers.load_state_dict(kept)
            assert trackers.run.id == first.run.id
            log_calls(trackers, calls, range(saved_at + 1, len(calls)), then=lambda at: None)
        if saved_at + 1 < len(calls):
            assert untimed(stopped) == untimed(straight)


def test_long_lines_are_cut_back_too(tmp_path: Path) -> None:
    ctx = accel.single()
    wide = {f"name {number}": number / 7 for number in range(3000)}
    with accel.tracking(ctx, "p", to=local(), dir=tmp_path) as trackers:
        for step in range(4):
            accel.log(ctx, trackers, wide, step=step)
            if step == 1:
                kept = trackers.state_dict()
    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()[0]) > 1 << 16
    with accel.tracking(ctx, "p", to=local(), dir=tmp_path) as trackers:
        trackers.load_state_dict(kept)
        accel.log(ctx, trackers, wide, step=9)
    rows, table = untimed(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 9]
    assert [row[0] for row in table] == ["step", "0", "1", "9"]


def train(ctx: accel.DistContext, out: Path, *, steps: int, to: list[accel.trackers.Tracker], item: bool = True) -> int:
    """A loop that goes on from its newest checkpoint; saves at every third step."""
    model = torch.nn.Linear(2, 1)
    with accel.tracking(ctx, "p", to=to, dir=out) as trackers:
        items: dict[str, object] = {"model": model, **({"trackers": trackers} if item else {})}
        start = accel.train_state(ctx)
        begin = 0
        if found := accel.latest_checkpoint(out):
            _ = accel.load_state(ctx, found, items | {"state": start})
            begin = int(found.name.removeprefix("step-"))
        for step in range(begin + 1, steps + 1):
            accel.log(ctx, trackers, {"loss": 1 / step}, step=step)
            if step % 3 == 0:
                _ = accel.save_state(ctx, out, items | {"state": start}, step=step)
    return begin


def test_trackers_are_an_item_of_checkpoints(tmp_path: Path, ranks: Simulator) -> None:
    for steps, begin in ((4, 0), (8, 3)):
        begins = ranks.run(lambda ctx, steps=steps: train(ctx, tmp_path, steps=steps, to=local()), 2)
        assert begins == [begin, begin]
    rows, _ = untimed(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 9))
    run = json.loads((tmp_path / "run.json").read_text())
    assert len(run["resumed_s"]) == 1


def test_a_resumed_loop_that_forgets_its_trackers_is_an_error(tmp_path: Path, ranks: Simulator) -> None:
    def forgetful(ctx: accel.DistContext) -> BaseException | None:
        return caught(lambda: train(ctx, tmp_path, steps=8, to=local(), item=False))

    assert ranks.run(forgetful, 2) == [None, None]
    for error in ranks.run(forgetful, 2):
        assert isinstance(error, accel.errors.ConfigError)
        assert "a new run at step 7" in str(error)
        assert '{"trackers": trackers}' in str(error)


def test_a_new_run_sets_the_earlier_ones_files_aside(tmp_path: Path) -> None:
    for _ in range(3):
        train(accel.single(), tmp_path, steps=2, to=local())
    names = sorted(path.name for path in tmp_path.glob("metrics*"))
    assert names == sorted(f"metrics{number}.{kind}" for number in ("", ".1", ".2") for kind in ("jsonl", "csv"))
    assert len({len(path.read_text().splitlines()) for path in tmp_path.glob("*.jsonl")}) == 1


@pytest.mark.parametrize("fails", [True, False])
def test_no_checkpoint_commits_before_the_local_records_hold_its_steps(
    fails: bool, tmp_path: Path, ranks: Simulator
) -> None:
    gate, flushed = threading.Event(), list[int]()
    rows = list[int]()

    def log(live: object, values: object, step: int) -> None:
        _ = gate.wait()
        if fails:
            raise OSError("disk full")
        rows.append(step)

    def flush(live: object) -> None:
        flushed.append(len(rows))

    tracker = accel.trackers.Tracker("slow", lambda run, config: 1, log, lambda live, ending: None, flush=flush)

    def save(ctx: accel.DistContext) -> BaseException | None:
        with accel.tracking(ctx, "p", to=[tracker]) as trackers:
            for step in range(5):
                accel.log(ctx, trackers, {"loss": 1.0}, step=step)
            if ctx.is_main_process:
                threading.Timer(0.05, gate.set).start()
            return caught(lambda: accel.save_state(ctx, tmp_path, {"trackers": trackers}, step=5))

    found = ranks.run(save, 2)
    if fails:
        assert [type(error) for error in found] == [accel.errors.CheckpointError] * 2
        assert "disk full" in str(found[1])
        assert accel.latest_checkpoint(tmp_path) is None
    else:
        assert found == [None, None]
        assert flushed == [5]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, the disk takes half of a line."""
    is_full, write = threading.Event(), os.write

    def written(file: int, data: Any) -> int:
        if not is_full.is_set() or not bytes(data).endswith(b"}\n"):
            return write(file, data)
        if len(data) > 20:
            return write(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", written)
    monkeypatch.setattr(_writer, "_RETRY_S", 0.02)
    return is_full


def logged_steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_moment_of_full_disk_loses_no_line_and_no_later_checkpoint(
    full: threading.Event, tmp_path: Path, ranks: Simulator, caplog: pytest.LogCaptureFixture
) -> None:
    def train(ctx: accel.DistContext) -> tuple[BaseException | None, ...]:
        def save(step: int) -> BaseException | None:
            return caught(lambda: accel.save_state(ctx, tmp_path / "ckpt", {"trackers": trackers}, step=step))

        with accel.tracking(ctx, "p", to=[accel.trackers.jsonl()], dir=tmp_path, strict=True) as trackers:
            for step in range(30):
                if step == 10:
                    accel.wait_for_everyone(ctx)
                    full.set()
                accel.log(ctx, trackers, {"loss": 1.0}, step=step)
            during = save(29)
            full.clear()
            accel.log(ctx, trackers, {"loss": 1.0}, step=30)
            return during, save(30)

    during, after = zip(*ranks.run(train, 2), strict=True)
    assert [type(error) for error in during] == [accel.errors.CheckpointError] * 2  # its disk is full now
    assert "No space left" in str(during[1])
    assert after == (None, None)
    assert logged_steps(tmp_path) == list(range(31))
    told = [each.getMessage() for each in caplog.records if "tries again" in each.getMessage()]
    assert len(told) == 1
    assert read_run(tmp_path).lost == ""


def test_lines_that_are_gone_are_told_once_and_saving_goes_on(
    full: threading.Event, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ctx = accel.single()
    with accel.tracking(ctx, "p", to=[accel.trackers.jsonl()], dir=tmp_path, room_bytes=2000) as trackers:
        accel.log(ctx, trackers, {"loss": 1.0}, step=0)
        trackers.tracked.save()
        full.set()
        for step in range(1, 100):
            accel.log(ctx, trackers, {"loss": 1.0}, step=step)
        full.clear()
        for step in range(100, 103):
            accel.log(ctx, trackers, {"loss": 1.0}, step=step)
            accel.save_state(ctx, tmp_path / "ckpt", {"trackers": trackers}, step=step)
    steps = logged_steps(tmp_path)
    assert steps[0] == 0
    assert steps[-4:] == [99, 100, 101, 102]
    assert 4 < len(steps) < 50
    lost = f"tracker jsonl: {103 - len(steps)} dropped"
    told = [each.getMessage() for each in caplog.records if lost in each.getMessage()]
    assert len(told) == 1  # not at the end again
    assert "missing steps" in told[0]
    assert not [each for each in caplog.records if "tracker run.json" in each.getMessage()]
    assert read_run(tmp_path).lost == lost
    assert lost in report_page([FollowedRun("a", tmp_path, lambda _: [], lambda _: "").look()])


def test_a_disk_that_stays_full_holds_the_end_up_for_a_moment_only(full: threading.Event, tmp_path: Path) -> None:
    ctx = accel.single()
    with accel.tracking(ctx, "p", to=[accel.trackers.jsonl()], dir=tmp_path) as trackers:
        accel.log(ctx, trackers, {"loss": 1.0}, step=0)
        trackers.tracked.save()
        full.set()
        for step in range(1, 10):
            accel.log(ctx, trackers, {"loss": 1.0}, step=step)
    assert logged_steps(tmp_path) == [0]
    assert "9 failed: log: OSError: [Errno 28] No space left" in read_run(tmp_path).lost


def test_a_run_of_another_project_is_refused() -> None:
    ctx = accel.single()
    with accel.tracking(ctx, "first", to=[]) as trackers:
        state = trackers.state_dict()
    with accel.tracking(ctx, "second", to=[]) as trackers:
        with assert_raises(accel.errors.CheckpointError, problem="another project", expected="'first'", got="'second'"):
            trackers.load_state_dict(state)
        with assert_raises(accel.errors.CheckpointError, problem="the run of trackers is not valid"):
            trackers.load_state_dict({"id": 3})


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import accel
import test_tracking_resume as here
here.train(accel.single(), Path(sys.argv[1]), steps=100, to=here.local())
"""


@pytest.mark.nightly
def test_a_killed_run_that_goes_on_writes_the_same_bytes(tmp_path: Path) -> None:
    code = KILLED.format(tests=os.path.dirname(__file__))

    def begin(folder: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code, str(tmp_path / folder)], env=same_path())

    straight = begin("straight")
    assert straight.wait(patience(120)) == 0
    kills = 0
    chance = random.Random(7)
    while kills < 3:
        with begin("killed") as process:
            before = accel.latest_checkpoint(tmp_path / "killed")
            until = time.monotonic() + patience(60)
            while accel.latest_checkpoint(tmp_path / "killed") == before and process.poll() is None:
                assert time.monotonic() < until
                time.sleep(0.005)
            time.sleep(chance.random() * 0.2)
            if process.poll() is not None:
                break
            process.send_signal(signal.SIGKILL)
            _ = process.wait()
            kills += 1
    assert kills >= 2
    last = begin("killed")
    assert last.wait(patience(120)) == 0
    assert untimed(tmp_path / "killed") == untimed(tmp_path / "straight")
    texts = [
        [line.partition(b',"time":')[0] for line in (tmp_path / name / "metrics.jsonl").read_bytes().splitlines()]
        for name in ("straight", "killed")
    ]
    assert texts[0] == texts[1]
