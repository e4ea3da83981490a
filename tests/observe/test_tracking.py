# SPDX-License-Identifier: Apache-2.0
"""Trackers: a thread each, losses that are counted, ends with a status, and slips that are errors on every rank."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from catching import assert_fields, assert_raises, caught
from processes import patience, same_path

import accel
from accel.testing import Simulator
from accel.trackers import _log

jsonl, csv = accel.trackers.jsonl, accel.trackers.csv


class Recorded:
    """A tracker that keeps what it is handed, and does something else in one of its functions."""

    def __init__(self, at: str = "", does: Any = None, **options: Any) -> None:
        self.runs: list[accel.trackers.Run] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.endings: list[accel.trackers.Ending] = []

        def start(run: accel.trackers.Run, config: Any) -> Recorded:
            self.runs.append(run)
            return does() if at == "start" else self

        def log(live: Any, values: Any, step: int) -> None:
            if at == "log":
                does()
            self.rows.append((step, dict(values)))

        def finish(live: Any, ending: accel.trackers.Ending) -> None:
            if at == "finish":
                does()
            self.endings.append(ending)

        self.tracker = accel.trackers.Tracker("recorded", start, log, finish, **options)


def hang() -> None:
    threading.Event().wait()


def fail() -> None:
    raise OSError("no network")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("at", ["start", "log", "finish"])
@pytest.mark.parametrize("does", [hang, fail])
def test_a_tracker_that_hangs_or_fails_delays_no_step_and_is_told(
    at: str, does: Any, tmp_path: Path, ranks: Simulator, caplog: pytest.LogCaptureFixture
) -> None:
    def train(ctx: accel.DistContext) -> bool:
        other = Recorded(at, does).tracker
        with accel.tracking(ctx, "p", to=[other, jsonl()], dir=tmp_path, finish_s=0.5) as trackers:
            for step in range(20):
                accel.log(ctx, trackers, {"loss": 1.0}, step=step)
        return accel.any_rank(ctx, True)  # the context stays open

    assert ranks.run(train, 2) == [True, True]
    assert [line["step"] for line in lines(tmp_path)] == list(range(20))
    told = [record.getMessage() for record in caplog.records if "tracker recorded" in record.getMessage()][-1]
    count = {"start": 20, "log": 20, "finish": 0}[at]
    if does is fail:
        assert f"{at}: OSError: no network" in told
        assert f"{count} failed" in told or not count
    else:
        assert f"did not come back from {at}" in told
        assert f"{count} unfinished" in told or not count


def test_a_full_queue_drops_the_oldest_records_and_counts_them(caplog: pytest.LogCaptureFixture) -> None:
    ctx, gate = accel.single(), threading.Event()
    slow = Recorded("log", gate.wait)
    with accel.tracking(ctx, "p", to=[slow.tracker], room_bytes=1000) as trackers:
        for step in range(100):
            accel.log(ctx, trackers, {"loss": 1.0}, step=step)
        gate.set()
    steps = [step for step, _ in slow.rows]
    assert 0 < len(steps) < 10
    assert steps[-1] == 99
    assert f"{100 - len(steps)} dropped" in caplog.records[-1].getMessage()


def test_strict_trackers_raise_on_every_rank_at_the_same_step(ranks: Simulator) -> None:
    def train(ctx: accel.DistContext) -> tuple[int, str]:
        step = 0
        try:
            with accel.tracking(ctx, "p", to=[Recorded("log", fail).tracker], strict=True) as trackers:
                for step in range(100_000):
                    accel.log(ctx, trackers, {"loss": 1.0}, step=step)
        except accel.errors.TrackerError as error:
            return step, error.got
        raise AssertionError

    first, second = ranks.run(train, 2)
    assert first == second
    assert "on rank 0" in first[1]
    assert "OSError: no network" in first[1]

    def end(ctx: accel.DistContext) -> BaseException | None:
        trackers = accel.init_trackers(ctx, "p", to=[Recorded("finish", fail).tracker], strict=True)
        accel.log(ctx, trackers, {"loss": 1.0}, step=0)
        return caught(lambda: accel.end_trackers(ctx, trackers))

    assert [type(error) for error in ranks.run(end, 2)] == [accel.errors.TrackerError] * 2


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt("boom")])
def test_a_loop_that_raises_ends_its_run_as_failed_with_all_records(error: BaseException, tmp_path: Path) -> None:
    ctx, recorded = accel.single(), Recorded()

    def train() -> None:
        config = {"lr": 0.1, "api_key": "hunter2"}
        with accel.tracking(ctx, "p", to=[recorded.tracker, jsonl()], dir=tmp_path, config=config) as trackers:
            for step in range(9):
                accel.log(ctx, trackers, {"loss": 1.0}, step=step)
            raise error

    with pytest.raises((ValueError, KeyboardInterrupt)) as raised:
        train()
    assert raised.value is error
    assert recorded.endings == [accel.trackers.Ending("failed", f"{type(error).__name__}: boom")]
    assert len(recorded.rows) == len(lines(tmp_path)) == 9
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["status"], run["error"]) == ("failed", f"{type(error).__name__}: boom")
    assert run["settings"]["precision"] == {"value": "fp32", "source": ""}
    assert run["settings"]["system"]["value"] == "false"  # as its flag takes it
    assert (run["config"], run["hidden"]) == ({"lr": 0.1, "api_key": "***"}, ["api_key"])
    assert run["id"] == recorded.runs[0].id


def test_a_run_stores_how_the_code_differs_from_its_commit_and_says_where_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code, out = tmp_path / "code", tmp_path / "out"
    code.mkdir()
    git = ["git", "-C", str(code), "-c", "user.name=a", "-c", "user.email=a@b"]
    (code / "train.py").write_text("lr = 1\n")
    for words in (["init"], ["add", "."], ["commit", "-m", "first"]):
        _ = subprocess.run([*git, *words], check=True, capture_output=True)
    (code / "train.py").write_text("lr = 2\npassword: Zq7Vx9Lw3Kj\n")

    def run(folder: Path, *, stored: bool) -> str:
        monkeypatch.setattr("accel.trackers._tracked_run._script_folder", lambda: str(folder))
        with accel.tracking(accel.single(), "p", to=[], dir=out, code=stored) as trackers:
            accel.log(accel.single(), trackers, {"loss": 1.0}, step=0)
        return json.loads((out / "run.json").read_text())["code"]

    assert run(code, stored=False) == ""
    assert not (out / "code.diff").exists()
    assert run(code, stored=True) == "code.diff"
    assert (out / "code.diff").read_text().endswith("-lr = 1\n+lr = 2\n+password: ***\n")
    assert run(tmp_path, stored=True).startswith("not stored: ")
    assert not (out / "code.diff").exists()
    assert "the changes of the code are not stored" in caplog.text
    with assert_raises(accel.errors.ConfigError, fix="Name the folder of the run"):
        _ = accel.init_trackers(accel.single(), "p", to=[jsonl()], code=True)


def test_a_wait_at_the_end_is_told_with_the_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel.trackers._tracked_run._SILENT_S", 0.05)
    gate = threading.Event()
    trackers = accel.init_trackers(accel.single(), "p", to=[Recorded("finish", gate.wait).tracker])
    accel.log(accel.single(), trackers, {"loss": 1.0}, step=1)
    accel.end_trackers(accel.single(), trackers, error=ValueError("boom"), finish_s=0.1)
    gate.set()
    assert caplog.messages[0] == "accel: ValueError: boom; waiting up to 0.05 s for recorded to finish"


def test_a_run_that_failed_before_its_first_record_leaves_its_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        accel.tracking(accel.single(), "p", to=[jsonl()], dir=tmp_path, config={"lr": 0.1}),
    ):
        _ = 1 / 0
    assert json.loads((tmp_path / "run.json").read_text())["error"] == "ZeroDivisionError: division by zero"
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(("where", "writing"), [("main", [0]), ("host", [0, 2]), ("every", [0, 1, 2, 3])])
def test_a_tracker_says_which_ranks_write(where: Any, writing: list[int], ranks: Simulator) -> None:
    def train(ctx: accel.DistContext) -> tuple[list[accel.trackers.Run], bool]:
        ctx = dataclasses.replace(ctx, local_rank=ctx.rank % 2, local_world_size=2, num_nodes=2)
        recorded = Recorded(ranks=where)
        with accel.tracking(ctx, "p", to=[recorded.tracker]) as trackers:
            accel.log(ctx, trackers, {"rank": ctx.rank}, step=1)
            has = accel.get_tracker(trackers, "recorded") is recorded
            assert trackers.names == (("recorded",) if has else ())
        assert [values["rank"] for _, values in recorded.rows] == ([ctx.rank] if has else [])
        return recorded.runs, has

    found = ranks.run(train, 4)
    assert [rank for rank, (_, has) in enumerate(found) if has] == writing
    assert len({(run.id, run.name) for runs, _ in found for run in runs}) == 1
    assert [run.rank for runs, _ in found for run in runs] == writing


SLIPS: list[tuple[str, Any]] = [
    ({"problem": "the values are not trackers"}, lambda ctx, t: accel.log(ctx, {"loss": 1.0}, t, step=9)),
    (
        {"problem": "the value is not an image"},
        lambda ctx, t: accel.trackers.log_images(ctx, t, {"x": [[0.0]]}, step=9),
    ),
    ({"fix": "permute"}, lambda ctx, t: accel.trackers.log_images(ctx, t, {"x": torch.rand(8, 8, 3)}, step=9)),
    ({"problem": "is no number|the value is not a number"}, lambda ctx, t: accel.log(ctx, t, {"text": "high"}, step=9)),
    (
        {"problem": "one real element|the value is not a number"},
        lambda ctx, t: accel.log(ctx, t, {"loss": torch.ones(2)}, step=9),
    ),
    ({"problem": "each line has itself"}, lambda ctx, t: accel.log(ctx, t, {"step": 3}, step=9)),
    ({"problem": "each line has itself"}, lambda ctx, t: accel.log(ctx, t, {"time": 3}, step=9)),
    ({"problem": "two values have one name"}, lambda ctx, t: accel.log(ctx, t, {"a/b": 1, "a": {"b": 2}}, step=9)),
    ({"problem": "the name of a value is not valid"}, lambda ctx, t: accel.log(ctx, t, {"a\nb": 1}, step=9)),
    (
        {"problem": "goes back", "expected": "5 or above", "got": "4"},
        lambda ctx, t: accel.log(ctx, t, {"loss": 1}, step=4),
    ),
    ({"problem": "the step is not valid"}, lambda ctx, t: accel.log(ctx, t, {"loss": 1}, step=5.5)),
    ({"fix": "Did you mean `jsonl`"}, lambda ctx, t: accel.get_tracker(t, "json")),
    ({"problem": "no tracker takes artifacts"}, lambda ctx, t: accel.trackers.log_artifact(ctx, t, "file", step=9)),
    (
        {"got": r"shape \[5, 2, 2\]"},
        lambda ctx, t: accel.trackers.log_images(ctx, t, {"a": torch.ones(5, 2, 2)}, step=9),
    ),
    ({"got": "torch.int64"}, lambda ctx, t: accel.trackers.log_images(ctx, t, {"a": torch.ones(2, 2).long()}, step=9)),
    (
        {"expected": "^2 values", "got": "^1$", "where": "^log_table, t, row 0"},
        lambda ctx, t: accel.trackers.log_table(ctx, t, "t", columns=["a", "b"], rows=[[1]], step=9),
    ),
    (
        {"problem": "trackers have ended"},
        lambda ctx, t: (accel.end_trackers(ctx, t), accel.log(ctx, t, {"loss": 1}, step=9)),
    ),
]


@pytest.mark.parametrize(("fields", "slip"), SLIPS)
def test_a_slip_is_an_error_on_every_rank(fields: dict[str, str], slip: Any, tmp_path: Path, ranks: Simulator) -> None:
    def train(ctx: accel.DistContext) -> BaseException | None:
        with accel.tracking(ctx, "p", to=[jsonl()], dir=tmp_path) as trackers:
            accel.log(ctx, trackers, {"loss": 1.0}, step=5)
            return caught(slip, ctx, trackers)

    for error in ranks.run(train, 2):
        assert isinstance(error, accel.errors.ConfigError)
        assert_fields(error, **fields)


def missing(run: accel.trackers.Run) -> None:
    raise accel.errors.MissingExtraError("needs wandb")


OPENINGS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (accel.errors.ConfigError, "the value is not a tracker", {"to": ["wandb"]}),
    (accel.errors.ConfigError, "the value is not a list of trackers", {"to": jsonl()}),
    (accel.errors.ConfigError, "two trackers have one name", {"to": [jsonl(), jsonl("b")]}),
    (accel.errors.ConfigError, "the run has no folder", {"to": [jsonl()]}),
    (
        accel.errors.MissingExtraError,
        "needs wandb",
        {"to": [msgspec.structs.replace(Recorded().tracker, check=missing)]},
    ),
    (accel.errors.ConfigError, "the value is not a configuration", {"to": [], "config": 3}),
    (accel.errors.ConfigError, "the name is not valid", {"to": [], "run": ""}),
    (accel.errors.ConfigError, "no room", {"to": [], "room_bytes": 0}),
    (accel.errors.ConfigError, "folder cannot be written", {"to": [], "dir": f"{__file__}/runs"}),
    (accel.errors.ConfigError, "files are local", {"to": [], "dir": "s3://bucket/runs"}),
]


@pytest.mark.parametrize(("kind", "message", "options"), OPENINGS, ids=[message for _, message, _ in OPENINGS])
def test_a_wrong_opening_is_an_error_on_every_rank(
    kind: type[Exception], message: str, options: dict[str, Any], ranks: Simulator
) -> None:
    found = ranks.run(lambda ctx: caught(lambda: accel.init_trackers(ctx, "p", **options)), 2)
    assert [type(error) for error in found] == [kind, kind]
    assert all(message in str(error) for error in found)


OPTIONAL = ("flush", "log_media", "first_step", "check")


@pytest.mark.parametrize(
    ("wrong", "changes"),
    [
        ({"problem": "the name is not valid", "expected": "printable text", "where": "Tracker, name="}, {"name": ""}),
        ({"problem": "the name is not valid"}, {"name": "a\nb"}),
        ({"problem": "the name is not valid"}, {"name": None}),
        ({"expected": r"start\(run, config\)", "got": "NoneType None", "where": "recorded, start="}, {"start": None}),
        ({"expected": r"log\(live, values, step\)", "got": "str 'x'", "where": "recorded, log="}, {"log": "x"}),
        ({"expected": r"finish\(live, ending\)", "got": "int 3"}, {"finish": 3}),
        *(({"expected": rf"^{field}\("}, {field: "x"}) for field in OPTIONAL),
        (
            {
                "problem": "the kind of media is unknown",
                "expected": "Images, Table, Figure, TextRecord, Histogram, Artifact",
            },
            {"media": (str,)},
        ),
        ({"problem": "unknown ranks"}, {"ranks": "all"}),
    ],
)
def test_a_tracker_that_no_run_could_use_is_refused_when_it_is_made(
    wrong: dict[str, str], changes: dict[str, Any]
) -> None:
    made = Recorded().tracker
    fields = {field: getattr(made, field) for field in made.__struct_fields__}
    for make in (
        lambda: accel.trackers.Tracker(**{**fields, **changes}),
        lambda: msgspec.structs.replace(made, **changes),
    ):
        with assert_raises(accel.errors.ConfigError, **wrong):
            make()


def test_a_tracker_of_any_callables_is_taken() -> None:
    class Live:
        def __init__(self, run: accel.trackers.Run, config: Any) -> None: ...

        def log(self, values: Any, step: int) -> None: ...

        def finish(self, ending: accel.trackers.Ending) -> None: ...

    named = accel.trackers.Tracker("my tracker", Live, Live.log, functools.partial(Live.finish), ranks="host")
    assert all(getattr(named, field) is None for field in OPTIONAL)
    assert all(callable(tracker.start) for tracker in (accel.trackers.wandb(), accel.trackers.csv()))


def test_debug_names_the_value_that_differs_between_ranks(ranks: Simulator) -> None:
    def train(ctx: accel.DistContext) -> str:
        with accel.tracking(ctx, "p", to=[Recorded().tracker], debug=True) as trackers:
            accel.log(ctx, trackers, {"loss": 1.0, "lr": 0.1}, step=1)
            return str(caught(lambda: accel.log(ctx, trackers, {"loss": 1.0 + ctx.rank, "lr": 0.1}, step=2)))

    first, second = ranks.run(train, 2)
    assert first == second
    assert "expected 1.0, as on rank 0, got 2.0 on rank 1 - at log, 'loss', step 2" in first


def test_media_stand_beside_the_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = torch.randint(256, (2, 3, 5, 7), dtype=torch.uint8)

    class Drawn:
        def savefig(self, file: Any, format: str) -> None:
            _ = file.write(format.encode())

    ctx = accel.single()
    with accel.tracking(ctx, "p", to=[jsonl(), csv()], dir=tmp_path) as trackers:
        for step in (3, 4):
            accel.trackers.log_images(ctx, trackers, {"in put": pixels, "mask": pixels[0, 0] > 99}, step=step)
        accel.trackers.log_images(ctx, trackers, {"grey": [torch.tensor([[0.0, 0.5], [1.0, float("nan")]])]}, step=4)
        accel.trackers.log_table(ctx, trackers, "words", columns=["a", "b"], rows=[["x", torch.tensor(1)]], step=4)
        accel.trackers.log_figure(ctx, trackers, "fig", Drawn(), step=4)
        _ = pixels.zero_()  # what was logged is a copy
    media = tmp_path / "media"
    with image.open(media / "in%20put-00000004-1.png") as picture:
        assert picture.size == (7, 5)
        assert picture.getpixel((3, 2)) != (0, 0, 0)
    with image.open(media / "grey-00000004-0.png") as picture:
        assert list(picture.tobytes()) == [0, 128, 255, 0]
    assert json.loads((media / "words-00000004.json").read_text()) == {"columns": ["a", "b"], "rows": [["x", 1]]}
    assert (media / "fig-00000004.png").read_bytes() == b"png"
    assert [record.getMessage() for record in caplog.records].count("csv takes no images") == 1


def test_values_are_flat_numbers_of_any_kind(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    ctx, recorded = accel.single(), Recorded()
    values = {
        "a": {"b": {"c": 1}},
        "half": torch.tensor([0.5], dtype=torch.bfloat16),
        "numpy": numpy.float32(0.25),
        "flag": True,
        "none": float("nan"),
        "time": {"step_s": 2.0},
    }
    with accel.tracking(ctx, "p", to=[recorded.tracker, jsonl()], dir=tmp_path) as trackers:
        accel.log(ctx, trackers, values, step=0)
    [(_, row)] = recorded.rows
    assert {name: row[name] for name in row if name != "none"} == {
        "a/b/c": 1,
        "half": 0.5,
        "numpy": 0.25,
        "flag": 1,
        "time/step_s": 2.0,
    }
    [line] = lines(tmp_path)
    assert line["none"] == "nan"
    assert line["time"].keys() == {"step_s", "at"}


def test_two_runs_in_one_process_keep_apart(tmp_path: Path) -> None:
    ctx = accel.single()
    folders = [tmp_path / name for name in ("one", "two")]
    with (
        accel.tracking(ctx, "p", to=[jsonl()], dir=folders[0]) as first,
        accel.tracking(ctx, "p", to=[jsonl()], dir=folders[1]) as second,
    ):
        for step in range(5):
            accel.log(ctx, first, {"loss": step}, step=step)
            accel.log(ctx, second, {"loss": -step}, step=step)
    assert [[line["loss"] for line in lines(folder)] for folder in folders] == [[0, 1, 2, 3, 4], [0, -1, -2, -3, -4]]
    assert first.run.id != second.run.id


HANGING = """
import threading, accel
hang = accel.trackers.Tracker("hang", lambda run, config: 1, lambda *_: threading.Event().wait(), lambda *_: None)
ctx = accel.single()
with accel.tracking(ctx, "p", to=[hang, accel.trackers.jsonl()], dir=".", finish_s=0.2) as trackers:
    accel.log(ctx, trackers, {"loss": 1.0}, step=1)
