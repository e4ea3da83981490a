# SPDX-License-Identifier: Apache-2.0
"""Trackers of other packages, offline: started, logged to, resumed, ended as failed, and read back by their readers."""

from __future__ import annotations

import gc
import glob
import html
import importlib
import json
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from catching import assert_raises
from processes import patience, same_path

import accel
from accel.trackers import Artifact, Figure, Histogram, Images, Table, TextRecord

Steps = list[int]
Reader = Callable[[Path, accel.trackers.Run], list[Steps]]

# Packages warn of their own dependencies, and leave files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages find an empty home, and send nothing."""
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "HOME": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "CLEARML_CACHE_DIR": str(tmp_path / "cache"),
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }.items():
        monkeypatch.setenv(name, value)
    yield
    _ = gc.collect()


EDGES, COUNTS = [0.0, 1.0, 2.0, 3.0, 4.0], [1, 2, 0, 1]  # of 0, 1, 1 and 4 in four intervals
HOSTILE = "<script>alert(1)</script>\n```\n# a & b"


class Drawn:
    """A figure of 2 x 2 pixels, without matplotlib."""

    def savefig(self, file: Any, format: str) -> None:
        importlib.import_module("PIL.Image").new("RGB", (2, 2)).save(file, format=format)


def log_media(
    ctx: accel.DistContext, trackers: accel.trackers.Trackers, tracker: accel.trackers.Tracker, folder: Path
) -> None:
    """Log one of each kind that the tracker takes."""
    file = folder / "notes.txt"
    _ = file.write_text("notes")
    pixels = torch.randint(256, (2, 3, 12, 14), dtype=torch.uint8)
    if Images in tracker.media:
        accel.trackers.log_images(ctx, trackers, {"inputs": pixels}, step=4)
    if Figure in tracker.media:
        accel.trackers.log_figure(ctx, trackers, "figure", Drawn(), step=4)
    if Table in tracker.media:
        accel.trackers.log_table(ctx, trackers, "words", columns=["a"], rows=[["x"]], step=4)
    if TextRecord in tracker.media:
        accel.trackers.log_text(ctx, trackers, "sample", HOSTILE, step=4)
    if Histogram in tracker.media:
        accel.trackers.log_histogram(ctx, trackers, "weights", torch.tensor([0.0, 1, 1, 4]), bins=4, step=4)
    if Artifact in tracker.media:
        accel.trackers.log_artifact(ctx, trackers, file, step=4)


def run_twice(tracker: accel.trackers.Tracker, folder: Path) -> accel.trackers.Run:
    """Log steps 1 to 4 and media, with a checkpoint of step 2; go on from it with steps 3 to 5, and fail."""
    ctx = accel.single()
    saved: dict[str, Any] = {}

    def log(trackers: accel.trackers.Trackers, steps: range) -> None:
        for step in steps:
            accel.log(ctx, trackers, {"loss": step / 4, "time": {"step_s": 0.5}}, step=step)
            if step == 2:
                saved.update(trackers.state_dict())

    options: dict[str, Any] = {"to": [tracker], "dir": folder, "run": "first", "strict": True}
    options["config"] = {"lr": 0.1, "api_key": "hunter2"}
    with accel.tracking(ctx, "demo", finish_s=120, **options) as trackers:
        log(trackers, range(1, 5))
        assert accel.get_tracker(trackers, tracker.name) is not None
        log_media(ctx, trackers, tracker, folder)
    # what a run that raises has lost is told, not raised: this one must lose nothing
    again = accel.init_trackers(ctx, "demo", **options)
    again.load_state_dict(saved)
    log(again, range(3, 6))
    text = "RuntimeError: boom"
    assert not again.tracked.end(accel.trackers.Ending("failed", text), 120)
    assert json.loads((folder / "run.json").read_text())["error"] == text
    assert again.run.id == trackers.run.id
    return again.run


