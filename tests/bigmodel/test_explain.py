# SPDX-License-Identifier: Apache-2.0
"""Device maps as text, maps that users write, and skeletons of checkpoints alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
from catching import assert_raises

import accel
from accel.bigmodel.plan import Segment, Skeleton, Weight, guess_skeleton

MB = 2**20


def part(name: str, megabytes: int, **options: Any) -> Segment:
    weight = Weight(name=f"{name}.weight", shape=(megabytes * MB // 4,), dtype="F32")
    return Segment(name=name, weights=(weight,), **options)


SKELETON = Skeleton(
    segments=(
        part("embed", 8, rows=True),
        *(part(f"layers.{at}", 4) for at in range(12)),
        part("norm", 1, movable=False),
        part("head", 8),
    )
)


def test_the_table_has_each_kind_once_and_places_with_their_limits() -> None:
    found = accel.infer_device_map(SKELETON, {0: 41 * MB, "cpu": 21 * MB - MB, "disk": None}, slots=2)
    text = accel.bigmodel.explain(found)
    cells = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    assert ["embed", "1", "cpu", "cuda:0", "rows", "8.4 MB", "8.4 MB"] in cells
    assert ["norm", "1", "cuda:0", "cuda:0", "1.0 MB", "1.0 MB"] in cells
    streamed = [row for row in cells if "streams" in row]
    assert sum(int(row[1]) for row in streamed) == len(found.order)
    assert ["cuda:0", "34.6 MB", "2 x 4.2 MB", "43.0 MB", "43.0 MB, 100.0% used"] in cells
    assert ["disk", "21.0 MB", "21.0 MB", "none"] in cells
    assert ["cpu", "12.6 MB", "8.4 MB", "21.0 MB", "21.0 MB, 100.0% used"] in cells
    assert all(len(line) <= 100 for line in text.splitlines())


def test_figures_of_a_pass_are_those_of_the_simulation() -> None:
    found = accel.infer_device_map(SKELETON, {0: 41 * MB, "cpu": 80 * MB})
    compute = dict.fromkeys(found.home, 0.01)
    text = accel.bigmodel.explain(found, compute=compute, bandwidth=4 * MB / 0.01)
    seconds = accel.bigmodel.pass_seconds(found, compute, 4 * MB / 0.01)
    assert seconds == pytest.approx(0.15)
    assert "A pass: 150 ms, 1.00 times the limit of 150 ms; 150 ms of it compute. Without overlap: 210 ms." in text
    assert re.search(r"streams +4.2 MB +25.2 MB +10 ms +10 ms", text)
    alone = accel.bigmodel.explain(found, bandwidth={"cpu": 4 * MB / 0.01})
    assert "The transfers of a pass take 60 ms." in alone


def test_the_picture_draws_the_segments_of_each_device_in_order() -> None:
    found = accel.infer_device_map(
        SKELETON, {0: 22 * MB, 1: 22 * MB, "cpu": 28 * MB, "disk": None}, slots=2, fill="balanced"
    )
    lines = accel.bigmodel.explain(found, picture=True).split("\n\n")[-1].splitlines()
    marks = {"cpu": "c", "disk": "d"}
    names = [segment.name for segment in SKELETON.segments]
    drawn = {
        device: "".join(
            "#" if found.home[name] == device else "r" if name == "embed" else marks[found.home[name]]
            for name in names
            if found.runs[name] == device
        )
        for device in ("cuda:0", "cuda:1")
    }
    assert lines[:2] == [f"{device}  {marks}" for device, marks in drawn.items()]
    assert lines[2] == "# on its device, r fetched by row, c in cpu, d in disk"
    many = Skeleton(segments=tuple(part(f"l.{at}", 1) for at in range(300)))
    last = accel.bigmodel.explain(accel.infer_device_map(many, {0: 300 * MB}), picture=True).splitlines()[-2]
    assert last == f"cuda:0  {'#' * 75}  (4 segments a character)"


def test_places_by_path_become_a_map_under_the_same_law() -> None:
    places: dict[str, int | str] = {
        "": 0,
        "layers.3": "cpu",
        "layers.4": "disk",
        "layers.11": 1,
        "norm": "cpu",
        "head": 1,
    }
    found = accel.bigmodel.check_device_map(
        SKELETON, places, max_memory={0: 60 * MB, 1: 13 * MB, "cpu": 12 * MB, "disk": None}
    )
    assert found.order == ("layers.3", "layers.4")
    assert (found.runs["layers.4"], found.runs["layers.11"], found.runs["norm"]) == ("cuda:0", "cuda:1", "cuda:1")
    assert found.home["norm"] == "cuda:1"
    assert (found.used("cuda:0"), found.used("cuda:1"), found.used("cpu")) == (52 * MB, 13 * MB, 12 * MB)
    fields = {"problem": "'cuda:1' is too small", "expected": "at most 1000000 bytes", "got": "^13631488: "}
    with assert_raises(accel.errors.PlacementError, **fields):
        accel.bigmodel.check_device_map(SKELETON, places, max_memory={0: 60 * MB, 1: "1MB", "cpu": 4 * MB})
    alone = accel.bigmodel.check_device_map(SKELETON, {"": "cpu", "layers": "mmap", "embed": "disk"})
    assert set(alone.runs.values()) == {"cpu"}
    assert alone.order == ()
    assert alone.used_everywhere() == {"cpu": 9 * MB, "mmap": 48 * MB, "disk": 8 * MB}


@pytest.mark.parametrize(
    ("places", "fields"),
    [
        ({"": 0, "layer.3": "cpu"}, {"problem": "no such path", "got": "'layer.3'", "fix": "Did you mean `layers.3`"}),
        ({"": 0, "layers.3.weight": "cpu"}, {"problem": "a path that divides a segment", "expected": "'layers.3'"}),
        ({"layers": 0}, {"problem": "a segment without a place", "got": "'embed'"}),
        ({"": "gpu"}, {"problem": "the place is not valid", "where": r"places\[''\]", "fix": "A GPU is its number"}),
    ],
)
def test_places_that_do_not_fit_the_model_are_refused(places: Any, fields: dict[str, str]) -> None:
    with assert_raises(accel.errors.ConfigError, **fields):
        accel.bigmodel.check_device_map(SKELETON, places)


def test_users_of_a_tied_weight_compute_together() -> None:
    table = Weight(name="embed.weight", shape=(8,), dtype="F32", tied=("head.weight",), moves=False)
    skeleton = Skeleton(
        segments=(Segment(name="embed", weights=(table,)), part("block", 1), Segment(name="head", weights=()))
    )
    found = accel.bigmodel.check_device_map(skeleton, {"embed": 0, "block": 1, "head": "cpu"})
    assert found.runs == {"embed": "cuda:0", "block": "cuda:1", "head": "cuda:0"}
    with assert_raises(accel.errors.ConfigError, problem="tied weights on two devices"):
        accel.bigmodel.check_device_map(skeleton, {"embed": 0, "block": 1, "head": 1})


def test_names_of_a_checkpoint_make_blocks() -> None:
    names = ["head.weight", "h.10.a.weight", "h.2.b.0.weight", "h.2.a.weight", "h.10.a.bias", "scale", "norm.weight"]
    entries = {name: Weight(name=name, shape=(2, 3), dtype="BF16") for name in names}
    entries["head.weight"] = Weight(name="head.weight", shape=(MB,), dtype="BF16")
    found = guess_skeleton(entries)
    assert [segment.name for segment in found.segments] == ["", "h.2", "h.10", "head", "norm"]
    assert [segment.movable for segment in found.segments] == [False, True, True, True, False]
    assert sorted(weight.name for weight in found.weights()) == sorted(names)
