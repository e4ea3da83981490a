# SPDX-License-Identifier: Apache-2.0
"""Reports without a browser: curves, states, escapes, what a page says, what the command refuses."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html.parser
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from sample_runs import START_S, write_everything, write_launch, write_metrics, write_run

from accel.cli import main
from accel.cli._runs import find_runs
from accel.errors import MissingExtraError
from accel.report import Curves, MetricCurve, _page, name_runs, read_data, report_page, state_of, thin
from accel.report._html import element, table
from accel.report._run_data import RunData
from accel.report._tables import settings as settings_of
from accel.run_folder import LaunchRecord, MetricsLine, RunRecord, Setting, read_launches, read_run

TRACE = """{"traceEvents": [
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 9},
    {"ph": "X", "cat": "cpu_op", "name": "<script>", "ts": 0, "dur": 4}
]}"""
POINTS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)


@settings(max_examples=60)
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


@settings(max_examples=60)
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
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.text += data


@settings(max_examples=60)
@given(text=st.text(st.characters(exclude_categories=["C"]), max_size=20), name=st.sampled_from(["<b>", "&lt;", '"x"']))
def test_every_text_in_markup_is_a_text(text: str, name: str) -> None:
    found = Texts(element("p", text, title=name) + table([name], [(text, text)]))
    assert found.tags == ["p", "div", "table", "thead", "tr", "th", "tbody", "tr", "th", "td"]
    assert found.text == f"{text}{name}{text}{text}"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folders = write_everything(tmp_path_factory.mktemp("runs"))
    return report_page([read_data(name, each) for name, each in zip(name_runs(folders), folders, strict=True)])


def test_a_page_says_what_happened(page: str) -> None:
    found = Texts(page)
    for text in (
        *("finished", "rank 1 failed: NonFiniteGradientError", "stopped by SIGTERM", "no output for 600 s"),
        *("0123456789ab on main, clean", "0123456789ab on main, 2 changed files", "bf16 (flag --precision)"),
        *("loss", "grad_norm", "by the clock: tokens_per_s", "model.width", "Configuration (4 of 4 differ)"),
        *("20 values not finite, nan at step 2400", "0.438444 at step 3990", "nan at step 2590", "--token=***"),
        *("at /home/me/train.py:41", "runs/demo/step-00000400", "/home/me/logs"),
    ):
        assert text in found.text, text
    assert "at" not in [each.strip() for each in found.text.splitlines()]  # the clock itself is no curve


def test_only_the_page_s_own_scripts_may_run_and_nothing_is_fetched(page: str) -> None:
    found = Texts(page)
    digests = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found.scripts}
    assert len(found.scripts) >= 3
    directives = {each.split()[0]: each.split()[1:] for each in found.policy.split(";")}
    assert directives["default-src"] == ["'none'"]
    assert set(directives["script-src"]) == {f"'sha256-{digest}'" for digest in digests}
    assert not {"link", "iframe", "img", "base"} & set(found.tags)
    assert len(page) < 2**21


def test_names_and_errors_of_a_run_are_no_markup(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    folder = tmp_path / "<script>alert(1)<|script>"
    write_metrics(folder, 30)
    (folder / "metrics.jsonl").write_text(f'{{"step":0,"{bad}":1,"time":{{"{bad}":1}}}}\n')
    write_run(folder, config={bad: {bad: bad}}, status="failed", error=bad)
    write_launch(folder, failed=f"{bad}: {bad}")
    shown = report_page([read_data(folder.name, folder)])
    found = Texts(shown)
    assert not any("alert(1)" in script and "{" not in script for script in found.scripts)
    assert found.text.count(bad) >= 6
    assert found.tags.count("script") == shown.count("</script>") == len(found.scripts)


def test_bokeh_draws_one_figure_of_a_kind_and_the_others_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def figure(**options: object) -> object:
        made.append(plotting.figure(**options))
        return made[-1]

    ask = _page._bokeh
    plotting = ask("plotting")
    monkeypatch.setattr(
        _page, "_bokeh", lambda name: SimpleNamespace(figure=figure) if name == "plotting" else ask(name)
    )
    curves: dict[str, dict[str, MetricCurve]] = {}
    for at in range(300):
        curve = MetricCurve()
        for step in range(1 if at == 7 else 5):  # a line of one point is a kind of its own, and one of marks
            curve.add(step, math.nan if at == 8 and step == 2 else float(at))
        curves[f"metric {at}"] = {"ColumnDataSource": curve, "b": curve} if at == 9 else {"ColumnDataSource": curve}
    drawn = _page.draw(curves, ["ColumnDataSource", "b"])
    assert len(made) == 4
    assert list(drawn.places) == list(curves)
    content, items = msgspec.json.decode(f"[{drawn.scripts[-1].removeprefix('Bokeh.embed.embed_items(')[:-2]}]")
    roots = content["report"]["roots"]
    assert [root["id"] for root in roots] == items[0]["root_ids"]
    known: list[str] = []
    heights: list[list[float]] = []
    for root in roots:  # names are unique but for references, and each figure has the data of its metric
        objects = list(walk(root))
        known += [each["id"] for each in objects if "type" in each]
        assert {each["id"] for each in objects} <= set(known)
        sources = [each["attributes"]["data"] for each in objects if each.get("name") == "ColumnDataSource"]
        heights.append([column_of(source, "y") for source in sources])
    assert len(known) == len(set(known))
    assert [each[0] for each in heights] == [[float(at)] * (1 if at == 7 else 4 if at == 8 else 5) for at in range(300)]
    assert heights[8][1:] == [[8.0]]
    ranges = {root["attributes"]["x_range"]["id"] for root in roots}
    assert len(ranges) == 1


def walk(value: object) -> Iterator[dict[str, Any]]:
    """Yield the objects and references of bokeh's JSON."""
    if isinstance(value, dict):
        if isinstance(value.get("id"), str):
            yield value
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from walk(each)


def column_of(data: dict[str, Any], name: str) -> list[float]:
    column = dict(data["entries"])[name]
    if isinstance(column, list):
        return column
    text = gzip.decompress(base64.b64decode(column["array"]["data"]))
    return list(struct.unpack(f"<{len(text) // 8}d", text))


def test_a_run_without_metrics_needs_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bokeh.plotting", None)
    write_launch(tmp_path, failed="OSError: disk")
    run = read_data("run", tmp_path)
    found = Texts(report_page([run]))
    assert "No metrics have been logged." in found.text
    assert found.text.lstrip().startswith("run\n")
    assert found.scripts == []
    write_metrics(tmp_path, 30)
    with pytest.raises(MissingExtraError, match=r"pip install 'accel-torch\[report\]'"):
        _ = report_page([read_data("run", tmp_path)])


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
    assert "not a trace of torch.profiler" in (tmp_path / "run" / "report.html").read_text()
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
    (runs / "link").symlink_to(elsewhere)
    (runs / "a" / "loop").symlink_to(runs)
    found = [path.relative_to(runs).as_posix() for path in find_runs(runs)]
    assert found == ["a/b/three", "a/five", "a/two", "one"]
    assert find_runs(runs / "link") == [runs / "link"]  # as it was named
    assert main(["report", str(runs)]) == 0
    assert "4 runs" in Texts((runs / "report.html").read_text()).text
    (tmp_path / "none" / "deep").mkdir(parents=True)
    _ = capsys.readouterr()
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "the folder is not a run's, and none is in it" in capsys.readouterr().err
    assert not (tmp_path / "none" / "report.html").exists()