def read_tensorboard(folder: Path, run: accel.trackers.Run) -> list[Steps]:
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    reader = module.EventAccumulator(str(folder / "tensorboard" / f"first-{run.id[:6]}"))
    reader.Reload()
    assert {event.value for event in reader.Scalars("loss")} == {step / 4 for step in range(1, 6)}
    assert set(reader.Tags()["images"]) == {"inputs/0", "inputs/1", "figure"}
    text = reader.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert b'"lr": 0.1' in text
    shown = reader.Tensors("sample/text_summary")[0].tensor_proto.string_val[0].decode()
    assert shown == "\n".join(f"    {line}" for line in HOSTILE.split("\n"))
    assert reader.Tags()["histograms"] == ["weights"]
    assert b"hunter2" not in text
    return [[event.step for event in reader.Scalars("loss")]]


def read_trackio(folder: Path, run: accel.trackers.Run) -> list[Steps]:
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    assert Path(storage.get_project_db_path("demo")).is_relative_to(folder)
    rows = [row for row in storage.get_logs("demo", f"first-{run.id[:6]}") if "loss" in row]
    assert all(row["loss"] == row["step"] / 4 for row in rows)
    assert len(list(folder.glob("trackio/media/**/*.png"))) == 3
    logged = storage.get_logs("demo", f"first-{run.id[:6]}")
    [text] = [row["sample"] for row in logged if "sample" in row]
    assert "    <script>alert(1)</script>" in json.dumps(text).replace("\\n", "\n")
    [counted] = [row["weights"] for row in logged if "weights" in row]
    assert counted["values"] == COUNTS
    return [[row["step"] for row in rows]]


def read_swanlab(folder: Path, run: accel.trackers.Run) -> list[Steps]:
    store = importlib.import_module("swanlab.sdk.internal.core_python.store")
    record = importlib.import_module("swanlab.proto.swanlab.record.v1.record_pb2").Record
    found: list[Steps] = []
    ends: list[str] = []
    for file in sorted(glob.glob(f"{folder}/swanlab/run-*-{run.id[:21]}/*.swanlab")):
        reader = store.DataStoreReader()
        reader.open(file)
        rows = []
        while (data := reader.scan()) is not None:
            row = record()
            row.ParseFromString(data)
            rows.append(row)
        reader.close()
        found.append([row.scalar.step for row in rows if row.scalar.key == "loss"])
        ends += [row.finish.error for row in rows if row.HasField("finish")]
    assert ends == ["", "RuntimeError: boom"]
    [chart] = [json.loads(path.read_text()) for path in folder.glob("swanlab/*/media/**/*.json")]
    assert chart["xAxis"][0]["data"] == ["0.5", "1.5", "2.5", "3.5"]
    assert [item["data"] for item in chart["series"]] == [COUNTS]
    assert "hunter2" not in "".join(path.read_text() for path in folder.glob("swanlab/*/files/config.yaml"))
    return found


def read_wandb(folder: Path, run: accel.trackers.Run) -> list[Steps]:
    reader_of = importlib.import_module("swanlab.converter.wb.wbdatastore").WBDataStoreReader
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    importlib.import_module("wandb").teardown()
    found: list[Steps] = []
    codes: list[int] = []
    for file in sorted(glob.glob(f"{folder}/wandb/offline-run-*-{run.id}/*.wandb")):
        steps: Steps = []
        with reader_of() as reader:
            reader.open(file)
            while (data := reader.scan()) is not None:
                assert b"hunter2" not in data
                row = record()
                row.ParseFromString(data)
                items = {"/".join(item.nested_key) or item.key: item.value_json for item in row.history.item}
                if "loss" in items:
                    assert float(items["loss"]) == int(items["_step"]) / 4
                    steps.append(int(items["_step"]))
                if row.WhichOneof("record_type") == "exit":
                    codes.append(row.exit.exit_code)
        found.append(steps)
    assert codes == [0, 1]
    return found


