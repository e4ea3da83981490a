# SPDX-License-Identifier: Apache-2.0
"""The record that a launch writes: settings, attempts, events, the error that ended it."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from launching import HERE, REST, Workspace
from msgspec.structs import replace
from processes import patience, wait_for

from accel.config import LaunchConfig, resolve
from accel.launching import FailureRecord, LaunchTarget
from accel.launching.reports._failure import Failure
from accel.launching.reports._journal import began, corrected, ended, first_record, noted, seen
from accel.run_folder import LaunchRecord, RunRecord, Setting, read_launches, read_run


def only(folder: Path) -> LaunchRecord:
    (record,) = read_launches(folder)
    return record


def a_record(*words: str) -> LaunchRecord:
    resolved = resolve({"nproc_per_node": "2"}, {"ACCEL_LOG_DIR": "logs"})
    return first_record(LaunchTarget(name="train.py", args=words), resolved.config, resolved.sources)


def test_settings_stand_with_their_sources_and_without_credentials() -> None:
    record = a_record("--api-key", "abc", "--lr=1")
    assert record.command == ("train.py", "--api-key", "***", "--lr=1")
    assert record.settings["nproc_per_node"] == Setting("2", "flag --nproc-per-node")
    assert record.settings["log_dir"] == Setting("logs", "environment ACCEL_LOG_DIR")
    assert record.settings["precision"] == Setting("auto", "default")
    bare = first_record(LaunchTarget(kind="module", name="pack.train"), LaunchConfig(nnodes=2, rdzv_endpoint="a:1"), {})
    assert bare.command == ("-m", "pack.train")
    assert bare.settings["nnodes"] == Setting("2", "the caller, or this machine")


def test_arguments_of_any_bytes_can_be_stored() -> None:
    record = noted(a_record("--name", "caf\udce9"), "end", "at \udce9.py", 1.0)
    assert msgspec.json.decode(msgspec.json.encode(record), type=LaunchRecord) == record
    assert record.command[-1] == "caf\\udce9"


@settings(max_examples=20)
@given(
    looks=st.lists(st.dictionaries(st.integers(0, 2), st.sampled_from([None, 0, 3, -9])), max_size=6),
)
def test_the_first_status_of_a_rank_stays_with_its_time(looks: list[dict[int, int | None]]) -> None:
    record = began(a_record(), [0, 1, 2], (), 0.0, "start")
    for now_s, statuses in enumerate(looks, 1):
        after = seen(record, statuses, float(now_s))
        assert (after is record) == (after == record)
        record = after
    for rank in record.attempts[-1].ranks:
        told = [(now_s, each[rank.rank]) for now_s, each in enumerate(looks, 1) if each.get(rank.rank) is not None]
        assert (rank.ended_s, rank.status) == (told[0] if told else (None, None))


def test_a_long_launch_keeps_its_first_events_and_its_newest() -> None:
    record = a_record()
    for at in range(700):
        record = noted(record, "hang", f"accel: {at}\naccel: x", float(at))
    assert len(record.events) == 500
    assert (record.events[0].text, record.events[-1].text) == ("0\nx", "699\nx")
    for at in range(150):
        record = began(record, [0], ("a", "b"), float(at), "restart" if at else "start")
    assert (len(record.attempts), record.attempts[-1].started_s, record.restarts) == (100, 149.0, 149)


def test_the_error_of_the_first_rank_stands_in_its_attempt() -> None:
    raised = FailureRecord(
        rank=1, host="h", exception="ValueError", message="<b>", location="a.py:3", traceback="T", time_s=1.0
    )
    first = Failure(rank=1, status=1, time_s=1.0, record=raised)
    crashed = Failure(rank=0, status=-11, time_s=2.0, crash="Fatal Python error\n")
    record = ended(began(a_record(), [0, 1], (), 0.0, "start"), {0: -11, 1: 1}, [crashed, first], first, 3.0)
    (attempt,) = record.attempts
    assert [rank.text for rank in attempt.ranks] == ["was killed by SIGSEGV", "failed: ValueError: <b> - at a.py:3"]
    assert attempt.error is not None
    assert (attempt.error.rank, attempt.error.exception, attempt.error.message) == (1, "ValueError", "<b>")
    lost = ended(record, {0: -11, 1: 1}, [], crashed, 4.0).attempts[0].error
    assert lost is not None
    assert lost.traceback == "Fatal Python error\n"


def test_the_record_of_a_run_gets_the_error_that_its_rank_0_cannot_know() -> None:
    raised = FailureRecord(
        rank=1, host="h", exception="ValueError", message="bad", location="a.py:3", traceback="T", time_s=1.0
    )
    other = Failure(rank=1, status=1, time_s=1.0, record=raised)
    lost = RunRecord(id="a", project="p", started_s=5.0, status="failed", error="PeerError: rank 1", ended_s=8.0)
    told = corrected(lost, 5.0, other, 9.0)
    assert (told.status, told.error, told.ended_s) == ("failed", "rank 1 failed: ValueError: bad - at a.py:3", 8.0)
    assert corrected(replace(lost, resumed_s=(7.0,)), 6.0, other, 9.0).error == told.error
    killed = corrected(
        replace(lost, status="running", error="", ended_s=None), 5.0, Failure(rank=0, status=-9, time_s=7.0), 9.0
    )
    assert (killed.status, killed.error, killed.ended_s) == ("failed", "rank 0 was killed by SIGKILL", 9.0)
    assert corrected(lost, 6.0, other, 9.0) is lost  # of an earlier launch
    assert corrected(lost, 5.0, Failure(rank=0, status=1, time_s=7.0), 9.0) is lost  # its own error
    finished = replace(lost, status="finished", error="")
    assert corrected(finished, 5.0, other, 9.0) is finished


@pytest.mark.multiprocess
def test_a_failed_and_restarted_launch_leaves_its_record(workspace: Workspace) -> None:
    script = workspace.write("""
        import os, sys, time
        sys.audit("accel.run", "run")
        sys.audit("accel.checkpoint", "other/step-00000001")
        if os.environ["RANK"] == "1":
            while not os.path.exists("run/run.json"): time.sleep(0.01)
            raise ValueError("<script> is bad")
        from accel.run_folder import RunRecord, write_json
        write_json("run/run.json", RunRecord(id="a", project="p", started_s=time.time()))
        time.sleep(60)
    """)
    for name in ("run", "other"):
        (workspace.folder / name).mkdir()
    done = workspace.accel(
        "launch", "--nproc-per-node", "2", "--log-dir", "logs", "--max-restarts", "1", script, "--token=abc"
    )
    assert done.returncode == 1
    record = only(workspace.folder / "logs")
    assert record == only(workspace.folder / "run") == only(workspace.folder / "other")
    run = read_run(workspace.folder / "run")
    assert run is not None
    assert run.error.startswith("rank 1 failed: ValueError: <script> is bad - at ")
    assert record.command == (str(script), "--token=***")
    assert (record.status, record.restarts, record.stopped, record.checkpoint) == (1, 1, "", "other/step-00000001")
    assert record.settings["max_restarts"] == Setting("1", "flag --max-restarts")
    assert record.versions.keys() >= {"python", "torch"}
    assert record.folder == str(workspace.folder)
    assert [event.kind for event in record.events] == ["start", "restart", "end"]
    for attempt in record.attempts:
        assert attempt.ended_s is not None
        assert [rank.rank for rank in attempt.ranks] == [0, 1]
        assert attempt.error is not None
        assert (attempt.error.exception, attempt.error.message) == ("ValueError", "<script> is bad")
        assert f"{script}:7" in attempt.error.location
        assert [rank.status for rank in attempt.ranks] == [-signal.SIGTERM, 1]
        ends = [rank.ended_s or 0.0 for rank in attempt.ranks]
        assert ends[1] < ends[0]  # the rank that failed ended first


@pytest.mark.multiprocess
def test_a_running_launch_shows_its_ranks_and_a_stop_is_noted(workspace: Workspace) -> None:
    script = workspace.write(f"""{HERE}
