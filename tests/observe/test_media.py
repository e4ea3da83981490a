# SPDX-License-Identifier: Apache-2.0
"""Texts and histograms beside images: what jsonl writes, exact counts, and what is refused on every rank."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from catching import caught
from hypothesis import given, strategies as st

import accel
from accel.migrate._signatures import is_tracker
from accel.run_folder import MediaKind, MediaName, parse_media
from accel.testing import Simulator
from accel.trackers import Figure, Histogram, Images, Table, TextRecord, jsonl, log_histogram, log_text
from accel.trackers._media import Media, png_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]
VALUES = st.lists(st.sampled_from([0.0, 1.0, -3.0, 0.5, 1e6, math.nan, math.inf, -math.inf]), max_size=40)


def logged(folder: Path, name: str) -> Any:
    return json.loads((folder / "media" / name).read_text())


@given(VALUES, st.integers(1, 9), st.sampled_from(DTYPES))
def test_each_finite_value_counts_once_in_its_interval(values: list[float], bins: int, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        values = [value for value in values if math.isfinite(value)]
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype).reshape(-1, 1)
    kept: list[Any] = []
    tracker = accel.trackers.Tracker(
        "kept",
        lambda run, config: None,
        lambda live, values, step: None,
        lambda live, ending: None,
        log_media=lambda live, histogram, step: kept.append(histogram),
        media=(Histogram,),
    )
    ctx = accel.single()
    with accel.tracking(ctx, "p", to=[tracker]) as trackers:
        log_histogram(ctx, trackers, "w", tensor, step=1, bins=bins)
    [found] = kept
    exact = [float(value) for value in tensor.double().flatten()]
    finite = [value for value in exact if math.isfinite(value)]
    assert sum(found.counts) == len(finite)
    assert found.nonfinite == len(exact) - len(finite)
    if finite:
        assert (found.low, found.high) == (min(finite), max(finite))
        width = (found.high - found.low) / bins or 1.0
        expected = [0] * bins
        for value in finite:
            expected[min(bins - 1, int((value - found.low) / width))] += 1
        assert list(found.counts) == expected
    assert len(found.edges) == bins + 1


def test_jsonl_writes_texts_as_they_are_into_files_that_nothing_runs(tmp_path: Path) -> None:
    ctx = accel.single()
    text = "<script>alert(1)</script>\n\x1b[2J \ud800 ü"
    with accel.tracking(ctx, "p", to=[jsonl()], dir=tmp_path) as trackers:
        log_text(ctx, trackers, "../eval/sample.html", text, step=7)
        log_histogram(ctx, trackers, "weights/0", torch.tensor([0.0, 1, 1, 4, math.nan]), step=7, bins=4)
    names = sorted(path.name for path in (tmp_path / "media").iterdir())
    assert names == ["%2E.%2Feval%2Fsample.html-00000007.txt", "weights%2F0-00000007.histogram.json"]
    written = (tmp_path / "media" / names[0]).read_bytes().decode()
    assert written == text.replace("\ud800", "\\ud800")
    assert logged(tmp_path, names[1]) == {"edges": [0, 1, 2, 3, 4], "counts": [1, 2, 0, 1], "nonfinite": 1}


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
KINDS: tuple[MediaKind, ...] = ("images", "figure", "table", "text", "histogram")


@given(NAMES, st.sampled_from(KINDS), st.integers(0, 10**12), st.integers(0, 999))
def test_a_file_s_name_has_all_parts_and_stays_in_its_folder(name: str, kind: MediaKind, step: int, at: int) -> None:
    written = MediaName(name, kind, step, at if kind == "images" else 0)
    assert parse_media(written.file) == written
    assert "/" not in written.file
    assert "\0" not in written.file
    assert not written.file.startswith(".")


def log_steps(folder: Path, steps: range, *, save: int = 0) -> None:
    """Log a text and an image at each step; go on from a checkpoint if there is one, and write one at `save`."""
    ctx = accel.single()
    with accel.tracking(ctx, "p", to=[jsonl()], dir=folder) as trackers:
        state = accel.resume(ctx, folder / "kept", {"trackers": trackers}, accel.train_state(ctx)) if save else None
        for step in steps:
            accel.log(ctx, trackers, {"loss": step}, step=step)
            log_text(ctx, trackers, "sample", f"step {step} of {len(steps)}", step=step)
            accel.trackers.log_images(ctx, trackers, {"in": torch.rand(1, 2, 2)}, step=step)
            if step == save:
                accel.save_state(ctx, folder / "kept", {"trackers": trackers, "state": state}, step=step)


def test_a_resume_removes_media_behind_its_checkpoint_and_a_new_run_sets_them_aside(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 6), save=3)
    (tmp_path / "media" / "mine.png").write_text("stays")
    (tmp_path / "media" / "in-00000006-0.png.partial").write_text("of a killed run")
    log_steps(tmp_path, range(4, 5), save=9)
    names = sorted(path.name for path in (tmp_path / "media").iterdir())
    kept = [
        f"{name}-0000000{step}{end}" for name, end in (("in", "-0.png"), ("sample", ".txt")) for step in range(1, 5)
    ]
    assert names == sorted([*kept, "mine.png"])
    assert (tmp_path / "media" / "sample-00000003.txt").read_text() == "step 3 of 5"
    assert (tmp_path / "media" / "sample-00000004.txt").read_text() == "step 4 of 1"
    log_steps(tmp_path, range(1, 2))
    assert sorted(path.name for path in (tmp_path / "media").iterdir()) == ["in-00000001-0.png", "sample-00000001.txt"]
    assert sorted(path.name for path in (tmp_path / "media.1").iterdir()) == names


def test_tensorboard_shows_the_counts(tmp_path: Path) -> None:
    _ = pytest.importorskip("tensorboard")
    ctx = accel.single()
    with accel.tracking(ctx, "p", to=[accel.trackers.tensorboard()], dir=tmp_path) as trackers:
        log_histogram(ctx, trackers, "weights", torch.tensor([0.0, 1, 1, 4]), step=1, bins=4)
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    [folder] = (tmp_path / "tensorboard").iterdir()
    [found] = module.EventAccumulator(str(folder)).Reload().Histograms("weights")
    value = found.histogram_value
    assert (value.min, value.max, value.num) == (0, 4, 4)
    assert (list(value.bucket), list(value.bucket_limit)) == ([1, 2, 0, 1], [1, 2, 3, 4])


def test_what_cannot_be_logged_is_an_error_on_every_rank(ranks: Simulator, tmp_path: Path) -> None:
    def told(ctx: accel.DistContext) -> list[str]:
        with accel.tracking(ctx, "p", to=[jsonl()], dir=tmp_path) as trackers:
            calls = (
                lambda: log_text(ctx, trackers, "a", 3, step=1),  # pyright: ignore
                lambda: log_histogram(ctx, trackers, "a", [1.0], step=1),  # pyright: ignore
                lambda: log_histogram(ctx, trackers, "a", torch.ones(2, dtype=torch.complex64), step=1),
                lambda: log_histogram(ctx, trackers, "a", torch.ones(2), step=1, bins=0),
            )
            texts = [str(caught(call)) for call in calls]
        with accel.tracking(ctx, "p", to=[accel.trackers.csv("/dev/null")], dir=tmp_path) as trackers:
            return [*texts, str(caught(lambda: log_text(ctx, trackers, "a", "b", step=1)))]

    for text, number, real, bins, taken in ranks.run(told, 2):
        assert "the value is not a text" in text
        assert "torch.as_tensor" in number
        assert "Log its abs()" in real
        assert "the number of intervals is not valid" in bins
        assert "no tracker takes texts" in taken


class Calls:
    """A live run that keeps the calls of its methods; `owner` declares them as the package does."""

    def __init__(self, owner: type) -> None:
        self.owner = owner
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.step = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        declared = inspect.signature(getattr(self.owner, name))

        def call(*args: object, **options: object) -> None:
            self.calls.append((name, declared.bind(*args, **options).arguments))

        return call


class ClearmlLogger:
    """The declarations of `clearml.Logger` 2.1 that are used."""

    @staticmethod
    def report_media(
        title: str, series: str, iteration: int, *, stream: Any, file_extension: str, max_history: int
    ): ...

    @staticmethod
    def report_histogram(
        title: str, series: str, values: list[int], iteration: int, *, xlabels: list[float], xaxis: str, yaxis: str
    ) -> None: ...


class DvcLive:
    """The declaration of `dvclive.Live` 3.49 that is used."""

    @staticmethod
    def log_plot(name: str, datapoints: list[Any], *, x: str, y: str, template: str, title: str) -> None: ...


class AimRun:
    """The declaration of `aim.Run` 3.29 that is used."""

    @staticmethod
    def track(value: object, *, name: str, step: int) -> None: ...


MIDDLES, COUNTS = [0.5, 1.5, 2.5, 3.5], [1, 2, 0, 1]
HISTOGRAM = Histogram("weights", 0.0, 4.0, tuple(COUNTS))


def test_texts_and_histograms_of_packages_that_are_too_large_for_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    def logged(tracker: accel.trackers.Tracker, owner: type) -> dict[str, Any]:
        live = Calls(owner)
        live.__dict__["get_logger"] = lambda: live
        assert tracker.log_media
        _ = tracker.log_media(live, HISTOGRAM, 4)
        if TextRecord in tracker.media:
            _ = tracker.log_media(live, TextRecord("t", "<b>\n"), 4)
        return dict(live.calls)

    found = logged(accel.trackers.clearml(), ClearmlLogger)
    page = found["report_media"]
    assert page["stream"].read().decode() == '<meta charset="utf-8"><pre>&lt;b&gt;\n</pre>'
    assert (page["title"], page["iteration"], page["file_extension"]) == ("t", 4, ".html")
    bars = found["report_histogram"]
    assert (bars["values"], bars["xlabels"], bars["iteration"]) == (COUNTS, MIDDLES, 4)

    tracker = accel.trackers.dvclive()
    assert TextRecord not in tracker.media
    plot = logged(tracker, DvcLive)["log_plot"]
    pairs = zip(MIDDLES, COUNTS, strict=True)
    assert plot["datapoints"] == [{"value": middle, "values": count} for middle, count in pairs]
    assert plot["datapoints"][0].keys() == {plot["x"], plot["y"]}

    package = types.SimpleNamespace(Distribution=lambda *, hist, bin_range: (hist, bin_range), Text=str)
    monkeypatch.setitem(sys.modules, "aim", package)
    live = Calls(AimRun)
    tracker = accel.trackers.aim()
    assert tracker.log_media
    _ = tracker.log_media(live, HISTOGRAM, 4)
    assert live.calls == [("track", {"value": (COUNTS, (0.0, 4.0)), "name": "weights", "step": 4})]


EACH = {
    Images: Images("i", (torch.zeros(2, 3, 1, dtype=torch.uint8),)),
    Table: Table("t", ("a",), (("x",),)),
    Figure: Figure("f", png_of(torch.zeros(2, 3, 3, dtype=torch.uint8))),
    TextRecord: TextRecord("w", "x"),
    Histogram: HISTOGRAM,
}


def test_the_jsonl_tracker_writes_each_kind_of_media_that_it_declares(tmp_path: Path) -> None:
    tracker = jsonl()
    assert set(tracker.media) == set(EACH)
    live = tracker.start(accel.trackers.Run(project="p", id="0" * 32, name="n", folder=tmp_path), {})
    assert tracker.log_media is not None
    for at, record in enumerate(EACH.values()):
        _ = tracker.log_media(live, record, at)
    tracker.finish(live, accel.trackers.Ending())
    assert len(list((tmp_path / "media").iterdir())) == len(EACH)


def test_trackers_declare_media_that_are_records_and_migrate_knows_all_of_them() -> None:
    named = {name: getattr(accel.trackers, name) for name in accel.trackers.__all__}
    made = {
        name
        for name, each in named.items()
        if inspect.isfunction(each) and inspect.signature(each).return_annotation == "Tracker"
    }
    assert made == {name for name in dir(accel.trackers) if is_tracker(name)}
    for name in made:
        tracker = named[name]()
        assert (tracker.log_media is None) == (not tracker.media), name
        assert set(tracker.media) <= set(get_args(Media)), name