def read_mlflow(folder: Path, run: accel.trackers.Run) -> list[Steps]:
    client = importlib.import_module("mlflow").MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    [found] = client.search_runs([client.get_experiment_by_name("demo").experiment_id])
    assert (found.info.status, found.info.run_name) == ("FAILED", "first")
    assert found.data.params == {"lr": "0.1", "api_key": "***"}
    assert found.data.tags["accel.error"] == "RuntimeError: boom"
    files = {path.name for path in folder.glob("files/**/*") if path.is_file()}
    pictures = {"00000004-0.png", "00000004-1.png", "00000004.png"}
    assert files == pictures | {"00000004.json", "00000004.histogram.json", "00000004.txt", "notes.txt"}
    [counted] = folder.glob("files/**/*.histogram.json")
    assert json.loads(counted.read_text()) == {"edges": EDGES, "counts": COUNTS, "nonfinite": 0}
    many = accel.trackers.mlflow(tracking_uri=f"sqlite:///{folder}/mlflow.db", ranks="every")
    other = many.start(msgspec.structs.replace(run, rank=1), {})  # another rank joins the run that rank 0 made
    _ = many.log(other, {"loss": 9.0}, 9)
    _ = many.finish(other, accel.trackers.Ending())
    assert [point.value for point in client.get_metric_history(found.info.run_id, "rank_1/loss")] == [9.0]
    assert client.get_run(found.info.run_id).info.status == "FAILED"  # rank 0 alone ends it
    return [[point.step for point in client.get_metric_history(found.info.run_id, "loss")]]


def read_comet_ml(folder: Path, run: accel.trackers.Run) -> list[Steps]:
    found: list[Steps] = []
    histograms: list[Any] = []
    for file in sorted(glob.glob(f"{folder}/comet/{run.id}-*.zip"), key=lambda name: Path(name).stat().st_mtime):
        with zipfile.ZipFile(file) as archive:
            text = archive.read("messages.json")
            assert b"hunter2" not in text
            rows = [(row["type"], row["payload"]) for row in map(json.loads, text.splitlines())]
            uploads = [row for kind, row in rows if kind == "file_upload" and row["upload_type"] == "histogram3d"]
            assert all(row["additional_params"]["step"] == 4 for row in uploads)
            histograms += [json.loads(archive.read(row["file_path"])) for row in uploads]
        points = [row["metric"] for kind, row in rows if kind == "metric_msg"]
        found.append([point["step"] for point in points if point["metricName"] == "loss"])
    read = importlib.import_module("comet_ml").Histogram.from_json
    [counted] = [read(each, verbose=False) for each in histograms]
    assert [round(counted.get_count(edge, edge + 1)) for edge in EDGES[:-1]] == COUNTS
    return found


def read_aim(folder: Path, run: accel.trackers.Run) -> list[Steps]:
    words = ["storage", "--repo", str(folder), "reindex", "-y"]  # without it, readers see what they saw first
    importlib.import_module("aim.cli.cli").cli_entry_point(words, standalone_mode=False)
    kept = (folder / f"aim-{run.id[:6]}.txt").read_text()
    found = importlib.import_module("aim").Repo(str(folder)).get_run(kept)
    assert (found["status"], found["error"]) == ("failed", "RuntimeError: boom")
    assert found["config"]["api_key"] == "***"
    [series] = [metric for metric in found.metrics() if metric.name == "loss"]
    steps, (values, *_) = series.data.items_list()
    assert values == [step / 4 for step in range(1, 6)]
    context = importlib.import_module("aim.storage.context").Context({})
    _, ([counted], *_) = found.get_distribution_sequence("weights", context).data.items_list()
    assert (counted.weights.tolist(), counted.ranges.tolist()) == (COUNTS, EDGES)
    return [steps]


def read_dvclive(folder: Path, run: accel.trackers.Run) -> list[Steps]:
    head, *rows = (folder / "dvclive/plots/metrics/loss.tsv").read_text().splitlines()
    assert head == "step\tloss"
    assert json.loads((folder / "dvclive/metrics.json").read_text())["status"] == "failed"
    assert "hunter2" not in (folder / "dvclive/params.yaml").read_text()
    rows_of_plot = json.loads((folder / "dvclive/plots/custom/weights.json").read_text())
    assert [row["values"] for row in rows_of_plot] == COUNTS
    assert [float(row["value"]) for row in rows_of_plot] == [0.5, 1.5, 2.5, 3.5]
    return [[int(row.split("\t")[0]) for row in rows]]