sys.audit("accel.run", "run")
if os.environ["RANK"] == "1":
    sys.exit()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
here("0")
{REST}
""")
    (workspace.folder / "run").mkdir()
    launcher = workspace.start("launch", "--nproc-per-node", "2", "--hang-timeout-s", "0.5", script)

    def kinds() -> list[str]:
        return [event.kind for each in read_launches(workspace.folder / "run") for event in each.events]

    def statuses() -> list[int | None]:
        return [rank.status for each in read_launches(workspace.folder / "run") for rank in each.attempts[-1].ranks]

    # Where others compute too, the silence is noted before rank 1 has started, and again as it changes.
    wait_for(lambda: (workspace.folder / "pid-0").exists() and "hang" in kinds() and statuses() == [None, 0], 30)
    assert only(workspace.folder / "run").status is None
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=patience(8))
    stopped = only(workspace.folder / "run")
    assert (stopped.status, stopped.stopped) == (143, "SIGTERM")
    assert [*dict.fromkeys(kinds())] == ["start", "hang", "stop", "end"]
    assert (kinds()[0], kinds()[-2:]) == ("start", ["stop", "end"])
    assert statuses() == [7, 0]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_folder_that_takes_no_record_stops_no_launch(workspace: Workspace) -> None:
    script = workspace.write("""
        import shutil, sys, time
        from accel.run_folder import RUN_EVENT
        from pathlib import Path
        Path("gone").mkdir()
        sys.audit(RUN_EVENT, str(Path("gone").absolute()))
        time.sleep(1.5)  # the launcher finds it
        shutil.rmtree("gone")
    """)
    (workspace.folder / "logs").mkdir()
    (workspace.folder / "logs" / "launches").write_text("a file")
    done = workspace.accel("launch", "--log-dir", "logs", script)
    assert done.returncode == 0
    assert f"accel: {workspace.folder}/logs gets no record of this launch: File exists\n" in done.stderr
    assert "gone gets no record" not in done.stderr