"""


@pytest.mark.slow
def test_a_tracker_that_hangs_does_not_hold_the_process_back(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING], cwd=tmp_path, env=same_path(), capture_output=True, timeout=patience(30)
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"tracker hang: 1 unfinished: did not come back from log" in done.stderr
    assert [line["step"] for line in lines(tmp_path)] == [1]


class Elsewhere(torch.Tensor):
    """A tensor of the CPU that takes itself for one of a device."""

    is_cpu = False


def test_a_number_of_a_device_is_read_once_its_copy_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[object]()

    class Streams(type(accel.single("cpu").streams)):
        is_pinnable = True

        def record(self, stream: object) -> object:
            return "copied"

        def synchronize(self, what: object) -> None:
            waited.append(what)

    monkeypatch.setattr(_log, "streams_of", Streams)
    values = _log.make_values({"loss": torch.tensor(0.5).as_subclass(Elsewhere)})
    assert not waited
    assert values.read() == {"loss": 0.5}
    assert waited == ["copied"]


def test_the_console_prints_aligned_lines_on_rank_0(ranks: Simulator, capsys: pytest.CaptureFixture[str]) -> None:
    def train(ctx: accel.DistContext) -> None:
        console = accel.trackers.console(every=50, label="epoch", formats={"accuracy": ".1%"})
        with accel.tracking(ctx, "p", to=[console]) as trackers:
            for step, loss, right in (
                (50, 1.5, 0.05),
                (99, 1.0, 0.5),
                (100, 12.345678, 1),
                (150, 1e-5, 0.9),
                (151, 0, 1),
            ):
                values = {"loss": loss, "accuracy": right, "tokens": 7, "time": {"step_s": 0.1}}
                accel.log(ctx, trackers, values, step=step)

    _ = ranks.run(train, 2)
    assert capsys.readouterr().out.splitlines() == [
        "epoch    50  loss  1.500  accuracy   5.0%  tokens      7",
        "epoch   100  loss  12.35  accuracy 100.0%  tokens      7",
        "epoch   150  loss 1.000e-05  accuracy  90.0%  tokens      7",
        "epoch   151  loss         0  accuracy 100.0%  tokens      7",  # the last one, though 50 does not divide it
    ]


def test_the_console_prints_the_chosen_names_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    console = accel.trackers.console(names=("b", "a"))
    with accel.tracking(accel.single(), "p", to=[console]) as trackers:
        accel.log(accel.single(), trackers, {"a": 2.0, "c": 1.0}, step=1)
        accel.log(accel.single(), trackers, {"a": float("nan"), "b": 1234.5}, step=2)
    assert capsys.readouterr().out.splitlines() == ["step     1  a  2.000", "step     2  b   1234  a    nan"]


def test_the_console_prints_rates_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    console = accel.trackers.console(names=["loss"], rates=True)
    times = [
        {"tokens_per_s": 412345.6, "samples_per_s": 402.7, "mfu": 0.412},
        {"samples_per_s": 97.31},
        {"step_s": 0.1, "mfu": 0.004},
        {},
    ]
    with accel.tracking(accel.single(), "p", to=[console]) as trackers:
        for step, time in enumerate(times, 1):
            accel.log(accel.single(), trackers, {"loss": 3.21, "time": time}, step=step)
    assert capsys.readouterr().out.splitlines() == [
        "step     1  loss  3.210  412k tok/s  41 % MFU",
        "step     2  loss  3.210  97.31 samples/s",
        "step     3  loss  3.210  0 % MFU",
        "step     4  loss  3.210",
    ]


@pytest.mark.parametrize("specification", ["d", "s", "%%", 3])
def test_the_console_refuses_a_format_that_no_float_has(specification: Any) -> None:
    with assert_raises(accel.errors.ConfigError, problem="the format of a float is not valid") as caught:
        accel.trackers.console(formats={"loss": specification})
    made = eval(f"accel.trackers.console({caught.value.fix})", {"accel": accel})
    assert made.name == "console"


def test_the_console_refuses_a_text_as_names() -> None:
    with assert_raises(accel.errors.ConfigError, problem="a text is no list of names") as caught:
        accel.trackers.console(names="loss")
    assert eval(f"accel.trackers.console({caught.value.fix})", {"accel": accel}).name == "console"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("jsonl", ["jsonl"]),
        ("all", ["jsonl"]),
        (["csv", "wandb", "csv"], ["csv", "wandb"]),
        (None, []),
        ("none", []),
        ([], []),
        (["all", None], ["jsonl"]),
    ],
)
def test_trackers_by_name(given: Any, found: list[str]) -> None:
    made = accel.trackers.by_name(given, {"wandb": {"tags": ["a"]}, "aim": {"repo": "x"}})
    assert [tracker.name for tracker in made] == found


def test_each_tracker_has_its_name_and_another_name_is_an_error() -> None:
    public = {name: getattr(accel.trackers, name) for name in accel.trackers.__all__}
    names = [name for name, each in public.items() if getattr(each, "__annotations__", {}).get("return") == "Tracker"]
    assert len(names) >= 12
    assert [tracker.name for tracker in accel.trackers.by_name(names)] == names
    with assert_raises(accel.errors.ConfigError, expected="tensorboard"):
        _ = accel.trackers.by_name("tensorbord")
