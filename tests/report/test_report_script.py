# SPDX-License-Identifier: Apache-2.0
"""Parts of the page's script that need no browser, run by node on stand-ins of its elements."""

from __future__ import annotations

import base64
import json
import shutil
import statistics
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import accel.report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on this machine"),
]
ASSETS = Path(accel.report.__file__).parent / "assets"
STUBS = """
const counts = {};
const pen = () => new Proxy({}, { get: (kept, name) => kept[name] ?? ((...given) => {
  counts[name] = (counts[name] ?? 0) + 1;
  return { width: 1 };
}), set: (kept, name, value) => { kept[name] = value; return true; } });
function element(tag) {
  const made = { tag, width: 0, height: 0, dataset: {}, style: {}, classList: { toggle() {} }, children: [],
    getBoundingClientRect: () => ({ left: 0, top: 0, width: 400, height: 200 }), addEventListener() {},
    append(...parts) { made.children.push(...parts); }, replaceChildren(...parts) { made.children = parts; },
    setAttribute() {}, querySelector: () => canvas, remove() {} };
  const own = pen();
  made.getContext = () => own;
  return made;
}
const canvas = element("canvas");
const data = element("script");
data.textContent = DATA_TEXT;
const document = { getElementById: (name) => (name === "data" ? data : null), createElement: element, body: element(),
  querySelectorAll: (words) => document.found[words] ?? [], found: {} };
const window = globalThis;
window.devicePixelRatio = 1;
const innerWidth = 1200, innerHeight = 900;
function requestAnimationFrame() { return 0; }
class IntersectionObserver { observe() {} }
class ResizeObserver { observe() {} }
"""


def packed(values: Iterable[float]) -> str:
    kept = list(values)
    return f"d{base64.b64encode(struct.pack(f'<{len(kept)}d', *kept)).decode()}"


