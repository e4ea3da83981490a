# SPDX-License-Identifier: Apache-2.0
"""Reports without a browser: curves, states, escapes, what a page says, what the command refuses."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import math
import os
import re
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from profiles import share
from sample_runs import START_S, look_at, write_everything, write_launch, write_metrics, write_run

import accel
from accel.alerts import Alert
from accel.cli import main
from accel.report import Curves, RunData, StoredCheckpoint, find_runs, name_runs, report_page, state_of, thin
from accel.report._series import better_of, charts_of, condense, encode_numbers, ranked_metrics
from accel.report._tables import _launch_facts, element, settings as settings_of, table
from accel.run_folder import (
    LaunchRecord,
    MetricsLine,
    RunRecord,
    Setting,
    encode_line,
    read_launches,
    read_run,
    write_json,
)
from accel.terminal import show_duration, show_names, show_value

TRACE = """{"traceEvents": [
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 9},
    {"ph": "X", "cat": "cpu_op", "name": "<script>", "ts": 0, "dur": 4}
]}"""
POINTS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)


@settings(max_examples=share(1.2))
@given(values=POINTS, most=st.integers(4, 40))
def test_a_thinned_curve_keeps_both_ends_and_all_extremes(values: list[float], most: int) -> None:
    steps = list(range(0, 3 * len(values), 3))
    x, y = thin(steps, values, most)
    assert len(x) == len(y) <= max(most, 1)
    assert x == sorted(set(x))
    assert all(values[int(at) // 3] == value for at, value in zip(x, y, strict=True))
    assert {values[0], values[-1], min(values), max(values)} <= set(y)
    assert len(values) > most or y == values


LINES = st.lists(st.tuples(st.integers(0, 12), st.sampled_from([0.5, 2.0, math.nan, math.inf])), max_size=20)


@settings(max_examples=share(1.2))
@given(lines=LINES)
def test_a_run_that_went_on_from_a_step_has_no_values_of_its_first_life_behind_it(
    lines: list[tuple[int, float]],
) -> None:
    curves = Curves()
    curves.add(MetricsLine(step=step, values={"a": value}) for step, value in lines)
    expected: dict[int, float] = {}
    for step, value in lines:
        expected = {at: each for at, each in expected.items() if at < step} | {step: value}
    finite = {at: value for at, value in expected.items() if math.isfinite(value)}
    curve = curves.values.get("a")
    if curve is None:
        assert not lines
        return
    assert dict(zip(curve.steps, curve.values, strict=True)) == finite
    assert dict(curve.marks) == {at: str(value) for at, value in expected.items() if at not in finite}
    assert curve.last is not None
    assert curve.last[0] == lines[-1][0]
    assert curves.last_step == lines[-1][0]


def test_two_lines_of_one_step_add_up_and_damage_is_counted() -> None:
    curves = Curves()
    curves.add(
        [
            MetricsLine(step=0, values={"a": 1.0}, time={"at": 10.0}),
            None,
            MetricsLine(step=8, values={"a": 2.0}, time={"at": 14.0}),
            MetricsLine(step=8, values={"b": 3.0}, time={"at": 14.0}),
        ]
    )
    assert (curves.values["a"].values, curves.values["b"].values, curves.damaged) == ([1.0, 2.0], [3.0], 1)
    assert curves.speed() == 2.0


class Texts(html.parser.HTMLParser):
    """Texts and tags of a page, as a browser finds them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.policy = ""
        self.scripts: list[str] = []
        self.data = ""
        self._is_data = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        self._is_data = found.get("type") == "application/json"
        if tag == "script" and not self._is_data:
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script" and self._is_data:
            self.data += data
        elif self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.text += data


@settings(max_examples=share(1.2))
@given(text=st.text(st.characters(exclude_categories=["C"]), max_size=20), name=st.sampled_from(["<b>", "&lt;", '"x"']))
def test_every_text_in_markup_is_a_text(text: str, name: str) -> None:
    found = Texts(element("p", text, title=name) + table([name], [(text, text)]))
    assert found.tags == ["p", "div", "table", "thead", "tr", "th", "tbody", "tr", "th", "td"]
    assert found.text == f"{text}{name}{text}{text}"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folders = write_everything(tmp_path_factory.mktemp("runs"))
    return report_page([look_at(name, each) for name, each in zip(name_runs(folders), folders, strict=True)])