LIGHT, WHOLE = [[1, 2, 3, 4, 5]], [[1, 2, 3, 4], [3, 4, 5]]
slow = pytest.mark.slow
CASES: list[Any] = [
    ("tensorboard", read_tensorboard, {}, LIGHT),
    ("trackio", read_trackio, {"auto_log_gpu": False, "auto_log_cpu": False}, [[1, 2, 3, 4, 3, 4, 5]]),
    ("swanlab", read_swanlab, {"mode": "offline"}, WHOLE),
    pytest.param("wandb", read_wandb, {"mode": "offline"}, WHOLE, marks=slow),
    pytest.param("mlflow", read_mlflow, {"tracking_uri": "{uri}", "artifact_location": "{files}"}, LIGHT, marks=slow),
    pytest.param("comet_ml", read_comet_ml, {"online": False}, WHOLE, marks=slow),
    pytest.param("aim", read_aim, {}, LIGHT, marks=slow),
    pytest.param("dvclive", read_dvclive, {"save_dvc_exp": False}, LIGHT, marks=slow),
]


def assert_law(name: str, read: Reader, options: dict[str, Any], steps: list[Steps], folder: Path) -> None:
    """Write a tracker's files, and read them back."""
    places = {"uri": f"sqlite:///{folder}/mlflow.db", "files": (folder / "files").as_uri()}
    given = {key: value.format(**places) if isinstance(value, str) else value for key, value in options.items()}
    run = run_twice(getattr(accel.trackers, name)(**given), folder)
    assert read(folder, run) == steps


@pytest.mark.parametrize(("name", "read", "options", "steps"), CASES)
def test_a_tracker_is_read_back_by_its_own_reader(
    name: str, read: Reader, options: dict[str, Any], steps: list[Steps], tmp_path: Path
) -> None:
    _ = pytest.importorskip(name)
    assert_law(name, read, options, steps, tmp_path)


def write_clearml(folder: Path) -> None:
    ctx = accel.single()
    options: dict[str, Any] = {"auto_connect_frameworks": False, "auto_resource_monitoring": False}
    tracker = accel.trackers.clearml(offline=True, **options)
    with accel.tracking(ctx, "demo", to=[tracker], dir=folder, strict=True, finish_s=100) as trackers:
        for step in range(1, 5):
            accel.log(ctx, trackers, {"loss": step / 4}, step=step)
        log_media(ctx, trackers, tracker, folder)
        accel.trackers.log_text(ctx, trackers, "sample", "later", step=5)


@pytest.mark.slow
def test_clearml_writes_its_archive_offline(tmp_path: Path) -> None:
    _ = pytest.importorskip("clearml")
    words = [sys.executable, __file__, str(tmp_path)]  # a process of its own, as ClearML leaves some behind
    limit_s = patience(120)
    ended = subprocess.run(words, env=same_path(), capture_output=True, text=True, timeout=limit_s, check=False)
    assert ended.returncode == 0, ended.stderr
    [file] = tmp_path.glob("cache/offline/*/metrics.jsonl")
    rows = [row for line in file.read_text().splitlines() for row in json.loads(line)]
    points = [row for row in rows if row["metric"] == "loss"]
    assert [(point["iter"], point["value"]) for point in points] == [(step, step / 4) for step in range(1, 5)]
    [plot] = [json.loads(row["plot_str"]) for row in rows if row["metric"] == "weights"]
    assert (plot["data"][0]["x"], plot["data"][0]["y"]) == ([0.5, 1.5, 2.5, 3.5], COUNTS)
    pages = sorted(path.read_text() for path in tmp_path.glob("cache/offline/**/sample/*.html"))
    assert pages == [f'<meta charset="utf-8"><pre>{html.escape(text)}</pre>' for text in (HOSTILE, "later")]