def run_script(count: int, program: str, **changes: Any) -> Any:
    """Run a program on the page's script, with runs of one curve; `changes` replace parts of the page's data."""
    steps = 200
    numbers = packed(range(steps))
    curve = {"x": 0, "y": numbers, "last": [1, 2]}
    made = {"name": "a", "state": "finished", "params": {}, "marks": [], "extent": [0, steps - 1], "axes": {}}
    data = {
        "runs": [{**made, "name": f"run{at}"} for at in range(count)],
        "metrics": [{"name": "loss", "curves": {str(at): curve for at in range(count)}}],
        "steps": [numbers],
        "media": [],
        "matter": [0],
        "differing": [],
    } | changes
    stubs = STUBS.replace("DATA_TEXT", json.dumps(json.dumps(data)))
    scripts = [(ASSETS / name).read_text() for name in ("data.js", "groups.js", "charts.js", "export.js", "page.js")]
    scripts.append((ASSETS / "sweep.js").read_text().removesuffix("openSweep();\nstart();\n"))
    whole = "\n".join([stubs, *scripts, program]).encode()
    ended = subprocess.run(["node", "-"], input=whole, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    return json.loads(ended.stdout)


HOVER = """
function renderMedia() {}
function redrawSpreads() {}
function updateSteps() {}
const card = element("div");
card.dataset.metric = 0;
const chart = new Chart(card);
charts.push(chart);
chart.draw();
const first = counts.stroke;
const drawn = [];
for (let at = 0; at < 20; at += 1) {
  counts.stroke = 0;
  const began = performance.now();
  setHover({ chart, place: 10 * at, y: 100 + at, client: [10, 10] });
  chart.draw();
  drawn.push([counts.stroke, performance.now() - began]);
}
setHover(null);
counts.stroke = 0;
state.smooth = 0.1;
changed("scale");
redraw();
chart.draw();
console.log(JSON.stringify({ first, drawn, again: counts.stroke, lit: state.lit }));
"""


def test_a_pointer_over_500_runs_draws_their_lines_once() -> None:
    found = run_script(500, HOVER)
    assert found["first"] >= 500
    assert all(strokes <= 3 for strokes, _ in found["drawn"])
    assert sorted(ms for _, ms in found["drawn"])[10] < 100  # the script's part of it
    assert found["again"] >= 500  # another scale draws them again


def test_with_few_runs_each_move_draws_them_all() -> None:
    found = run_script(3, HOVER)
    assert all(strokes >= 3 for strokes, _ in found["drawn"])


def test_a_printed_page_draws_charts_out_of_sight_and_opens_groups() -> None:
    program = """
    const card = element("div");
    card.dataset.metric = 0;
    charts.push(new Chart(card), new Chart(card));
    const group = { open: false };
    document.found["main details:not([open])"] = [group];
    const classes = [];
    document.documentElement = { classList: { toggle: (name, is) => classes.push(is && name) } };
    document.body.append = () => {};
    globalThis.getComputedStyle = () => ({ color: "black", fontFamily: "" });
    globalThis.redrawSpreads = () => {};
    beginPrint();
    const during = [group.open, charts.every((each) => each.drawn && !each.isVisible)];
    endPrint();
    console.log(JSON.stringify([...during, group.open, classes]));
    """
    assert run_script(2, program) == [True, True, False, ["printed", False]]


def test_a_link_keeps_filter_zoom_axis_and_hidden_runs() -> None:
    program = """
    const made = (id, value, type = "text") => Object.assign(element("input"), { id, value, type, tagName: "INPUT",
      dispatchEvent(event) { made.events.push(`${id} ${event.type}`); } });
    made.events = [];
    const controls = Object.fromEntries([made("filter", ""), made("axis", "step"), made("smooth", "0"),
      made("log", "", "checkbox")].map((each) => [each.id, each]));
    document.getElementById = (id) => controls[id] ?? null;
    const location = { hash: "", search: "", pathname: "/x" };
    const history = { replaceState(_, __, to) { location.hash = to.startsWith("#") ? to : ""; } };
    openLink();
    const none = linkOf();
    controls.filter.value = "lr<0.1 a&b";
    controls.axis.value = "time";
    state.hidden.add(1);
    state.view = [3, 50];
    keepLink();
    const link = location.hash;
    Object.assign(controls.filter, { value: "" });
    Object.assign(controls.axis, { value: "step" });
    state.hidden.clear();
    state.view = null;
    openLink();
    console.log(JSON.stringify([none, link.startsWith("#"), controls.filter.value, controls.axis.value,
      [...state.hidden], state.view, made.events]));
    """
    assert run_script(3, program) == [
        "", True, "lr<0.1 a&b", "time", [1], [3, 50], ["filter input", "axis input"],
    ]  # fmt: skip


def test_a_link_keeps_colors_when_other_runs_came_first() -> None:
    program = """
    const location = { hash: "", search: "", pathname: "/x" };
    const history = { replaceState(_, __, to) { location.hash = to; } };
    state.hidden.add(1);
    keepLink();
    const before = RUNS.map((_, run) => colorOf(run));
    RUNS.unshift({ ...RUNS[0], name: "earlier" });
    state.hidden.clear();
    openLink();
    console.log(JSON.stringify([before, RUNS.map((_, run) => colorOf(run)), [...state.hidden]]));
    """
    before, after, hidden = run_script(3, program)
    assert after[1:] == before
    assert len(set(after)) == 4
    assert hidden == [2]


def test_a_chart_is_saved_as_svg_and_csv() -> None:
    program = """
    RUNS[1].name = '=<b>"1"';
    const card = element("div");
    card.dataset.metric = 0;
    const chart = new Chart(card);
    Object.assign(theme, { card: "white", soft: "gray", line: "gray" });
    console.log(JSON.stringify([svgOf(chart), csvOf(chart)]));
    """
    svg, csv = run_script(2, program)
    root = ElementTree.fromstring(svg)
    paths = [each for each in root.iter() if each.tag.endswith("path")]
    assert {"#2185d0", "#d55e00"} <= {each.get("stroke") for each in paths}
    assert '=<b>"1"' in [each.text for each in root.iter() if each.tag.endswith("text")]
    lines = csv.splitlines()
    assert lines[0] == "run,step,mean,least,most"
    assert lines[1] == '"run0",0,0,0,0'
    assert len(lines) == 1 + 2 * 200
    assert lines[-1].startswith('"\'=<b>""1""",199,')


GROUPED = """
state.group = GROUP;
regroup();
const card = element("div");
card.dataset.metric = 0;
const chart = new Chart(card);
charts.push(chart);
chart.draw();
const column = { ...columnOfMetric(0, "last"), better: "min" };
const seeds = columnOfSetting("seed");
table.columns = [column];
table.sort = column.key;
const rows = sortedGroups();
console.log(JSON.stringify({
  labels: grouping.groups.map(({ label }) => label),
  lines: chart.drawn.lines.map(({ run, curve: { label, runs, mean, low, counts } }) =>
    [run, label, runs, [...mean], [...low], [...counts]]),
  colors: RUNS.map((_, run) => colorOf(run)),
  rows: rows.map(({ label, runs }) => [label, valueIn(column, runs), valueIn(seeds, runs)]),
  best: bestGroup(column, rows).label,
  csv: csvOf(chart).split("\\r\\n").slice(0, 2),
}));
"""


def grouped(group: str, hidden: str = "") -> Any:
    """Six runs of two learning rates and three seeds; the last run is shorter."""
    made = {"state": "finished", "marks": [[1, "resumed", "resumed"]], "extent": [0, 2], "axes": {}}
    places = [(lr, seed) for lr in ("0.1", "0.01") for seed in ("1", "2", "3")]
    curves = {str(at): {"x": 0, "y": packed([at, at * at, 3 * at]), "last": [2, 3 * at]} for at in range(5)}
    curves["5"] = {"x": 1, "y": packed([5, 15]), "last": [2, 15]}
    return run_script(
        6,
        GROUPED.replace("GROUP", json.dumps(group)).replace("regroup();", f"{hidden}regroup();"),
        runs=[
            {**made, "name": f"run{at}", "params": {"train.lr": lr, "seed": seed, "out": f"runs/run{at}"}}
            for at, (lr, seed) in enumerate(places)
        ],
        metrics=[{"name": "loss", "better": "min", "curves": curves}],
        steps=[packed([0, 1, 2]), packed([0, 2])],
        differing=["train.lr", "seed", "out"],
    )


@pytest.mark.parametrize("group", ["*", "train.lr"])
def test_groups_have_the_mean_and_the_deviation_of_their_runs(group: str) -> None:
    found = grouped(group)
    assert found["labels"] == ["train.lr=0.1", "train.lr=0.01"]
    values = [[[0, 0, 0], [1, 1, 3], [2, 4, 6]], [[3, 9, 9], [4, 16, 12], [5, 10, 15]]]  # the last between its steps
    for line, runs, members in zip(found["lines"], values, ((0, 1, 2), (3, 4, 5)), strict=True):
        run, label, shown, mean, low, counts = line
        columns = list(zip(*runs, strict=True))
        assert (run, label, shown) == (members[0], found["labels"][members[0] // 3], list(members))
        assert mean == pytest.approx([statistics.mean(each) for each in columns])
        assert low == pytest.approx([statistics.mean(each) - statistics.stdev(each) for each in columns])
        assert counts == [3, 3, 3]
    assert found["rows"] == [["train.lr=0.1", 3, "3 values"], ["train.lr=0.01", 12, "3 values"]]
    assert found["best"] == "train.lr=0.1"
    assert len(set(found["colors"])) == 2
    assert found["csv"] == ["group,step,mean,mean - deviation,mean + deviation", '"train.lr=0.1",0,1,0,2']


def test_hidden_runs_are_no_part_of_a_mean_and_each_seed_may_be_a_group() -> None:
    found = grouped("train.lr", hidden="state.hidden.add(2);")
    assert found["lines"][0][2:4] == [[0, 1], [0.5, 0.5, 1.5]]
    assert grouped("seed")["labels"] == ["seed=1", "seed=2", "seed=3"]
    assert [line[2] for line in grouped("seed")["lines"]] == [[0, 3], [1, 4], [2, 5]]
