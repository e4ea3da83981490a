# SPDX-License-Identifier: Apache-2.0
"""A run that is followed while it goes on: files that grow, are cut back, or do not exist yet."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sample_runs import START_S, write_launch, write_metrics, write_run

from accel.alerts import AlertLog, Alerts
from accel.cli import main
from accel.errors import CheckpointError
from accel.report import FollowedRun, StoredCheckpoint, rank_rows, state_of, status_line
from accel.report._followed import ordered_names
from accel.run_folder import RunRecord, encode_line, read_launches, write_json

CHECKPOINT = StoredCheckpoint(name="step-00000040", size=1200, changed_s=START_S, metrics={"[b]loss": 0.5})


def follow(folder: Path) -> FollowedRun:
    return FollowedRun("a run", folder, lambda _: [CHECKPOINT])


def test_a_followed_run_has_what_its_files_hold_now(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    followed = follow(folder)
    first = followed.look()
    assert (first.curves.last_step, first.checkpoints) == (None, ())
    write_metrics(folder, 100)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 10')  # torn
        file.flush()
        assert followed.look().curves.last_step == 90
        file.write(b'0,"loss":3}\n')
    assert followed.look().curves.values["loss"].last == (100, 3.0)
    write_metrics(folder, 40)
    again = followed.look()
    assert again.curves.values["loss"].steps == [0, 10, 20, 30]
    assert again.checkpoints == [CHECKPOINT]


def test_one_line_tells_step_values_speed_ranks_and_state(tmp_path: Path) -> None:
    write_metrics(tmp_path, 100)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(encode_line(100, {"\x1b[2J": 1.0}, {"at": START_S + 5}))
    write_launch(tmp_path, failed="ValueError: bad")
    run = follow(tmp_path).look()
    line = status_line(run, state_of(run.run, run.launches))
    assert line.startswith("step 100  loss 0.821234  lr 6.5702e-05")
    for part in ("\\x1b[2J 1", "20 steps/s", "tokens_per_s 4", "ranks: 1 ended with SIGTERM, 1 failed"):
        assert part in line, part
    assert line.endswith("step-00000040  rank 1 failed: ValueError: bad")
    assert "step_s" not in line
    assert line.isprintable()


def test_the_line_counts_what_cannot_be_read(tmp_path: Path) -> None:
    write_metrics(tmp_path, 20)
    write_launch(tmp_path)
    run = follow(tmp_path).look()
    assert "unreadable" not in status_line(run, state_of(run.run, run.launches))
    (log,) = (tmp_path / "launches").iterdir()
    for file, text in ((tmp_path / "metrics.jsonl", b"{]\n"), (log, b"?\n{torn")):
        with file.open("ab") as stream:
            stream.write(text)
    run = follow(tmp_path).look()
    assert "unreadable lines: 3" in status_line(run, state_of(run.run, run.launches))


def test_files_that_cannot_be_read_are_told_and_the_run_is_followed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").mkdir()  # a read of it fails, for root too
    assert main(["watch", str(tmp_path), "--once"]) == 2
    told = f"no run in {tmp_path}, metrics.jsonl cannot be read: Is a directory\n"
    assert capsys.readouterr().out == told

    def go_on(seconds: float) -> None:
        if (tmp_path / "metrics.jsonl").is_dir():
            (tmp_path / "metrics.jsonl").rmdir()
            write_metrics(tmp_path, 20)
            (tmp_path / "run.json").write_text("{")
        else:
            write_run(tmp_path, config={})

    monkeypatch.setattr("accel.cli._runs.time.sleep", go_on)
    assert main(["watch", str(tmp_path), "--plain"]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == told.rstrip()
    assert second.startswith("step 10 ")
    assert "run.json cannot be read: DecodeError" in second
    assert last.endswith("  finished")
    assert "cannot be read" not in last
    (tmp_path / "run.json").write_text("{")
    assert main(["watch", str(tmp_path), "--once"]) == 0


def test_a_run_that_lost_its_rank_0_is_followed_until_its_launcher_has_started_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_metrics(tmp_path, 20)
    gone = subprocess.Popen(["true"])
    gone.wait()
    record = RunRecord(id="a", project="p", started_s=START_S, host=socket.gethostname(), pid=gone.pid)
    write_json(tmp_path / "run.json", record)
    assert main(["watch", str(tmp_path), "--once"]) == 1
    assert capsys.readouterr().out.endswith("rank 0 ended without a record, as after SIGKILL or a loss of power\n")
    monkeypatch.setattr("accel.cli._runs.time.sleep", lambda _: write_run(tmp_path, config={}))
    assert main(["watch", str(tmp_path), "--plain"]) == 0
    assert capsys.readouterr().out.endswith("finished\n")


def test_checkpoints_stay_where_a_later_listing_fails(tmp_path: Path) -> None:
    answers: list[list[StoredCheckpoint] | CheckpointError] = [[CHECKPOINT], CheckpointError("Stale file handle"), []]

    def list_checkpoints(folder: Path) -> list[StoredCheckpoint]:
        answer = answers.pop(0)
        if isinstance(answer, CheckpointError):
            raise answer
        return answer

    followed = FollowedRun("a run", tmp_path, list_checkpoints)
    write_metrics(tmp_path, 20)
    for name, checkpoints, problems in (
        ("a", [CHECKPOINT], []),
        ("b", [CHECKPOINT], ["checkpoints cannot be read: Stale file handle"]),
        ("b", [], []),  # asked anew, though nothing has changed
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        os.utime(tmp_path, ns=(ord(name), ord(name)))
        run = followed.look()
        assert (run.checkpoints, run.problems) == (checkpoints, problems)


def test_ranks_of_all_hosts_of_the_newest_launch_are_listed(tmp_path: Path) -> None:
    assert rank_rows([]) == []
    write_launch(tmp_path, failed="OSError: old", pid=1, offset_s=-9000)
    write_launch(tmp_path, pid=2)
    assert rank_rows(read_launches(tmp_path)) == [
        ("0", "node-a", "0:30:00", "finished"),
        ("1", "node-a", "0:30:00", "finished"),
    ]


def test_without_a_terminal_lines_are_printed_until_the_run_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path / "later"), "--once"]) == 3
    assert capsys.readouterr().out == f"no run in {tmp_path / 'later'}\n"
    write_metrics(tmp_path, 50)
    assert main(["watch", str(tmp_path), "--once"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    write_launch(tmp_path, stopped="SIGTERM")
    assert main(["watch", str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith("stopped by SIGTERM\n")
    for words in ([str(tmp_path / "metrics.jsonl")], [str(tmp_path), "--every-s", "0"]):
        assert main(["watch", *words]) == 2


def test_a_script_reads_the_end_of_a_run_from_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, options, status in (("good", {}, 0), ("bad", {"failed": "ValueError: bad"}, 1)):
        write_metrics(tmp_path / name, 50)
        assert main(["watch", str(tmp_path / name), "--once"]) == 0  # metrics alone: nothing failed
        write_launch(tmp_path / name, **options)
        for words in (["--once"], ["--plain"]):
            assert main(["watch", str(tmp_path / name), *words]) == status
    (tmp_path / "empty").mkdir()
    assert main(["watch", str(tmp_path / "empty"), "--once"]) == 3

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("accel.cli._runs.time.sleep", interrupt)
    assert main(["watch", str(tmp_path / "empty"), "--plain"]) == 3
    assert capsys.readouterr().out.endswith("no run in " + str(tmp_path / "empty") + "\n")


def test_what_matters_comes_first_and_alerts_are_counted(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        for step in range(3):
            values = {"batch_size": 8.0, "norm": 1.0 + step, "eval/accuracy": 0.5 + step / 10, "loss": 1.0 - step / 10}
            file.write(encode_line(step, values, {"at": START_S + step}))
    log = AlertLog(Alerts(), source="rank 0", report=lambda level, text: None, folders=[str(tmp_path)])
    for title in ("old", "loss above 3", "loss above 3"):
        log.add(title, "loss is 4", level="error", every_s=600)
    log.end(30)
    followed = follow(tmp_path)
    run = followed.look()
    names = ordered_names(run)
    assert names.index("eval/accuracy") < names.index("loss") < names.index("norm") < names.index("batch_size")
    line = status_line(run, state_of(run.run, run.launches), followed.alerts)
    assert "alerts: 2, error: loss above 3: loss is 4 (2 times)" in line
    assert line.index("accuracy") < line.index("norm")


def test_a_terminal_without_the_extra_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "textual", None)
    assert main(["watch", str(tmp_path)]) == 2
    assert "pip install 'accel-torch[watch]'" in capsys.readouterr().err


def test_the_terminal_program_follows_holds_and_turns_pages(tmp_path: Path) -> None:
    _ = pytest.importorskip("textual_plotext", reason="the extra `watch` is not installed")
    from accel.report import WatchApp

    async def use() -> None:
        app = WatchApp(follow(tmp_path), every_s=600, now_s=lambda: START_S + 60)
        async with app.run_test(size=(100, 34)) as pilot:
            await pilot.pause()
            assert app.curve_names == []
            write_metrics(tmp_path, 400, bad=300)
            write_launch(tmp_path, failed="[red]ValueError: [/]bad")
            app.refresh_run()
            await pilot.pause()
            assert app.curve_names == ["loss", "lr", "grad_norm", "step_s", "tokens_per_s"]
            shown = app.export_screenshot().replace("&#160;", " ")
            for text in ("loss, 10 not finite", "grad_norm", "[red]ValueError", "step-00000040", "1 min", "[b]loss"):
                assert text in shown, text
            assert ("98" in shown, "97.5" in shown) == (True, False)  # steps are whole
            # in the line of the state; its curve is on the next page, once the tables have their room
            for _ in range(50):
                if app.export_screenshot().count("tokens_per_s") == 1:
                    break
                app.refresh_run()
                await pilot.pause(0.05)
            assert app.export_screenshot().count("tokens_per_s") == 1
            await pilot.press("n")
            await pilot.pause()
            assert app.query_one("#curve-0").display
            assert not app.query_one("#curve-1").display
            await pilot.press("space")
            write_metrics(tmp_path, 20)
            app.refresh_run()
            assert app.holds
            assert len(app.curve_names) == 5
            assert app.sub_title == "held"
            await pilot.press("space", "p")
            await pilot.pause()
            assert "step 10" in app.export_screenshot().replace("&#160;", " ")
            await pilot.resize_terminal(160, 60)
            await pilot.pause()
            app.refresh_run()
            await pilot.pause()
            assert sum(app.query_one(f"#curve-{at}").display for at in range(12)) == 5
            shown = app.export_screenshot().replace("&#160;", " ")
            assert "tokens_per_s" in shown
            await pilot.press("q")
        assert app.return_code == 0

    asyncio.run(use())