def test_a_page_says_what_happened(page: str) -> None:
    found = Texts(page)
    for text in (
        *("finished", "rank 1 failed: NonFiniteError", "stopped by SIGTERM", "no output for 600 s"),
        *("0123456789ab on main, clean", "0123456789ab on main, 2 changed files", "bf16 (flag --precision)"),
        *("loss", "grad_norm", "time/tokens_per_s", "model.width", "Configuration (4 of 4 differ)"),
        *("20 values not finite, nan at step 2400", "0.438444 at step 3990", "nan at step 2590", "--token=***"),
        *("at /home/me/train.py:41", "runs/demo/step-00000400", "/home/me/logs"),
    ):
        assert text in found.text, text
    assert "at" not in [each.strip() for each in found.text.splitlines()]  # the clock itself is no curve


def test_only_the_page_s_own_scripts_may_run_and_nothing_is_fetched(page: str) -> None:
    found = Texts(page)
    digests = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found.scripts}
    assert len(found.scripts) == 1
    directives = {each.split()[0]: each.split()[1:] for each in found.policy.split(";")}
    assert directives["default-src"] == ["'none'"]
    assert set(directives["script-src"]) == {f"'sha256-{digest}'" for digest in digests}
    assert not {"link", "iframe", "img", "base"} & set(found.tags)
    assert len(page) < 200_000
    assert not re.search(r"fetch\(|XMLHttp|WebSocket|innerHTML|insertAdjacent|document\.write|eval\(|Function\(", page)