KILLED = """
import os, sys
import accel

tracker = getattr(accel.trackers, sys.argv[1])(**eval(sys.argv[2]))
trackers = accel.init_trackers(ctx := accel.single(), "demo", to=[tracker], dir=sys.argv[3], run="first")
for step in range(1, 4):
    accel.log(ctx, trackers, {"loss": step / 4}, step=step)
trackers.state_dict()  # what a checkpoint waits for
print(trackers.run.id)
sys.stdout.flush()
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("trackio", {"auto_log_gpu": False, "auto_log_cpu": False}),
        ("mlflow", {"tracking_uri": "sqlite:///mlflow.db"}),
    ],
)
def test_a_kill_in_the_first_seconds_loses_nothing_that_a_checkpoint_counts(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    _ = pytest.importorskip(name)
    words = [sys.executable, "-c", KILLED, name, repr(options), str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=patience(120), check=False)
    assert ended.returncode == -9, ended.stderr
    if name == "trackio":
        run = f"first-{ended.stdout.strip().splitlines()[-1][:6]}"
        read = f"import trackio; print([row['step'] for row in trackio.SQLiteStorage.get_logs('demo', {run!r})])"
        found = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
        steps = json.loads(found.stdout.strip().splitlines()[-1])  # another process: its folder is read at the import
    else:
        client = importlib.import_module("mlflow").MlflowClient(tracking_uri="sqlite:///mlflow.db")
        [found] = client.search_runs([client.get_experiment_by_name("demo").experiment_id])
        steps = [point.step for point in client.get_metric_history(found.info.run_id, "loss")]
    assert steps == [1, 2, 3]


def test_mlflow_holds_a_checkpoint_up_only_where_its_files_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    for uri, is_local in (
        ("sqlite:///a.db", True),
        ("file:///a", True),
        (None, True),
        ("https://mlflow.example", False),
    ):
        assert (accel.trackers.mlflow(tracking_uri=uri).flush is not None) == is_local
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    assert accel.trackers.mlflow().flush is None


NAMES = ["tensorboard", "wandb", "trackio", "swanlab", "mlflow", "comet_ml", "aim", "clearml", "dvclive"]


@pytest.mark.parametrize("name", NAMES)
def test_a_package_that_is_missing_is_an_error_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for found in (None, importlib.machinery.ModuleSpec(name, None)):  # nothing, or a folder of that name
        monkeypatch.setattr(importlib.util, "find_spec", lambda module, found=found: found)
        with assert_raises(accel.errors.MissingExtraError, fix=rf"pip install 'accel-torch\[{name}\]'"):
            _ = accel.init_trackers(accel.single(), "demo", to=[getattr(accel.trackers, name)()], dir=tmp_path)


def test_several_ranks_write_to_one_run_of_wandb_in_shared_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    class Fake:
        Settings = dict

        @staticmethod
        def init(**options: Any) -> None:
            calls.append(options)

    monkeypatch.setitem(sys.modules, "wandb", Fake())
    for mode in ("online", "offline"):
        tracker = accel.trackers.wandb(ranks="every", mode=mode, tags=["a"])
        for rank in (0, 1):
            tracker.start(accel.trackers.Run(project="p", id="i" * 32, name="first", rank=rank, world_size=2), {})
    shared, alone = calls[:2], calls[2:]
    assert [each["settings"]["x_primary"] for each in shared] == [True, False]
    assert {each["settings"]["mode"] for each in shared} == {"shared"}
    assert len({each["id"] for each in shared}) == 1
    assert len({each["id"] for each in alone}) == 2
    assert {each["group"] for each in alone} == {"first"}
    assert all(each["tags"] == ["a"] for each in calls)


def test_variables_of_mlflow_name_the_experiment_and_add_tags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[dict[str, Any]] = []
    experiments: list[str] = []

    class Client:
        def __init__(self, tracking_uri: str | None) -> None:
            del tracking_uri

        def get_experiment_by_name(self, name: str) -> None:
            experiments.append(name)

        def create_experiment(self, name: str, artifact_location: str | None) -> str:
            del artifact_location
            return name

        def create_run(self, experiment: str, **options: Any) -> Any:
            made.append({"experiment": experiment, **options})
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="1"))

    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=Client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", types.SimpleNamespace(Param=str))
    run = accel.trackers.Run(project="p", id="i" * 32, name="first")
    tracker = accel.trackers.mlflow(tags={"team": "speech"})
    _ = tracker.start(run, {})
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "vision")
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "vision", "host": "h0"}')
    _ = tracker.start(run, {})
    assert [each["experiment"] for each in made] == ["p", "vision"]
    assert [each["tags"] for each in made] == [
        {"team": "speech", "accel.run": run.id},
        {"team": "speech", "host": "h0", "accel.run": run.id},
    ]
    for wrong in ("team=vision", '{"rank": 1}', "[]"):
        monkeypatch.setenv("MLFLOW_TAGS", wrong)
        with assert_raises(accel.errors.ConfigError, expected="a JSON object of texts", where="MLFLOW_TAGS"):
            _ = accel.init_trackers(accel.single(), "demo", to=[tracker], dir=tmp_path)


if __name__ == "__main__":
    write_clearml(Path(sys.argv[1]))
