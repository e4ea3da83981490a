# SPDX-License-Identifier: Apache-2.0
"""The log that a launch writes: settings, attempts, events, the error that ended it, whatever happens to its files."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from launches import LaunchTarget, died, file_beside, raised
from launching import HERE, REST, Workspace
from msgspec.structs import replace
from processes import patience, wait_for
from profiles import share

from accel.config import LaunchConfig, resolve
from accel.launching.reports._journal import Description, Journal, first_record
from accel.run_folder import (
    LaunchRecord,
    RunRecord,
    Setting,
    fold_log,
    launch_file,
    read_launches,
    read_run,
    write_json,
)


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


@pytest.fixture(scope="module", autouse=True)
def _no_git() -> Iterator[None]:
    """Journals of this process wait for no answer of git, which comes at any moment; those of `accel launch` do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Description, "run", lambda _: None)
        yield


class KeptLaunch:
    """A journal that writes into one folder, with a clock that counts its readings."""

    def __init__(self, folder: Path, *words: str, ranks: tuple[int, ...] = (0, 1, 2), host: str = "h") -> None:
        self.folder = folder
        self.records = {rank: str(folder / f"rank-{rank}.json") for rank in ranks}
        self.seconds = itertools.count(1)
        record = replace(a_record(*words), settings={}, host=host, started_s=float(ranks[0]), log_dir=str(folder))
        self.path = folder / launch_file(record.host, record.pid, record.started_s)
        self.journal = Journal(record, str(folder), clock=lambda: float(next(self.seconds)))

    def begin(self, kind: str = "start", hosts: tuple[str, ...] = ()) -> None:
        self.journal.begin(self.records, hosts, kind)

    @property
    def log(self) -> bytes:
        return self.path.read_bytes()


@contextmanager
def a_launch(**named: object) -> Iterator[KeptLaunch]:
    """A launch that has begun, in a folder of its own: Hypothesis shares no fixture between examples."""
    with tempfile.TemporaryDirectory() as folder:
        kept = KeptLaunch(Path(folder), **named)
        kept.begin()
        yield kept


def test_arguments_of_any_bytes_can_be_stored(tmp_path: Path) -> None:
    kept = KeptLaunch(tmp_path, "--name", "caf\udce9")
    kept.begin(hosts=("a\udce9",))
    kept.journal.finish(1, "at \udce9.py", checkpoint="\udce9")
    record = only(tmp_path)
    assert record.command[-1] == "caf\\udce9"
    assert (record.events[-1].text, record.checkpoint) == ("at \\udce9.py", "\\udce9")


@settings(max_examples=share(0.4))
@given(
    looks=st.lists(st.dictionaries(st.integers(0, 2), st.sampled_from([None, 0, 3, -9])), max_size=6),
)
def test_the_first_status_of_a_rank_stays_with_its_time(looks: list[dict[int, int | None]]) -> None:
    with a_launch() as kept:
        for now_s, statuses in enumerate(looks, 100):
            ranks, before = only(kept.folder).attempts[-1].ranks, kept.log
            kept.seconds = itertools.count(now_s)
            kept.journal.see(statuses)
            is_news = any(each.status is None and statuses.get(each.rank) is not None for each in ranks)
            assert (kept.log != before) == is_news
        for rank in only(kept.folder).attempts[-1].ranks:
            told = [(at, each[rank.rank]) for at, each in enumerate(looks, 100) if each.get(rank.rank) is not None]
            assert (rank.ended_s, rank.status) == (told[0] if told else (None, None))


def test_a_long_launch_keeps_its_first_events_and_its_newest(tmp_path: Path) -> None:
    kept = KeptLaunch(tmp_path, ranks=(0,))
    kept.begin(hosts=("a", "b"))
    for at in range(700):
        kept.journal.note("hang", f"accel: {at}\naccel: x")
    events = only(tmp_path).events
    assert len(events) == 500
    assert (events[0].kind, events[1].text, events[-1].text) == ("start", "0\nx", "699\nx")
    for _ in range(149):
        kept.begin("restart", ("a", "b"))
    record = only(tmp_path)
    assert (len(record.attempts), record.attempts[-1].hosts, record.restarts) == (100, ("a", "b"), 149)
    assert record.events[-1].time_s > record.attempts[-1].started_s > record.attempts[-2].started_s


FIRST = raised(1, 1.0, "ValueError", "<b>", location="a.py:3", traceback="T")


def test_the_error_of_the_first_rank_stands_in_its_attempt(tmp_path: Path) -> None:
    crashed = died(0, 2.0, -11, crash="Fatal Python error\n")
    kept = KeptLaunch(tmp_path, ranks=(0, 1))
    kept.begin()
    kept.journal.see({0: None, 1: 1})
    kept.journal.end({0: -11, 1: 1}, [crashed, FIRST], FIRST)
    kept.begin("restart")
    kept.journal.end({0: -11, 1: 1}, [], crashed)
    attempt, second = only(tmp_path).attempts
    assert [rank.text for rank in attempt.ranks] == ["was killed by SIGSEGV", "failed: ValueError: <b> - at a.py:3"]
    assert attempt.error is not None
    assert (attempt.error.rank, attempt.error.exception, attempt.error.message) == (1, "ValueError", "<b>")
    assert attempt.error.text == "failed: ValueError: <b> - at a.py:3"
    assert second.error is not None
    assert second.error.traceback == "Fatal Python error\n"