def test_names_and_errors_of_a_run_are_no_markup(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    folder = tmp_path / "<script>alert(1)<|script>"
    write_metrics(folder, 30)
    (folder / "metrics.jsonl").write_text(f'{{"step":0,"{bad}":1,"time":{{"{bad}":1}}}}\n')
    write_run(folder, config={bad: {bad: bad}}, status="failed", error=bad)
    write_launch(folder, failed=f"{bad}: {bad}")
    shown = report_page([look_at(folder.name, folder)])
    found = Texts(shown)
    assert found.text.count(bad) >= 6
    assert found.tags.count("script") == shown.count("</script>") == len(found.scripts) + 1
    assert bad not in "".join(found.scripts)
    assert "<" not in found.data
    assert bad in msgspec.json.decode(found.data)["metrics"][0]["name"]


def numbers_of(text: str) -> list[float]:
    """Numbers as the page has them."""
    raw = base64.b64decode(text[1:])
    return list(struct.unpack(f"<{len(raw) // (8 if text[0] == 'd' else 4)}{text[0]}", raw))


@settings(max_examples=share(1.2))
@given(values=POINTS, most=st.integers(2, 40))
def test_a_condensed_curve_keeps_extremes_and_the_mean(values: list[float], most: int) -> None:
    steps = list(range(0, 3 * len(values), 3))
    x, mean, low, high = condense(steps, values, most)
    assert len(x) == len(mean) == min(most, len(values))
    assert x == sorted(set(x))
    assert (x[0], x[-1]) == (steps[0], steps[-1])
    if low:
        assert (min(low), max(high)) == (min(values), max(values))
        assert all(map(float.__le__, low, high))
        assert all(map(float.__le__, (each - 1e-9 for each in low), mean))
    else:
        assert (mean, high) == (values, [])


@settings(max_examples=share(2))
@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_numbers_of_a_page_differ_from_those_of_the_run_by_nothing_one_sees(values: list[float]) -> None:
    found = numbers_of(encode_numbers(values))
    spread = max(values) - min(values)
    assert all(abs(one - other) <= 1e-3 * spread for one, other in zip(found, values, strict=True))


def test_the_page_has_each_curve_once_and_steps_that_curves_share_once(page: str) -> None:
    data = msgspec.json.decode(Texts(page).data)
    assert [run["name"] for run in data["runs"]] == ["plain", "wide", "stopped early"]
    loss = data["metrics"][0]
    assert (loss["name"], loss["better"], loss["curves"]["0"]["last"]) == (
        "loss",
        "min",
        [3990, pytest.approx(0.438444)],
    )
    assert [len(numbers_of(loss["curves"][run]["y"])) for run in "012"] == [400, 240, 120]
    assert loss["curves"]["1"]["marks"][0] == [2400, "nan"]
    plain = [metric["curves"]["0"] for metric in data["metrics"]]
    assert len({curve["x"] for curve in plain}) == 1
    assert numbers_of(data["steps"][plain[0]["x"]]) == list(range(0, 4000, 10))
    assert {"model.width", "lr"} <= set(data["differing"])


def test_a_long_run_keeps_its_spikes_in_a_small_page(tmp_path: Path) -> None:
    lines = [encode_line(step, {"loss": 1.0 + step % 7}, {"at": START_S + step}) for step in range(20_000)]
    lines[12_345] = encode_line(12_345, {"loss": 99.0})
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    page = report_page([look_at("run", tmp_path)])
    curve = msgspec.json.decode(Texts(page).data)["metrics"][0]["curves"]["0"]
    assert max(numbers_of(curve["high"])) == 99.0
    assert len(numbers_of(curve["y"])) == 4000
    assert curve["best"] == [0, 1.0]
    assert len(page) < 200_000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(200_000, "200k"), (5e-4, "5e-4"), (0.43121, "0.4312"), (0, "0"), (-12345.6, "-12.3k"), (1.25e9, "1.25B")],
        *[(9999.7, "10k"), (1e20, "1e20"), (3990, "3990"), (0.001, "0.001"), (math.nan, "nan"), (-math.inf, "-inf")],
    ],
)
def test_numbers_are_written_as_people_write_them(value: float, text: str) -> None:
    assert show_value(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(4, "4 s"), (100, "2 min"), (3600, "1 h"), (12_000, "3 h 20 min"), (187_200, "2 d 4 h")]
)
def test_durations_are_written_as_people_write_them(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text


def test_names_that_are_left_out_are_counted() -> None:
    names = ["a", "b", "c", "d"]
    assert show_names(names) == "a, b, c and 1 more"
    assert (show_names(names, 4), show_names(names[:1]), show_names([])) == ("a, b, c, d", "a", "")
    assert show_names(names, 2, "; ") == "a; b and 2 more"


@pytest.mark.parametrize(
    ("name", "better"),
    [
        *[("loss", "min"), ("eval/top1", "max"), ("trainLoss", "min"), ("lr", ""), ("grad_norm", ""), ("gloss", "")],
        *[("val_accuracy", "max"), ("eval/perplexity", "min"), ("reward", "max"), ("time/tokens_per_s", "max")],
    ],
)
def test_a_metric_s_direction_is_read_from_whole_words_of_its_name(name: str, better: str) -> None:
    assert better_of(name) == better


def test_the_first_screen_says_in_words_what_a_reader_should_know(tmp_path: Path) -> None:
    clocks = {"slowest_rank": 3.0, "slowest_own_s": 0.043, "own_s": 0.02, "step_s": 0.05, "tokens_per_s": 41_000.0}
    lines: list[bytes] = []
    for step in range(0, 2000, 10):
        values = {"train/loss": 2 / (1 + step), "epoch": step // 500, "weight_decay": 0.1}
        values |= {"eval/accuracy": step / 2000} if step % 100 == 0 else {}
        values |= {"train/grad_norm": math.inf if step == 900 else 1.0 + step % 3}
        lines.append(encode_line(step, values, {"at": START_S + step + 7500 * (step >= 600), **clocks}))
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    record = RunRecord(
        id="a", project="p", started_s=START_S, resumed_s=(START_S + 600 + 7000,), lost="jsonl lost 3 records"
    )
    write_json(tmp_path / "run.json", record)
    checkpoints = [
        StoredCheckpoint(name="step-00000400", size=10_000, changed_s=0.0),
        *(
            StoredCheckpoint(name=f"step-00000{step}", size=10_000, changed_s=0.0, problem="no manifest")
            for step in (200, 300, 450, 500)
        ),
    ]
    page = report_page([look_at("run", tmp_path, checkpoints, "slowest: rank 3, 43.00 ms a step\n")])
    found = Texts(page).text
    for text in (
        *("2 h 38 min", "step 1990", "eval/accuracy0.95best 0.95 at step 1900", "tokens/s41k", "step-0000040010.0 kB"),
        "1 step with values that are not finite, from step 900: train/grad_norm",
        "rank 3 is slow: 43 ms a step of its own, median 20 ms, the slowest in 20 of the last 20 readings",
        *("profile, slowest: rank 3, 43.00 ms a step", "records were lost: jsonl lost 3 records"),
        *(
            "a gap in the log of 2 h 5 min before step 600",
            "resumed once",
            *("step-00000500 is no checkpoint: no manifest", "2 earlier folders are no checkpoints"),
        ),
        *("train/ (2)", "eval/ (1)", "constants and counters (7)"),
    ):
        assert text in found, text
    marks = msgspec.json.decode(Texts(page).data)["runs"][0]["marks"]
    assert marks == [[400, "checkpoint", "step-00000400"], [600, "resume", "resume"]]


def test_samples_of_all_hosts_are_one_curve_each_where_the_clock_has_them(tmp_path: Path) -> None:
    lines = [encode_line(step, {"loss": 1.0}, {"at": START_S + 10 * step}) for step in range(0, 100, 10)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    for node in range(2):
        samples: list[bytes] = []
        for at in range(50, 800, 50):
            values = {"cpu/percent": 20.0 + node, "gpu0/power_w": 100.0 * node, "gpu1/power_w": 300.0 + at}
            samples.append(encode_line(at // 100 * 10, values, {"at": START_S + at + node}))
        (tmp_path / f"system-{node}.jsonl").write_bytes(b"".join(samples))
    page = Texts(report_page([look_at("run", tmp_path)]))
    data = msgspec.json.decode(page.data)
    found = {metric["name"]: metric["curves"]["0"] for metric in data["metrics"]}
    power = found["system/gpu/power_w"]
    assert numbers_of(power["low"])[0] == 0.0
    assert numbers_of(power["high"])[:2] == [350.0, 400.0]
    assert numbers_of(power["y"])[0] == pytest.approx((0 + 100 + 350 + 350) / 4)
    assert numbers_of(data["steps"][power["x"]])[:2] == pytest.approx([5.1, 10.1], abs=0.11)
    cpu = found["system/cpu/percent"]
    assert (set(numbers_of(cpu["low"])), set(numbers_of(cpu["high"]))) == ({20.0}, {21.0})
    assert "system/ (2)" in page.text


def test_alerts_are_among_the_warnings(tmp_path: Path) -> None:
    write_metrics(tmp_path, 50)
    (tmp_path / "alerts").mkdir()
    made = (
        Alert(time_s=START_S + at, level="warning", title=f"<b>{at}", text="12 left", count=at) for at in range(1, 8)
    )
    (tmp_path / "alerts" / "a.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in made))
    found = Texts(report_page([look_at("run", tmp_path)]))
    assert "warning, 2026-11-18 11:06:47 UTC, 7 times: <b>7: 12 left" in found.text
    assert "2 earlier alerts" in found.text
    assert "<b>2" not in found.text
    assert "b" not in found.tags


def test_many_runs_are_a_row_each_and_say_what_they_share(tmp_path: Path) -> None:
    for at in range(9):
        write_metrics(tmp_path / f"run-{at}", 60, seed=at, bad=30 if at == 4 else None)
        config: dict[str, object] = {"lr": 10.0**-at, "depth": 4, "name": "<b>" if at else "x"}
        write_run(
            tmp_path / f"run-{at}", config=config, status="failed" if at == 4 else "finished", error="<i>" * (at == 4)
        )
    folders = sorted(tmp_path.iterdir())
    page = report_page([look_at(name, each) for name, each in zip(name_runs(folders), folders, strict=True)])
    found = Texts(page)
    for text in (
        "9 runs",
        "8 finished",
        "1 failed",
        "1 of 9 failed: run-4",
        "1 of 9 have values that are not finite: run-4",
    ):
        assert text in found.text, text
    assert "depth" in found.text  # alike in all
    data = msgspec.json.decode(found.data)
    assert data["differing"] == ["lr", "name"]
    assert [run["params"]["lr"] for run in data["runs"]][:2] == ["1.0", "0.1"]
    assert data["metrics"][data["matter"][0]]["name"] == "loss"
    assert "b" not in found.tags


@pytest.mark.parametrize("axis", ["runs", pytest.param("metrics", marks=pytest.mark.slow)])
def test_a_page_grows_with_runs_and_metrics_no_faster_than_they_do(axis: str) -> None:
    def size(count: int) -> int:
        runs, metrics = (count, 5) if axis == "runs" else (20, count)
        curves = Curves()
        curves.add(MetricsLine(step=step, values={f"m{at}": step % 7 for at in range(metrics)}) for step in range(200))
        made = [RunData(name=f"run-{at}", folder=Path(f"run-{at}"), curves=curves) for at in range(runs)]
        return len(report_page(made))

    fixed = size(10)
    assert size(1000) - fixed < 2.2 * (size(500) - fixed)


def test_a_run_without_metrics_has_no_script(tmp_path: Path) -> None:
    write_launch(tmp_path, failed="OSError: disk")
    run = look_at("run", tmp_path)
    found = Texts(report_page([run]))
    assert "No metrics have been logged." in found.text
    assert found.text.lstrip().startswith("run")
    assert (found.scripts, found.data) == ([], "")


def test_the_state_of_a_run_is_that_of_its_newest_launch(tmp_path: Path) -> None:
    assert state_of(None, []).kind == "unknown"
    write_run(tmp_path, config={}, status="failed", error="boom")
    run = read_run(tmp_path)
    alone = state_of(run, [])
    assert (alone.kind, alone.text, alone.started_s) == ("failed", "failed: boom", START_S)
    write_launch(tmp_path, failed="ValueError: x", offset_s=-10)
    write_launch(tmp_path, pid=9, offset_s=100)
    launches = read_launches(tmp_path)
    assert [each.pid for each in launches] == [7, 9]
    newest = state_of(run, launches)
    assert (newest.kind, newest.started_s, newest.ended_s) == ("finished", START_S - 10, START_S + 1900)
    assert state_of(run, launches[:1]).text == "rank 1 failed: ValueError"
    (tmp_path / "launches").joinpath("x.json").write_text(
        '{"host":"h","pid":1,"command":[],"folder":"","started_s":1e12}'
    )
    running = read_launches(tmp_path)
    assert state_of(run, running, alive=lambda each: True).kind == "running"
    assert state_of(run, running, alive=lambda each: False).kind == "lost"


def test_a_run_whose_rank_0_is_gone_is_lost(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    run = RunRecord(id="a", project="p", started_s=time.time(), host=socket.gethostname(), pid=os.getpid())
    assert state_of(run, []).kind == "running"
    assert state_of(msgspec.structs.replace(run, started_s=START_S), []).kind == "lost"  # a later process of its number
    ended = subprocess.Popen(["true"])
    assert os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT) is not None
    assert state_of(msgspec.structs.replace(run, pid=ended.pid), []).kind == "lost"  # its parent has not asked yet
    ended.wait()
    assert state_of(msgspec.structs.replace(run, pid=gone.pid), []).kind == "lost"
    assert state_of(msgspec.structs.replace(run, pid=gone.pid, status="finished"), []).kind == "finished"
    # another host's processes, and those of older records, are unknown
    assert state_of(msgspec.structs.replace(run, pid=gone.pid, host="elsewhere"), []).kind == "running"
    assert state_of(msgspec.structs.replace(run, pid=0, host=""), []).kind == "running"
    write_launch(tmp_path)
    again = msgspec.structs.replace(run, pid=gone.pid, resumed_s=(START_S + 9000,))  # by another command
    assert state_of(again, read_launches(tmp_path)).kind == "lost"


def test_a_run_of_another_host_that_writes_nothing_is_not_running(tmp_path: Path) -> None:
    run = RunRecord(id="a", project="p", started_s=START_S, host="elsewhere", pid=7)
    inside = tmp_path / "logs" / "rank0.log"
    inside.parent.mkdir()
    inside.write_text("x")
    assert state_of(run, [], folder=tmp_path).kind == "running"
    for each in (inside, inside.parent, tmp_path):
        os.utime(each, (START_S, START_S))
    assert state_of(run, [], folder=tmp_path).text.startswith("unknown: nothing written for 30 min")
    inside.write_text("y")
    assert state_of(run, [], folder=tmp_path).kind == "running"


def test_settings_are_those_that_the_run_had_and_a_launch_says_where_they_come_from(tmp_path: Path) -> None:
    launch = {"precision": Setting("auto", "default"), "strategy": Setting("fsdp", "flag --strategy")}
    settled = {"precision": Setting("bf16", ""), "strategy": Setting("fsdp", ""), "device": Setting("cpu", "")}
    record = RunRecord(id="a", project="p", name="n", started_s=START_S, settings=settled)
    first = LaunchRecord(host="h", pid=1, command=("a.py",), folder="", started_s=START_S, settings=launch)
    run = RunData(name="n", folder=tmp_path, curves=Curves(), run=record, launches=[first])
    assert settings_of([run]) == [("precision", "bf16"), ("strategy", "fsdp (flag --strategy)"), ("device", "cpu")]


def test_runs_have_the_shortest_names_that_differ(tmp_path: Path) -> None:
    assert name_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert name_runs([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert name_runs([tmp_path / "a", tmp_path / "a"]) == ["a", "a (2)"]


def test_the_command_writes_the_page_and_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_launch(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!doctype html>")
    assert "report.html" in capsys.readouterr().out
    (tmp_path / "run" / "profile").mkdir()
    (tmp_path / "run" / "profile" / "rank-00000.json").write_text(TRACE)
    assert main(["report", str(tmp_path / "run")]) == 0
    page = Texts((tmp_path / "run" / "report.html").read_text()).text
    assert "1 ranks, 1 steps, on the CPU" in page
    assert "<script>  0.004    1.0" in page
    (tmp_path / "run" / "profile" / "rank-00000.json").write_text("{")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "the file is not a trace of torch.profiler" in (tmp_path / "run" / "report.html").read_text()
    _ = capsys.readouterr()
    (tmp_path / "empty").mkdir()
    for words, told in (
        ([str(tmp_path / "nowhere")], "there is no such folder"),
        ([str(tmp_path / "rum")], "Did you mean `run`?"),
        ([str(tmp_path / "empty")], "the folder is not a run's"),
        ([str(tmp_path / "run"), "--output", str(tmp_path / "no" / "x.html")], "the page cannot be written"),
    ):
        assert main(["report", *words]) == 2
        assert told in capsys.readouterr().err


def test_runs_are_searched_three_levels_deep_and_links_are_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    for place in ("one", "a/two", "a/b/three", "a/b/c/four", "one/step-1/inner"):
        write_metrics(runs / place, 20)
    (runs / "a" / "five").mkdir()
    write_run(runs / "a" / "five", config={})
    write_metrics(elsewhere, 20)
    (runs / "begun").mkdir()
    (runs / "begun" / "metrics.jsonl").touch()
    (runs / "link").symlink_to(elsewhere)
    (runs / "a" / "loop").symlink_to(runs)
    found = [path.relative_to(runs).as_posix() for path in find_runs(runs).folders]
    assert found == ["a/b/three", "a/five", "a/two", "begun", "one"]
    assert find_runs(runs / "link").folders == [runs / "link"]  # as it was named
    assert main(["report", str(runs)]) == 0
    assert "5 runs" in Texts((runs / "report.html").read_text()).text
    (tmp_path / "none" / "deep").mkdir(parents=True)
    _ = capsys.readouterr()
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "the folder is not a run's, and none is in it" in capsys.readouterr().err
    assert main(["report", str(runs / "begun")]) == 2
    _ = capsys.readouterr()
    assert main(["compare", str(runs), str(runs / "one")]) == 2
    assert "but holds runs: expected metrics.jsonl, run.json" in capsys.readouterr().err
    assert main(["report", str(runs), "--output", str(runs)]) == 2
    assert f"Name a file, such as {runs / 'report.html'}" in capsys.readouterr().err


def test_a_counter_stays_one_where_a_resumed_run_counts_from_the_start(tmp_path: Path) -> None:
    for name, values in (("resumed", [*range(50), *range(50)]), ("noisy", [at * 7 % 10 for at in range(100)])):
        (tmp_path / name).mkdir()
        lines = [encode_line(step, {"samples": value, "loss": 1 / step}) for step, value in enumerate(values, 1)]
        (tmp_path / name / "metrics.jsonl").write_bytes(b"".join(lines))
        kinds = {chart.title: chart.kind for chart in charts_of([look_at(name, tmp_path / name)])}
        assert kinds == {"samples": "folded" if name == "resumed" else "curve", "loss": "curve"}


def test_runs_stand_in_their_natural_order_beside_a_folder_without_permission_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run10", "run2", "run1", "other"):
        write_metrics(tmp_path / name, 20)
    (tmp_path / "other" / "metrics.jsonl").rename(tmp_path / "other" / "kept")
    assert [path.name for path in find_runs(tmp_path).folders] == ["run1", "run2", "run10"]
    lstat, scandir, listdir = os.lstat, os.scandir, os.listdir

    def refuse(path: Any) -> os.stat_result:  # as the system does for all but root
        if Path(path).parent.name == "run2":
            raise PermissionError(13, "Permission denied", str(path))
        return lstat(path)

    def refuse_to_list(by: Any) -> Any:
        def refuse(path: Any) -> Any:
            if Path(path).name == "other":
                raise PermissionError(13, "Permission denied", str(path))
            return by(path)

        return refuse

    monkeypatch.setattr("accel.report._run_data.os.scandir", refuse_to_list(scandir))
    monkeypatch.setattr("accel.report._run_data.os.listdir", refuse_to_list(listdir))
    with monkeypatch.context() as patched:
        patched.setattr("accel.report._run_data.os.lstat", refuse)
        assert main(["report", str(tmp_path)]) == 0
    told = capsys.readouterr().err
    page = Texts((tmp_path / "report.html").read_text())
    assert "2 runs" in page.text
    for name in ("other", "run2"):
        line = f"{tmp_path / name} cannot be read: Permission denied"
        assert f"accel report: {line}\n" in told
        assert line in page.text
    assert main(["report", str(tmp_path / "run2"), "--output", str(tmp_path / "none.html")]) == 0  # it is named: a run
    assert main(["report", str(tmp_path / "other")]) == 2
    told = capsys.readouterr().err
    assert f"error: the folder cannot be read: Permission denied - at {tmp_path / 'other'}" in told


def test_files_that_cannot_be_read_are_named_and_the_others_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, broken = tmp_path / "runs" / "good", tmp_path / "runs" / "broken"
    for folder in (good, broken):
        write_metrics(folder, 50)
        write_run(folder, config={"lr": 1e-3})
        write_launch(folder)
    assert look_at("good", good).problems == []
    (broken / "run.json").write_text('{"id": "x"')
    for name in ("system-0.jsonl", "alerts/a.jsonl", "launches/b.jsonl"):
        (broken / name).mkdir(parents=True)  # a read of it fails, for root too
    (broken / "launches" / "c.jsonl").write_text('{"kind": "event"}\n')
    (broken / "launches" / "d.jsonl").write_text('{"kind": "laun')  # begins to be written
    data = look_at("broken", broken)
    assert data.curves.last_step == 40
    assert len(data.launches) == 1
    expected = [
        "run.json cannot be read: DecodeError: Input data was truncated",
        "launches/b.jsonl cannot be read: Is a directory",
        "launches/c.jsonl is no log of a launch",
        "alerts/a.jsonl cannot be read: Is a directory",
        "system-0.jsonl cannot be read: Is a directory",
    ]
    assert data.problems == expected
    assert main(["report", str(tmp_path / "runs")]) == 0
    told = capsys.readouterr().err
    page = Texts((tmp_path / "runs" / "report.html").read_text()).text
    for line in expected:
        assert f"accel report: {broken}: {line}\n" in told
        assert f"broken: {line}" in page
    assert f"{good}: " not in told
    (broken / "metrics.jsonl").unlink()
    (broken / "metrics.jsonl").mkdir()
    assert main(["report", str(broken)]) == 0  # its launch is left
    assert "metrics.jsonl cannot be read: Is a directory" in capsys.readouterr().err
    assert main(["compare", str(good), str(broken)]) == 2
    assert "metrics.jsonl cannot be read" in capsys.readouterr().err
    for path in (broken / "launches").iterdir():
        _ = path.rmdir() if path.is_dir() else path.unlink()
    assert main(["report", str(broken), "--output", str(tmp_path / "no.html")]) == 2
    assert "error: metrics.jsonl cannot be read: Is a directory; run.json" in capsys.readouterr().err
    assert not (tmp_path / "no.html").exists()


def test_what_counts_is_no_metric_that_matters_also_where_it_begins_anew_with_each_epoch(tmp_path: Path) -> None:
    values = [{"samples": float(step % 8), "lap/epoch": float(step % 3), "norm": 1 / (1 + step)} for step in range(99)]
    lines = [encode_line(step, each) for step, each in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    charts = charts_of([look_at("run", tmp_path)])
    assert [chart.title for chart in charts if chart.kind == "curve"] == ["samples", "lap/epoch", "norm"]
    assert [chart.title for chart in ranked_metrics(charts)] == ["norm"]


def test_the_first_colour_of_curves_reads_on_light_and_dark_cards() -> None:
    def luminance(colour: str) -> float:  # of WCAG 2
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    assets = Path(accel.__path__[0]) / "report" / "assets"
    first = re.search(r'const COLORS = \["(#\w{6})"', (assets / "data.js").read_text())
    cards = re.search(r"--card: light-dark\((#\w{6}), (#\w{6})\)", (assets / "style.css").read_text())
    assert first
    assert cards
    for card in cards.groups():
        low, high = sorted([luminance(first[1]), luminance(card)])
        assert (high + 0.05) / (low + 0.05) > 3.5


def test_facts_that_a_launch_lacks_take_no_row(tmp_path: Path) -> None:
    write_launch(tmp_path)
    [whole] = read_launches(tmp_path)
    begun = msgspec.structs.replace(whole, ended_s=None, status=None, checkpoint="", log_dir="", source=None)
    titles = [re.findall(r'<th scope="row">([^<]*)</th>', "".join(_launch_facts(launch))) for launch in (whole, begun)]
    assert titles == [
        ["command", "folder", "code", "ended", "restarts", "newest checkpoint", "output of each rank"],
        ["command", "folder", "restarts"],
    ]


def test_the_reason_why_code_is_not_stored_is_on_the_page(tmp_path: Path) -> None:
    write_metrics(tmp_path, 20)
    write_run(tmp_path, config={})
    record = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(record | {"code": "not stored: git is not there"}))
    assert "not stored: git is not there" in Texts(report_page([look_at("run", tmp_path)])).text


@pytest.mark.slow
def test_five_hundred_runs_take_thirty_seconds_and_ten_megabytes_at_most(tmp_path: Path) -> None:
    values = {f"train/metric{at}": float(at) for at in range(8)}
    for run in range(500):
        folder = tmp_path / "runs" / f"run-{run}"
        folder.mkdir(parents=True)
        lines = [
            encode_line(step, {name: value + 1 / (1 + step) for name, value in values.items()}, {"at": START_S + step})
            for step in range(500)
        ]
        (folder / "metrics.jsonl").write_bytes(b"".join(lines))
        write_run(folder, config={"lr": run / 500, "model": {"width": 2 ** (run % 5)}})
    began_s = time.process_time()
    assert main(["report", str(tmp_path / "runs")]) == 0
    assert time.process_time() - began_s < 30
    assert (tmp_path / "runs" / "report.html").stat().st_size < 10_000_000


def test_groups_beyond_six_are_folded_and_small_curves_have_the_colour_of_their_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        values = {f"{group}{at}/loss_{part}": 0.5 + at for group in "xy" for at in range(4) for part in "pq"}
        lines = [encode_line(step, {key: value / step for key, value in values.items()}) for step in (1, 2)]
        (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    page = report_page([look_at(name, tmp_path / name) for name in ("a", "b")])
    groups = re.findall(r'<details [^>]*class="group"[^>]*>', page) or re.findall(r"<details[^>]*group[^>]*>", page)
    assert [("open" in each) for each in groups] == [True] * 6 + [False] * 2
    assert set(re.findall(r'class="spark"[^>]*data-run="(\d)"', page)) == {"0", "1"}
