# SPDX-License-Identifier: Apache-2.0
"""Two runs compared: what differs, from which step, by how much, and the status that says so."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from profiles import share
from sample_runs import write_launch, write_metrics, write_run

from accel.cli import main
from accel.report import Curves, RunData, compare_runs
from accel.run_folder import MetricsLine, Setting

LINES = st.dictionaries(st.integers(0, 6), st.sampled_from([0.5, 0.5000001, 2.0, math.nan, math.inf]), max_size=6)


def run_of(lines: dict[int, float]) -> RunData:
    curves = Curves()
    curves.add(MetricsLine(step=step, values={"a": lines[step]}) for step in sorted(lines))
    return RunData(name="n", folder=Path("n"), curves=curves)


@settings(max_examples=share(1.6))
@given(ours=LINES, theirs=LINES, rtol=st.sampled_from([0.0, 1e-3]))
def test_metrics_differ_where_a_loop_over_all_steps_finds_it(
    ours: dict[int, float], theirs: dict[int, float], rtol: float
) -> None:
    def differ(one: float, other: float) -> bool:
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) != math.isnan(other)
        return one != other and not math.isclose(one, other, rel_tol=rtol)

    found = compare_runs(run_of(ours), run_of(theirs), rtol=rtol)
    steps = sorted(ours.keys() | theirs.keys())
    both = [step for step in steps if step in ours and step in theirs and differ(ours[step], theirs[step])]
    alone = [step for step in steps if (step in ours) != (step in theirs)]
    apart = sorted(both + alone)
    assert found.alike == (not apart)
    assert found.first_step == (apart[0] if apart else None)
    if apart:
        metric = found.metrics[0]
        assert (metric.differing, metric.missing_a + metric.missing_b) == (len(both), len(alone))
        distances = [abs(ours[step] - theirs[step]) for step in both]
        largest = max((each if math.isfinite(each) else math.inf for each in distances), default=None)
        assert (None if metric.largest is None else float(metric.largest.difference or 0.0)) == largest


def test_the_command_says_what_differs_and_by_how_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lr, bad in (("a", 1e-3, None), ("b", 1e-2, 30)):
        write_metrics(tmp_path / name, 100, bad=bad)
        write_run(tmp_path / name, config={"model": {"width": 64}, "lr": lr})
        write_launch(tmp_path / name, failed="OSError: disk" if bad else "")
    both = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["compare", both[0], both[0]]) == 0
    shown = capsys.readouterr().out
    assert "settings, versions and code are alike" in shown
    assert "alike: loss, lr, grad_norm" in shown
    assert main(["compare", *both]) == 1
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert ["config", "lr", "0.001", "0.01"] in rows
    assert "0123456789ab, 2 changed files" in shown
    assert "step 30 is the first at which loss differs" in shown
    assert "alike: lr" in shown
    assert "width" not in shown
    assert main(["compare", *both, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["first_step"], found["alike"], found["alike_metrics"]) == (30, False, ["lr"])
    loss = next(each for each in found["metrics"] if each["name"] == "loss")
    assert (loss["differing"], loss["first"]["b"], loss["first"]["difference"]) == (7, "nan", "inf")
    grad = next(each for each in found["metrics"] if each["name"] == "grad_norm")
    assert (grad["differing"], grad["largest"]["step"]) == (7, 30)


def test_a_setting_reads_alike_by_whom_and_when_it_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = {"system": Setting("true", "flag --system"), "prefix": Setting("true", "default")}
    for name, system in (("old", "True"), ("new", "true"), ("off", "False")):
        write_metrics(tmp_path / name, 20)
        write_run(tmp_path / name, config={}, settings={"system": Setting(system, "")})
        if name != "off":
            write_launch(tmp_path / name, settings=launched)
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    shown = capsys.readouterr().out
    assert main(["report", str(tmp_path / "old")]) == 0
    assert ">true (flag --system)<" in (tmp_path / "old" / "report.html").read_text()
    # of a run without a launcher, its settings are no differences one by one
    write_launch(tmp_path / "new", settings=launched)
    assert main(["compare", str(tmp_path / "off"), str(tmp_path / "new"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out.partition("\n")[2])
    facts = {each["name"]: (each["a"], each["b"]) for each in found["facts"] if each["kind"] == "setting"}
    assert facts == {
        "started by": ("another command", "accel launch, with 1 setting"),
        "system": ("false", "true"),
    }
    assert "True" not in shown


def test_long_values_show_where_they_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, end in (("a", "one"), ("b", "other")):
        write_metrics(tmp_path / name, 10)
        write_run(
            tmp_path / name, config={"mixture": "x" * 300 + end, "short": end, "none": "" if end == "one" else "0"}
        )
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    rows = {line.split()[1]: line.split()[2:] for line in capsys.readouterr().out.splitlines() if "config" in line}
    mixture = rows["mixture"]
    assert mixture == [f"…{'x' * 45}one", f"…{'x' * 43}other"]
    assert (rows["short"], rows["none"]) == (["one", "other"], ["empty", "0"])


def test_a_run_that_cannot_be_read_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics(tmp_path / "a", 50)
    write_metrics(tmp_path / "broken", 50)
    (tmp_path / "broken" / "run.json").write_text("{")
    (tmp_path / "empty").mkdir()
    for words, told in (
        (["a", "nowhere"], "there is no such folder"),
        (["empty", "a"], "the folder is not a run's"),
        (["a", "broken"], "run.json cannot be read: DecodeError"),
    ):
        assert main(["compare", *(str(tmp_path / word) for word in words)]) == 2
        assert told in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a"), "--rtol", "2"]) == 2
    assert "expected a number from 0 to below 1" in capsys.readouterr().err


def test_a_run_that_ended_early_and_other_changes_of_the_code_are_differences(tmp_path: Path) -> None:
    for name, steps in (("a", 50), ("b", 40)):
        write_metrics(tmp_path / name, 100)
        write_launch(tmp_path / name)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines[: steps // 10]))
    both = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["compare", *both]) == 1
    (tmp_path / "b" / "metrics.jsonl").write_bytes((tmp_path / "a" / "metrics.jsonl").read_bytes())
    assert main(["compare", *both]) == 0
    for name in ("a", "b"):
        (tmp_path / name / "code.diff").write_text("+lr = 1\n")
    assert main(["compare", *both]) == 0
    (tmp_path / "b" / "code.diff").write_text("+lr = 2\n")
    assert main(["compare", *both]) == 1