def test_the_record_of_a_run_gets_the_error_that_its_rank_0_cannot_know(tmp_path: Path) -> None:
    kept = KeptLaunch(tmp_path)
    kept.seconds = itertools.count(5)
    kept.begin()  # at 5
    kept.seconds = itertools.count(8)
    kept.journal.end({0: 1, 1: 1}, [FIRST], FIRST)  # seen at 8, ended at 9

    def told(**fields: object) -> tuple[str, str, float | None]:
        run = msgspec.convert({"id": "a", "project": "p", "started_s": 5.0, **fields}, RunRecord)
        write_json(tmp_path / "run.json", run)
        after = read_run(tmp_path)
        assert after is not None
        assert after == read_run(tmp_path, read_launches(tmp_path))
        assert (after == run) == ((after.status, after.error) == (run.status, run.error))
        return after.status, after.error, after.ended_s

    lost = {"status": "failed", "error": "PeerError: rank 1", "ended_s": 8.0}
    text = "rank 1 failed: ValueError: <b> - at a.py:3"
    assert told(**lost) == ("failed", text, 8.0)
    assert told(**lost, resumed_s=(7.0,))[1] == text
    assert told() == ("failed", text, 9.0)  # a killed rank 0 left no end
    assert told(**{**lost, "started_s": 4.0})[1] == "PeerError: rank 1"  # of an earlier launch
    assert told(**lost, resumed_s=(10.0,))[1] == "PeerError: rank 1"  # of a later one
    assert told(**{**lost, "status": "finished", "error": ""})[:2] == ("finished", "")
    (tmp_path / "launches").rename(tmp_path / "gone")
    assert told() == ("running", "", None)

    kept = KeptLaunch(tmp_path)
    kept.seconds = itertools.count(5)
    kept.begin()
    kept.journal.end({0: 1, 1: 1}, [], died(0, 7.0))
    assert told(**lost)[1] == "PeerError: rank 1"  # its own error
    shutil.rmtree(tmp_path / "launches")
    elsewhere = KeptLaunch(tmp_path, ranks=(1, 2))
    elsewhere.seconds = itertools.count(5)
    elsewhere.begin()
    elsewhere.journal.end({1: 1}, [FIRST], FIRST)
    assert told(**lost)[1] == "PeerError: rank 1"  # the host of rank 0 says it


Act = Callable[[Journal], None]


def acts(ranks: tuple[int, ...] = (0, 1, 2)) -> st.SearchStrategy[list[Act]]:
    """Lists of what a supervisor does with its journal after the first start."""
    statuses = st.dictionaries(st.sampled_from(ranks), st.sampled_from([None, 0, 1, -9]))
    last = died(ranks[-1], record=FIRST.record)
    return st.lists(
        st.one_of(
            statuses.map(lambda each: lambda journal: journal.see(each)),
            st.text(max_size=20).map(lambda text: lambda journal: journal.note("hang", text)),
            st.just(lambda journal: journal.end(dict.fromkeys(ranks, 1), [last], last)),
            st.just(lambda journal: journal.begin({rank: f"/none/{rank}" for rank in ranks}, (), "restart")),
            st.just(lambda journal: journal.finish(1, "the end", stopped="SIGTERM")),
        ),
        max_size=8,
    )


@settings(max_examples=share(0.2), deadline=None)
@given(acts())
def test_a_log_grows_by_whole_lines_and_reads_wherever_it_is_cut(did: list[Act]) -> None:
    with a_launch() as kept:
        sizes = [len(kept.log)]
        for act in did:
            before = kept.log
            act(kept.journal)
            assert kept.log.startswith(before)
            assert kept.log.endswith(b"\n")
            sizes.append(len(kept.log))
        log = kept.log
        whole = fold_log(log.splitlines(keepends=True))
        assert whole is not None
        assert (whole, whole.damaged) == (only(kept.folder), 0)
        first = log.index(b"\n") + 1
        expected = None
        for cut in range(len(log)):
            if log[cut - 1 : cut] == b"\n":
                expected = fold_log(log[:cut].splitlines(keepends=True))
                assert expected is not None
                assert expected.damaged == 0
            is_torn = cut > first and log[cut - 1 : cut] != b"\n"
            found = fold_log(log[:cut].splitlines(keepends=True))
            assert found == (None if cut < first else replace(expected, damaged=int(is_torn)))


@settings(max_examples=share(0.5), deadline=None)
@given(did=acts(), at=st.integers(0, 8), name=st.sampled_from(["run", "rün", "a b"]))
def test_a_late_folder_gets_the_lines_so_far_and_those_that_follow(did: list[Act], at: int, name: str) -> None:
    with a_launch() as kept:
        late = kept.folder / name
        late.mkdir()
        for act in did[:at]:
            act(kept.journal)
        kept.begin("restart")
        Path(file_beside(kept.records[0], "run")).write_text(f"{late}\n")
        kept.journal.see({})
        assert (late / "launches" / kept.path.name).read_bytes() == kept.log
        for act in did[at:]:
            act(kept.journal)
            assert (late / "launches" / kept.path.name).read_bytes() == kept.log


@settings(max_examples=share(0.5), deadline=None)
@given(one=acts((0, 1)), two=acts((2, 3)), turns=st.lists(st.booleans(), max_size=16))
def test_two_hosts_write_a_log_each_and_each_reads_as_if_alone(
    one: list[Act], two: list[Act], turns: list[bool]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        shared, alone = Path(name, "shared"), Path(name, "alone")
        for folder in (shared, alone):
            folder.mkdir()
        first, second = KeptLaunch(shared, ranks=(0, 1), host="a"), KeptLaunch(shared, ranks=(2, 3), host="b")
        mirrors = KeptLaunch(alone, ranks=(0, 1), host="a"), KeptLaunch(alone, ranks=(2, 3), host="b")
        for kept in (first, second, *mirrors):
            kept.begin()
        queues = {False: iter(one), True: iter(two)}
        for turn in turns:
            for act in itertools.islice(queues[turn], 1):
                act((second if turn else first).journal)
                act(mirrors[turn].journal)
        assert len(list((shared / "launches").iterdir())) == 2
        bare = {"log_dir": "", "pid": 0, "versions": {}, "source": None}
        found, wanted = read_launches(shared), read_launches(alone)
        assert [replace(each, **bare) for each in found] == [replace(each, **bare) for each in wanted]
        assert [[rank.rank for rank in each.attempts[-1].ranks] for each in found] == [[0, 1], [2, 3]]


@settings(max_examples=share(0.5), deadline=None)
@given(
    did=acts(), faults=st.lists(st.sampled_from(["", "torn", "gone", "full", "short"]), max_size=8), at=st.integers(1)
)
def test_a_fault_of_the_disk_is_mended_by_the_next_line(did: list[Act], faults: list[str], at: int) -> None:
    with a_launch() as kept, pytest.MonkeyPatch.context() as patch:
        write = os.write
        for act, fault in zip(did, faults, strict=False):
            if fault == "torn" and kept.path.exists():
                os.truncate(kept.path, at % len(kept.log))
            elif fault == "gone":
                shutil.rmtree(kept.folder / "launches", ignore_errors=True)
            elif fault in ("full", "short"):
                left = iter([at % 50 + 1])

                def some(file: int, data: bytes, left: Iterator[int] = left, fault: str = fault) -> int:
                    if fault == "full" and (count := next(left, 0)) == 0:
                        raise OSError(errno.ENOSPC, "No space left on device")
                    return write(file, data[: count if fault == "full" else at % 50 + 1])

                patch.setattr("accel.run_folder._files.os.write", some)
            act(kept.journal)
            patch.setattr("accel.run_folder._files.os.write", write)
        kept.journal.note("notice", "after the faults")
        record = only(kept.folder)
        assert (record.damaged, record.events[-1].text) == (0, "after the faults")
        assert kept.log == bytes(kept.journal._log)


def test_damaged_lines_and_lines_of_a_newer_version_are_counted(tmp_path: Path) -> None:
    kept = KeptLaunch(tmp_path)
    kept.begin()
    kept.journal.see({0: 1})
    first, attempt, start, *ends = kept.log.splitlines()
    bad = [b"{", b"\xff\xfe", b"[" * 100_000, b'{"kind":"mood","mood":1}', b'{"kind":"event"}', b""]
    record = fold_log(each + b"\n" for each in [first, *bad, attempt, start, *bad, *ends])
    assert record is not None
    assert record == replace(only(tmp_path), damaged=2 * len(bad))
    kept.path.write_bytes(b"\n".join([first, b"", start, b'{"kind"']))
    assert (only(tmp_path).damaged, only(tmp_path).attempts) == (2, ())
    assert fold_log([attempt + b"\n", start + b"\n"]) is None


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
    script = workspace.write(f"""
        import shutil, sys, time
        from accel.run_folder import RUN_EVENT
        from pathlib import Path
        Path("gone").mkdir()
        sys.audit(RUN_EVENT, str(Path("gone").absolute()))
        time.sleep({patience(1.5)})  # the launcher finds it
        shutil.rmtree("gone")
    """)
    (workspace.folder / "logs").mkdir()
    (workspace.folder / "logs" / "launches").write_text("a file")
    done = workspace.accel("launch", "--log-dir", "logs", script)
    assert done.returncode == 0
    assert f"accel: {workspace.folder}/logs gets no record of this launch: File exists\n" in done.stderr
    assert "gone gets no record" not in done.stderr
